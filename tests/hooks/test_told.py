"""Steps for which nothing is launched before their replay; kernels run in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ddtree_guard.config import Depth
from ddtree_guard.hooks import arm, device_checker
from ddtree_guard.hooks.launches import Launch
from ddtree_guard.hooks.links import with_parents
from ddtree_guard.hooks.told import READ_DONE, Told, reads_to_the_end
from ddtree_guard.step import Tree
from ddtree_guard.testing.cases import small_case
from ddtree_guard.testing.live import plant_at
from ddtree_guard.testing.plant import plant
from ddtree_guard.testing.server import DECODE, IDLE

pytestmark = pytest.mark.sglang

LINKS = ("retrieve_next_token", "retrieve_next_sibling")
LEARNT = 3  # steps, before the last of which nothing is launched


class Lab:
    """A server whose trees stay in their place, as NGRAM's do, and who began each of its steps."""

    def __init__(self, server: Any, guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, self.guard = server, guard
        self.checker: Any = guard.checker
        (self.launch,) = self.checker._launches.values()
        self.key = next(iter(self.checker._launches))
        self.begun: list[int] = []  # steps for which something was launched
        self.held: dict[int, list[Any]] = {}  # by number of requests, views of one pair
        self.spoil: Callable[[], None] = lambda: None  # just before a replay
        own = Launch.begin

        def begin(launch: Launch, spec: Any, bs: int) -> None:
            self.begun.append(guard.begun)
            own(launch, spec, bs)

        monkeypatch.setattr(Launch, "begin", begin)
        self.runner.war_fastpath_read_done_event = None
        server.redress, server.replayed = self.keep, self.replay

    @property
    def runner(self) -> Any:
        return self.server.runner

    def keep(self, spec: Any) -> None:
        """The step's links, in the tensors of all steps of as many requests."""
        links = [getattr(spec, name).to(torch.int64) for name in LINKS]
        bs, w = links[0].shape
        if not self.held:
            whole = [torch.zeros(3, w, dtype=torch.int64) for _ in LINKS]
            self.held = {n: [part[:n] for part in whole] for n in (1, 2, 3)}
        for name, mine, part in zip(LINKS, self.held[bs], links, strict=True):
            mine.copy_(part)
            setattr(spec, name, mine)

    def replay(self) -> None:
        self.spoil()
        self.checker.graphs.in_graph(self.key)

    def steps(self, count: int = 1, bs: int = 3) -> None:
        server = self.server
        for _ in range(count):
            batch = server.batch(DECODE, server.reqs[:bs])
            server.resolve(server.model_worker.forward_batch_generation(batch), batch)

    def spoil_once(self, change: Callable[[], None]) -> None:
        """In the next step only, and as steps are: no part of the guard is told."""

        def spoil() -> None:
            self.spoil = lambda: None
            change()

        self.spoil = spoil


@pytest.fixture
def lab(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, with_device: Callable[..., Any]
) -> Lab:
    monkeypatch.setattr(arm, "ServerGuard", with_device)
    monkeypatch.setattr(device_checker, "ALERT", 1)
    monkeypatch.setattr(device_checker, "FIRST", 0)  # no step is read to the host
    server, guard = serve(small_case("NGRAM", True), depth=Depth.FAST)
    if not any(launch.recorded for launch in guard.checker._launches.values()):
        pytest.skip("0.5.12 has no place inside the graph")
    return Lab(server, guard, monkeypatch)


def _clean(lab: Lab, steps: int, lines: list[dict[str, str]]) -> None:
    assert lines == []
    assert not lab.guard.fuses.faults
    coverage = lab.guard.coverage
    assert (coverage.verify_steps, coverage.steps_checked) == (steps, steps), coverage.skipped


def _parents(lab: Lab, bs: int = 3) -> Any:
    """Of the newest step's trees, from its links, on the host."""
    child, sibling = (part.numpy() for part in lab.held[bs])
    return with_parents(Tree(retrieve_next_token=child, retrieve_next_sibling=sibling)).parents


def test_nothing_is_launched_before_a_replay_like_the_last_one(
    lab: Lab, lines: Callable[[], list[dict[str, str]]]
) -> None:
    lab.steps(LEARNT)
    seen = []
    for _ in range(3):
        lab.steps()
        seen.append(lab.launch.buffers.parents[:3].numpy().copy())
        assert np.array_equal(seen[-1], _parents(lab))
    assert lab.begun == [1, 2]
    assert lab.checker.ahead == LEARNT + 1
    assert not np.array_equal(seen[0], seen[1])  # each step has its own trees
    _clean(lab, LEARNT + 3, lines())


def _plant_next(lab: Lab, rule: str) -> None:
    if rule == "A1":
        plant_at(lab.guard, {"rule": "A1", "from": 0, "at": None})
    else:
        lab.spoil_once(functools.partial(_plant, lab, rule))


def _plant(lab: Lab, rule: str) -> None:
    """In the last request, as the graph is about to read it."""
    if rule == "T1":  # rows that no link reaches
        for part in lab.held[3]:
            part[2].fill_(-1)
    else:
        plant(rule, lab.guard.current.view)


def test_a_fault_is_found_on_its_step_and_no_other(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}
    steps, report = set(), lab.guard._report

    def spy(record: Any, finding: Any, dump: Any) -> str:
        if not finding.latent:
            found[finding.rule] = finding
            steps.add(record.step_id)
        return report(record, finding, dump)

    lab.steps(LEARNT)
    monkeypatch.setattr(lab.guard, "_report", spy)
    for rule in ("M2", "T1", "T6", "P1", "K1", "K3", "K4", "A1"):
        begun = len(lab.begun)
        _plant_next(lab, rule)
        lab.steps()
        assert len(lab.begun) == begun
        assert rule in found, (rule, found)
        assert (found[rule].tokens_left, found[rule].request) in ((False, 2), (False, None))
        assert "DG1" not in found
        bad = lab.guard.begun
        lab.steps(2)  # one is read to the host
        assert steps == {bad}
        found.clear()
        steps.clear()


@pytest.mark.parametrize("ahead", [True, False])
def test_a_fault_planted_in_a_live_server_is_read_by_the_graph_alone(
    lab: Lab, lines: Callable[[], list[dict[str, str]]], ahead: bool
) -> None:
    if not ahead:
        lab.server.redress = lambda spec: None
    lab.steps(LEARNT)
    plan: dict[str, Any] = {"rule": "M2", "from": 0, "at": None}
    plant_at(lab.guard, plan)
    lab.steps(2)
    assert (plan["ahead"], plan["rid"], plan.get("error")) == (ahead, "r2", None)
    first = lines()[0]
    assert (first["rule"], first["step"], first["rid"]) == ("M2", str(plan["at"]), "r2")
    assert {line["step"] for line in lines()} == {str(plan["at"])}


def test_another_number_of_requests_is_told_before_its_replay(
    lab: Lab, lines: Callable[[], list[dict[str, str]]]
) -> None:
    lab.steps(LEARNT)
    lab.steps(2, bs=2)
    lab.steps(1, bs=1)
    lab.steps(2)
    at = LEARNT
    assert [step for step in lab.begun if step > at] == [at + 1, at + 3, at + 4]
    _clean(lab, LEARNT + 5, lines())


@pytest.mark.parametrize("rule", ["", "K3", "A1"])
def test_trees_that_lie_elsewhere_are_looked_at_again(
    lab: Lab, lines: Callable[[], list[dict[str, str]]], rule: str
) -> None:
    """What the graph found in the old place is of no step, in either direction."""
    lab.steps(LEARNT)
    assert lab.begun[-1] < LEARNT
    for part in lab.held[3]:
        part.fill_(1)  # no trees: the graph finds all kinds of things
    lab.held = {}
    if rule:
        _plant_next(lab, rule)
    lab.steps()
    assert lab.begun[-1] == LEARNT + 1
    if rule:
        found = {line["rule"]: line for line in lines()}
        assert rule in found
        assert {line["step"] for line in found.values()} == {str(LEARNT + 1)}
        assert not found.keys() & {"T1", "T2", "T3", "T4", "DG1"}
        return
    lab.steps(3)
    assert lab.begun[-1] == LEARNT + 2  # and known again
    _clean(lab, LEARNT + 4, lines())


def test_links_that_are_new_in_each_step_are_told_in_each(
    lab: Lab, lines: Callable[[], list[dict[str, str]]]
) -> None:
    """EAGLE's: the allocator may give them the same place, or not."""
    lab.server.redress = lambda spec: None
    lab.steps(LEARNT + 1)
    assert lab.begun == [*range(1, LEARNT + 2)]
    assert not lab.checker._bound.told.cell.any()
    _clean(lab, LEARNT + 1, lines())


@pytest.mark.parametrize("name", READ_DONE)
def test_a_graph_reads_no_table_that_others_may_write_meanwhile(
    lab: Lab, lines: Callable[[], list[dict[str, str]]], name: str
) -> None:
    """DFLASH's replays say so before they run, and a release to come may say it of all."""
    lab.steps(LEARNT)
    begun = len(lab.begun)
    setattr(lab.runner, name, object())
    lab.steps(2)
    assert lab.begun[begun:] == [LEARNT + 1, LEARNT + 2]
    assert not lab.checker._bound.told.cell.any()
    setattr(lab.runner, name, None)
    lab.steps(3)
    assert lab.begun[-1] == LEARNT + 4
    _clean(lab, LEARNT + 5, lines())


def test_a_release_that_says_nothing_of_the_table_is_told_of_each_step(
    lab: Lab, lines: Callable[[], list[dict[str, str]]]
) -> None:
    del lab.runner.war_fastpath_read_done_event
    lab.steps(LEARNT)
    assert lab.begun == [*range(1, LEARNT + 1)]
    _clean(lab, LEARNT, lines())


@pytest.mark.parametrize("bs", [3, 2])
def test_another_slot_table_is_the_one_that_counts(
    lab: Lab, lines: Callable[[], list[dict[str, str]]], bs: int
) -> None:
    """Also where the step is another one than the last for a second reason."""
    lab.steps(LEARNT)
    pool = lab.runner.req_to_token_pool
    old, pool.req_to_token = pool.req_to_token, pool.req_to_token.clone()
    for reader in (lab.server.backend, getattr(lab.runner, "kv_index_translator", None)):
        if reader is not None:
            reader.req_to_token = pool.req_to_token
    old.fill_(0)
    lab.steps(3, bs=bs)
    assert lab.begun[-3:] == [LEARNT + n for n in (1, 2, 3)]  # its graph knows the old one only
    _clean(lab, LEARNT + 3, lines())


def test_inputs_that_a_pass_changes_are_told_in_each_step(
    lab: Lab, lines: Callable[[], list[dict[str, str]]]
) -> None:
    """A step could not be checked again behind its replay."""
    lab.launch.rewritten = True
    lab.steps(LEARNT)
    assert lab.begun == [*range(1, LEARNT + 1)]
    _clean(lab, LEARNT, lines())


def test_a_capture_is_told_of_nothing(
    lab: Lab, lines: Callable[[], list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.steps(LEARNT)
    monkeypatch.setattr(lab.server.backend, "init_cuda_graph_state", lambda *sizes: None)
    lab.server.capture()
    (lab.launch,) = lab.checker._launches.values()
    assert not lab.launch.told.cell.any()
    begun = len(lab.begun)
    lab.steps(LEARNT)
    assert lab.begun[begun] == LEARNT + 1
    assert lab.begun[-1] < LEARNT + LEARNT
    _clean(lab, 2 * LEARNT, lines())


def test_an_idle_rank_s_replay_is_not_the_next_step_s(
    lab: Lab, lines: Callable[[], list[dict[str, str]]]
) -> None:
    lab.steps(LEARNT)
    batch = lab.server.batch(IDLE, [])
    lab.server.model_worker.forward_batch_generation(batch)
    lab.steps(2)
    assert lab.begun[-1] <= LEARNT
    _clean(lab, LEARNT + 2, lines())


def _links(count: int, dtype: torch.dtype = torch.int64) -> tuple[Any, Any]:
    return torch.ones(2, count, dtype=dtype), torch.ones(2, count, dtype=dtype)


def test_what_is_told_is_kept_alive_and_forgotten() -> None:
    told, links = Told(torch.device("cpu")), _links(4)
    told.learn(links, 2)
    assert (told.live, told.cell.tolist()) == (0, [0, 0])
    told.learn(_links(4), 2)
    told.learn(links, 2)
    assert told.live == 0  # not the last one's
    told.learn(links, 2)
    where = [part.data_ptr() for part in links]
    assert (told.live, told.cell.tolist()) == (2, where)
    assert told.keeps((links[0][:1], links[1][:1]))  # fewer requests, in the same place
    assert not told.keeps((links[1], links[0]))
    assert not told.keeps((links[0].t(), links[1]))
    held = weakref.ref(links[0])
    del links
    assert held() is not None
    told.forget()
    assert (told.live, told.cell.tolist(), held()) == (0, [0, 0], None)


@pytest.mark.parametrize("links", [_links(4, torch.int32), tuple(p.t() for p in _links(4))])
def test_links_that_an_address_does_not_describe_are_not_told(links: tuple[Any, Any]) -> None:
    told = Told(torch.device("cpu"))
    for _ in range(3):
        told.learn(links, 2)
    assert (told.live, told.cell.tolist()) == (0, [0, 0])


@pytest.mark.parametrize(
    ("events", "expected"),
    [({}, False), ({READ_DONE[0]: None}, True), ({READ_DONE[1]: None}, True),
     ({READ_DONE[0]: 1}, False), (dict.fromkeys(READ_DONE), True),
     ({READ_DONE[0]: None, READ_DONE[1]: 1}, False)],
)  # fmt: skip
def test_whether_a_pass_reads_the_table_to_its_end(events: dict[str, Any], expected: bool) -> None:
    assert reads_to_the_end(SimpleNamespace(**events)) is expected


def test_trees_that_cannot_be_looked_at_are_of_no_finding(
    lab: Lab, lines: Callable[[], list[dict[str, str]]]
) -> None:
    """The graph has looked at trees in the old place, which are of no step."""
    lab.steps(LEARNT)
    for part in lab.held[3]:
        part.fill_(1)

    def bare(spec: Any) -> None:
        for name in LINKS:
            setattr(spec, name, None)

    lab.server.redress = bare
    lab.steps()
    assert lines() == []
    assert lab.guard.fuses.faults == {"verify": 1}
    assert lab.guard.coverage.skipped == {"its trees could not be looked at": 1}
    lab.server.redress = lab.keep
    lab.steps(2)
    assert lines() == []
    assert (lab.guard.coverage.verify_steps, lab.guard.coverage.steps_checked) == (6, 5)


@pytest.mark.parametrize("bs", [2, 3])
def test_parents_where_links_were_are_the_ones_that_count(
    lab: Lab, lines: Callable[[], list[dict[str, str]]], bs: int
) -> None:
    lab.steps(LEARNT)

    def give(spec: Any) -> None:
        lab.keep(spec)
        links = {name: getattr(spec, name).numpy() for name in LINKS}
        tree = with_parents(Tree(**links))
        for part in lab.held[3]:
            part.fill_(1)  # nobody's
        for name, of in (("parents", "parents"), ("depths", "depths"), ("tree_sizes", "sizes")):
            setattr(spec, name, torch.from_numpy(getattr(tree, of)).to(torch.int32))

    lab.server.redress = give
    lab.steps(1, bs=bs)
    _clean(lab, LEARNT + 1, lines())


def test_a_graph_of_another_width_does_not_read_past_the_trees(
    lab: Lab, lines: Callable[[], list[dict[str, str]]]
) -> None:
    """Adaptive speculation: a state's trees are too short for a wider one's graph."""
    server, guard = lab.server, lab.guard
    wide = server.case
    narrow = dataclasses.replace(wide, budget=3, draft_tokens=4)
    held: dict[int, Any] = {}

    def switch(case: Any) -> None:
        held[server.case.w] = lab.held
        server.switch(case, guard)
        lab.runner.war_fastpath_read_done_event = None
        lab.held = held.get(case.w, {})
        lab.key = (id(server.backend), 4)
        lab.launch = lab.checker._launches[lab.key]

    lab.steps(LEARNT)
    switch(narrow)
    lab.steps(LEARNT)
    switch(wide)
    lab.steps(LEARNT)
    switch(narrow)
    lab.steps(LEARNT)
    switch(wide)
    ahead: list[bool] = []
    lab.spoil_once(lambda: ahead.append(guard.current.ahead))
    lab.steps()
    assert ahead == [False]
    _clean(lab, 4 * LEARNT + 1, lines())


def test_an_eager_step_tells_how_many_requests_the_device_knows_of(
    lab: Lab, lines: Callable[[], list[dict[str, str]]]
) -> None:
    """As one is that has more requests than the largest graph."""
    lab.steps(LEARNT)
    case = lab.server.case
    lab.server.case = dataclasses.replace(case, padded_bs=None)
    lab.steps(1, bs=2)
    lab.server.case = case
    begun = len(lab.begun)
    lab.steps(1, bs=2)
    _clean(lab, LEARNT + 2, lines())
    lab.spoil_once(functools.partial(_plant, lab, "M2"))
    lab.steps()
    assert lab.begun[begun:] == [LEARNT + 3]
    assert ("M2", str(LEARNT + 3), "r2") in {
        (line["rule"], line["step"], line["rid"]) for line in lines()
    }


def test_trees_of_another_number_of_requests_that_lie_elsewhere_are_told(
    lab: Lab, lines: Callable[[], list[dict[str, str]]]
) -> None:
    """Before their replay; the graph, too, no longer looks at the old place."""
    lab.steps(LEARNT)
    for part in lab.held[3]:
        part.fill_(1)
    lab.held = {}
    lab.steps(2, bs=2)
    assert lab.begun[-2:] == [LEARNT + 1, LEARNT + 2]
    _clean(lab, LEARNT + 2, lines())


@pytest.mark.parametrize("new", [0, 1])
def test_half_of_the_links_that_stays_is_not_told(new: int) -> None:
    told, links = Told(torch.device("cpu")), list(_links(4))
    for _ in range(3):
        links[new] = links[new].clone()
        told.learn((links[0], links[1]), 2)
    assert (told.live, told.cell.tolist()) == (0, [0, 0])
