"""The fused Triton kernel of the build site. See `protocol` for the verdict it writes.

A clean step pays for the rules about rows, one row a thread, and for a filter over cells; only a
program whose filter has a doubt judges its cells exactly and reports. The two kinds of program run
side by side, so that neither waits for the other's loads.

Row indices are below MAX_LANES * MAX_W < 2^31 and fit 32 bits; everything read from data is
compared and added in 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ddtree_guard.device.cells import (
    count_stray_kv,
    filter_mask,
    filter_pairs,
    judge_mask,
    judge_pairs,
    judge_prefix,
    offsets_wrong,
    readable_rows,
)
from ddtree_guard.device.protocol import (
    begin_step,
    cFULL,
    cG4,
    cK1,
    cKVI,
    cLINKS,
    cM3,
    cMASK,
    cOUT,
    cPAD_LEN,
    cPOS,
    cROW_BLOCK,
    cTREE,
    flag,
    load_wide,
    report,
    report_lane,
)
from ddtree_guard.device.rows import (
    judge_chains,
    judge_kv_ends,
    judge_layout,
    judge_links,
    judge_nodes,
    judge_positions,
    judge_slots,
)


@triton.jit
def _row_program(
    state: tl.tensor, slots: tl.tensor, live_count: tl.tensor, lens: tl.tensor, qo: tl.tensor,
    kv: tl.tensor, mi: tl.tensor, stride: tl.tensor, tokens: tl.tensor, parents: tl.tensor,
    depths: tl.tensor, sizes: tl.tensor, index: tl.tensor, child: tl.tensor, sibling: tl.tensor,
    positions: tl.tensor, out: tl.tensor, kvi: tl.tensor, lanes: tl.tensor, w: tl.tensor,
    sections: tl.tensor, depth_max: tl.tensor, kv_extra: tl.tensor, pad_rows: tl.tensor,
    enabled: tl.tensor, host_bits: tl.tensor, host_lane: tl.tensor, host_row: tl.tensor,
    host_extent: tl.tensor, len_max: tl.tensor, vocab: tl.tensor, pool: tl.tensor,
    reserved: tl.tensor, kvi_numel: tl.tensor, pad_len: tl.tensor, pad_position: tl.tensor,
    pad_slot: tl.tensor, HAS: tl.constexpr,
) -> None:  # fmt: skip
    """Judge ROW_BLOCK rows of a lane, one a thread; the first program also its layout."""
    lane = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    first = tl.program_id(0) * w
    rows = block * cROW_BLOCK + tl.arange(0, cROW_BLOCK)
    inside = rows < w
    bs = tl.load(live_count).to(tl.int64)
    s = tl.load(lens + lane).to(tl.int64)
    live = lane < bs
    head, w1_row = judge_layout(lane, live, s, w, qo, kv, mi, stride, kv_extra, len_max, HAS)
    flags = (rows * 0).to(tl.int32)
    pads = (rows * 0).to(tl.int32)
    depth, node = (rows * 0).to(tl.int64), inside
    if HAS & cTREE:
        size = tl.load(sizes + lane).to(tl.int64)
        flags, parent, up, linked, node, depth = judge_nodes(
            first, rows, w, size, tokens, parents, depths, depth_max, vocab, pad_rows, HAS
        )
        if HAS & cLINKS:
            found, disorder = judge_links(
                first, rows, w, size, parent, up, linked, node, parents, index, child, sibling,
                pad_rows,
            )  # fmt: skip
            flags |= found
            if tl.max((disorder & live).to(tl.int32)) != 0:
                flags |= judge_chains(first, rows, w, up, linked, child, sibling)
    if HAS & cOUT:
        slot = load_wide(out, first + rows, inside)
        found, stray = judge_slots(slot, inside, node, pool, pad_slot, reserved, HAS)
        flags |= found
        pads |= stray
    if HAS & cPOS:
        found, stray = judge_positions(
            first, rows, w, lanes, s, sections, node, depth, positions, depths, pad_position, HAS
        )
        flags |= found
        pads |= stray
    if HAS & cPAD_LEN:
        pads |= flag((rows == 0) & (s != pad_len), cG4)
    if HAS & cKVI:
        flags |= judge_kv_ends(lane, rows, w, s, kv, kvi, kvi_numel, pool)
    flags = tl.where(inside, tl.where(live, flags, pads), 0) & enabled
    head = tl.where(block == 0, head & enabled, 0)
    if (tl.max(flags) != 0) | (head != 0):
        current = tl.load(state + 1) % 4
        report_lane(slots, current, head, lane, w1_row, w)
        report(slots, current, lane, rows, flags)
    if (lane == 0) & (block == 0):
        begin_step(state, slots, bs, host_bits & enabled, host_lane, host_row, host_extent, w)


@triton.jit
def _cell_program(
    state: tl.tensor, slots: tl.tensor, live_count: tl.tensor, lens: tl.tensor, kv: tl.tensor,
    mi: tl.tensor, mask: tl.tensor, tokens: tl.tensor, parents: tl.tensor, depths: tl.tensor,
    sizes: tl.tensor, child: tl.tensor, sibling: tl.tensor, out: tl.tensor, kvi: tl.tensor,
    block: tl.tensor, blocks: tl.tensor, lanes: tl.tensor, w: tl.tensor, pad_rows: tl.tensor,
    enabled: tl.tensor, reserved: tl.tensor, pool: tl.tensor, mask_numel: tl.tensor,
    kvi_numel: tl.tensor, HAS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Filter ROWS rows of a lane against all columns; judge them exactly where in doubt."""
    lane = tl.program_id(0).to(tl.int64)
    first = tl.program_id(0) * w
    rows = block * ROWS + tl.arange(0, ROWS)[:, None]
    inside = rows < w
    s = tl.load(lens + lane).to(tl.int64)
    live = lane < tl.load(live_count).to(tl.int64)
    node = inside & live
    parent, token = (rows * 0).to(tl.int64), (rows * 0).to(tl.int64)
    slot = (rows * 0).to(tl.int64)
    if HAS & cTREE:
        node = node & (rows < tl.load(sizes + lane))
        parent = load_wide(parents, first + rows, inside)
        token = load_wide(tokens, first + rows, inside)
    if HAS & cOUT:
        slot = load_wide(out, first + rows, inside)
    linked = node & (parent >= 0) & (parent < rows)
    up = tl.where(linked, parent, 0).to(tl.int32)
    doubt = _filter(
        lane, first, block, rows, s, w, live, lanes, parent, up, linked, node, token, slot, lens,
        mi, mask, parents, tokens, sibling, out, pad_rows, reserved, mask_numel, HAS, LANES, ROWS,
        COLS, WIDE,
    )  # fmt: skip
    if (HAS & cKVI) and (HAS & cFULL):
        stray = count_stray_kv(lane, block, blocks, kv, kvi, kvi_numel, pool, WIDE) > 0
        if stray:
            report_lane(slots, tl.load(state + 1) % 4, (lane * 0 + cK1) & enabled, lane, lane, w)
    if tl.max(doubt) != 0:
        _judge(
            slots, tl.load(state + 1) % 4, lane, first, rows, s, w, live, parent, up, linked, node,
            token, slot, lens, mask, parents, tokens, depths, child, sibling, out, pad_rows,
            reserved, mask_numel, enabled, HAS, LANES, COLS, WIDE,
        )  # fmt: skip


@triton.jit
def _filter(
    lane: tl.tensor, first: tl.tensor, block: tl.tensor, rows: tl.tensor, s: tl.tensor,
    w: tl.tensor, live: tl.tensor, lanes: tl.tensor, parent: tl.tensor, up: tl.tensor,
    linked: tl.tensor, node: tl.tensor, token: tl.tensor, slot: tl.tensor, lens: tl.tensor,
    mi: tl.tensor, mask: tl.tensor, parents: tl.tensor, tokens: tl.tensor, sibling: tl.tensor,
    out: tl.tensor, pad_rows: tl.tensor, reserved: tl.tensor, mask_numel: tl.tensor,
    HAS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Per cell, nonnegative: 0 everywhere means that no rule about cells is broken here."""
    # A row without a node gets keys that match nothing.
    parent32 = tl.where(node, parent.to(tl.int32), -7)
    slot32 = tl.where(live & (slot != reserved), slot.to(tl.int32), -7 - rows)
    token32 = token.to(tl.int32)
    doubt = tl.zeros([ROWS, COLS], tl.int32)
    start = lane * 0
    judged = rows < 0
    if HAS & cMASK:
        start = tl.load(mi + lane).to(tl.int64)
        readable = readable_rows(rows, w, s, start, mask_numel) & live
        judged = readable & (node | (pad_rows > 0))
        doubt |= ((rows < w) & live & (judged == 0)).to(tl.int32)
        doubt |= offsets_wrong(lens, mi, w, lanes, LANES)
        hidden, prefix = judge_prefix(mask, start, rows, s, w, node, readable, HAS, WIDE)
        doubt |= hidden
        if HAS & cFULL:
            doubt |= (node & readable & (prefix != s)).to(tl.int32)
    for c in range(0, w, COLS):
        cols = c + tl.arange(0, COLS)[None, :]
        if HAS & cMASK:
            doubt |= filter_mask(
                mask, start + s, rows, up, cols, s + w, linked, judged & (cols < w),
                node | (pad_rows == 1),
            )  # fmt: skip
        if c < (block + 1) * ROWS:
            doubt |= filter_pairs(
                first, rows, cols, w, parent32, token32, slot32, parents, tokens, sibling, out, HAS
            )
    return doubt


@triton.jit
def _judge(
    slots: tl.tensor, slot_at: tl.tensor, lane: tl.tensor, first: tl.tensor, rows: tl.tensor,
    s: tl.tensor, w: tl.tensor, live: tl.tensor, parent: tl.tensor, up: tl.tensor,
    linked: tl.tensor, node: tl.tensor, token: tl.tensor, slot: tl.tensor, lens: tl.tensor,
    mask: tl.tensor, parents: tl.tensor, tokens: tl.tensor, depths: tl.tensor, child: tl.tensor,
    sibling: tl.tensor, out: tl.tensor, pad_rows: tl.tensor, reserved: tl.tensor,
    mask_numel: tl.tensor, enabled: tl.tensor, HAS: tl.constexpr, LANES: tl.constexpr,
    COLS: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Cold: judge the cells rule by rule, at the builder's own mask offset, and report."""
    grid = (rows + tl.arange(0, COLS)[None, :]) * 0
    hot = (rows * 0).to(tl.int64)
    start = lane * 0
    readable = rows < 0
    if HAS & cMASK:
        other = tl.arange(0, LANES)
        before = tl.sum(load_wide(lens, other, other < lane), axis=0)
        start = w * (before + lane * w)
        readable = readable_rows(rows, w, s, start, mask_numel)
    for c in range(0, w, COLS):
        cols = c + tl.arange(0, COLS)[None, :]
        if HAS & cMASK:
            found, own = judge_mask(
                mask, start + s, rows, up, cols, s + w, linked, node, readable & (cols < w),
                pad_rows,
            )  # fmt: skip
            grid |= found
            hot += tl.sum(own, axis=1)[:, None].to(tl.int64)
        grid |= judge_pairs(
            first, rows, cols, w, parent, node, token, slot, parents, tokens, out, reserved, HAS
        )
    if HAS & cLINKS:
        grid |= judge_chains(first, rows, w, up, linked, child, sibling)
    if HAS & cMASK:
        hidden, prefix = judge_prefix(mask, start, rows, s, w, node, readable, HAS, WIDE)
        grid |= hidden
        if HAS & cFULL:
            depth = load_wide(depths, first + rows, rows < w)
            grid |= flag(node & readable & (prefix + hot != s + depth + 1), cM3)
    report(slots, slot_at, lane, rows, tl.where((rows < w) & live, grid, 0) & enabled)


# One compiled kernel serves every size and address.
VERIFY_ARGS = [
    "state", "slots", "live_count", "lens", "qo", "kv", "mi", "stride", "mask", "tokens",
    "parents", "depths", "sizes", "index", "child", "sibling", "positions", "out", "kvi",
    "lanes", "w", "sections", "depth_max", "kv_extra", "pad_rows", "enabled", "host_bits",
    "host_lane", "host_row", "host_extent", "len_max", "vocab", "pool", "reserved", "mask_numel", "kvi_numel",
    "pad_len", "pad_position", "pad_slot",
]  # fmt: skip


@triton.jit(do_not_specialize=VERIFY_ARGS, do_not_specialize_on_alignment=VERIFY_ARGS)
def verify_kernel(
    state: tl.tensor, slots: tl.tensor, live_count: tl.tensor, lens: tl.tensor, qo: tl.tensor,
    kv: tl.tensor, mi: tl.tensor, stride: tl.tensor, mask: tl.tensor, tokens: tl.tensor,
    parents: tl.tensor, depths: tl.tensor, sizes: tl.tensor, index: tl.tensor, child: tl.tensor,
    sibling: tl.tensor, positions: tl.tensor, out: tl.tensor, kvi: tl.tensor, lanes: tl.int32,
    w: tl.int32, sections: tl.int32, depth_max: tl.int32, kv_extra: tl.int32, pad_rows: tl.int32,
    enabled: tl.int32, host_bits: tl.int32, host_lane: tl.int32, host_row: tl.int32,
    host_extent: tl.int32, len_max: tl.int64, vocab: tl.int64, pool: tl.int64, reserved: tl.int64,
    mask_numel: tl.int64, kvi_numel: tl.int64, pad_len: tl.int64, pad_position: tl.int64,
    pad_slot: tl.int64, HAS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Rules of the build site. Grid (lanes, ceil(w / ROW_BLOCK) + ceil(w / ROWS)).

    Programs with the lowest second index judge rows, the others cells. `operands.Buffers` has the
    shapes of the arrays.
    """
    row_blocks = (w + cROW_BLOCK - 1) // cROW_BLOCK
    if tl.program_id(1) < row_blocks:
        _row_program(
            state, slots, live_count, lens, qo, kv, mi, stride, tokens, parents, depths, sizes,
            index, child, sibling, positions, out, kvi, lanes, w, sections, depth_max, kv_extra,
            pad_rows, enabled, host_bits, host_lane, host_row, host_extent, len_max, vocab, pool, reserved,
            kvi_numel, pad_len, pad_position, pad_slot, HAS,
        )  # fmt: skip
    else:
        _cell_program(
            state, slots, live_count, lens, kv, mi, mask, tokens, parents, depths, sizes, child,
            sibling, out, kvi, tl.program_id(1) - row_blocks, tl.num_programs(1) - row_blocks,
            lanes, w,
            pad_rows, enabled, reserved, pool, mask_numel, kvi_numel, HAS, LANES, ROWS, COLS, WIDE,
        )  # fmt: skip
