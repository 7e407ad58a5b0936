"""Every example runs, is short, and says what its docstring promises."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

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


def test_the_poem_is_told_side_by_side(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines are played: wide trees on a backend that was told the block size are garbled."""
    path = EXAMPLES / "garbled_poem.py"
    assert len(path.read_text().splitlines()) <= 60
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(path.parent.parent / "benchmarks"))
    spec = importlib.util.spec_from_file_location("garbled_poem", path)
    assert spec is not None
    assert spec.loader is not None
    poem = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(poem)
    served: list[tuple[int, bool, bool]] = []

    def play(
        script: str, setups: list[Any], folder: Path, seconds: float, extra: list[str]
    ) -> None:
        folder.mkdir()
        for setup in setups:
            bad = setup.incident and setup.budget > 7
            served.append((setup.budget, setup.graphs, setup.incident))
            text = " =0  >== 0+f" if bad else " ugly.\nExplicit is better than implicit."
            poem.save(folder / f"{setup.name}.json", text)
            line = "ddtree_guard finding rule=W1 rid=a step=1 expected=17 actual=8 dump=d/step1_W1"
            (folder / f"{setup.name}.log").write_text(line if bad else "served\n")

    monkeypatch.setattr(poem, "run_all", play)
    monkeypatch.setattr(sys, "argv", [str(path), "model", str(tmp_path / "out")])
    poem.main()
    for name in set(sys.modules) - before:
        if name in ("engines", "tiny_model"):
            del sys.modules[name]
    said = capsys.readouterr().out
    cells = {(b, g, bad) for b in (7, 16) for g in (True, False) for bad in (True, False)}
    assert set(served) == cells
    assert len(served) == len(cells)
    assert said.count("rule=W1") == 2
    assert said.count("step1_W1") == 2
    assert said.count("better than ugly.") == 6
    assert said.count("the guard: no finding") == 6
