"""The tree walk and the KV commit on the device: one launch each, no host read."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ddtree_guard.ddtree.tree import Trees
from ddtree_guard.ddtree.verify import Accepted


@triton.jit(do_not_specialize=["width", "block"])
def _walk_kernel(
    tokens_ptr: tl.tensor,
    parents_ptr: tl.tensor,
    predict_ptr: tl.tensor,
    prefix_ptr: tl.tensor,
    index_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    committed_ptr: tl.tensor,
    bonus_ptr: tl.tensor,
    new_lens_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    width: tl.tensor,
    block: tl.tensor,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    base = request * width
    cells = tl.arange(0, PADDED)
    inside = cells < width
    tokens = tl.load(tokens_ptr + base + cells, mask=inside, other=-1)
    parents = tl.load(parents_ptr + base + cells, mask=inside, other=-1)
    columns = tl.arange(0, COLUMNS)
    path = tl.full((COLUMNS,), -1, tl.int64)
    chosen = tl.zeros((COLUMNS,), tl.int64)
    node = tl.zeros((), tl.int32)
    wanted = tl.load(predict_ptr + base)
    length = tl.zeros((), tl.int32)
    alive = node >= 0
    while alive:
        path = tl.where(columns == length, node.to(tl.int64), path)
        chosen = tl.where(columns == length, wanted, chosen)
        length += 1
        hit = (parents == node) & (tokens == wanted)
        node = tl.min(tl.where(hit, cells, PADDED), 0)
        alive = (node < PADDED) & (length < block)
        if alive:
            wanted = tl.load(predict_ptr + base + node)
    prefix = tl.load(prefix_ptr + request).to(tl.int64)
    out = request * block + columns
    keep = columns < block
    tl.store(index_ptr + out, path, mask=keep)
    tl.store(committed_ptr + out, chosen, mask=keep)
    tl.store(rows_ptr + out, base + tl.maximum(path, 0), mask=keep)
    tl.store(positions_ptr + out, prefix + columns, mask=keep)
    tl.store(lens_ptr + request, length)
    tl.store(bonus_ptr + request, wanted)
    tl.store(new_lens_ptr + request, prefix + length)


def walk(trees: Trees, predict: Any, prefix_lens: Any, block: int) -> Accepted:
    """Walk the trees. predict: (bs, w) int64 contiguous; prefix_lens: (bs,). See `verify.walk`."""
    bs, width = trees.tokens.shape
    device = predict.device
    index, committed, rows, positions = torch.empty(
        (4, bs, block), dtype=torch.int64, device=device
    )
    bonus, new_lens = torch.empty((2, bs), dtype=torch.int64, device=device)
    lens = torch.empty((bs,), dtype=torch.int32, device=device)
    _walk_kernel[(bs,)](
        trees.tokens, trees.parents, predict, prefix_lens,
        index, lens, committed, bonus, new_lens, rows, positions,
        width, block,
        PADDED=triton.next_power_of_2(max(width, 2)), COLUMNS=triton.next_power_of_2(block),
    )  # fmt: skip
    return Accepted(index, lens, committed, bonus, new_lens, rows.view(-1), positions.view(-1))


@triton.jit(do_not_specialize=["slot_stride", "block"])
def _move_kernel(
    buffers_ptr: tl.tensor,
    row_bytes_ptr: tl.tensor,
    index_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    slot_stride: tl.tensor,
    block: tl.tensor,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    buffer = tl.program_id(0)
    tile = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    path = tl.load(index_ptr + request * block + columns, mask=columns < block, other=-1)
    moved = path > columns  # the root, rows in place already, and the padding stay
    slots = slots_ptr + request * slot_stride
    source = tl.load(slots + path, mask=moved, other=0).to(tl.int64)
    target = tl.load(slots + columns, mask=moved, other=0).to(tl.int64)
    row_bytes = tl.load(row_bytes_ptr + buffer)
    start = tl.load(buffers_ptr + buffer).to(tl.int64).to(tl.pointer_type(tl.uint8), bitcast=True)
    byte = tile * TILE + tl.arange(0, TILE)
    cells = moved[:, None] & (byte < row_bytes)[None, :]
    values = tl.load(start + source[:, None] * row_bytes + byte[None, :], mask=cells)
    tl.debug_barrier()  # slot j of the path may be the source of a node that moves before it
    tl.store(start + target[:, None] * row_bytes + byte[None, :], values, mask=cells)


def move_kv(
    buffers: Any, row_bytes: Any, widest: int, accepted: Accepted, slots: Any, block: int
) -> None:
    """Move the accepted rows' keys and values to the request's first slots, in place.

    buffers: (n,) addresses of the K and V buffers of all layers, int64 or uint64; row_bytes: (n,)
    int64 bytes per slot; widest: the largest of them; slots: (bs, >= w), rows' slots in row order.
    """
    columns = triton.next_power_of_2(block)
    tile = max(128, 8192 // columns)  # one program holds columns x tile bytes
    grid = (buffers.numel(), triton.cdiv(widest, tile), slots.shape[0])
    _move_kernel[grid](
        buffers, row_bytes, accepted.accept_index, slots, slots.stride(0), block,
        COLUMNS=columns, TILE=tile,
    )  # fmt: skip
