"""The probe's other places of the check, in captures whose streams note what is queued on them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ddtree_guard.hooks.branch import Branch  # noqa: E402
from ddtree_guard.testing import places  # noqa: E402
from ddtree_guard.testing.captures import FullCudaGraphBackend, Streams  # noqa: E402

IN_LINE = ["check on main", "pass on main", "own hook on main"]
EARLY = ["side waits for main", "check on side", "pass on main", "main waits for side",
         "own hook on main"]  # fmt: skip
BESIDE = ["side waits for main", "pass on main", "check on side", "main waits for side",
          "own hook on main"]  # fmt: skip


class Capture(Streams):
    """Passes as SGLang makes them of a batch size: two to warm up, and the captured one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch.setattr)
        self.graphs = SimpleNamespace(backend=FullCudaGraphBackend())
        self.runner = SimpleNamespace(capture_tail_hooks=[lambda *rest: self.queue("own hook")])
        self.branch = Branch(torch.device("cuda"))

    def run(self, capturing: bool, dies: bool = False) -> list[str]:
        """One pass; what it queued."""
        self.begin(capturing)
        self.branch.beside(self.runner, lambda: self.queue("check"))
        self.queue("pass")
        if not dies:
            for hook in list(self.runner.capture_tail_hooks):
                hook(self.graphs, None, None, 8)
        return list(self.queued)

    def shape(self) -> list[list[str]]:
        return [self.run(capturing) for capturing in (False, False, True)]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Capture]:
    monkeypatch.setattr(Branch, "beside", Branch.beside)  # put back behind the test

    def make(**asked: str) -> Capture:
        for name, value in asked.items():
            monkeypatch.setenv(f"DDTREE_GUARD_PROBE_{name}", value)
        places.place()
        return Capture(monkeypatch)

    return make


@pytest.mark.parametrize(
    ("asked", "expected"),
    [({}, BESIDE), ({"IN_LINE": "on"}, IN_LINE), ({"EARLY": "on"}, EARLY), ({"EARLY": ""}, BESIDE)],
    ids=["beside", "in line", "early", "unset"],
)
def test_the_check_stands_where_it_is_asked_for(
    start: Callable[..., Capture], asked: dict[str, str], expected: list[str]
) -> None:
    capture = start(**asked)
    for _ in range(3):  # batch sizes
        assert capture.shape() == [IN_LINE, IN_LINE, expected]
    assert capture.branch.joined == (0 if expected is IN_LINE else 3)
    assert len(capture.runner.capture_tail_hooks) == 1


@pytest.mark.parametrize("warms", [True, False])
def test_the_early_check_of_a_capture_that_died_is_in_no_other_graph(
    start: Callable[..., Capture], warms: bool
) -> None:
    capture = start(EARLY="on")
    capture.shape()
    capture.run(False)
    assert capture.run(True, dies=True) == EARLY[:3]
    if warms:
        assert capture.shape() == [IN_LINE, IN_LINE, EARLY]
    else:
        assert capture.run(True) == IN_LINE


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    yield importlib.import_module("serving")
    sys.modules.pop("serving")


def test_places_are_the_ones_that_a_benchmark_can_name(serving: Any, tmp_path: Path) -> None:
    assert set(serving.PLACES) == set(places.PLACES)
    for tool, place in (
        ("early2", "early"),
        ("in_line", "in_line"),
        ("twin2", ""),
        ("control", ""),
    ):
        cell = serving.Cell("NGRAM", tool=tool, replays=True, folder=str(tmp_path))
        asked = {name: serving.environment(cell)[f"DDTREE_GUARD_PROBE_{name.upper()}"]
                 for name in places.PLACES}  # fmt: skip
        assert [name for name, value in asked.items() if value] == ([place] if place else [])
        guarded = serving.environment(cell)["SGLANG_DDTREE_GUARD"]
        assert guarded == ("off" if tool == "control" else "log")
        assert serving.environment(cell)["DDTREE_GUARD_PROBE_REPLAYS"] == "on"
