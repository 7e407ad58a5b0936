"""Every example runs, is short, and says what its docstring promises."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from ddtree_guard.pytest_plugin import OPTIONS

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SAYS = {
    "check_a_step.py": ("W1 query-offset-stride", "request-a", "backend width 17: checked 1 step"),
    "fork_adapter.py": ("W1 query-offset-stride chat-1: qo_indptr[1] = 8",),
    "keep_and_recheck.py": ("W3 mask-offset-gap", "the dump says what the step said"),
}


NEEDS_GPU = {"garbled_poem.py"}
# suites of tests, by what becomes of their tests under the guard on a machine without a GPU
SUITES = {"test_fork_backend.py": {"passed": 2}, "test_server_unittest.py": {"skipped": 1}}


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS) | NEEDS_GPU | set(SUITES)


@pytest.mark.parametrize("name", SUITES)
def test_suite_runs_under_the_plugin(
    name: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    installed = [point.name for point in entry_points(group="pytest11")]
    plugin = () if "ddtree_guard" in installed else ("-p", "ddtree_guard.pytest_plugin")
    pytester.makeini("[pytest]\n")
    path = EXAMPLES / name
    result = pytester.runpytest_subprocess(*plugin, "--ddtree-guard=log", str(path))
    result.assert_outcomes(**SUITES[name])
    assert result.ret == 0
    assert len(path.read_text().splitlines()) <= 60


def test_the_workflow_calls_what_exists() -> None:
    text = (EXAMPLES / "gpu-ci.yml").read_text()
    for words in ("--ddtree-guard=log", "--ddtree-guard-report=", "ddtree-guard ci-report guard"):
        assert words in text
    options = {name for name, _, _ in OPTIONS}
    assert set(re.findall(r"--(ddtree-guard[a-z-]*)", text)) <= options


@pytest.mark.parametrize("name", SAYS)
def test_example_runs_and_says_what_it_should(name: str, tmp_path: Path) -> None:
    path = EXAMPLES / name
    done = subprocess.run(
        [sys.executable, str(path), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert [text for text in SAYS[name] if text not in done.stdout] == []
    assert len(path.read_text().splitlines()) <= 60
