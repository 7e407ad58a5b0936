"""What the worker goes on with: silent on its own steps, and each fault of it named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from ddtree_guard.config import Config, Mode  # noqa: E402
from ddtree_guard.hooks import witness  # noqa: E402
from ddtree_guard.testing.toy_server import ToyServer  # noqa: E402

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2], [1, 6, 1, 8, 0, 3, 3, 9, 8, 8, 7, 4]]

Start = Callable[..., "tuple[ToyServer, Any, list[Any]]"]


@pytest.fixture
def start(interpreter: None, tmp_path: Path) -> Iterator[Start]:
    """A guarded toy server, and the findings of its steps as they come, tokens not yet sent."""
    guards: list[Any] = []

    def make(graph: bool = False, budget: int = 16) -> Any:
        server = ToyServer(PROMPTS, budget, 8, skill=0.5)
        guard = server.watch(Config(mode=Mode.LOG, dump_dir=tmp_path))
        found: list[Any] = []
        act = guard._apply

        def applied(record: Any, findings: list[Any], tokens_left: Any) -> None:
            found.extend((f.rule, f.rid, f.row, tokens_left) for f in findings)
            act(record, findings, tokens_left)

        guard._apply = applied
        if graph:  # as if the steps were replays: the toy server has none
            computed = guard.witness.computed
            guard.witness.computed = lambda output, info, _: computed(output, info, True)
        guards.append(guard)
        return server, guard, found

    yield make
    for guard in guards:
        assert not guard.fuses.faults
        guard.remove()


def _before(owner: Any, name: str, change: Callable[..., Any], times: int = 1) -> None:
    """Run `change` before a method; what it returns takes the first argument's place."""
    method, left = getattr(owner, name), [times]

    def spoilt(*args: Any) -> Any:
        if left[0]:
            left[0] -= 1
            first = change(*args)
            args = args if first is None else (first, *args[1:])
        return method(*args)

    setattr(owner, name, spoilt)


@pytest.mark.parametrize("budget", [3, 7, 16, 33])
def test_sound_steps_are_clean_and_every_rule_is_judged(start: Start, budget: int) -> None:
    server, guard, found = start(graph=True, budget=budget)
    steps: list[Any] = []
    settle = guard.witness.settle
    guard.witness.settle = lambda record: (settle(record), steps.append(record.step))[0]
    for _ in range(4):
        server.step()
    assert found == []
    for step in steps:
        assert {"A5", "A7", "L1", "L3", "T5", "G7", "W4"} <= set(guard.guard.check(step).checked)
    assert steps[-1].outcome.accept_lens.max() > 1


def test_a_row_of_nan_or_of_one_value_is_named(start: Start) -> None:
    server, _, found = start()

    def spoil(output: Any, *_: Any) -> None:
        output.next_token_logits[2 * 17 + 3] = float("nan")
        output.next_token_logits[1 * 17 + 5] = 0.0

    _before(server.worker.witness, "computed", spoil)
    server.step()
    assert [(f[0], f[1], f[2], f[3]) for f in found if f[0] == "L1"] == [("L1", "r1", 5, False)]


def test_a_request_that_samples_in_a_batch_of_argmax_is_named(start: Start) -> None:
    server, _, found = start()
    req = server._req

    def samples(i: int, params: Any) -> Any:
        made = req(i, params)
        made.sampling_params.top_k = 40 if i == 2 else 1
        return made

    server._req = samples  # type: ignore[method-assign]
    server.step()
    assert [(f[0], f[1], f[3]) for f in found] == [("L3", "r2", False)]


def test_a_mask_of_other_rows_than_the_kernel_walks_is_named(start: Start) -> None:
    server, _, found = start()
    prepare = server.worker.model_runner.attn_backend.init_forward_metadata

    def relaid(batch: Any) -> Any:
        batch.spec_info.mask_columns += 1
        return prepare(batch)

    server.worker.model_runner.attn_backend.init_forward_metadata = relaid
    server.step()
    assert [f[0] for f in found] == ["W4"]


def test_hidden_rows_of_the_first_block_rows_are_named(start: Start) -> None:
    """The accepted path is no prefix of the rows; an implementation took it for one (I21)."""
    server, _, found = start()

    def first_rows(accepted: Any, *_: Any) -> Any:
        rows = (torch.arange(3)[:, None] * 17 + torch.arange(8)).reshape(-1)
        return dataclasses.replace(accepted, rows=rows)

    for _ in range(4):
        _before(server.worker, "_commit", first_rows)
        server.step()
    hit = [f for f in found if f[0] == "A5"]
    assert hit
    assert {f[3] for f in hit} == {False}


def test_the_hidden_row_that_is_handed_on_is_measured(start: Start) -> None:
    server, guard, found = start()
    steps: list[Any] = []
    settle = guard.witness.settle
    guard.witness.settle = lambda record: (settle(record), steps.append(record.step))[0]

    def others(accepted: Any, *_: Any) -> Any:
        rows = accepted.rows.clone()
        rows[2 * 8] = 2 * 17 + 16  # the last request's root
        return dataclasses.replace(accepted, rows=rows)

    _before(server.worker, "_commit", others)
    server.step()
    assert [f[:2] for f in found] == [("A5", "r2")]
    assert steps[0].outcome.hidden_rows[2, 0] == 16


def test_a_draft_from_another_token_is_named(start: Start) -> None:
    server, _, found = start()
    block = server.worker._block

    def masked(batch: Any, draft_input: Any) -> Any:
        ids, slots, places = block(batch, draft_input)
        ids[2, 0] = (ids[2, 0] + 1) % 24
        return ids, slots, places

    server.worker._block = masked
    server.step()
    assert ("A7", "r2", 0, False) in found


def test_a_draft_at_another_length_is_named(start: Start) -> None:
    server, _, found = start()
    block = server.worker._block

    def behind(batch: Any, draft_input: Any) -> Any:
        ids, slots, places = block(batch, draft_input)
        places[1] -= 1
        return ids, slots, places

    server.worker._block = behind
    server.step()
    assert [f[:2] for f in found] == [("A7", "r1")]


def test_a_request_that_is_gone_is_not_compared(start: Start) -> None:
    server, _, found = start()
    req = server._req

    def finished(i: int, params: Any) -> Any:
        made = req(i, params)
        made.finished, made.output_ids = (
            (lambda: i == 1),
            [0 if i == 1 else made.origin_input_ids[-1]],
        )
        return made

    server._req = finished  # type: ignore[method-assign]
    server.step()
    assert found == []


def test_an_output_that_changes_before_its_last_use_is_named(start: Start) -> None:
    server, _, found = start(graph=True)

    def overwrite(accepted: Any, output: Any, *_: Any) -> None:
        output.hidden_states[2 * 17 + 1, 3] += 1.0

    _before(server.worker, "_commit", overwrite)
    server.step()
    assert [f[0] for f in found] == ["G7"]


def test_a_tree_without_the_favourite_is_named(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddtree_guard.ddtree import tree_kernel

    server, _, found = start()
    build = tree_kernel.build

    def cut(tokens: Any, logp: Any, roots: Any, budget: int) -> Any:
        seconds = tokens.clone()
        seconds[2, 0] = tokens[2, 0].roll(1)  # the favourite of the first place is not its first
        logp = logp.clone()
        logp[2, 0, 1:] = -100.0
        return build(seconds, logp, roots, budget)

    monkeypatch.setattr(tree_kernel, "build", cut)
    server.step()
    assert [f[:2] for f in found] == [("T5", "r2")]


def test_steps_that_are_not_read_cost_a_comparison(start: Start) -> None:
    server, guard, _ = start()
    looked: list[str] = []
    guard.witness.every = 1 << 30
    guard.witness._measured = lambda step, *_: looked.append("measured") or step
    for _ in range(witness.FIRST + 2):
        server.step()
    assert len(looked) == witness.FIRST
    assert guard.certificates.stamps._noted[0] == witness.FIRST


def test_a_step_that_was_not_read_is_not_measured(start: Start) -> None:
    server, guard, _ = start()
    looked: list[str] = []
    build = guard.checker.build
    guard.checker.build = lambda record, view: (build(record, view), setattr(record, "step", None))
    guard.witness._measured = lambda *_: looked.append("measured")
    server.step()
    assert looked == []


def test_a_path_off_the_tree_is_measured_without_reading_beyond_it() -> None:
    index = torch.tensor([[0, 99], [0, 2]])
    accepted = SimpleNamespace(accept_index=index, lens=torch.tensor([2, 2]))
    hidden = torch.arange(12.0).view(6, 2)
    done = SimpleNamespace(accepted=accepted, hidden=hidden, handed=hidden[[0, 1, 4, 5]])
    assert witness._rows_handed_on(done, 2, 3).tolist() == [[0, 1], [1, 2]]


def test_without_a_count_of_writes_no_stale_input_is_claimed(start: Start) -> None:
    server, guard, _ = start()
    assert "graph.generation" in guard.witness.supplies
    with torch.inference_mode():
        buffers = SimpleNamespace(positions=torch.zeros(3))
    server.worker.model_runner.graph_runner = SimpleNamespace(buffers=buffers)
    again = witness.witness_of(guard, server.worker)
    assert again is not None
    assert "graph.generation" not in again.supplies
    assert witness.witness_of(guard, SimpleNamespace(observers=[])) is None


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_a_fingerprint_depends_on_every_place(kind: Any) -> None:
    tensor = torch.arange(24.0).view(4, 6).to(kind)
    before = int(witness._mark(tensor))
    assert before == int(witness._mark(tensor.clone()))
    swapped = tensor.clone()
    swapped[0], swapped[1] = tensor[1], tensor[0]
    assert int(witness._mark(swapped)) != before
    tensor[3, 5] = float("nan")
    assert int(witness._mark(tensor)) == int(witness._mark(tensor.clone())) != before
