"""Programs of the fused kernel that judge a lane and its rows, a row a thread."""

from __future__ import annotations

import triton
import triton.language as tl

from ddtree_guard.device.cells import (
    builder_offset,
    cells_inside,
    judge_ends,
    readable_rows,
)
from ddtree_guard.device.filters import (
    filter_links,
    strange_links,
)
from ddtree_guard.device.protocol import (
    begin_step,
    cFULL,
    cG4,
    cKVI,
    cLINKS,
    cMASK,
    cOUT,
    cPAD_LEN,
    cPOS,
    cTREE,
    flag,
    load_wide,
    node_count,
    report,
    report_lane,
)
from ddtree_guard.device.rows import (
    judge_kv_ends,
    judge_layout,
    judge_links,
    judge_nodes,
    judge_positions,
    judge_slots,
)


@triton.jit
def node_program(
    state: tl.tensor, slots: tl.tensor, live_count: tl.tensor, tokens: tl.tensor,
    parents: tl.tensor, depths: tl.tensor, sizes: tl.tensor, index: tl.tensor, child: tl.tensor,
    sibling: tl.tensor, out: tl.tensor, block: tl.tensor, w: tl.tensor, depth_max: tl.tensor,
    pad_rows: tl.tensor, enabled: tl.tensor, vocab: tl.tensor, pool: tl.tensor,
    reserved: tl.tensor, pad_slot: tl.tensor, HAS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Rules about a tree row, its links and its slot; a thread judges a row."""
    lane = tl.program_id(0).to(tl.int64)
    first = tl.program_id(0) * w
    rows = block * BLOCK + tl.arange(0, BLOCK)
    node = rows < w
    live = lane < tl.load(live_count).to(tl.int64)
    flags = (rows * 0).to(tl.int32)
    pads = flags
    if HAS & cTREE:
        flags, node = judge_nodes(
            first,
            rows,
            w,
            tl.load(sizes + lane).to(tl.int64),
            tokens,
            parents,
            depths,
            depth_max,
            vocab,
            pad_rows,
            HAS,
        )
    if HAS & cOUT:
        slot = load_wide(out, first + rows, rows < w)
        found, pads = judge_slots(slot, rows < w, node, pool, pad_slot, reserved, HAS)
        flags |= found
    flags = tl.where(rows < w, tl.where(live, flags, pads), 0) & enabled
    strange = rows * 0
    if HAS & cLINKS:
        size = node_count(sizes, lane, w)
        strange = strange_links(
            first, rows, w, size, pad_rows, parents, index, child, sibling
        ) & live.to(tl.int32)
    if tl.max(flags | strange) != 0:
        report(slots, tl.load(state + 1) % 4, lane, rows, flags, enabled)
        if HAS & cLINKS:  # noqa: SIM102
            if tl.max(strange) != 0:
                size = node_count(sizes, lane, w)
                _link_report(
                    state, slots, lane, first, w, size, parents, index, child, sibling, pad_rows,
                    enabled, BLOCK,
                )  # fmt: skip


@triton.jit
def place_program(
    state: tl.tensor, slots: tl.tensor, live_count: tl.tensor, lens: tl.tensor, kv: tl.tensor,
    mi: tl.tensor, mask: tl.tensor, depths: tl.tensor, sizes: tl.tensor, positions: tl.tensor,
    kvi: tl.tensor, block: tl.tensor, lanes: tl.tensor, w: tl.tensor, sections: tl.tensor,
    enabled: tl.tensor, pool: tl.tensor, mask_numel: tl.tensor, kvi_numel: tl.tensor,
    pad_len: tl.tensor, pad_position: tl.tensor, HAS: tl.constexpr, LANES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Rules about a row's position and the ends of its prefix; a thread judges a row."""
    lane = tl.program_id(0).to(tl.int64)
    first = tl.program_id(0) * w
    rows = block * BLOCK + tl.arange(0, BLOCK)
    node = rows < w
    live = lane < tl.load(live_count).to(tl.int64)
    s = tl.load(lens + lane).to(tl.int64)
    flags = (rows * 0).to(tl.int32)
    pads, doubt, depth = flags, flags, flags.to(tl.int64)
    if HAS & cTREE:
        node = node & (rows < node_count(sizes, lane, w))
        depth = load_wide(depths, first + rows, rows < w)
    if HAS & cPAD_LEN:
        pads |= flag((rows == 0) & (s != pad_len), cG4)
    if HAS & cKVI:
        flags |= judge_kv_ends(lane, rows, w, s, kv, kvi, kvi_numel, pool)
    if (HAS & cMASK) and not (HAS & cFULL):
        start = tl.load(mi + lane).to(tl.int64)
        sane = cells_inside(s, start, w, mask_numel)
        doubt |= judge_ends(mask, tl.where(sane, start, 0), rows, s, w, node, sane & live)
        doubt |= (live & (sane == 0)).to(tl.int32)
    if HAS & cPOS:
        found, stray = judge_positions(
            first, rows, w, lanes, s, sections, node, depth, positions, depths, pad_position, HAS
        )
        flags |= found
        pads |= stray
    flags = tl.where(rows < w, tl.where(live, flags, pads), 0) & enabled
    if tl.max(flags | doubt) != 0:
        if (HAS & cMASK) and not (HAS & cFULL):
            start = builder_offset(lens, lane, w, LANES)
            readable = readable_rows(rows, w, s, start, mask_numel) & live
            flags |= judge_ends(mask, start, rows, s, w, node, readable)
        report(slots, tl.load(state + 1) % 4, lane, rows, flags, enabled)


@triton.jit
def lane_program(
    state: tl.tensor, slots: tl.tensor, live_count: tl.tensor, lens: tl.tensor, qo: tl.tensor,
    kv: tl.tensor, mi: tl.tensor, stride: tl.tensor, w: tl.tensor, kv_extra: tl.tensor,
    enabled: tl.tensor, host_bits: tl.tensor, host_lane: tl.tensor, host_row: tl.tensor,
    host_extent: tl.tensor, len_max: tl.tensor, HAS: tl.constexpr,
) -> None:  # fmt: skip
    """The layout of a lane; lane 0 also says that the step has begun."""
    lane = tl.program_id(0).to(tl.int64)
    closed = tl.load(state + 1)
    launches = tl.load(state + 2)
    bs = tl.load(live_count).to(tl.int64)
    s = tl.load(lens + lane).to(tl.int64)
    bits, row = judge_layout(lane, lane < bs, s, w, qo, kv, mi, stride, kv_extra, len_max, HAS)
    if (bits & enabled) != 0:
        report_lane(slots, closed % 4, bits, lane, row, w, enabled)
    if lane == 0:
        begin_step(
            state, slots, closed, launches, bs, host_bits, host_lane, host_row, host_extent, w,
            enabled,
        )  # fmt: skip


@triton.jit
def link_program(
    scratch: tl.tensor, state: tl.tensor, slots: tl.tensor, live_count: tl.tensor,
    parents: tl.tensor,
    sizes: tl.tensor, index: tl.tensor, child: tl.tensor, sibling: tl.tensor, w: tl.tensor,
    pad_rows: tl.tensor, enabled: tl.tensor, HAS: tl.constexpr, BITS: tl.constexpr,
    PACK: tl.constexpr, WARPS: tl.constexpr,
) -> None:  # fmt: skip
    """Filter the lists of siblings of a lane; judge them where in doubt."""
    lane = tl.program_id(0).to(tl.int64)
    first = tl.program_id(0) * w
    live = lane < tl.load(live_count).to(tl.int64)
    size = node_count(sizes, lane, w)
    doubt = filter_links(scratch, first, w, size, child, sibling, HAS, BITS, PACK, WARPS)
    if live & (doubt != 0):
        _link_report(
            state, slots, lane, first, w, size, parents, index, child, sibling, pad_rows, enabled,
            32 * WARPS,
        )  # fmt: skip


@triton.jit
def _link_report(
    state: tl.tensor, slots: tl.tensor, lane: tl.tensor, first: tl.tensor, w: tl.tensor,
    size: tl.tensor, parents: tl.tensor, index: tl.tensor, child: tl.tensor, sibling: tl.tensor,
    pad_rows: tl.tensor, enabled: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Cold: T3 of all rows of a lane; one strange link can lose other rows."""
    for begin in range(0, w, BLOCK):
        rows = begin + tl.arange(0, BLOCK)
        flags = judge_links(first, rows, w, size, parents, index, child, sibling, pad_rows)
        report(slots, tl.load(state + 1) % 4, lane, rows, flags, enabled)
