"""Shadow mode on SGLang's real backend: silent on sound rows, loud on wrong ones, harmless."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ddtree_guard.config import Capture, Config, Mode, RuleSelection
from ddtree_guard.hooks import arm
from ddtree_guard.testing.cases import VerifyCase

if TYPE_CHECKING:
    from ddtree_guard.hooks.runtime import ServerGuard
    from ddtree_guard.testing.server import MiniServer

pytestmark = pytest.mark.sglang

SIZES: dict[str, Any] = {"lens": (19, 11, 26), "head_dim": 16, "heads": 2, "kv_heads": 1}
WIDTHS: dict[str, dict[str, Any]] = {
    "w=8": {"budget": 7},
    "w=16 ngram": {"algorithm": "NGRAM", "budget": 15, "draft_tokens": 16},
    "w=6 eagle": {"algorithm": "EAGLE", "budget": 5, "draft_tokens": 6, "topk": 4},
    "w=17": {"budget": 16},
    "w=33": {"budget": 32},
    "chain": {"algorithm": "DFLASH", "budget": 7, "draft_tokens": 8, "kind": "chain"},
}
PATHS = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def _case(graph: bool = False, **sizes: Any) -> VerifyCase:
    lanes = 4 if graph else None
    return VerifyCase(**{**SIZES, "budget": 16, "padded_bs": lanes, **sizes})


Start = Callable[..., "tuple[MiniServer, ServerGuard]"]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts servers whose steps are shadowed; their hooks are gone afterwards. The self-test has
    tests of its own.
    """
    from ddtree_guard.hooks import shadow
    from ddtree_guard.testing.server import MiniServer

    monkeypatch.setattr(shadow, "self_test", lambda device: "")

    def make(case: VerifyCase, choice: str = "corrected", layers: int = 2, **config: Any) -> Any:
        server = MiniServer(case, choice)  # type: ignore[arg-type]
        server.layers = layers
        settings = {"mode": Mode.LOG, "dump_dir": tmp_path, "shadow_every": 1, **config}
        guard = server.arm(Config(**settings))
        assert guard is not None
        return server, guard

    yield make
    while arm.GUARDS:
        assert arm.GUARDS.pop().remove() == ()


@PATHS
@pytest.mark.parametrize("width", WIDTHS)
def test_sound_rows_are_compared_and_silent(
    start: Start, lines: Callable[[], list[dict[str, str]]], width: str, graph: bool
) -> None:
    server, guard = start(_case(graph, **WIDTHS[width]), layers=1)
    for _ in range(2):
        server.step()
    assert guard.shadow.compared == 2, guard.shadow.skipped
    assert lines() == []
    assert not guard.fuses.faults


@PATHS
def test_the_incident_alarms_and_names_the_first_wrong_row(
    start: Start,
    lines: Callable[[], list[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    graph: bool,
) -> None:
    """Stock steps 8 rows a request: the last one of three gets no row of its own."""
    server, guard = start(_case(graph), "stock", rules=RuleSelection.parse("D"), layers=1)
    if _follows(guard):
        pytest.skip("this release follows the batch: stock is right")
    kernel, kept, prepare = Kernel(server, ""), [], server.prepare
    monkeypatch.setattr(server, "prepare", lambda batch: kept.append(prepare(batch)) or kept[-1])
    monkeypatch.setattr("ddtree_guard.hooks.shadow.pick", lambda step, count, salt: count - 1)
    server.step()
    found = {line["rule"]: line for line in lines()}
    assert {"D1", "D4"} <= set(found)
    row = _expected(server, kernel, kept[0], 2)
    assert f" in row {row} at layer 0" in found["D4"]["actual"]
    assert not guard.fuses.faults


class Kernel:
    """The backend's kernel with a fault of its own; keeps what it wrote."""

    def __init__(self, server: Any, fault: str) -> None:
        self.fault, self.kernel = fault, server.backend.extend_attention_fwd
        self.output: Any = None
        server.backend.extend_attention_fwd = self

    def __call__(self, q: Any, k: Any, v: Any, out: Any, *args: Any, **kwargs: Any) -> None:
        given = q * 1.05 if self.fault == "scale" else q
        self.kernel(given, k, v, out, *args, **kwargs)
        if self.fault == "row":
            out[-3] = float("nan")
        self.output = out.detach().clone()


def _expected(server: Any, kernel: Kernel, inputs: Any, request: int) -> int | None:
    """The first row of a request that the dense oracle disagrees with."""
    from ddtree_guard.testing.standins import oracle

    case = server.case
    shape = (case.bs, case.w, case.heads, case.head_dim)
    rows = kernel.output.numpy()[: case.bs * case.w].reshape(shape)
    error = np.abs(rows - oracle(inputs)).max(axis=(2, 3))[request]
    return next(iter(np.flatnonzero(~(error <= 1e-3))), None)


@PATHS
@pytest.mark.parametrize(
    ("fault", "rules"),
    [("K4", "D1 D3 D4"), ("scale", "D1 D3 D4"), ("M2", "D1 D4"), ("row", "D1 D4")],
)
def test_a_fault_is_named_with_its_first_row(
    start: Start,
    lines: Callable[[], list[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    rules: str,
    graph: bool,
) -> None:
    """A key from a wrong slot, a wrong scale, a hidden ancestor, a row that was never written."""
    only = RuleSelection.parse("D")
    server, guard = start(_case(graph, lens=(19, 11, 26, 15)), shadow_every=3, rules=only, layers=1)
    monkeypatch.setattr("ddtree_guard.hooks.shadow.pick", lambda step, count, salt: count - 1)
    for _ in range(2):
        server.step()
    kernel, kept, prepare = Kernel(server, fault), [], server.prepare
    monkeypatch.setattr(server, "prepare", lambda batch: kept.append(prepare(batch)) or kept[-1])
    if fault in ("K4", "M2"):
        _plant_next(guard, monkeypatch, fault)
    server.step()
    found = {line["rule"]: line for line in lines()}
    assert set(found) == set(rules.split()), (found, guard.fuses.faults)
    assert {line["rid"] for line in found.values()} == {"r3"}
    assert {line["step"] for line in found.values()} == {"3"}
    row = _expected(server, kernel, kept[0], 3)
    assert f" in row {row} at layer 0" in found["D4"]["actual"]


def _follows(guard: ServerGuard) -> bool:
    from ddtree_guard.hooks.facts import facts_of

    return facts_of(type(guard.backends()[0][1])).follows_batch


def _plant_next(
    guard: ServerGuard, monkeypatch: pytest.MonkeyPatch, rule: str, **where: Any
) -> None:
    """The fault of `rule` in the live tensors of the next launch, after all checks have read it."""
    from ddtree_guard.testing.plant import plant

    build = guard.checker.build

    def planted(record: Any, view: Any) -> None:
        plant(rule, view, **where)
        monkeypatch.setattr(guard.checker, "build", build)
        build(record, view)

    monkeypatch.setattr(guard.checker, "build", planted)


@PATHS
def test_a_dump_of_a_finding_can_be_recomputed(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, graph: bool
) -> None:
    from ddtree_guard.commands.recompute import recompute
    from ddtree_guard.dump.read import Dump

    server, guard = start(_case(graph), capture=Capture.QKV, redact=False, shadow_every=0)
    server.step()
    _plant_next(guard, monkeypatch, "M2")
    server.step()
    assert not guard.fuses.faults
    dump = Dump(*tmp_path.rglob("*_M2"))
    at = dump.findings()[0][0]
    result = recompute(at, dump.step(at))
    assert result is not None
    assert {request for request, _ in result.wrong} == {2}


def test_rows_of_a_step_that_was_read_late_follow_it(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The step holds a later one's buffers: rows, lengths and trees are of a step of their own."""
    from ddtree_guard.commands.recompute import recompute
    from ddtree_guard.dump.read import Dump
    from ddtree_guard.guard import find_rule
    from ddtree_guard.testing.examples import example

    server, guard = start(_case(), capture=Capture.QKV, redact=False, shadow_every=0)
    finding, _ = example(find_rule("P1"))
    settle = guard.checker.settle

    def late(record: Any) -> Any:
        lens = record.step.layout.prefix_lens + 1
        record.step = record.step.replace(layout__prefix_lens=lens)
        return [*settle(record), finding]

    monkeypatch.setattr(guard.checker, "settle", late)
    server.step()
    (path,) = list(tmp_path.rglob("*_P1"))
    whole, bare = (Dump(path).step(at) for at in range(2))
    assert whole.attention.q is None
    assert bare.layout.prefix_lens.tolist() == [19, 11, 26]
    result = recompute(1, bare)
    assert result is not None
    assert (result.wrong, result.error.shape) == ([], (3, 17))


@pytest.mark.parametrize("width", ["chain", "w=16 ngram"])
def test_rows_of_chains_and_links_can_be_recomputed(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, width: str
) -> None:
    """A finding that is not about attention: its rows are right. Ended requests are left out."""
    from ddtree_guard.commands.recompute import recompute
    from ddtree_guard.dump.read import Dump
    from ddtree_guard.guard import find_rule
    from ddtree_guard.testing.examples import example

    case = _case(**WIDTHS[width])
    server, guard = start(case, capture=Capture.QKV, redact=False, shadow_every=0)
    monkeypatch.setattr(server.reqs[1], "finished", lambda: True)
    finding, _ = example(find_rule("P1"))
    settle = guard.checker.settle
    monkeypatch.setattr(guard.checker, "settle", lambda record: [*settle(record), finding])
    server.step()
    (path,) = list(tmp_path.rglob("*_P1"))
    step = Dump(path).step(0)
    result = recompute(0, step)
    assert result is not None
    assert (result.wrong, result.error.shape) == ([], (2, case.w))
    assert step.attention.requests.tolist() == [0, 2]


def test_a_redacted_dump_holds_the_numbers_and_can_be_judged_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ddtree_guard.dump.read import Dump
    from ddtree_guard.guard import Guard

    server, _ = start(_case(), rules=RuleSelection.parse("D"), layers=1)
    Kernel(server, "scale")
    server.step()
    dump = Dump(*tmp_path.rglob("*_D1"))  # one dump for the step's three findings
    assert [finding.rule for _, finding in dump.findings()] == ["D1", "D3", "D4"]
    step = dump.step(0)
    assert step.attention.q is None
    assert {"D1", "D3", "D4"} <= set(Guard().check(step).rules)


def test_off_leaves_every_function_as_it_was(start: Start) -> None:
    from ddtree_guard.testing.fakes import sglang

    backend = sglang("layers.attention.triton_backend").TritonAttnBackend
    before = backend.forward_extend
    server, guard = start(_case(), shadow_every=0)
    assert backend.forward_extend is before
    assert not guard.shadow.on
    assert not {"attend", "ran"} & {site for site, _ in guard.hooks}
    server.step()
    assert guard.coverage.steps_checked == 1


def test_without_a_self_test_that_passes_shadow_mode_is_off(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ddtree_guard.hooks import shadow

    monkeypatch.setattr(shadow, "self_test", lambda device: "a swapped slot was not seen")
    server, guard = start(_case(budget=7), layers=1)
    assert any("shadow is off: a swapped slot" in text for text in caplog.messages)
    server.step()
    assert (guard.shadow.compared, guard.coverage.steps_checked) == (0, 1)


def test_hooks_are_put_back(start: Start) -> None:
    from ddtree_guard.testing.fakes import sglang

    backend = sglang("layers.attention.triton_backend").TritonAttnBackend
    before = backend.forward_extend
    start(_case())
    assert backend.forward_extend is not before
    arm.GUARDS.pop().remove()
    assert backend.forward_extend is before


@pytest.mark.parametrize(
    ("part", "graph"), [("_compare", True), ("_judge", False), ("_fit", True), ("_learn", False)]
)
def test_a_fault_of_shadow_mode_disarms_it_and_nothing_else(
    start: Start, monkeypatch: pytest.MonkeyPatch, part: str, graph: bool
) -> None:
    server, guard = start(_case(graph, budget=7), mode=Mode.RAISE, layers=1)
    guard.shadow.layers.clear()

    def broken(*args: Any) -> None:
        raise RuntimeError("broken shadow")

    monkeypatch.setattr(guard.shadow, part, broken)
    for _ in range(5):
        server.step()
    assert len(server.sent) == 5
    assert guard.fuses.faults == {"shadow": 3}
    assert guard.coverage.steps_checked == 5


def test_a_late_result_says_that_the_tokens_have_left(
    start: Start, lines: Callable[[], list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, guard = start(_case(), rules=RuleSelection.parse("D4"), layers=1, shadow_every=2)
    server.step()
    server.step()
    Kernel(server, "scale")
    server.step()
    arrived = iter([False, True])
    monkeypatch.setattr(guard.shadow._check, "arrived", lambda number: next(arrived))
    server.step()
    assert lines() == []
    server.step()
    assert [(line["step"], line["tokens_left"]) for line in lines()] == [("4", "yes")]


@pytest.mark.parametrize("what", ["slots", "queries"])
def test_a_launch_that_is_narrower_than_it_states_is_not_read_beyond_its_end(
    start: Start, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    from ddtree_guard.hooks import shadow, shadow_rows

    server, guard = start(_case(budget=7), layers=1)
    if what == "slots":
        monkeypatch.setattr(shadow_rows, "verify_width", lambda *given: 9)
    else:
        monkeypatch.setattr(shadow, "heads_of", lambda rows, layer: rows.view(-1, 2, 16)[:20])
    server.step()
    assert guard.shadow.skipped == {f"its {what} are fewer than its rows": 1}
    assert not guard.fuses.faults


def test_each_request_and_layer_has_its_turn_and_ranks_agree() -> None:
    from ddtree_guard.hooks.shadow import pick

    for every in (1, 4, 64):
        steps = range(every, 2000 * every, every)
        pairs = {(pick(step, 6, 1), pick(step, 12, 2)) for step in steps}
        assert len(pairs) == 72
    assert [pick(64, 7, 1), pick(64, 28, 2)] == [pick(64, 7, 1), pick(64, 28, 2)]


def test_graphs_record_different_layers(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server, guard = start(_case(True), layers=3)
    before = {key: held.layer for key, held in guard.shadow.recordings.items()}
    server.case = _case(True, padded_bs=6)
    server.capture()
    after = {key: held.layer for key, held in guard.shadow.recordings.items()}
    assert len(after) == 2
    assert len(set(after.values())) == 2
    assert before.items() <= after.items()
    assert any("shadow every=1" in text and "graph_layers=4:0" in text for text in caplog.messages)


LAYER: dict[str, Any] = {
    "qk_head_dim": 16, "v_head_dim": 16, "sliding_window_size": -1, "logit_cap": 0.0,
    "is_cross_attention": False, "k_scale": None, "layer_id": 0, "attn_type": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "given", "why"),
    [
        ({}, {}, ""),
        ({"sliding_window_size": 128}, {}, "sliding window"),
        ({"logit_cap": 30.0}, {}, "logit cap"),
        ({"qk_head_dim": 24}, {}, "MLA"),
        ({"is_cross_attention": True}, {}, "causal self-attention"),
        ({"k_scale": 0.5}, {}, "KV cache"),
        ({}, {"sinks": 1}, "sinks"),
        ({}, {"save_kv_cache": False}, "no keys of its own"),
    ],
)
def test_what_cannot_be_compared_has_a_reason(
    changes: dict[str, Any], given: dict[str, Any], why: str
) -> None:
    from types import SimpleNamespace

    from ddtree_guard.hooks.shadow_rows import unfit
    from ddtree_guard.testing import standins

    backend = standins.build_backend(_case(), "corrected")
    pool = standins.runner_of(backend).token_to_kv_pool
    layer = SimpleNamespace(**{**LAYER, **changes})
    found = unfit(standins.runner_of(backend), backend, pool.k, pool.k, layer, given)
    assert why in found if why else found == ""


def test_a_reason_is_told_once(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ddtree_guard.hooks import shadow

    monkeypatch.setattr(shadow, "unfit", lambda *given: "sliding window")
    server, guard = start(_case(budget=7))
    for _ in range(3):
        server.step()
    told = [text for text in caplog.messages if "does not compare layer" in text]
    assert told == ["ddtree_guard shadow does not compare layer 0: sliding window"]
    assert guard.shadow.compared == 0
    assert guard.shadow.skipped == {"sliding window": 3}
