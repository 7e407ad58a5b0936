"""The check on a branch of a captured graph, with streams that note what is queued on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddtree_guard.hooks.branch import Branch


class Stream:
    """Notes what waits for what."""

    def __init__(self, name: str, queued: list[str]) -> None:
        self.name, self.queued = name, queued

    def wait_stream(self, other: Stream) -> None:
        self.queued.append(f"{self.name} waits for {other.name}")


class FullCudaGraphBackend:
    """A capture in one piece."""


class BreakableCudaGraphBackend:
    """A capture in several."""


class Capture:
    """Passes as SGLang's graph runner makes them: two to warm up, then the captured one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
        self.queued: list[str] = []
        self.capturing = False
        self.main, self.side = Stream("main", self.queued), Stream("side", self.queued)
        self.current = self.main
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.side)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        self.graphs = SimpleNamespace(backend=backend)
        self.runner = SimpleNamespace(capture_tail_hooks=[self._own])
        self.branch = Branch(torch.device("cuda"))

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        self.current, before = stream, self.current
        yield
        self.current = before

    def _own(self, graphs: Any, *rest: Any) -> None:
        self.queued.append(f"own hook on {self.current.name}")

    def run(self, capturing: bool, forward: Callable[[], None] = lambda: None) -> list[str]:
        """One pass; what it queued."""
        self.queued.clear()
        self.capturing = capturing
        with self.branch.beside(self.runner):
            self.queued.append(f"check on {self.current.name}")
        forward()
        for hook in self.runner.capture_tail_hooks:
            hook(self.graphs, None, None, 8)
        return list(self.queued)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Capture]:
    return lambda backend=None: Capture(monkeypatch, backend or FullCudaGraphBackend())


IN_LINE = ["check on main", "own hook on main"]
BESIDE = [
    "side waits for main", "check on side", "own hook on main", "main waits for side",
]  # fmt: skip


def test_the_check_runs_beside_a_captured_pass_and_is_joined_at_its_end(
    start: Callable[..., Capture],
) -> None:
    capture = start()
    own = capture.runner.capture_tail_hooks
    for _ in range(3):  # batch sizes
        assert capture.run(False) == IN_LINE
        assert capture.run(False) == IN_LINE
        assert capture.run(True) == BESIDE
        assert capture.runner.capture_tail_hooks is own
        assert len(own) == 1
    assert capture.branch.joined == 3


def test_a_capture_in_pieces_has_it_in_line(start: Callable[..., Capture]) -> None:
    capture = start(BreakableCudaGraphBackend())
    capture.run(False)
    assert capture.run(True) == IN_LINE


def test_a_capture_that_nothing_was_learnt_of_has_it_in_line(
    start: Callable[..., Capture],
) -> None:
    capture = start()
    assert capture.run(True) == IN_LINE
    capture.runner.capture_tail_hooks, own = [], capture.runner.capture_tail_hooks
    capture.run(False)
    capture.graphs.backend = BreakableCudaGraphBackend()
    capture.run(False)
    assert capture.run(True) == ["check on main"]
    capture.graphs.backend, capture.runner.capture_tail_hooks = FullCudaGraphBackend(), own
    capture.run(False)
    assert capture.run(True) == BESIDE


@pytest.mark.parametrize("hooks", [None, ()], ids=["none", "another kind"])
def test_a_release_without_the_hooks_has_it_in_line(
    start: Callable[..., Capture], hooks: Any
) -> None:
    capture = start()
    capture.run(False)
    if hooks is None:
        del capture.runner.capture_tail_hooks
    else:
        capture.runner.capture_tail_hooks = hooks
    capture.queued.clear()
    capture.capturing = True
    with capture.branch.beside(capture.runner):
        capture.queued.append(f"check on {capture.current.name}")
    assert capture.queued == ["check on main"]


@pytest.mark.parametrize("capturing", [False, True])
def test_a_pass_that_fails_leaves_nothing_for_the_next_one(
    start: Callable[..., Capture], capturing: bool
) -> None:
    capture = start()
    own = capture.runner.capture_tail_hooks
    capture.run(False)

    def fails() -> None:
        raise torch.OutOfMemoryError("no memory left")

    with pytest.raises(torch.OutOfMemoryError):
        capture.run(capturing, fails)
    assert capture.run(True) == IN_LINE
    assert capture.run(False) == IN_LINE
    assert capture.run(True) == BESIDE
    assert capture.runner.capture_tail_hooks is own


def test_hooks_of_others_that_come_and_go_are_kept(start: Callable[..., Capture]) -> None:
    capture = start()
    capture.run(False)
    new = [*capture.runner.capture_tail_hooks, capture._own]
    capture.runner.capture_tail_hooks = new
    assert capture.run(True) == [*BESIDE[:3], BESIDE[2], BESIDE[3]]
    assert capture.runner.capture_tail_hooks is new


def test_on_a_cpu_nothing_is_asked() -> None:
    branch, runner = Branch(torch.device("cpu")), SimpleNamespace(capture_tail_hooks=[])
    with branch.beside(runner):
        pass
    assert runner.capture_tail_hooks == []
