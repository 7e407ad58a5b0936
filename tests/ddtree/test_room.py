"""Requests at the context limit: SGLang reserves slots behind them, and the row must have room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from ddtree_guard.attention.backend import graph_mask  # noqa: E402
from ddtree_guard.ddtree import algorithm  # noqa: E402
from ddtree_guard.hooks.facts import facts_of  # noqa: E402
from ddtree_guard.hooks.patching import apply  # noqa: E402
from ddtree_guard.testing.fakes import sglang  # noqa: E402

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]
CONTEXT, FREE = 128, -7


def _args(name: str, budget: int, block: int) -> Any:
    return SimpleNamespace(
        speculative_algorithm=name, speculative_ddtree_budget=budget,
        speculative_dflash_block_size=block, speculative_num_draft_tokens=max(budget + 1, block),
        max_speculative_num_draft_tokens=max(budget + 1, block), page_size=1,
        speculative_num_steps=None, speculative_eagle_topk=None,
    )  # fmt: skip


def _row_width(args: Any) -> int:
    """Columns of a row of `req_to_token`, as the server of these arguments makes it."""
    report = apply(algorithm.SERVER)
    try:
        room = sglang("mem_cache.kv_cache_configurator").get_req_to_token_extra_context_len
        return CONTEXT + int(room(args))
    finally:
        report.restore()


def _reserve(args: Any, table: Any, row: int, committed: int) -> None:
    """SGLang's own preparation of a decode step of one request."""
    info = sglang("speculative.dflash_info_v2")
    allocator = SimpleNamespace(page_size=1, alloc=lambda n: torch.arange(1, n + 1),
                                available_size=lambda: 1 << 20)  # fmt: skip
    req = SimpleNamespace(
        kv_committed_len=committed, kv=SimpleNamespace(kv_allocated_len=committed),
        sampling_params=SimpleNamespace(top_k=1),
    )  # fmt: skip
    batch = SimpleNamespace(
        device="cpu", reqs=[req], batch_size=lambda: 1, token_to_kv_pool_allocator=allocator,
        tree_cache=SimpleNamespace(
            token_to_kv_pool_allocator=allocator, is_chunk_cache=lambda: True
        ),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        req_pool_indices=torch.tensor([row]),
    )  # fmt: skip
    asked = "get_spec" if hasattr(info, "get_spec") else "get_server_args"  # 0.5.17; 0.5.16
    with mock.patch.object(info, asked, return_value=args):
        info.DFlashDraftInputV2.create_idle_input("cpu").prepare_for_decode(batch)


@pytest.mark.parametrize(("budget", "block"), [(3, 8), (7, 8), (16, 8), (64, 8), (16, 16), (7, 31)])
def test_a_request_at_the_context_limit_stays_in_its_row(
    interpreter: None, budget: int, block: int
) -> None:
    args = _args("DDTREE", budget, block)
    table = torch.full((3, _row_width(args)), FREE, dtype=torch.int32)
    last = CONTEXT - 4  # committed before its last step: two tokens less than SGLang admits
    _reserve(args, table, 1, last)
    assert (table[1, last : last + 2 * max(budget + 1, block)] != FREE).all()
    assert (table[2] == FREE).all()
    # the step that runs ahead of the last one starts up to a block later
    assert last + block + max(budget + 1, block) <= table.shape[1]


def test_other_algorithms_keep_their_rows() -> None:
    plain = sglang("mem_cache.allocation_sizing").get_req_to_token_extra_context_len
    args = _args("DFLASH", 0, 8)
    assert _row_width(args) == CONTEXT + plain(args)


@pytest.mark.parametrize(("budget", "block"), [(1, 8), (3, 8), (16, 8), (16, 17)])
def test_a_full_batch_at_the_context_limit_keeps_the_captured_mask(budget: int, block: int) -> None:
    """A replay reads that buffer only. The host counts one step more than can have happened."""
    from ddtree_guard.ddtree.worker import DDTreeWorker
    from ddtree_guard.testing.standins import VerifyCase, build_backend

    case = VerifyCase(lens=(36, 36), budget=budget, block=block, context=40, padded_bs=2)
    backend, w = build_backend(case, "corrected"), budget + 1
    backend.init_cuda_graph_state(2, 2 * w)
    worker = object.__new__(DDTreeWorker)
    worker.budget, worker.block_size, worker._eager_mask = budget, block, None
    worker.model_runner, worker.device = SimpleNamespace(attn_backend=backend), "cpu"
    mask = worker._mask(2, w, 2 * (36 + max(w, block)))
    assert mask is graph_mask(backend, facts_of(type(backend)))
    most = 36 + min(w, block)  # what a step that runs ahead can start from
    assert mask.numel() >= 2 * w * (most + w)
