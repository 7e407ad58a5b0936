"""What a captured graph reads: big enough at full context, and nothing stale."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_guard.attention.reference import visible
from ddtree_guard.guard import Guard

pytestmark = pytest.mark.sglang


def _full(block: int, beyond: int = 0) -> Any:
    from ddtree_guard.testing.standins import VerifyCase

    return VerifyCase(
        lens=(40 + beyond, 40 + beyond),
        budget=16,
        block=block,
        context=40,
        padded_bs=2,
        heads=2,
        head_dim=16,
    )


@pytest.mark.parametrize("block", [8, 17])
def test_stock_mask_is_too_small_at_full_context_and_full_batch(block: int) -> None:
    from ddtree_guard.testing.standins import build_backend, run_verify

    with pytest.raises(RuntimeError, match="size"):
        run_verify(build_backend(_full(block)), _full(block), "graph")


@pytest.mark.parametrize("choice", ["corrected", "auto"])
@pytest.mark.parametrize("block", [8, 17])
def test_corrected_holds_full_context_and_full_batch(block: int, choice: str) -> None:
    from ddtree_guard.testing.standins import build_backend, run_verify

    run = run_verify(build_backend(_full(block), choice), _full(block), "graph")
    assert run.right
    assert Guard().check(run.step).findings == ()


def test_corrected_holds_a_step_that_runs_ahead_of_the_context_limit() -> None:
    """SGLang starts a step before it knows that the one before ended the request."""
    from ddtree_guard.testing.standins import build_backend, run_verify

    case = _full(8, beyond=4)
    backend = build_backend(case, "corrected")
    run = run_verify(backend, case, "graph")
    assert run.right
    assert backend.cuda_graph_kv_indices.numel() >= sum(case.lens)


def _short_after_long(choice: str) -> Any:
    """A backend whose graph has just replayed a short step after a long one; the short run."""
    from ddtree_guard.testing import fakes, standins
    from ddtree_guard.testing.batches import verify_batch
    from ddtree_guard.testing.cases import VerifyCase, make_inputs

    size = {"budget": 16, "head_dim": 16, "context": 128, "padded_bs": 4, "draft_tokens": 17}
    long = VerifyCase(lens=(90, 60, 70, 80), kind="chain", **size)
    short = VerifyCase(lens=(5, 9), kind="star", **size)
    backend = standins.build_backend(long, choice)
    standins.run_verify(backend, long, "graph")
    inputs = make_inputs(short)
    standins.fill_pools(backend, inputs)
    batch = verify_batch(inputs, lanes=4)
    with fakes.host_context(standins.runner_of(backend).server_args):
        standins.replay(backend, batch)
    return standins.finish(backend, inputs, batch, "graph"), inputs


def _read_cells(step: Any, lane: int) -> Any:
    """The tree columns of a lane's rows, as the kernel addresses them."""
    w, s = step.w, int(step.layout.prefix_lens[lane])
    start = int(step.layout.mask_indptr[lane])
    return step.mask.cells[start : start + w * (s + w)].reshape(w, s + w)[:, s:].astype(bool)


def test_a_short_step_after_a_long_one_reads_nothing_stale() -> None:
    run, inputs = _short_after_long("corrected")
    assert run.right
    for lane in range(2):
        assert (_read_cells(run.step, lane) == visible(inputs.tree.parents[lane].tolist())).all()
    for lane in (2, 3):
        assert not _read_cells(run.step, lane).any()


def test_stock_leaves_stale_cells_to_padded_lanes() -> None:
    run, _ = _short_after_long("stock")
    assert run.right
    assert any(_read_cells(run.step, lane).any() for lane in (2, 3))


def test_captured_buffers_are_what_was_announced() -> None:
    from ddtree_guard.attention.backend import graph_mask, verify_buffer_bytes
    from ddtree_guard.hooks.facts import facts_of
    from ddtree_guard.testing.standins import VerifyCase, build_backend, run_verify

    case = VerifyCase(budget=16, context=64, padded_bs=4, head_dim=16)
    backend = build_backend(case, "corrected")
    run_verify(backend, case, "graph")
    need = verify_buffer_bytes(4, 17, 64, heads=4, head_dim=16, kv_splits=8)
    mask = graph_mask(backend, facts_of(type(backend)))
    assert mask.nbytes == need.mask == 4 * 17 * (64 + 2 * 17)
    assert backend.cuda_graph_kv_indices.nbytes == need.kv_indices == 6 * 64 * 8  # 4 * (64 + 17)
    logits = backend.cuda_graph_attn_logits.nbytes + backend.cuda_graph_attn_lse.nbytes
    assert logits == need.attn_logits
    assert backend.cuda_graph_num_kv_splits.nbytes == need.rows == 4 * 17 * 4
