"""What a session says at its start and end: header, terminal summary, JSON report, JUnit."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import ddtree_guard
from ddtree_guard.checks import ALL
from ddtree_guard.evidence import Process
from ddtree_guard.guard import Guard
from ddtree_guard.pytest_plugin.gpu import no_gpu
from ddtree_guard.pytest_plugin.servers import missing_here, visible
from ddtree_guard.pytest_plugin.settings import Settings, Wish, expired

SCHEMA = "ddtree-guard-pytest/1"
NO_STEP = "guard saw no verify step"
_GPU = re.compile(r"\b(cuda|gpu)", re.IGNORECASE)
_RAN = ("passed", "failed", "error")


class Summary:
    """Takes reports (of every xdist worker) and tells the whole."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.config, self.settings = config, settings
        self.began = time.time()
        self.processes: list[dict[str, Any]] = []
        self.tests: dict[str, dict[str, Any]] = {}
        self.attempts: list[dict[str, Any]] = []  # runs of a test that were run again
        self.skipped: Counter[str] = Counter()
        self.rest: list[str] = []  # what was found after the last test
        self._lost = ""

    # --- the start ------------------------------------------------------------------------------
    def header(self) -> str:
        """Mode, rules, SGLang and backend found, and whether servers will be armed."""
        guard = Guard(self.settings.config(Wish(self.settings.mode, self.settings.rules)))
        parts = [
            f"mode={self.settings.mode.value}",
            f"rules={len(guard.rules)}/{len(ALL)}",
            f"SGLang {_sglang()}",
            _armed(),
            f"evidence and dumps in {self.settings.folder}",
        ]
        ended = expired(self.settings.rules)
        parts += [f"ignored no longer: {', '.join(ended)}"] if ended else []
        return "ddtree_guard: " + ", ".join(parts)

    # --- reports --------------------------------------------------------------------------------
    def take(self, report: pytest.TestReport) -> None:
        """Remember what a report says of its test."""
        test = self.tests.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "not run"})
        case = getattr(report, "ddtree_guard", None)
        if case is not None:
            if "steps_checked" in test:
                self.attempts.append(dict(test))
                test.pop("late", None)
            test.update(case)
        if report.when == "call" or (report.when == "setup" and not report.passed):
            test["outcome"] = str(report.outcome)
        elif report.when == "teardown" and report.failed:
            test["outcome"] = "error"
        late = getattr(report, "ddtree_guard_late", [])
        if late:
            test["late"] = test.get("late", []) + late
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[str(report.longrepr[2])] += 1

    def process(self, process: Process) -> dict[str, Any]:
        """A process as JSON values."""
        return {
            "name": process.name,
            "pid": process.pid,
            "rank": process.rank,
            "release": process.release,
            "state": process.state,
            "why": process.problem or process.why,
            "boot": process.boot,
            "rules": process.rules,
            "verify_steps": process.verify_steps,
            "steps_checked": process.steps_checked,
            "skipped": dict(process.skipped),
            "faults": dict(process.faults),
            "findings": dict(process.found),
            "latent": dict(process.latent),
        }

    @property
    def runs(self) -> list[dict[str, Any]]:
        """Every run of every guarded test."""
        return [*self.attempts, *(t for t in self.tests.values() if "steps_checked" in t)]

    def total(self, name: str) -> int:
        """Sum over all processes."""
        return sum(int(process[name]) for process in self.processes)

    def findings(self) -> list[dict[str, Any]]:
        """Every finding that was charged to a test, or later."""
        return [f for run in self.runs for f in [*run["findings"], *run.get("late", [])]]

    def failure(self) -> str:
        """Why the session fails as a whole; empty if it does not."""
        return "\n\n".join([*self.rest, *self._runs_again(), *filter(None, [self._no_step()])])

    def _runs_again(self) -> list[str]:
        """A broken rule is no flake: what passes when it is run again had one all the same."""
        broken: dict[str, list[str]] = {}
        for run in self.attempts:
            found = [*run["findings"], *run.get("late", [])]
            rules = [f["rule"] for f in found if not f["expected"]]
            if rules and self.tests[run["test"]]["outcome"] not in ("failed", "error"):
                broken.setdefault(run["test"], []).extend(rules)
        return [
            f"{test} passed when it was run again, but an earlier run had findings: "
            f"{', '.join(dict.fromkeys(rules))}; a broken rule is no flake"
            for test, rules in broken.items()
        ]

    def _no_step(self) -> str:
        guarded = [r for r in self.runs if r["mode"] != "off" and r["outcome"] in _RAN]
        if not guarded or self.total("steps_checked"):
            return ""
        if no_gpu() and any(_GPU.search(why) for why in self.skipped):
            return ""
        tests = f"{len(guarded)} test{'' if len(guarded) == 1 else 's'}"
        return f"{NO_STEP} in {tests}: {self._why_none()}"

    def _why_none(self) -> str:
        words = [p["why"] for p in self.processes if p["why"]]
        words += [why for p in self.processes for why in p["skipped"]]
        words += [problem for run in self.runs for problem in run["problems"]]
        return "; ".join(dict.fromkeys(words)) or missing_here()

    # --- the end --------------------------------------------------------------------------------
    def show(self, terminal: Any) -> None:
        """The terminal summary."""
        terminal.section("ddtree_guard")
        for text in self.lines():
            bad = text.startswith(("findings:", NO_STEP, "NOT GUARDED")) or text == self.failure()
            bad |= text == self._lost
            terminal.write_line(text, red=bad and not text.startswith("findings: none"))

    def lines(self) -> list[str]:
        """Steps checked, rules, findings, dumps, latent ones, and what is wrong on the whole."""
        told, expected = self._counts(False), self._counts(True)
        own = sum(p["verify_steps"] > 0 for p in self.processes)
        where = f"{own} process{'' if own == 1 else 'es'}"
        rules = max([0, *(p["rules"] for p in self.processes)])
        steps = f"{self.total('steps_checked')} of {self.total('verify_steps')} verify steps"
        lines = [
            f"checked {steps} in {where}, {rules} rules",
            f"findings: {told or 'none'}",
        ]
        if expected:
            lines.append(f"expected findings: {expected}")
        latent = sum((Counter(p["latent"]) for p in self.processes), Counter[str]())
        if latent:
            words = ", ".join(f"{rule} x{n}" for rule, n in sorted(latent.items()))
            lines.append(f"latent, not read by the kernel: {words}")
        lines += [f"dump: {dump}" for dump in self.dumps()]
        gpu = [f"{n} skipped: {why}" for why, n in self.skipped.items() if _GPU.search(why)]
        lines += gpu if no_gpu() else []
        failure = self.failure()
        if failure:
            lines.append(failure)
        elif not self.total("steps_checked"):
            lines.append(f"{NO_STEP}: no guarded test ran")
        return lines + ([self._lost] if self._lost else [])

    def _counts(self, expected: bool) -> str:
        """Findings by rule in words, the expected ones or the others."""
        counts = Counter[str]()
        for finding in self.findings():
            counts[finding["rule"]] += finding["count"] * (finding["expected"] == expected)
        return ", ".join(f"{rule} x{n}" for rule, n in sorted(counts.items()) if n)

    def dumps(self) -> list[str]:
        """Folders of dumps, in the order of their findings."""
        return list(dict.fromkeys(f["dump"] for f in self.findings() if f["dump"]))

    def as_json(self, exit_status: int) -> dict[str, Any]:
        """The report, as `report.schema.json` describes it."""
        return {
            "schema": SCHEMA,
            "version": ddtree_guard.__version__,
            "mode": self.settings.mode.value,
            "rules": self.settings.rules,
            "began": round(self.began, 3),
            "seconds": round(time.time() - self.began, 3),
            "exit": exit_status,
            "failure": self.failure(),
            "verify_steps": self.total("verify_steps"),
            "steps_checked": self.total("steps_checked"),
            "folder": str(self.settings.folder),
            "dumps": self.dumps(),
            "processes": self.processes,
            "tests": list(self.tests.values()),
            "attempts": self.attempts,
            "skipped": dict(self.skipped),
        }

    def write(self, exit_status: int) -> bool:
        """Write the report, and the session's properties into JUnit XML. False where the report
        was asked for and cannot be written.
        """
        self._junit()
        path = self.settings.report
        if path is None:
            return True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.part")
            part.write_text(json.dumps(self.as_json(exit_status), indent=1) + "\n")
            part.replace(path)
        except OSError as error:
            self._lost = f"the report was not written to {path}: {error.strerror}"
        return not self._lost

    def _junit(self) -> None:
        """Properties of the whole suite, where JUnit XML is written."""
        try:
            from _pytest.junitxml import xml_key  # pytest has no public name for it
        except ImportError:
            return
        xml = self.config.stash.get(xml_key, None)
        if xml is not None:
            values = {
                "mode": self.settings.mode.value,
                "verify_steps": self.total("verify_steps"),
                "steps_checked": self.total("steps_checked"),
                "findings": sum(f["count"] for f in self.findings() if not f["expected"]),
                "failure": self.failure(),
            }
            for name, value in values.items():
                xml.add_global_property(f"ddtree_guard_{name}", str(value))


def _sglang() -> str:
    """Release and backend, without importing either."""
    spec = importlib.util.find_spec("sglang")
    if spec is None:
        return "not installed"
    try:
        release = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        release = "of unknown release"
    place = "srt/layers/attention/triton_backend.py"
    has = any((Path(root) / place).exists() for root in spec.submodule_search_locations or ())
    return f"{release} with{'' if has else 'out'} a Triton backend"


def _armed() -> str:
    """Whether a server started now would load the guard."""
    if importlib.util.find_spec("sglang") is None or not visible():
        return f"servers NOT ARMED: {missing_here()}"
    why = missing_here()
    return f"servers NOT ARMED: {why}" if "SGLANG_PLUGINS" in why else "servers are armed"
