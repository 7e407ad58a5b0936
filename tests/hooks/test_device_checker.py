"""The device checker in the server loop; its kernels run in Triton's interpreter here."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ddtree_guard.config import Depth
from ddtree_guard.device.launch import DeviceCheck
from ddtree_guard.hooks import arm, device_checker, launches
from ddtree_guard.hooks.branch import Branch
from ddtree_guard.hooks.links import with_parents
from ddtree_guard.step import Tree
from ddtree_guard.testing.captures import FullCudaGraphBackend, Streams
from ddtree_guard.testing.cases import SMALL, VerifyCase, grow_trees, small_case
from ddtree_guard.testing.fakes import host_context, sglang
from ddtree_guard.testing.server import IDLE

pytestmark = pytest.mark.sglang

IN_GRAPH = "init_forward_metadata_in_graph"
DEVICE_RULES = ("W1", "W2", "W3", "M2", "M4", "T2", "T6", "P1", "K1", "K3", "K4")


@pytest.fixture
def start(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, with_device: Callable[..., Any]
) -> Callable[..., Any]:
    """Starts servers whose guard checks on the "device"; captured checks run at each replay."""
    monkeypatch.setattr(arm, "ServerGuard", with_device)

    def make(case: VerifyCase, depth: Depth = Depth.FAST) -> Any:
        server, guard = serve(case, depth=depth)
        checker: Any = guard.checker
        if case.padded_bs and any(launch.recorded for launch in checker._launches.values()):
            key = next(iter(checker._launches))
            server.replayed = lambda: checker.graphs.in_graph(key)
        return server, guard

    return make


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("algorithm", SMALL)
def test_sound_steps_are_all_checked_and_clean(
    start: Callable[..., Any], algorithm: str, graph: bool
) -> None:
    server, guard = start(small_case(algorithm, graph), Depth.FULL)
    steps = 6 if algorithm == "EAGLE" else 3  # six are more than the verdict has slots
    for _ in range(steps):
        server.step()
    assert (guard.coverage.verify_steps, guard.coverage.steps_checked) == (steps, steps)
    assert guard.coverage.findings == 0
    assert not guard.fuses.faults


def _plant_next(
    guard: Any, monkeypatch: pytest.MonkeyPatch, rule: str, request: int | None = None
) -> None:
    from ddtree_guard.testing.plant import plant

    build, guard.running.quick = guard.checker.build, False

    def planted(record: Any, view: Any) -> None:
        plant(rule, view, request)
        monkeypatch.setattr(guard.checker, "build", build)
        build(record, view)

    monkeypatch.setattr(guard.checker, "build", planted)


@pytest.mark.parametrize("rule", DEVICE_RULES)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_fault_is_found_by_its_bit_and_gets_its_words(
    start: Callable[..., Any],
    lines: Callable[[], list[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    graph: bool,
) -> None:
    server, guard = start(small_case("DDTREE", graph))
    for _ in range(3):
        server.step()  # past the steps that are read to the host
    _plant_next(guard, monkeypatch, rule)
    server.step()
    found = {line["rule"]: line for line in lines()}
    assert rule in found
    assert (found[rule]["step"], found[rule]["tokens_left"]) == ("4", "no")
    assert "DG1" not in found
    assert found[rule]["rid"] in ("r2", "-")


@pytest.mark.parametrize("request_at", [2, 0], ids=["across", "within"])
def test_a_slot_written_twice_is_named_by_the_rule_of_each(
    start: Callable[..., Any],
    lines: Callable[[], list[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    request_at: int,
) -> None:
    """The slot of row 0 of request 0, written again by this request's last row. Across requests the
    device sees that it is not the table's (K3); who the victim is (K2) the host finds.
    """
    server, guard = start(small_case("DDTREE", True))
    for _ in range(3):
        server.step()
    _plant_next(guard, monkeypatch, "K2", request_at)
    server.step()
    found = {line["rule"]: line for line in lines()}
    assert set(found) == {"K2", "K3"}
    assert {line["rid"] for line in found.values()} == {f"r{request_at}"}
    assert guard.coverage.steps_checked == 4


def test_a_step_whose_buffers_were_reused_keeps_rule_and_request(
    start: Callable[..., Any],
    lines: Callable[[], list[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, guard = start(small_case("DDTREE", True))
    for _ in range(3):
        server.step()
    _plant_next(guard, monkeypatch, "P1")
    bad = server.step(overlap=True)
    good = server.step(overlap=True)  # refills the captured buffers
    server.resolve(*bad)
    server.resolve(*good)
    first = lines()[0]
    assert (first["rule"], first["rid"], first["step"]) == ("P1", "r2", "4")
    assert {line["step"] for line in lines()} == {"4"}


def _require_check_in_graph(guard: Any) -> None:
    if not all(hasattr(backend, IN_GRAPH) for _, backend in guard.backends()):
        pytest.skip("0.5.12 has no place inside the graph; the check is launched before it")
    assert any(launch.recorded for launch in guard.checker._launches.values())


def test_a_graph_that_does_not_run_the_check_costs_that_step_alone(
    start: Callable[..., Any],
) -> None:
    server, guard = start(small_case("DDTREE", True))
    _require_check_in_graph(guard)
    server.step()
    replayed, server.replayed = server.replayed, lambda: None
    server.step()
    assert (guard.coverage.verify_steps, guard.coverage.steps_checked) == (2, 1)
    server.replayed = replayed
    server.step()
    server.step()
    assert (guard.coverage.verify_steps, guard.coverage.steps_checked) == (4, 3)


def test_what_a_graph_checked_of_a_step_that_was_not_built_is_not_the_next_one_s(
    start: Callable[..., Any],
    lines: Callable[[], list[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, guard = start(small_case("DDTREE", True))
    _require_check_in_graph(guard)
    for _ in range(3):
        server.step()
    begin = launches.Launch.begin

    def broken(launch: Any, spec: Any, bs: int) -> None:
        monkeypatch.setattr(launches.Launch, "begin", begin)
        raise RuntimeError("planted")

    _plant_next(guard, monkeypatch, "P1")
    monkeypatch.setattr(launches.Launch, "begin", broken)
    server.step()
    for _ in range(3):
        server.step()
    assert [line for line in lines() if "rule" in line] == []
    assert (guard.coverage.verify_steps, guard.coverage.steps_checked) == (7, 6)


def test_a_replay_that_cannot_be_told_its_batch_costs_that_step_alone(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, guard = start(small_case("NGRAM", True))
    _require_check_in_graph(guard)
    for _ in range(3):
        server.step()  # past the steps that are read to the host
    begin = launches.Launch.begin

    def broken(launch: Any, spec: Any, bs: int) -> None:
        monkeypatch.setattr(launches.Launch, "begin", begin)
        raise RuntimeError("planted")

    monkeypatch.setattr(launches.Launch, "begin", broken)
    for _ in range(3):
        server.step()
    assert guard.fuses.faults == {"build": 1}
    assert (guard.coverage.verify_steps, guard.coverage.steps_checked) == (6, 5)
    assert guard.coverage.skipped == {"the check failed": 1}
    assert guard.coverage.findings == 0


def test_eager_steps_of_a_kind_are_bound_once(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "EAGER", 2)
    server, guard = start(small_case("DDTREE", False))
    server.step()
    held = guard.checker._binder.eager
    (first,) = held.values()
    mask = weakref.ref(server.backend.forward_metadata.custom_mask)
    assert mask() is not None
    server.step()
    assert list(held.values()) == [first]
    server.step()
    gc.collect()
    assert mask() is None  # what grows with the context is not kept
    reqs = list(server.reqs)
    for count in (2, 1, 3):
        server.reqs = reqs[:count]
        server.step()
    assert [launch.shape.lanes for launch in held.values()] == [1, 3]
    assert (guard.coverage.verify_steps, guard.coverage.steps_checked) == (6, 6)
    assert guard.coverage.findings == 0


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_slot_table_that_is_replaced_while_serving_is_the_one_that_counts(
    start: Callable[..., Any],
    lines: Callable[[], list[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    graph: bool,
) -> None:
    server, guard = start(small_case("DFLASH" if graph else "NGRAM", graph))
    for _ in range(4):
        server.step()  # past the steps that are read to the host
    old = server.runner.req_to_token_pool.req_to_token
    table = server.runner.req_to_token_pool.req_to_token = old.new_zeros(
        (old.shape[0] + 2, old.shape[1] + 5)
    )
    translator = getattr(server.runner, "kv_index_translator", None)
    for reader in (server.backend, translator):  # from 0.5.18 on there are two
        if reader is not None:
            reader.req_to_token = table
    old.zero_()
    for _ in range(2):
        server.step()
    assert guard.coverage.findings == 0
    _plant_next(guard, monkeypatch, "K3")
    server.step()
    assert {(line["rule"], line["step"]) for line in lines()} == {("K3", "7")}
    assert (guard.coverage.verify_steps, guard.coverage.steps_checked) == (7, 7)


def test_a_backend_that_follows_a_dead_one_is_bound_anew(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "id", lambda backend: 7, raising=False)  # used again
    server, guard = start(small_case("NGRAM", False))
    for _ in range(2):
        server.init_model_worker(guard)
        for _ in range(3):
            server.step()
    assert len(guard.checker._binder.eager) == 1
    assert guard.coverage.findings == 0
    assert (guard.coverage.verify_steps, guard.coverage.steps_checked) == (6, 6)


def _short(predict: Any, lens: Any, index: Any) -> Any:
    return predict[:-1], lens, index


def _fewer(predict: Any, lens: Any, index: Any) -> Any:
    return predict, lens[:-1], index[:-1]


def _more(predict: Any, lens: Any, index: Any) -> Any:
    parts = (predict.view(len(lens), -1), lens, index)
    predict, lens, index = (torch.cat((part, part[-1:])) for part in parts)
    return predict.view(-1), lens, index


@pytest.mark.parametrize(
    ("wrong", "graph"), [(_short, False), (_short, True), (_fewer, False), (_more, True)]
)
def test_a_walk_that_is_not_of_this_step_is_not_read(
    start: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    graph: bool,
    wrong: Callable[..., Any],
) -> None:
    """Its arrays are SGLang's own: past their ends lies memory of somebody else."""
    server, guard = start(small_case("DDTREE", graph))
    for _ in range(3):
        server.step()  # past the steps that are read to the host
    walked = server._walk
    monkeypatch.setattr(server, "_walk", lambda inputs: wrong(*walked(inputs)))
    monkeypatch.setattr(server, "resolve", lambda result, batch: guard.resolve(result))
    server.step()
    monkeypatch.setattr(server, "_walk", walked)
    server.step()
    assert guard.fuses.faults == {"verify": 1}
    assert guard.coverage.skipped == {"its walk could not be judged": 1}
    assert (guard.coverage.verify_steps, guard.coverage.steps_checked) == (5, 4)


def test_a_replay_waits_for_what_the_device_needs_alone(start: Callable[..., Any]) -> None:
    server, guard = start(small_case("NGRAM", True))
    _require_check_in_graph(guard)
    for _ in range(3):
        server.step()  # past the steps that are read to the host
    seen: list[tuple[bool, bool]] = []
    replayed = server.replayed

    def replay() -> None:
        record = guard.current
        seen.append((record.studied, record.view.late is None))
        replayed()

    server.replayed = replay
    server.step()
    assert seen == [(False, False)]
    assert guard.coverage.steps_checked == 4


def test_a_replay_of_another_kind_is_no_verify_step(start: Callable[..., Any]) -> None:
    server, guard = start(small_case("NGRAM", True))
    _require_check_in_graph(guard)
    for _ in range(3):
        server.step()
    assert guard.checker.ready_made
    built, modes = guard.built, sglang("model_executor.forward_batch_info").ForwardMode

    def other(backend: Any, batch: Any, path: str) -> None:
        batch = copy.copy(batch)
        batch.forward_mode, batch.spec_info = modes["DECODE"], None
        built(backend, batch, path)

    guard.built = other
    server.replayed = lambda: None
    for _ in range(2):
        server.step()
    assert not guard.fuses.faults
    assert guard.coverage.steps_checked == 3
    assert guard.coverage.findings == 0


def test_inputs_that_the_pass_itself_changes_are_not_read_after_it(
    start: Callable[..., Any],
    lines: Callable[[], list[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gemma 3 adds 1 to its positions in place: a sample of a queued replay would find P1."""
    monkeypatch.setattr(device_checker, "SAMPLE", {Depth.FAST: 5})
    server, guard = start(small_case("NGRAM", True))
    _require_check_in_graph(guard)
    guard.checker.graphs.branch.rewritten = True  # as a warm-up pass shows
    server.capture()
    key = next(iter(guard.checker._launches))

    def replayed() -> None:
        guard.checker.graphs.in_graph(key)
        server.static.positions += 1

    server.replayed = replayed
    for _ in range(6):
        server.step()
    assert lines() == []
    _plant_next(guard, monkeypatch, "K1")
    server.step()
    assert {line["rule"] for line in lines()} == {"K1", "K3"}
    assert (guard.coverage.verify_steps, guard.coverage.steps_checked) == (7, 7)


def test_a_drafter_s_view_that_has_no_spec_info_is_left_alone(start: Callable[..., Any]) -> None:
    """Multi-layer EAGLE plans its draft forwards with such views, on a backend of the same class,
    before and after the target's replay.
    """
    server, guard = start(small_case("NGRAM", True))
    _require_check_in_graph(guard)
    modes = sglang("model_executor.forward_batch_info").ForwardMode
    drafter, built = copy.copy(server.backend), guard.built

    def other(backend: Any, batch: Any, path: str) -> None:
        bare = {"batch_size": 4, "req_pool_indices": batch.req_pool_indices}
        view = SimpleNamespace(forward_mode=modes["DRAFT_EXTEND_V2"], **bare)
        built(drafter, view, path)
        built(backend, batch, path)
        built(drafter, view, path)

    guard.built = other
    for _ in range(5):
        server.step()
    assert not guard.fuses.faults
    assert guard.coverage.findings == 0
    assert (guard.coverage.verify_steps, guard.coverage.steps_checked) == (5, 5)


@pytest.mark.parametrize(("algorithm", "at"), [("NGRAM", 0), ("DDTREE", 1), ("DFLASH", 1)])
def test_a_batch_size_that_is_not_the_graph_s_costs_that_step_alone(
    start: Callable[..., Any],
    lines: Callable[[], list[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str,
    at: int,
) -> None:
    """A fork's replay view may give another one: the graph that runs was told nothing."""
    server, guard = start(small_case(algorithm, True))
    _require_check_in_graph(guard)
    held = {}
    for lanes in (6, 4):
        server.case = dataclasses.replace(server.case, padded_bs=lanes)
        server.capture()
        held[lanes] = server.static
        monkeypatch.setattr(server.backend, "init_cuda_graph_state", lambda *sizes: None)
    built = guard.built

    def step(lanes: int, said: int) -> None:
        def told(backend: Any, batch: Any, path: str) -> None:
            batch = copy.copy(batch)
            batch.batch_size = said
            built(backend, batch, path)

        guard.built = told
        server.case = dataclasses.replace(server.case, padded_bs=lanes)
        server.static = server.runner.graph_runner.buffers = held[lanes]
        key = id(server.backend), lanes
        server.replayed = functools.partial(guard.checker.graphs.in_graph, key)
        server.step()

    for _ in range(3):
        step(6, 6)
        step(4, 4)
    assert len(guard.checker.ready_made) == 2
    step((6, 4)[at], (4, 6)[at])
    for _ in range(2):
        step(6, 6)
        step(4, 4)
    assert lines() == []
    assert not guard.fuses.faults
    assert guard.coverage.skipped == {"its batch size is not that of its graph": 1}
    assert (guard.coverage.verify_steps, guard.coverage.steps_checked) == (11, 10)


def test_a_layout_that_a_class_does_not_declare_is_no_width(
    start: Callable[..., Any], lines: Callable[[], list[dict[str, str]]]
) -> None:
    server, guard = start(small_case("NGRAM", True))
    _require_check_in_graph(guard)
    for _ in range(3):
        server.step()
    for launch in guard.checker.ready_made.values():
        launch.may_be_ragged = False  # none that was seen had one
    server.redress = lambda spec: setattr(spec, "ragged_verify_layout", object())
    server.step()
    server.redress = lambda spec: None
    server.step()
    assert lines() == []
    assert guard.coverage.skipped == {"a ragged batch has no single width": 1}
    assert (guard.coverage.verify_steps, guard.coverage.steps_checked) == (5, 4)


def test_what_an_idle_rank_replays_is_not_the_next_step_s(
    start: Callable[..., Any],
) -> None:
    """DP attention: a rank without requests replays a graph, and with it the check inside."""
    server, guard = start(small_case("NGRAM", True))
    for _ in range(3):
        server.step()
    for _ in range(2):
        server.model_worker.forward_batch_generation(server.batch(IDLE, []))
        server.step()
    server.model_worker.forward_batch_generation(server.batch(IDLE, []))
    assert not guard.fuses.faults
    assert guard.coverage.findings == 0
    assert (guard.coverage.verify_steps, guard.coverage.steps_checked) == (5, 5)
    begun, closed = guard.checker.graphs.check.state[:2].tolist()
    assert begun == closed  # none is open


def test_captures_while_serving_do_not_leave_false_alarms(start: Callable[..., Any]) -> None:
    server, guard = start(small_case("DDTREE", True))
    server.step()
    server.capture()
    key, launch = next(iter(guard.checker._launches.items()), (None, None))
    if launch is not None and launch.recorded:
        server.replayed = lambda: guard.checker.graphs.in_graph(key)
    for _ in range(3):
        server.step()
    assert guard.coverage.findings == 0
    assert not guard.fuses.faults


class Passes(Streams):
    """Passes of a server's one batch size as on a GPU: with a branch, and hooks at their end. It is
    bound, and has been warmed up.
    """

    def __init__(self, patches: pytest.MonkeyPatch, server: Any, guard: Any) -> None:
        super().__init__(patches.setattr)
        checks = guard.checker.graphs
        internal, checks.branch = checks.branch.internal, Branch(torch.device("cuda"))
        checks.branch.internal = internal
        self.server, server.runner.capture_tail_hooks = server, []
        server.capture()
        self.end()

    def head(self, capturing: bool) -> None:
        """A pass, but for its end."""
        self.begin(capturing)
        with host_context(self.server.runner.server_args):
            self.server.backend.init_forward_metadata_in_graph(self.server.static)

    def end(self) -> None:
        """The end of a pass."""
        for hook in self.server.runner.capture_tail_hooks:
            hook(SimpleNamespace(backend=FullCudaGraphBackend()))


def test_a_check_that_a_capture_s_end_did_not_record_is_launched_before_each_replay(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, guard = start(small_case("DDTREE", True))
    _require_check_in_graph(guard)
    for n, end in enumerate(("recorded", "fails", "dies"), start=1):
        with monkeypatch.context() as patches:
            passes = Passes(patches, server, guard)
            ((key, launch),) = guard.checker._launches.items()
            own, warm = server.runner.capture_tail_hooks, launch.recorded
            if end == "fails":
                patches.setattr(DeviceCheck, "check", lambda check, operands: 1 / 0)
            passes.head(True)
            assert (warm, launch.recorded) == (True, False)
            if end != "dies":
                passes.end()
        assert launch.recorded is (end == "recorded")
        assert guard.fuses.faults == ({} if end == "recorded" else {"capture": 1})
        in_graph = functools.partial(guard.checker.graphs.in_graph, key)
        server.replayed = in_graph if launch.recorded else lambda: None
        _plant_next(guard, monkeypatch, "P1")
        server.step()
        assert (guard.coverage.steps_checked, guard.coverage.findings) == (n, n)
        assert server.runner.capture_tail_hooks is own


def test_a_capture_s_end_fails_as_its_head_does(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also in mode raise: counted, said, disarmed in the end, and never raised into a capture."""
    server, guard = start(small_case("DDTREE", True))
    _require_check_in_graph(guard)
    guard.fuses.strict = True
    with monkeypatch.context() as patches:
        passes = Passes(patches, server, guard)
        for n in range(1, 4):
            for capturing in (False, True):
                patches.setattr(
                    DeviceCheck, "check", lambda *args, fails=capturing: 1 / (not fails)
                )
                passes.head(capturing)
                passes.end()
            assert guard.fuses.faults == {"capture": n}
            assert passes.queued[-1] == "main waits for side"
    assert guard.fuses.disarmed() == ("capture",)
    said = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert [text.partition(":")[0] for text in said] == [
        "ddtree_guard internal site=capture", "NOT GUARDED",
    ]  # fmt: skip


def test_a_capture_does_not_lose_the_verdict_of_a_step_in_flight(
    start: Callable[..., Any],
    lines: Callable[[], list[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes late, and is not taken for one of the steps after the capture."""
    server, guard = start(small_case("DDTREE", True))
    _require_check_in_graph(guard)
    for _ in range(3):
        server.step()
    _plant_next(guard, monkeypatch, "P1")
    bad = server.step(overlap=True)
    server.capture()
    key = next(iter(guard.checker._launches))
    server.replayed = lambda: guard.checker.graphs.in_graph(key)
    good = server.step(overlap=True)
    server.resolve(*bad)
    server.resolve(*good)
    for _ in range(3):
        server.step()
    assert {(line["rule"], line["step"]) for line in lines()} == {("P1", "4")}
    assert (guard.coverage.verify_steps, guard.coverage.steps_checked) == (8, 8)


@pytest.mark.parametrize("w", [2, 17, 33, 130])
@pytest.mark.parametrize("kind", ["random", "chain", "star"])
def test_links_on_the_device_are_links_on_the_host(w: int, kind: str) -> None:
    from ddtree_guard.device.tree import fill_parents

    case = VerifyCase(lens=(5, 6, 7), budget=w - 1, seed=w, kind=kind, block=w + 1)  # type: ignore[arg-type]
    tree = grow_trees(case)
    bare = Tree(
        retrieve_next_token=tree.retrieve_next_token,
        retrieve_next_sibling=tree.retrieve_next_sibling,
    )
    want = with_parents(bare)
    parents = torch.full((4, w), 9, dtype=torch.int32)
    depths = torch.full((4, w), 9, dtype=torch.int32)
    links = (tree.retrieve_next_token, tree.retrieve_next_sibling)
    fill_parents(parents, depths, *(torch.from_numpy(link) for link in links), 3)
    assert np.array_equal(parents[:3].numpy(), want.parents)
    assert np.array_equal(depths[:3].numpy(), want.depths)
    assert (parents[3] == 9).all()


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_adaptive_speculation_has_a_width_per_runtime_state(
    start: Callable[..., Any],
    lines: Callable[[], list[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    graph: bool,
) -> None:
    wide = small_case("EAGLE", graph)
    narrow = dataclasses.replace(wide, budget=3, draft_tokens=4)
    server, guard = start(wide)
    for case in (wide, narrow, wide):
        server.switch(case, guard)
        key = (id(server.backend), 4)
        held = guard.checker._launches.get(key)
        if held is not None and held.recorded:  # 0.5.12 has no place inside the graph
            server.replayed = functools.partial(guard.checker.graphs.in_graph, key)
        for _ in range(2):
            server.step()
    assert lines() == []
    assert (guard.coverage.verify_steps, guard.coverage.steps_checked) == (6, 6)
    assert set(guard.checker.host._states) == {"D=6", "D=4"}
    _plant_next(guard, monkeypatch, "W3")
    server.step()
    assert {(line["rule"], line["step"]) for line in lines()} == {("W3", "7")}
