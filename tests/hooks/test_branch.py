"""The check on a branch of a captured graph, with streams that note what is queued on them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddtree_guard.hooks.branch import Branch
from ddtree_guard.hooks.fuses import Fuses
from ddtree_guard.testing.captures import FullCudaGraphBackend, Streams


class BreakableCudaGraphBackend:
    """A capture in several."""


class Held:
    """What a launch keeps alive."""

    def launch(self) -> None:
        """Nothing."""


class Capture(Streams):
    """Passes as SGLang's graph runner makes them: two to warm up, then the captured one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
        super().__init__(monkeypatch.setattr)
        self.graphs = SimpleNamespace(backend=backend)
        self.runner = SimpleNamespace(capture_tail_hooks=[self._own])
        self.branch = Branch(torch.device("cuda"))

    def _own(self, graphs: Any, *rest: Any) -> None:
        self.queue("own hook")

    def check(self, read: Any = (), branch: Branch | None = None, name: str = "check") -> None:
        (branch or self.branch).beside(self.runner, lambda: self.queue(name), read)

    def end(self) -> list[str]:
        """The tail of a pass; all that the pass queued."""
        for hook in self.runner.capture_tail_hooks:
            hook(self.graphs, None, None, 8)
        assert not (self.main.capturing and self.side.capturing and self.unjoined)
        return list(self.queued)

    @property
    def unjoined(self) -> bool:
        """Whether CUDA would refuse to end the capture."""
        last = [text for text in self.queued if "side" in text]
        return bool(last) and last[-1] != "main waits for side"

    def run(
        self, capturing: bool, forward: Callable[[], None] = lambda: None, read: Any = ()
    ) -> list[str]:
        """One pass; what it queued."""
        self.begin(capturing)
        self.check(read)
        self.queue("pass")
        forward()
        return self.end()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Capture]:
    return lambda backend=None: Capture(monkeypatch, backend or FullCudaGraphBackend())


IN_LINE = ["check on main", "pass on main", "own hook on main"]
BESIDE = [
    "side waits for main", "pass on main", "check on side", "main waits for side",
    "own hook on main",
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
    assert capture.run(True) == IN_LINE[:2]
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
    capture.begin(True)
    capture.check()
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
    assert capture.run(True) == [*BESIDE, BESIDE[-1]]
    assert capture.runner.capture_tail_hooks is new


@pytest.mark.parametrize("ends", [True, False])
def test_hooks_that_are_added_during_a_pass_stay(start: Callable[..., Capture], ends: bool) -> None:
    """A worker appends its own to the list that the runner has just then."""
    capture = start()
    own = capture.runner.capture_tail_hooks

    def adds() -> None:
        capture.runner.capture_tail_hooks.append(capture._own)
        if not ends:
            raise torch.OutOfMemoryError("no memory left")

    if ends:
        assert capture.run(False, adds) == [*IN_LINE, IN_LINE[-1]]
    else:
        with pytest.raises(torch.OutOfMemoryError):
            capture.run(False, adds)
    assert capture.run(False) == [*IN_LINE, IN_LINE[-1]]
    assert capture.run(True) == [*BESIDE, BESIDE[-1]]
    assert capture.runner.capture_tail_hooks is own
    assert len(own) == 2


def test_two_checks_in_a_pass_are_on_one_branch(start: Callable[..., Capture]) -> None:
    """Two backends of one pass, or a class and its base: both hooked. The second one's metadata
    may be made in the graph, after the first one's place.
    """
    capture = start()
    for capturing in (False, False, True):
        capture.begin(capturing)
        capture.check(name="check 1")
        capture.queue("metadata")
        capture.check(name="check 2")
        capture.queue("pass")
        queued = capture.end()
    assert queued == [
        "side waits for main", "metadata on main", "side waits for main", "pass on main",
        "check 1 on side", "check 2 on side", "main waits for side", "own hook on main",
    ]  # fmt: skip
    assert capture.branch.joined == 1


def test_the_branch_of_a_capture_that_died_is_not_joined_to_another_one(
    start: Callable[..., Capture],
) -> None:
    capture = start()
    own = capture.runner.capture_tail_hooks
    capture.run(False)
    capture.begin(True)
    capture.check()
    capture.begin(True)  # a graph without a check: of another mode
    assert capture.end() == ["own hook on main"]
    assert capture.runner.capture_tail_hooks is own
    assert capture.run(True) == IN_LINE
    assert capture.branch.joined == 0


def _dies(capture: Capture, launch: Callable[[], None]) -> None:
    """A captured pass that does not come to its end."""
    capture.run(False)
    capture.begin(True)
    capture.branch.beside(capture.runner, launch)
    assert capture.queued == BESIDE[:1]


@pytest.mark.parametrize("warms", [0, 2])
def test_the_check_of_a_capture_that_died_is_in_no_later_graph(
    start: Callable[..., Capture], warms: int
) -> None:
    capture = start()
    _dies(capture, lambda: capture.queue("dead check"))
    for _ in range(warms):
        assert capture.run(False) == IN_LINE
    assert capture.run(True) == (BESIDE if warms else IN_LINE)
    assert capture.run(False) == IN_LINE
    assert capture.run(True) == BESIDE


@pytest.mark.parametrize("then", ["warm-up", "another graph", "serving"])
def test_what_a_capture_that_died_would_have_launched_is_let_go(
    start: Callable[..., Capture], then: str
) -> None:
    capture = start()
    own, held = capture.runner.capture_tail_hooks, Held()
    _dies(capture, held.launch)
    known, held = weakref.ref(held), None  # type: ignore[assignment]
    assert known() is not None
    if then == "warm-up":
        capture.run(False)
    elif then == "another graph":
        capture.begin(True)
        capture.end()
    else:
        capture.branch.forget()
    assert known() is None
    assert capture.runner.capture_tail_hooks is own


def _fails() -> None:
    raise RuntimeError("planted")


@pytest.mark.parametrize("at", [0, 1])
def test_what_fails_at_the_end_of_a_pass_costs_its_own_check_alone(
    start: Callable[..., Capture], at: int
) -> None:
    """SGLang hears nothing of it, its capture is joined, and the other backend's check is there."""
    capture, fuses = start(), Fuses(strict=True)
    capture.branch.internal = functools.partial(fuses.internal, "capture", may_raise=False)
    capture.run(False)
    capture.begin(True)
    for n in range(2):
        capture.branch.beside(capture.runner, _fails if n == at else lambda: capture.queue("check"))
    capture.queue("pass")
    assert capture.end() == [BESIDE[0], *BESIDE]
    assert (fuses.faults, capture.branch.joined) == ({"capture": 1}, 1)
    assert capture.run(False) == IN_LINE
    assert capture.run(True) == BESIDE


def test_a_branch_on_which_nothing_could_be_launched_holds_no_check(
    start: Callable[..., Capture],
) -> None:
    capture, fuses = start(), Fuses()
    capture.branch.internal = functools.partial(fuses.internal, "capture", may_raise=False)
    for joined in (1, 2):
        capture.run(False)
        assert capture.run(True) == BESIDE
        assert capture.branch.joined == joined
        capture.run(False)
        capture.begin(True)
        capture.branch.beside(capture.runner, _fails)
        assert capture.end() == [BESIDE[0], *BESIDE[-2:]]
        assert (fuses.faults, capture.branch.joined) == ({"capture": joined}, joined)


def test_a_branch_that_cannot_be_joined_is_a_fault_of_ours(
    start: Callable[..., Capture], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a CUDA error; SGLang's capture then fails by itself, with its own words."""
    capture, fuses = start(), Fuses()
    capture.branch.internal = functools.partial(fuses.internal, "capture", may_raise=False)
    capture.run(False)
    capture.begin(True)
    capture.check()
    with monkeypatch.context() as broken:
        broken.setattr(capture.main, "wait_stream", lambda other: _fails())
        for hook in capture.runner.capture_tail_hooks:
            hook(capture.graphs)
    assert fuses.faults == {"capture": 1}
    assert capture.run(True) == IN_LINE
    assert capture.run(False) == IN_LINE
    assert capture.run(True) == BESIDE


@pytest.mark.parametrize("capturing", [False, True])
def test_what_fails_in_line_is_the_caller_s(start: Callable[..., Capture], capturing: bool) -> None:
    capture = start()
    capture.begin(capturing)
    with pytest.raises(RuntimeError, match="planted"):
        capture.branch.beside(capture.runner, _fails)
    assert capture.end() == IN_LINE[-1:]


def test_what_one_runner_has_shown_is_not_known_of_another(
    start: Callable[..., Capture],
) -> None:
    capture = start()
    capture.run(False)
    capture.runner = SimpleNamespace(capture_tail_hooks=[capture._own])
    assert capture.run(True) == IN_LINE


def test_two_guards_leave_the_hooks_as_they_were(start: Callable[..., Capture]) -> None:
    capture = start()
    own, other = capture.runner.capture_tail_hooks, Branch(torch.device("cuda"))
    for capturing in (False, False, True, False, True):
        capture.begin(capturing)
        capture.check()
        capture.check(branch=other)
        queued = capture.end()
        assert capture.runner.capture_tail_hooks is own
        assert len(own) == 1
    assert queued[-1] == "own hook on main"
    assert capture.branch.joined == other.joined == 2


@pytest.mark.parametrize("where", ["pass", "hook"])
def test_what_writes_the_check_s_inputs_does_not_run_beside_it(
    start: Callable[..., Capture], where: str
) -> None:
    """Gemma 3 adds 1 to the positions that it is given. A runner's own hooks come after."""
    capture = start()
    positions, lens = torch.arange(6), torch.tensor([4, 5])

    def writes(*graph: Any) -> None:
        positions.add_(1)

    if where == "hook":
        capture.runner.capture_tail_hooks.append(writes)
    for _ in range(2):
        capture.run(False, writes if where == "pass" else lambda: None, (lens, positions))
    expected = IN_LINE if where == "pass" else BESIDE
    assert capture.run(True, read=(lens, positions)) == expected
    assert capture.branch.rewritten is (where == "pass")


def test_on_a_cpu_nothing_is_asked() -> None:
    branch, runner = Branch(torch.device("cpu")), SimpleNamespace(capture_tail_hooks=[])
    launched: list[str] = []
    branch.beside(runner, lambda: launched.append("check"))
    assert (launched, runner.capture_tail_hooks) == (["check"], [])


def test_a_fault_of_the_comparison_is_none_of_sglangs(
    start: Callable[..., Capture], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = start()
    monkeypatch.setattr(torch, "equal", lambda *pair: 1 / 0)
    assert capture.run(False, read=[torch.zeros(2)]) == IN_LINE
    assert capture.run(True, read=[torch.zeros(2)]) == IN_LINE


def test_a_part_of_the_processor_has_it_in_line(start: Callable[..., Capture]) -> None:
    capture = start()
    capture.runner.server_args = SimpleNamespace(enable_pdmux=True)
    capture.run(False)
    assert capture.run(True) == IN_LINE
    capture.runner.server_args.enable_pdmux = False
    capture.run(False)
    assert capture.run(True) == BESIDE
