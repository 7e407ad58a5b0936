"""Exact rules about mask cells and pairs of rows."""

from __future__ import annotations

import triton
import triton.language as tl

from ddtree_guard.device.protocol import (
    cFAR,
    cK2,
    cM1,
    cM2,
    cM3,
    cM4,
    cM6,
    cMAJOR,
    cONES,
    cOUT,
    cT2,
    cT4,
    cTREE,
    cWORDS_OK,
    flag,
    load_wide,
)


@triton.jit
def readable_rows(
    rows: tl.tensor, w: tl.tensor, s: tl.tensor, start: tl.tensor, mask_numel: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Which mask rows of the lane lie inside the buffer. No sum here can leave 64 bits."""
    sane = (s >= 0) & (s <= mask_numel) & (start >= 0) & (start <= mask_numel)
    most = tl.where(sane, s, 0) + w
    return (rows < w) & sane & (start + (rows + 1) * most <= mask_numel)


@triton.jit
def cells_inside(
    s: tl.tensor, start: tl.tensor, w: tl.tensor, mask_numel: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Whether all mask cells of the lane lie inside the buffer, at offsets of 31 bits."""
    near = (s >= 0) & (s < cFAR)
    room = mask_numel - w * (tl.where(near, s, 0).to(tl.int32) + w)
    return near & (start >= 0) & (start <= room)


@triton.jit
def judge_ends(
    mask: tl.tensor, start: tl.tensor, rows: tl.tensor, s: tl.tensor, w: tl.tensor, node: tl.tensor,
    readable: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """M1 of the first and the last prefix column of these rows."""
    edge = start + rows * (s + w)
    ends = node & readable & (s > 0)
    front = tl.load(mask + edge, mask=ends, other=1)
    back = tl.load(mask + edge + s - 1, mask=ends, other=1)
    return flag(ends & ((front != 1) | (back != 1)), cM1)


@triton.jit
def not_solid(
    mask: tl.tensor, edge: tl.tensor, s: tl.tensor, piece: tl.tensor, HAS: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Full depth: whether a piece of a row's s prefix cells, the first and last eight with it,
    holds anything but ones. The caller has checked that the row lies inside the buffer.
    """
    at = tl.arange(0, 16)
    at = tl.where(at < 8, at, s - 16 + at)
    ends = tl.load(mask + edge + at, mask=(at >= 0) & (at < s), other=1)
    bad = tl.max((ends != 1).to(tl.int32))
    if HAS & cWORDS_OK:
        first = (edge // 16) * 2 + piece * WIDE
        word = tl.multiple_of(first, 2) + tl.arange(0, WIDE)
        whole = (word * 8 >= edge) & (word * 8 + 8 <= edge + s)
        words = tl.multiple_of(mask.to(tl.pointer_type(tl.int64)), 16)
        cells = tl.load(words + word, mask=whole, other=cONES)
        bad |= tl.max((cells != cONES).to(tl.int32))
    else:
        cols = piece * WIDE + tl.arange(0, WIDE)
        cells = tl.load(mask + edge + cols, mask=cols < s, other=1)
        bad |= tl.max((cells != 1).to(tl.int32))
    return bad != 0


@triton.jit
def judge_row(
    mask: tl.tensor, begin: tl.tensor, row: tl.tensor, s: tl.tensor, w: tl.tensor,
    depths: tl.tensor, mask_numel: tl.tensor, WIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Cold: M1 and M3 of one row of a node, at the builder's own mask offset."""
    edge = begin + row * (s + w)
    readable = readable_rows(row, w, s, begin, mask_numel)
    solid = s * 0
    total = s * 0
    for at in range(0, tl.where(readable, s + w, 0), WIDE):
        cols = at + tl.arange(0, WIDE)
        cells = tl.load(mask + edge + cols, mask=cols < s + w, other=0).to(tl.int32)
        total += tl.sum(cells, axis=0)
        solid += tl.sum(((cells == 1) & (cols < s)).to(tl.int32), axis=0)
    depth = tl.load(depths + tl.program_id(0) * w + row).to(tl.int64)
    bits = flag(readable & (solid != s), cM1)
    return bits | flag(readable & (total != s + depth + 1), cM3)


@triton.jit
def judge_mask(
    mask: tl.tensor, start: tl.tensor, rows: tl.tensor, up: tl.tensor, cols: tl.tensor,
    stride: tl.tensor, linked: tl.tensor, node: tl.tensor, readable: tl.tensor, pad_rows: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """M2, M4, M6 of a block of tree cells."""
    own = tl.load(mask + start + rows * stride + cols, mask=readable, other=0).to(tl.int32)
    seen = tl.load(mask + start + up * stride + cols, mask=readable & linked, other=0) == 1
    diagonal = cols == rows
    want = tl.where(node, seen | diagonal, (pad_rows == 1) & diagonal)
    odd = readable & (own != want.to(tl.int32))
    flags = flag(odd & node, cM2) | flag(odd & tl.where(node, diagonal, pad_rows > 0), cM4)
    return flags | flag(readable & (own != 0) & (cols > rows), cM6)


@triton.jit
def judge_pairs(
    first: tl.tensor, rows: tl.tensor, cols: tl.tensor, w: tl.tensor, node: tl.tensor,
    parents: tl.tensor, tokens: tl.tensor, out: tl.tensor, reserved: tl.tensor, HAS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """T2, T4 and K2 between a block of rows and a block of earlier rows."""
    at = first + cols
    inside = cols < w
    earlier = inside & (cols < rows) & (rows < w)
    flags = (rows + cols) * 0
    if HAS & cTREE:
        parent = load_wide(parents, first + rows, rows < w)
        token = load_wide(tokens, first + rows, rows < w)
        kin = earlier & node & (load_wide(parents, at, inside) == parent)
        twin = (cols > 0) & (load_wide(tokens, at, inside) == token)
        flags |= flag(kin & twin, cT4)
        if HAS & cMAJOR:
            apart = load_wide(parents, first + rows - 1, node & (rows > 0)) != parent
            flags |= flag(kin & apart, cT2)
    if HAS & cOUT:
        slot = load_wide(out, first + rows, rows < w)
        flags |= flag(earlier & (slot != reserved) & (load_wide(out, at, inside) == slot), cK2)
    return flags


@triton.jit
def count_stray_kv(
    lane: tl.tensor, block: tl.tensor, blocks: tl.tensor, kv: tl.tensor, kvi: tl.tensor,
    kvi_numel: tl.tensor, pool: tl.tensor, WIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Full depth: number of slots outside the pool in this program's share of the KV range."""
    head = tl.minimum(tl.maximum(tl.load(kv + lane).to(tl.int64), 0), kvi_numel)
    tail = tl.minimum(tl.maximum(tl.load(kv + lane + 1).to(tl.int64), 0), kvi_numel)
    wrong = lane * 0
    for at in range(head + block * WIDE, tail, blocks * WIDE):
        cols = at + tl.arange(0, WIDE)
        entry = load_wide(kvi, cols, cols < tail)
        wrong += tl.sum(((entry < 0) | (entry >= pool)).to(tl.int64), axis=0)
    return wrong


@triton.jit
def builder_offset(
    lens: tl.tensor, lane: tl.tensor, w: tl.tensor, LANES: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Cold: where the lane's mask begins by lengths and w alone."""
    other = tl.arange(0, LANES)
    return w * (tl.sum(load_wide(lens, other, other < lane), axis=0) + lane * w)
