"""Suites that run under the plugin, and children that leave evidence without SGLang."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# an inner session drops what it imports; NumPy and torch can be imported once only
import ddtree_guard.hooks.boot
import ddtree_guard.pytest_plugin.session
import ddtree_guard.testing.examples  # noqa: F401

with contextlib.suppress(ImportError):
    import torch  # noqa: F401
    import triton  # noqa: F401

ROOT = Path(__file__).parents[2]
INSTALLED = [p.name for p in importlib.metadata.entry_points(group="pytest11")]
PLUGIN = () if "ddtree_guard" in INSTALLED else ("-p", "ddtree_guard.pytest_plugin")

# A server as the guard sees one, without SGLang: it writes evidence and obeys its input.
CHILD = """
import sys, time
from ddtree_guard.checks import ALL
from ddtree_guard.config import Config
from ddtree_guard.evidence import ARMED, NOT_ARMED
from ddtree_guard.guard import find_rule
from ddtree_guard.hooks.evidence import Evidence
from ddtree_guard.testing.examples import example

counts = {"steps": 0, "verify_steps": 0, "steps_checked": 0, "open": 0, "skipped": {}, "faults": {}}
RANK = sys.argv[1] if len(sys.argv) > 1 else "TP0"
evidence = Evidence(Config.from_env(), "run-1", RANK, "0.5.16", lambda: dict(counts)).begin()
print("ANSWER", flush=True)

def find(rule, step):
    finding, seen = example(find_rule(rule))
    seen = seen.replace(who__step_id=step)
    evidence.finding(finding, seen, None, f"{rule} in words")

for line in sys.stdin:
    what, _, value = line.strip().partition(" ")
    if what == "arm":
        evidence.state(ARMED, boot="boot line", rules=36, world=1, armed=1)
    elif what == "refuse":
        evidence.state(NOT_ARMED, value)
    elif what == "missing":
        evidence.state(ARMED, rules=36, world=2, armed=1, missing=["rank 1: " + value])
    elif what == "step":
        for name in ("steps", "verify_steps", "steps_checked"):
            counts[name] += int(value)
    elif what == "skip":
        counts["steps"] += 1
        counts["verify_steps"] += 1
        counts["skipped"] = {value: 1}
    elif what == "find":
        find(value, counts["steps"])
    elif what == "slow":  # a step in flight whose finding takes a while
        counts["steps"] += 1
        counts["open"] = 1
        print("ANSWER", flush=True)
        time.sleep(0.7)
        find(value, counts["steps"])
        counts["verify_steps"] += 1
        counts["steps_checked"] += 1
        counts["open"] = 0
        continue
    elif what == "after":  # a finding of the last step that comes when nothing was in flight
        step = counts["steps"]
        print("ANSWER", flush=True)
        time.sleep(1.2)
        find(value, step)
        continue
    elif what == "hang":
        evidence._ended = True
    print("ANSWER", flush=True)
"""

HELPER = """
import os, subprocess, sys
from pathlib import Path

HERE = Path(__file__).parent

class Server:
    def __init__(self, *args, script="launch_server.py", **env):
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / script), *args], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, **env})
        self.wait()

    def wait(self):
        for line in self.process.stdout:
            if line.startswith("ANSWER"):
                return
        raise RuntimeError("the server has ended")

    def ask(self, *commands):
        for text in commands:
            self.process.stdin.write(text + "\\n")
            self.process.stdin.flush()
            self.wait()
        return self

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with `helper.Server` and its child; the plugin's own settings are unset."""
    for name in ("SGLANG_PLUGINS", "CUDA_VISIBLE_DEVICES", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(pytester.path))
    pytester.makepyfile(helper=HELPER, launch_server=CHILD)
    pytester.makeini("[pytest]\n")
    return pytester


Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(suite: pytest.Pytester) -> Run:
    """Run the suite with `--ddtree-guard=log` and the given arguments, in this process."""

    def call(*args: str, mode: str | None = "log", apart: bool = False) -> pytest.RunResult:
        words = [*PLUGIN, "-p", "no:cacheprovider", "-p", "no:randomly", *args]
        words += [f"--ddtree-guard={mode}"] if mode else []
        return suite.runpytest_subprocess(*words) if apart else suite.runpytest_inprocess(*words)

    return call


@pytest.fixture
def report(suite: pytest.Pytester, run: Run) -> Callable[..., dict[str, Any]]:
    """Run the suite and return its JSON report, which fits the shipped schema."""
    jsonschema = importlib.import_module("jsonschema")
    schema = json.loads((ROOT / "ddtree_guard/pytest_plugin/report.schema.json").read_text())

    def call(*args: str, **how: Any) -> dict[str, Any]:
        run(f"--ddtree-guard-report={suite.path / 'report.json'}", *args, **how)
        value: dict[str, Any] = json.loads((suite.path / "report.json").read_text())
        jsonschema.Draft202012Validator(schema).validate(value)
        return value

    return call
