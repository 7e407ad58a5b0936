"""The fused Triton kernel of the build site. See `protocol` for the verdict it writes."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ddtree_guard.device.protocol import (
    begin_step,
    cFULL,
    cG4,
    cK1,
    cK2,
    cKV,
    cKVI,
    cLINKS,
    cM1,
    cM2,
    cM3,
    cM4,
    cM6,
    cMAJOR,
    cMASK,
    cMI,
    cOUT,
    cP1,
    cPAD_LEN,
    cPAD_POS,
    cPAD_SLOT,
    cPOS,
    cQO,
    cSTRIDE,
    cT1,
    cT2,
    cT3,
    cT4,
    cT6,
    cTREE,
    cW1,
    cW2,
    cW3,
    cW4,
    flag,
    load_wide,
    report,
    report_lane,
)


@triton.jit
def _layout(
    lane: Any, live: Any, s: Any, w: Any, qo: Any, kv: Any, mi: Any, stride: Any, kv_extra: Any,
    len_max: Any, HAS: tl.constexpr,
) -> Any:  # fmt: skip
    """W1 to W4 of one lane as bits, and the row that W1 names."""
    bits = lane * 0
    row = lane * 0
    rows = lane * 0
    range_ = lane * 0
    if HAS & cQO:
        start = tl.load(qo + lane).to(tl.int64)
        rows = tl.load(qo + lane + 1).to(tl.int64) - start
        shifted = (lane == 0) & (start != 0)
        row = tl.where(shifted, 0, tl.minimum(tl.maximum(rows, 0), w - 1))
        bits |= tl.where(shifted | (rows != w), 1 << cW1, 0)
    if HAS & cKV:
        start = tl.load(kv + lane).to(tl.int64)
        range_ = tl.load(kv + lane + 1).to(tl.int64) - start
        wrong = ((lane == 0) & (start != 0)) | (range_ != s + kv_extra) | (s < 0) | (s > len_max)
        bits |= tl.where(wrong, 1 << cW2, 0)
    if HAS & cMI:
        start = tl.load(mi + lane).to(tl.int64)
        cells = tl.load(mi + lane + 1).to(tl.int64) - start
        bits |= tl.where(((lane == 0) & (start != 0)) | (cells != w * (s + w)), 1 << cW3, 0)
    if HAS & cSTRIDE:
        walked = range_ + tl.where(kv_extra > 0, 0, rows)
        built = tl.load(stride + lane).to(tl.int64)
        bits |= tl.where(live & (walked != built), 1 << cW4, 0)
    return bits, row


@triton.jit
def _nodes(
    lane: Any, rows: Any, w: Any, size: Any, tokens: Any, parents: Any, depths: Any, depth_max: Any,
    vocab: Any, HAS: tl.constexpr,
) -> Any:  # fmt: skip
    """T1, T2, T6 of these rows; their parents, whether those are usable, tokens and depths."""
    first = lane * w
    inside = rows < w
    node = inside & (rows < size)
    parent = load_wide(parents, first + rows, inside)
    token = load_wide(tokens, first + rows, inside)
    depth = load_wide(depths, first + rows, inside)
    linked = node & (parent >= 0) & (parent < rows)
    known = node & (parent >= 0) & (parent < w)
    up = tl.where(known, parent, 0)
    above = load_wide(depths, first + up, known)
    flags = flag(node & tl.where(rows == 0, parent != -1, linked == 0), cT1)
    deep = depth != tl.where(rows == 0, 0, tl.where(known, above + 1, depth))
    flags |= flag(node & (deep | (depth > depth_max)), cT2)
    flags |= flag(node & ((token < 0) | (token >= vocab)), cT6)
    if HAS & cMAJOR:
        before = load_wide(depths, first + rows - 1, node & (rows > 0))
        flags |= flag(node & (rows > 0) & (depth < before), cT2)
    up = tl.where(linked, up, 0)
    return flags, parent, up, linked, node, token, depth


@triton.jit
def _links(
    lane: Any, rows: Any, w: Any, size: Any, parent: Any, up: Any, linked: Any, node: Any,
    parents: Any, index: Any, child: Any, sibling: Any, pad_rows: Any,
) -> Any:  # fmt: skip
    """T3, the part that one row can see: links lead forward to a node of the right parent.

    With `_pairs` (no sibling is skipped) this makes the links those of the parent array.
    """
    first = lane * w
    inside = rows < w
    wrong = node & (load_wide(index, first + rows, inside) != first + rows)
    down = load_wide(child, first + rows, inside)
    there = node & (down > rows) & (down < size)
    whose = load_wide(parents, first + tl.where(there, down, 0), there)
    wrong |= node & (down != -1) & ((there == 0) | (whose != rows))
    side = load_wide(sibling, first + rows, inside)
    there = linked & (side > rows) & (side < size)
    whose = load_wide(parents, first + tl.where(there, side, 0), there)
    wrong |= node & (side != -1) & ((there == 0) | (whose != parent))
    wrong |= (node == 0) & (pad_rows > 0) & ((down != -1) | (side != -1))
    eldest = load_wide(child, first + up, linked)
    wrong |= linked & ((eldest <= up) | (eldest > rows))
    return flag(inside & wrong, cT3)


@triton.jit
def _mask_cells(
    mask: Any, start: Any, rows: Any, up: Any, cols: Any, stride: Any, linked: Any, node: Any,
    readable: Any, pad_rows: Any,
) -> Any:  # fmt: skip
    """M2, M4, M6 of a block of tree cells, and the cells."""
    own = tl.load(mask + start + rows * stride + cols, mask=readable, other=0).to(tl.int32)
    seen = tl.load(mask + start + up * stride + cols, mask=readable & linked, other=0) == 1
    diagonal = cols == rows
    want = tl.where(node, seen | diagonal, (pad_rows == 1) & diagonal)
    odd = readable & (own != want.to(tl.int32))
    flags = flag(odd & node, cM2) | flag(odd & tl.where(node, diagonal, pad_rows > 0), cM4)
    return flags | flag(readable & (own != 0) & (cols > rows), cM6), own


@triton.jit
def _pairs(
    lane: Any, rows: Any, cols: Any, w: Any, parent: Any, node: Any, token: Any, slot: Any,
    parents: Any, tokens: Any, sibling: Any, out: Any, reserved: Any, HAS: tl.constexpr,
) -> Any:  # fmt: skip
    """T3, T4 and K2 between a block of rows and a block of earlier rows."""
    at = lane * w + cols
    inside = cols < w
    earlier = inside & (cols < rows) & (rows < w)
    flags = (rows + cols) * 0
    if HAS & cTREE:
        kin = earlier & node & (cols > 0) & (load_wide(parents, at, inside) == parent)
        flags |= flag(kin & (load_wide(tokens, at, inside) == token), cT4)
        if HAS & cLINKS:
            side = load_wide(sibling, at, inside)
            flags |= flag(kin & ((side <= cols) | (side > rows)), cT3)
        if HAS & cMAJOR:
            gap = load_wide(parents, lane * w + rows - 1, node & (rows > 0)) != parent
            flags |= flag(kin & gap, cT2)
    if HAS & cOUT:
        flags |= flag(earlier & (slot != reserved) & (load_wide(out, at, inside) == slot), cK2)
    return flags


@triton.jit
def _prefix_cells(
    mask: Any, start: Any, rows: Any, most: Any, stride: Any, readable: Any, WIDE: tl.constexpr
) -> Any:
    """Full depth: sum of columns [0, most) per row, and whether all of them are 1."""
    total = rows * 0
    solid = rows * 0
    for at in range(0, most, WIDE):
        cols = at + tl.arange(0, WIDE)[None, :]
        cells = tl.load(
            mask + start + rows * stride + cols, mask=readable & (cols < most), other=0
        ).to(tl.int32)
        total += tl.sum(cells, axis=1)[:, None].to(tl.int64)
        solid += tl.sum((cells == 1).to(tl.int32), axis=1)[:, None].to(tl.int64)
    return total, solid == most


@triton.jit
def _kv_ends(
    lane: Any, rows: Any, w: Any, s: Any, kv: Any, kvi: Any, kvi_numel: Any, pool: Any
) -> Any:
    """K1 of the first and the last w prefix slots."""
    head = tl.load(kv + lane).to(tl.int64)
    flags = (rows * 0).to(tl.int32)
    for end in tl.static_range(2):
        at = tl.where(end == 0, head + rows, head + s - 1 - rows)
        there = (rows < w) & (rows < s) & (at >= 0) & (at < kvi_numel)
        entry = load_wide(kvi, tl.where(there, at, 0), there)
        flags |= flag(there & ((entry < 0) | (entry >= pool)), cK1)
    return flags


@triton.jit
def _kv_all(
    lane: Any, block: Any, blocks: Any, kv: Any, kvi: Any, kvi_numel: Any, pool: Any,
    WIDE: tl.constexpr,
) -> Any:  # fmt: skip
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
def _positions(
    lane: Any, rows: Any, w: Any, lanes: Any, s: Any, sections: Any, node: Any, depth: Any,
    positions: Any, depths: Any, pad_position: Any, HAS: tl.constexpr,
) -> Any:  # fmt: skip
    """P1 and the pad value of these rows; mRoPE sections count from their root row."""
    flags = (rows * 0).to(tl.int32)
    pads = (rows * 0).to(tl.int32)
    at = lane * w + rows
    root = lane * w
    base = s
    for _ in range(sections):
        value = load_wide(positions, at, rows < w)
        if HAS & cTREE:
            if sections > 1:
                base = tl.load(positions + root).to(tl.int64)
                base -= tl.load(depths + lane * w).to(tl.int64)
            flags |= flag(node & (value != base + depth), cP1)
        if HAS & cPAD_POS:
            pads |= flag((rows < w) & (value != pad_position), cG4)
        at += lanes.to(tl.int64) * w
        root += lanes.to(tl.int64) * w
    return flags, pads


@triton.jit
def _slots_of_rows(
    slot: Any, inside: Any, node: Any, pool: Any, pad_slot: Any, reserved: Any, HAS: tl.constexpr
) -> Any:
    """K1 and K2 that one row can see, in live and in padded lanes."""
    outside = flag(inside & ((slot < 0) | (slot >= pool)), cK1)
    stray = inside & (slot != pad_slot)
    pads = flag(stray, cK2)
    if HAS & cPAD_SLOT:
        pads |= tl.where(stray, outside, 0) | flag(stray, cG4)
    else:
        pads |= outside
    return outside | flag(node & (slot == reserved), cK2), pads


# One compiled kernel serves every size and address.
VERIFY_ARGS = [
    "state", "slots", "live_count", "lens", "qo", "kv", "mi", "stride", "mask", "tokens",
    "parents", "depths", "sizes", "index", "child", "sibling", "positions", "out", "kvi",
    "lanes", "w", "sections", "depth_max", "kv_extra", "pad_rows", "enabled", "host_bits",
    "host_lane", "host_row", "len_max", "vocab", "pool", "reserved", "mask_numel", "kvi_numel",
    "pad_len", "pad_position", "pad_slot",
]  # fmt: skip


@triton.jit(do_not_specialize=VERIFY_ARGS, do_not_specialize_on_alignment=VERIFY_ARGS)
def verify_kernel(
    state: Any, slots: Any, live_count: Any, lens: Any, qo: Any, kv: Any, mi: Any, stride: Any,
    mask: Any, tokens: Any, parents: Any, depths: Any, sizes: Any, index: Any, child: Any,
    sibling: Any, positions: Any, out: Any, kvi: Any,
    lanes: tl.int32, w: tl.int32, sections: tl.int32, depth_max: tl.int32, kv_extra: tl.int32,
    pad_rows: tl.int32, enabled: tl.int32, host_bits: tl.int32, host_lane: tl.int32,
    host_row: tl.int32, len_max: tl.int64, vocab: tl.int64, pool: tl.int64, reserved: tl.int64,
    mask_numel: tl.int64, kvi_numel: tl.int64, pad_len: tl.int64, pad_position: tl.int64,
    pad_slot: tl.int64, HAS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Rules of the build site. Grid (lanes, ceil(w / ROWS)); `launch.Operands` has the shapes."""
    lane = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    rows = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = rows < w
    bs = tl.load(live_count).to(tl.int64)
    s = tl.load(lens + lane).to(tl.int64)
    live = lane < bs
    flags = tl.zeros([ROWS, 1], tl.int32)
    pads = tl.zeros([ROWS, 1], tl.int32)
    parent, up, token, depth, slot = rows * 0, rows * 0, rows * 0, rows * 0, rows * 0
    linked, node = rows < 0, inside
    if HAS & cTREE:
        size = tl.load(sizes + lane).to(tl.int64)
        found, parent, up, linked, node, token, depth = _nodes(
            lane, rows, w, size, tokens, parents, depths, depth_max, vocab, HAS
        )
        ghost = inside & (node == 0) & (parent >= 0) & (pad_rows > 0)
        flags |= found | flag(((rows == 0) & ((size < 1) | (size > w))) | ghost, cT4)
        if HAS & cLINKS:
            flags |= _links(
                lane, rows, w, size, parent, up, linked, node, parents, index, child, sibling,
                pad_rows,
            )  # fmt: skip
        if HAS & cMASK:
            flags |= flag((rows == size) & (pad_rows == 0), cM4)
    if HAS & cOUT:
        slot = load_wide(out, lane * w + rows, inside)
        found, stray = _slots_of_rows(slot, inside, node, pool, pad_slot, reserved, HAS)
        flags |= found
        pads |= stray
    if HAS & cPOS:
        found, stray = _positions(
            lane, rows, w, lanes, s, sections, node, depth, positions, depths, pad_position, HAS
        )
        flags |= found
        pads |= stray
    if HAS & cPAD_LEN:
        pads |= flag((rows == 0) & (s != pad_len), cG4)
    if HAS & cKVI:
        flags |= _kv_ends(lane, rows, w, s, kv, kvi, kvi_numel, pool)
        if HAS & cFULL:
            bad = _kv_all(lane, block, tl.num_programs(1), kv, kvi, kvi_numel, pool, WIDE)
            flags |= flag((rows == block * ROWS) & (bad > 0), cK1)
            pads |= flag((rows == block * ROWS) & (bad > 0), cK1)
    wide = s + w
    start = lane * 0
    readable = rows < 0
    if HAS & cMASK:
        # The builder's offset of this lane, from lengths and w, not from mask_indptr.
        other = tl.arange(0, LANES)
        before = tl.load(lens + other, mask=other < lane, other=0).to(tl.int64)
        start = w * (tl.sum(before, axis=0) + lane * w)
        sane = (s >= 0) & (s <= mask_numel) & (start >= 0) & (start <= mask_numel)
        readable = inside & sane & (start + (rows + 1) * wide <= mask_numel)
        ends = node & readable & (s > 0)
        first = tl.load(mask + start + rows * wide, mask=ends, other=1) == 1
        last = tl.load(mask + start + rows * wide + s - 1, mask=ends, other=1) == 1
        flags |= flag(ends & ((first & last) == 0), cM1)
    grid = tl.zeros([ROWS, COLS], tl.int32)
    hot = rows * 0
    for c in range(0, w, COLS):
        cols = c + tl.arange(0, COLS)[None, :]
        if HAS & cMASK:
            found, own = _mask_cells(
                mask, start + s, rows, up, cols, wide, linked, node, readable & (cols < w), pad_rows
            )
            grid |= found
            if HAS & cFULL:
                hot += tl.sum(own, axis=1)[:, None].to(tl.int64)
        if c < (block + 1) * ROWS:
            grid |= _pairs(
                lane, rows, cols, w, parent, node, token, slot, parents, tokens, sibling, out,
                reserved, HAS,
            )  # fmt: skip
    if (HAS & cFULL) and (HAS & cMASK):
        most = tl.where((s >= 0) & (s <= mask_numel), s, 0)
        prefix, solid = _prefix_cells(mask, start, rows, most, wide, readable, WIDE)
        flags |= flag(node & readable & (solid == 0), cM1)
        flags |= flag(node & readable & (prefix + hot != s + depth + 1), cM3)
    flags = tl.where(inside, tl.where(live, flags, pads), 0)
    grid = (tl.where(live, grid, 0) | flags) & enabled
    head = lane * 0
    w1_row = lane * 0
    if block == 0:
        head, w1_row = _layout(lane, live, s, w, qo, kv, mi, stride, kv_extra, len_max, HAS)
    worst = tl.max(tl.max(grid, axis=1), axis=0)
    if (worst | (head & enabled)) != 0:
        current = tl.load(state + 1) % 4
        report(slots, current, lane, rows, grid)
        report_lane(slots, current, head & enabled, lane, w1_row, w)
    if (lane == 0) & (block == 0):
        begin_step(state, slots, bs, host_bits & enabled, host_lane, host_row, w)
