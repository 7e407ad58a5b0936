"""`ddtree-guard ci-report DIR`: the verdict on a suite that ran without pytest.

DIR is the folder of dumps of servers that ran with `SGLANG_DDTREE_GUARD=log`. Exit code 0: armed,
steps were checked, nothing found. 1: findings, or steps that ran unchecked. 3: a process that was
not armed, or no verify step at all.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ddtree_guard import render
from ddtree_guard.commands import ci_formats
from ddtree_guard.config import setting
from ddtree_guard.dump.find import find_dumps
from ddtree_guard.errors import DumpError, UsageError
from ddtree_guard.evidence import Process, read_processes
from ddtree_guard.fold import fold

BLOCKS = 20  # findings that are written out
NO_STEP = "guard saw no verify step"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the evidence of a folder says."""

    folder: Path
    processes: list[Process]

    @property
    def found(self) -> Counter[str]:
        """Findings by rule, latent ones left out."""
        return sum((p.found for p in self.processes), Counter[str]())

    @property
    def unchecked(self) -> Counter[str]:
        """Verify steps that were not checked, by reason."""
        return sum((p.skipped for p in self.processes), Counter[str]())

    @property
    def checked(self) -> int:
        """Verify steps that were checked."""
        return sum(p.steps_checked for p in self.processes)

    @property
    def not_guarded(self) -> list[str]:
        """Why the run as a whole cannot be trusted."""
        told = [f"NOT GUARDED: {p.name}: {p.problem}" for p in self.processes if p.problem]
        told += [f"{p.name}: {p.distrust}" for p in self.processes if p.distrust]
        if not self.checked:
            told.append(f"{NO_STEP}: {self._why_none()}")
        return told

    def _why_none(self) -> str:
        idle = [f"{p.name}: {p.why}" for p in self.processes if p.why and not p.problem]
        if idle:
            return "; ".join(idle)
        if self.processes:
            return "the armed processes ran none; did the suite send a request?"
        plugins = setting("SGLANG_PLUGINS")
        hint = (
            f"; SGLANG_PLUGINS={plugins} is set here: does it name ddtree_guard" if plugins else ""
        )
        missing = ", which does not exist" if _absent(self.folder) else ""
        return (
            f"no process left evidence in {self.folder}{missing}; was the suite run with "
            "SGLANG_DDTREE_GUARD=log and SGLANG_DDTREE_GUARD_DUMP_DIR set to this folder, and is "
            f"ddtree-guard installed where its servers run{hint}?{_dumps_alone(self.folder)}"
        )

    @property
    def exit_code(self) -> int:
        """See the module."""
        if self.found or self.unchecked:
            return 1
        return 3 if self.not_guarded else 0


def run(args: argparse.Namespace) -> int:
    """Print the verdict; write JUnit XML and GitHub annotations where they are wanted."""
    folder = Path(args.dir)
    processes = [] if _absent(folder) else read_processes(folder, _since(args.since))
    verdict = Verdict(folder, processes)
    if args.junit:
        _write(Path(args.junit), ci_formats.junit(verdict))
    if args.json:
        print(json.dumps(as_json(verdict), indent=1))
    else:
        print("\n".join(text(verdict)))
    if args.github or setting("GITHUB_ACTIONS").lower() == "true":
        # the runner reads both streams; JSON on stdout must stay JSON
        print("\n".join(ci_formats.github(verdict)), file=sys.stderr if args.json else None)
    return verdict.exit_code


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"--junit {str(path)!r} cannot be written ({why}); give a file that can."
        ) from None


def _absent(folder: Path) -> bool:
    """Nothing was written there: no server was guarded, which is a verdict and no error."""
    return not folder.exists()


def _dumps_alone(folder: Path) -> str:
    """What dumps are that lie in a folder without evidence; empty where there are none."""
    try:
        number = len(find_dumps(folder))
    except DumpError:
        return ""
    if not number:
        return ""
    return (
        f" {render.count(number, 'dump')} {'lies' if number == 1 else 'lie'} there without "
        "evidence, as those of checks inside a test process do: pytest's own summary and "
        "--ddtree-guard-report have their findings, and `ddtree-guard check DUMP` finds them again."
    )


def _since(text: str | None) -> float:
    """Seconds since the epoch. Raises UsageError."""
    if not text:
        return 0.0
    try:
        seconds = float(text)
        if math.isfinite(seconds):
            return seconds
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"--since {text[:60]!r} is no time; give seconds since the epoch (`date +%s`) or "
            "2026-12-31T12:00:00."
        ) from None


def text(verdict: Verdict) -> list[str]:
    """For a person: a line per process, the first finding of each rule, the summary."""
    lines = [_line(process) for process in verdict.processes]
    shown = first_hits(verdict)
    for process, hit in shown[:BLOCKS]:
        lines += ["", f"in {process.name}:", hit.text]
    if len(shown) > BLOCKS:
        lines += ["", f"{len(shown) - BLOCKS} more rules of which no block is shown"]
    lines += ["", *map(render.plain, [*verdict.not_guarded, summary(verdict)])]
    return [_printable(line) for line in fold("\n".join(lines)).split("\n")]


def _printable(line: str) -> str:
    """A line that neither a terminal nor a CI runner obeys: runners take commands from any line."""
    line = render.plain(line)
    return f"| {line}" if line.lstrip().startswith(("::", "##[")) else line


def first_hits(verdict: Verdict) -> list[tuple[Process, Any]]:
    """The first finding of each rule of each process that the kernel reads."""
    found: dict[tuple[Path, str], tuple[Process, Any]] = {}
    for process in verdict.processes:
        for hit in process.hits:
            if not hit.latent:
                found.setdefault((process.path, hit.rule), (process, hit))
    return list(found.values())


def _line(process: Process) -> str:
    words = f"{process.name}: {process.state}"
    if process.state == "armed":
        words += f", {process.steps_checked} of {process.verify_steps} verify steps checked"
        words += f" ({process.open} in flight)" if process.open else ""
        words += f", {process.rules} rules"
    if process.found:
        words += ", found " + _counts(process.found)
    if process.latent:
        words += f", latent {_counts(process.latent)}"
    return words + ("" if process.ended else "; killed, or still running")


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} x{n}" for name, n in sorted(counts.items()))


def summary(verdict: Verdict) -> str:
    """The closing line. Never a bare OK."""
    steps = sum(p.verify_steps for p in verdict.processes)
    count = len(verdict.processes)
    where = f"{count} process{'' if count == 1 else 'es'}"
    words = f"checked {verdict.checked} of {steps} verify steps in {where}"
    if verdict.unchecked:
        words += f"; ran unchecked: {_counts(verdict.unchecked)}"
    if verdict.found:
        total = sum(verdict.found.values())
        noun = "finding" if total == 1 else "findings"
        return f"{words}; {total} {noun} ({_counts(verdict.found)})"
    return f"{words}; " + ("so nothing is known" if verdict.not_guarded else "clean")


def as_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict as JSON values."""
    return {
        "schema": "ddtree-guard-ci/1",
        "folder": str(verdict.folder),
        "read": round(time.time(), 3),
        "exit": verdict.exit_code,
        "summary": summary(verdict),
        "verify_steps": sum(p.verify_steps for p in verdict.processes),
        "steps_checked": verdict.checked,
        "findings": dict(verdict.found),
        "unchecked": dict(verdict.unchecked),
        "not_guarded": verdict.not_guarded,
        "processes": [
            {
                "name": p.name, "pid": p.pid, "rank": p.rank, "mode": p.mode, "release": p.release,
                "state": p.state, "why": p.problem or p.why, "boot": p.boot, "rules": p.rules,
                "verify_steps": p.verify_steps, "steps_checked": p.steps_checked,
                "findings": dict(p.found), "latent": dict(p.latent), "ended": p.ended,
                "hits": [
                    {"rule": h.rule, "step": h.step, "latent": h.latent, "headline": h.headline,
                     "text": h.text, "line": h.line, "dump": h.dump}
                    for h in p.hits
                ],
            }
            for p in verdict.processes
        ],
    }  # fmt: skip
