"""The tree search and the tree mask on the device: one launch each for the whole batch.

`build` gives exactly what `tree.search` gives, equal scores included. No host read, no
allocation beyond the outputs, and nothing specialised on the batch size or the lengths.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ddtree_guard.ddtree.tree import Trees, check_sizes

# One program holds one request's rows in registers. One offer per parent row:
#   key = score as an order-preserving int32  (high half)
#       | 1023 - row (10 bits) | depth (5 bits) | rank (11 bits)         (26 bits of the low half)
# so that one max finds the best offer, the lowest row among equals, and all that is needed of it.
_NONE = tl.constexpr(-(2**63))


@triton.jit
def _keys(
    score: tl.tensor, row: tl.tensor, depth: tl.tensor, rank: tl.tensor, alive: tl.tensor
) -> tl.tensor:
    bits = score.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    low = ((1023 - row).to(tl.int64) << 16) | (depth.to(tl.int64) << 11) | rank.to(tl.int64)
    # NaN compares false, -inf is not greater than itself: neither is ever offered.
    alive = alive & (score > float("-inf"))
    return tl.where(alive, (ordered << 32) | low, _NONE)


@triton.jit
def _search_kernel(
    tokens_ptr: tl.tensor,
    logp_ptr: tl.tensor,
    roots_ptr: tl.tensor,
    out_tokens: tl.tensor,
    out_parents: tl.tensor,
    out_depths: tl.tensor,
    out_sizes: tl.tensor,
    out_child: tl.tensor,
    out_sibling: tl.tensor,
    depth_max: tl.tensor,
    top_k: tl.tensor,
    budget: tl.tensor,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    width = budget + 1
    tokens_ptr += request * depth_max * top_k
    logp_ptr += request * depth_max * top_k
    out = request * width
    cells = tl.arange(0, PADDED)
    inside = cells < width
    none = tl.full((PADDED,), -1, tl.int64)
    spine = tl.minimum(depth_max, budget)
    # Defaults and the spine first, by whole vectors.
    on_spine = (cells > 0) & (cells <= spine)
    token = tl.load(tokens_ptr + (cells - 1) * top_k, mask=on_spine, other=0)
    token = tl.where(cells == 0, tl.load(roots_ptr + request), token)
    tl.store(out_tokens + out + cells, token, mask=inside)
    tl.store(out_parents + out + cells, tl.where(on_spine, cells.to(tl.int64) - 1, none), inside)
    tl.store(out_depths + out + cells, tl.where(on_spine, cells, 0).to(tl.int64), mask=inside)
    has_child = cells < spine
    tl.store(out_child + out + cells, tl.where(has_child, cells.to(tl.int64) + 1, none), inside)
    tl.store(out_sibling + out + cells, none, mask=inside)

    tl.debug_barrier()  # the loop below overwrites cells that other lanes have just set

    # The state of the rows that can still have children: the last row never does.
    rows = tl.arange(0, ROWS)
    exists = rows <= spine
    depth = tl.where(exists, rows, 0)
    taken = tl.where(rows < spine, 1, 0)
    last = tl.where(rows < spine, rows + 1, 0)
    score = tl.zeros((ROWS,), tl.float32)
    running = tl.full((), 0.0, tl.float32)
    for level in range(spine):
        running += tl.load(logp_ptr + level * top_k)
        score = tl.where(rows == level + 1, running, score)
    room = exists & (depth < depth_max) & (taken < top_k)
    step = tl.load(logp_ptr + depth * top_k + taken, mask=room, other=0.0)
    key = _keys(score + step, rows, depth, taken, room)

    size = spine + 1
    best = tl.max(key, 0)
    while (size < width) & (best != _NONE):
        parent = 1023 - ((best >> 16) & 1023).to(tl.int32)
        level = ((best >> 11) & 31).to(tl.int32)
        rank = (best & 2047).to(tl.int32)
        ordered = (best >> 32).to(tl.int32)
        won = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(out_tokens + out + size, tl.load(tokens_ptr + level * top_k + rank))
        tl.store(out_parents + out + size, parent.to(tl.int64))
        tl.store(out_depths + out + size, (level + 1).to(tl.int64))
        is_parent = rows == parent
        is_new = rows == size
        new = tl.zeros((ROWS,), tl.int64) + size
        tl.store(out_child + out + rows, new, mask=is_parent & (rank == 0))
        tl.store(out_sibling + out + last, new, mask=is_parent & (rank > 0))
        last = tl.where(is_parent, size, last)
        taken = tl.where(is_parent, rank + 1, taken)
        depth = tl.where(is_new, level + 1, depth)
        score = tl.where(is_new, won, score)
        changed = is_parent | is_new
        room = changed & (depth < depth_max) & (taken < top_k)
        step = tl.load(logp_ptr + depth * top_k + taken, mask=room, other=0.0)
        key = tl.where(changed, _keys(score + step, rows, depth, taken, room), key)
        size += 1
        best = tl.max(key, 0)
    tl.store(out_sizes + request, size.to(tl.int64))


def build(tokens: Any, logp: Any, roots: Any, budget: int, out: Trees | None = None) -> Trees:
    """Build the trees of a batch on the device of `logp`. See `tree.search`.

    tokens: (bs, L, K) int64 contiguous; logp: same shape, float32 contiguous; roots: (bs,) int64.
    `out` gives tensors to write into, rows (bs, B + 1) contiguous.
    """
    bs, depth, top_k = logp.shape
    check_sizes(depth, top_k, budget)
    width = budget + 1
    if out is None:
        out = empty(bs, width, logp.device)
    # Rows that can be parents are 0 .. B-1, so a budget of 256 needs no 512 lanes. One warp, as far
    # as the registers reach: its reductions need no shared memory.
    _search_kernel[(bs,)](
        tokens, logp, roots,
        out.tokens, out.parents, out.depths, out.sizes, out.next_token, out.next_sibling,
        depth, top_k, budget,
        ROWS=triton.next_power_of_2(max(budget, 2)), PADDED=triton.next_power_of_2(width),
        num_warps=max(1, budget // 256),
    )  # fmt: skip
    return out


def empty(bs: int, width: int, device: Any) -> Trees:
    """Uninitialised outputs for `build`."""
    parts = torch.empty((5, bs, width), dtype=torch.int64, device=device)
    sizes = torch.empty((bs,), dtype=torch.int64, device=device)
    return Trees(parts[0], parts[1], parts[2], sizes, parts[3], parts[4])


@triton.jit(do_not_specialize=["bs", "width"])
def _mask_kernel(
    parents_ptr: tl.tensor,
    depths_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    bs: tl.tensor,
    width: tl.tensor,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    WITH_MASK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    request = tl.program_id(1)
    at = request.to(tl.int64) * width + row
    lanes = tl.arange(0, LANES)
    before = tl.load(lens_ptr + lanes, mask=lanes < request, other=0).to(tl.int64)
    prefix = tl.load(lens_ptr + request).to(tl.int64)
    depth = tl.load(depths_ptr + at)
    tl.store(positions_ptr + at, prefix + depth)
    if WITH_MASK:
        start = width.to(tl.int64) * (tl.sum(before, 0) + request * width.to(tl.int64))
        start += row * (prefix + width)
        columns = tl.arange(0, COLUMNS)
        ones = tl.full((COLUMNS,), 1, tl.uint8)
        for column in range(0, prefix, COLUMNS):
            cells = column + columns
            tl.store(mask_ptr + start + cells, ones, mask=cells < prefix)
        cells = tl.arange(0, COLUMNS)
        seen = cells == row
        node = tl.load(parents_ptr + at)
        while node >= 0:
            seen = seen | (cells == node)
            node = tl.load(parents_ptr + request.to(tl.int64) * width + node)
        tl.store(mask_ptr + start + prefix + cells, seen.to(tl.uint8), mask=cells < width)


def paint(trees: Trees, lens: Any, positions: Any, mask: Any | None) -> None:
    """Write positions (bs*w, int64) and the flat mask (uint8 or bool) of the trees, in place.

    `lens` are the committed lengths on the device. Request i's rows start at the sum of w*(s+w)
    over the requests before it; cells behind the last request are left alone. The caller makes sure
    of the room: this function cannot read the lengths without waiting for the device. With `mask`
    None only the positions are written.
    """
    bs, width = trees.parents.shape
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    _mask_kernel[(width, bs)](
        trees.parents, trees.depths, lens, mask if mask is not None else positions, positions,
        bs, width,
        COLUMNS=max(256, triton.next_power_of_2(width)), LANES=triton.next_power_of_2(bs),
        WITH_MASK=mask is not None,
    )  # fmt: skip
