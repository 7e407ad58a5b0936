"""Adapter: a live Triton backend and the batch it has just built metadata for, as a Step.

Values are copied to NumPy on the host. Nothing is changed and nothing is computed that a rule
compares: lengths, offsets, masks and slots are taken as they are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ddtree_guard.attention.backend import graph_mask, is_corrected, tree_width
from ddtree_guard.hooks.contracts import contract_of
from ddtree_guard.hooks.facts import BUDGET, VARIES, Facts, facts_of, release, stated_width
from ddtree_guard.step import (
    Contract,
    Graph,
    Layout,
    Limits,
    Mask,
    Positions,
    Slots,
    Step,
    Tree,
    Who,
    Widths,
)

WHOLE = 1 << 24  # cells; of a larger captured mask only what a launch can reach is copied


def read_step(
    backend: Any,
    batch: Any,
    runner: Any,
    *,
    path: str = "eager",
    bs: int | None = None,
    q_rows: int | None = None,
    tree: Tree | None = None,
    rids: tuple[str, ...] = (),
    step_id: int = 0,
    contract: Contract | None = None,
    metadata: Any = None,
    draft: Any = None,
) -> Step:
    """The verify step that `backend` is about to launch for `batch`.

    Call it after the metadata was built: eager, capture or replay. `batch` is the forward batch
    as the backend saw it (padded under graphs); `bs` its live requests, if fewer. `q_rows` is the
    number of query rows of the launch, where known. `tree` overrides what the spec info holds;
    `draft` is the draft runner's backend. `metadata` is what the launch reads, where that is not
    the backend's newest: a replay refills the metadata that its capture made and leaves
    `backend.forward_metadata` alone.
    """
    spec, facts = batch.spec_info, facts_of(type(backend))
    meta = metadata or backend.forward_metadata
    lanes = len(batch.req_pool_indices)
    live = lanes if bs is None else bs
    w = verify_width(backend, runner, facts, spec)
    args = runner.server_args
    captured = graph_mask(backend, facts)
    algorithm = str(args.speculative_algorithm or "")
    layout = _layout(meta, batch, live, q_rows)
    return Step(
        bs=live,
        padded_bs=lanes,
        widths=_widths(backend, facts, args, w, draft),
        layout=layout,
        mask=_mask(meta, captured, rids, layout, w, _row_stride(spec, layout, live)),
        tree=tree or tree_of(spec, live, w),
        positions=Positions(values=host(batch.positions)),
        slots=_slots(meta, batch, runner, live, w),
        graph=Graph(num_tokens=int(batch.input_ids.shape[0])) if path == "graph" else Graph(),
        limits=_limits(backend, meta, facts, runner, w),
        who=Who(
            rids=rids,
            step_id=step_id,
            worker="draft" if runner.is_draft_worker else "target",
            algorithm=algorithm,
            backend_kind="corrected" if is_corrected(backend) else "stock",
            release=release(),
            path=path,
        ),
        contract=contract or _contract(spec, algorithm, facts, path),
    )


def verify_width(backend: Any, runner: Any, facts: Facts, spec: Any) -> int:
    """Rows per request of a verify batch: what its spec info states, else what the budget asks for.

    The backend's own width comes last, because it is what the rules judge.
    """
    stated = stated_width(facts, spec) or tree_width(runner)
    return stated or int(getattr(backend, facts.widths[-1]))


def _contract(spec: Any, algorithm: str, facts: Facts, path: str) -> Contract:
    """The table's contract. An eager batch may say that its mask lies in a longer buffer."""
    contract = contract_of(algorithm, facts, path)
    if contract.mask_length == "capacity" or not getattr(spec, "mask_is_buffer", False):
        return contract
    why = "this step's mask lies in a longer buffer: its length is known on the device only"
    return dataclasses.replace(contract, not_checked={**contract.not_checked, "M9": why})


def host(value: Any, dtype: Any = None) -> Any:
    """A NumPy copy of a tensor; None stays None."""
    if value is None:
        return None
    return np.array(value.detach().cpu().numpy(), dtype=dtype)


def _follows(backend: Any, facts: Facts) -> bool:
    """Whether this backend builds its offsets from the width that the batch states."""
    return facts.follows_batch or is_corrected(backend)


def _widths(backend: Any, facts: Facts, args: Any, w: int, draft: Any) -> Widths:
    """The copies of the width. A backend that follows the batch has no copy that can be stale."""
    held = w if _follows(backend, facts) else int(getattr(backend, facts.widths[0]))
    budget = getattr(args, BUDGET, None)
    if budget and getattr(args, VARIES, False) and _follows(backend, facts):
        budget = min(budget, w - 1)  # a step may ask for less, and this backend follows it
    block = getattr(args, "speculative_dflash_block_size", None)
    return Widths(
        w=w,
        holders={"backend": held},
        block=int(block) if block else None,
        budget=int(budget) if budget else None,
        draft_width=None if draft is None else int(getattr(draft, facts.widths[0])),
        draft_rows=int(block) if draft is not None and block else None,
    )


def _limits(backend: Any, meta: Any, facts: Facts, runner: Any, w: int) -> Limits:
    """What the deployment holds, what its backend supports and what this step needs of it."""
    vocab = getattr(runner.model_config, "vocab_size", None)
    width = ("width_not_block",) if _follows(backend, facts) else ()
    needs = ("width_not_block",) if w != runner.server_args.speculative_num_draft_tokens else ()
    masked = ("custom_mask",) if meta.custom_mask is not None else ()
    return Limits(
        context=int(backend.max_context_len),
        vocab=None if vocab is None else int(vocab),
        supports=("custom_mask", *width),
        needs=(*masked, *needs),
    )


def _layout(meta: Any, batch: Any, live: int, q_rows: int | None) -> Layout:
    kv_indptr = host(meta.kv_indptr)
    rows = {} if q_rows is None else {"q": q_rows}
    for name in ("out_cache_loc", "positions", "input_ids"):
        value = getattr(batch, name, None)
        if value is not None:
            rows[name] = int(value.shape[-1])
    mirror = getattr(batch, "seq_lens_cpu", None)
    return Layout(
        qo_indptr=host(meta.qo_indptr),
        kv_indptr=kv_indptr,
        mask_indptr=host(meta.mask_indptr),
        kv_indices=host(meta.kv_indices[: max(int(kv_indptr[-1]), 0)]),
        prefix_lens=host(batch.seq_lens),
        prefix_lens_cpu=None if mirror is None else host(mirror)[:live],
        max_extend_len=int(meta.max_extend_len),
        offset_bits=None if meta.mask_indptr is None else meta.mask_indptr.element_size() * 8,
        rows=rows,
    )


def _reach(layout: Layout, w: int) -> int:
    """Cells behind which no row begins or ends, by the offsets of the launch or by its lengths."""
    columns = np.maximum(np.asarray(layout.prefix_lens, np.int64), 0) + w
    starts = [0] if layout.mask_indptr is None else layout.mask_indptr
    return int(max(w * columns.sum(), np.max(starts) + w * columns.max()))


def _row_stride(spec: Any, layout: Layout, live: int) -> Any:
    """Cells of a mask row per request, where the builder says how many columns its trees have."""
    columns = getattr(spec, "mask_columns", None)
    return None if columns is None else np.asarray(layout.prefix_lens, np.int64)[:live] + columns


def _mask(
    meta: Any, captured: Any, rids: tuple[str, ...], layout: Layout, w: int, row_stride: Any = None
) -> Mask:
    """The mask. A captured buffer is made for the longest context and can hold hundreds of MB."""
    cells = meta.custom_mask
    if cells is None:
        return Mask(present=False)
    capacity = captured if captured is not None else cells
    if captured is not None and cells.numel() > WHOLE:
        cells = cells[: max(WHOLE, _reach(layout, w))]
    return Mask(
        cells=host(cells), present=True, capacity=int(capacity.numel()), rids=rids or None,
        row_stride=row_stride,
    )  # fmt: skip


def tree_of(spec: Any, bs: int, w: int) -> Tree:
    """What the spec info says about the trees: parents where it has them, SGLang's links else."""

    def rows(name: str) -> Any:
        value = getattr(spec, name, None)
        if value is None or value.numel() < bs * w:
            return None
        return host(value).reshape(-1)[: bs * w].reshape(bs, w).astype(np.int64)

    sizes = getattr(spec, "tree_sizes", None)
    drafted = getattr(spec, "drafted", None)  # DDTREE of this project: candidates, favourites first
    return Tree(
        tokens=rows("draft_token"),
        parents=rows("parents"),
        depths=rows("depths"),
        sizes=None if sizes is None else host(sizes, np.int64)[:bs],
        top1=None if drafted is None else host(drafted[:bs, :, 0], np.int64),
        retrieve_index=rows("retrieve_index"),
        retrieve_next_token=rows("retrieve_next_token"),
        retrieve_next_sibling=rows("retrieve_next_sibling"),
    )


def _slots(meta: Any, batch: Any, runner: Any, live: int, w: int) -> Slots:
    pool = runner.req_to_token_pool
    table = pool.req_to_token[batch.req_pool_indices[:live].long()]
    lens = host(batch.seq_lens)[:live]
    size = int(runner.token_to_kv_pool_allocator.size)
    return Slots(
        out_cache_loc=host(batch.out_cache_loc),
        req_to_token=host(table, np.int64),
        pools={"full": size + int(runner.page_size)},  # SGLang keeps one page below slot ids 1..N
        page_size=int(runner.page_size),
        kernel_page_size=int(runner.page_size),
        row_width=int(pool.req_to_token.shape[1]),
        reserve=w,
        capacity={"kv_indices": (int(lens.sum()), int(meta.kv_indices.numel()))},
    )
