"""The corrected backend on every release of the matrix, and what auto makes of each."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_guard.guard import Guard
from ddtree_guard.testing.cases import VerifyCase

pytestmark = [pytest.mark.sglang, pytest.mark.matrix]

WIDTHS = (4, 8, 17, 40)


def _case(w: int, path: str, **changes: object) -> VerifyCase:
    size = {"lens": (37, 21, 9), "budget": w - 1, "head_dim": 16, "seed": w, **changes}
    return VerifyCase(padded_bs=5 if path == "graph" else None, **size)  # type: ignore[arg-type]


def _facts() -> Any:
    from ddtree_guard.hooks.facts import facts_of
    from ddtree_guard.testing.fakes import sglang

    return facts_of(sglang("layers.attention.triton_backend").TritonAttnBackend)


def _run(case: VerifyCase, choice: str, path: str) -> Any:
    from ddtree_guard.testing.standins import build_backend, run_verify

    return run_verify(build_backend(case, choice), case, path)


@pytest.mark.parametrize("path", ["eager", "graph"])
@pytest.mark.parametrize("w", WIDTHS)
@pytest.mark.parametrize("choice", ["corrected", "auto"])
def test_corrected_and_auto_are_right(choice: str, w: int, path: str) -> None:
    run = _run(_case(w, path), choice, path)
    assert run.right
    assert Guard().check(run.step).findings == ()


@pytest.mark.parametrize("path", ["eager", "graph"])
@pytest.mark.parametrize("w", [17, 40])
def test_stock_is_as_the_table_says(w: int, path: str) -> None:
    run = _run(_case(w, path, context=400), "stock", path)
    assert run.ran
    assert run.right == _facts().follows_batch
    assert ({"W1", "W3"} <= set(Guard().check(run.step).rules)) != _facts().follows_batch


@pytest.mark.parametrize("choice", ["corrected", "auto"])
def test_full_context_and_full_batch_fit(choice: str) -> None:
    case = _case(17, "graph", lens=(40,) * 5, context=40)
    assert _run(case, choice, "graph").right


def test_stock_cannot_hold_full_context_and_full_batch() -> None:
    case = _case(17, "graph", lens=(40,) * 5, context=40)
    with pytest.raises(RuntimeError, match="size"):
        _run(case, "stock", "graph")


@pytest.mark.parametrize("choice", ["corrected", "auto"])
def test_the_draft_runner_keeps_the_block(choice: str) -> None:
    from ddtree_guard.testing.standins import build_backend

    draft = build_backend(_case(17, "eager"), choice, draft=True)
    assert {getattr(draft, name) for name in _facts().widths} == {8}


def test_the_target_holds_the_width_from_the_start() -> None:
    from ddtree_guard.testing.standins import build_backend

    target = build_backend(_case(17, "eager"), "corrected")
    assert {getattr(target, name) for name in _facts().widths} == {17}
    assert type(target).__name__ == "TritonAttnBackend"


def test_auto_takes_stock_exactly_where_stock_is_right() -> None:
    from ddtree_guard.testing.fakes import sglang
    from ddtree_guard.testing.standins import build_backend

    stock = sglang("layers.attention.triton_backend").TritonAttnBackend
    wide = type(build_backend(_case(17, "eager"), "auto"))
    equal = type(build_backend(_case(8, "eager"), "auto"))
    assert wide is not stock
    # at the block's own width, only releases whose captured mask is too small need us
    assert (equal is stock) == _facts().follows_batch


def test_a_width_stated_for_one_batch_is_forgotten_after_it() -> None:
    from ddtree_guard.testing.standins import build_backend, run_verify

    backend = build_backend(_case(17, "eager"), "corrected")
    narrow = _case(9, "eager", budget=8)
    run = run_verify(backend, narrow, "eager")
    assert run.right
    assert {getattr(backend, name) for name in _facts().widths} == {17}


def test_the_width_is_restored_when_metadata_fails() -> None:
    from ddtree_guard.testing import fakes, standins
    from ddtree_guard.testing.batches import verify_batch
    from ddtree_guard.testing.cases import make_inputs

    case = _case(17, "eager")
    backend = standins.build_backend(case, "corrected")
    batch = verify_batch(make_inputs(_case(9, "eager", budget=8)))
    batch.seq_lens = None
    with (
        fakes.host_context(standins.runner_of(backend).server_args),
        pytest.raises((AttributeError, TypeError)),
    ):
        backend.init_forward_metadata(batch)
    assert {getattr(backend, name) for name in _facts().widths} == {17}
