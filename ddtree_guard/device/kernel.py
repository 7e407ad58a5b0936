"""The fused Triton kernel of the build site. See `protocol` for the verdict it writes.

A clean step pays for the rules about rows, one row a thread, and for filters over links, mask
cells and pairs of rows; only a program whose filter has a doubt judges exactly and reports. The
kinds of program run side by side, so that none waits for another's loads: a step costs little
more than its longest chain of loads, and each kind is kept to two, one after the other.

Row indices are below MAX_LANES * MAX_W < 2^31 and fit 32 bits; everything read from data is
compared and added in 64 bits, except where a filter asks only whether values are equal or has
checked that offsets are below 2^31.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ddtree_guard.device.cells import (
    builder_offset,
    cells_inside,
    count_stray_kv,
    judge_ends,
    judge_mask,
    judge_pairs,
    judge_row,
    not_solid,
    readable_rows,
)
from ddtree_guard.device.filters import filter_cells, filter_links, filter_pairs, strange_links
from ddtree_guard.device.protocol import (
    begin_step,
    cCOLD_COLS,
    cCOLD_ROWS,
    cFULL,
    cG4,
    cK1,
    cKVI,
    cLINKS,
    cMASK,
    cOUT,
    cPAD_LEN,
    cPOS,
    cTREE,
    cWORDS_OK,
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
def _node_program(
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
def _place_program(
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
def _lane_program(
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
def _link_program(
    state: tl.tensor, slots: tl.tensor, live_count: tl.tensor, parents: tl.tensor,
    sizes: tl.tensor, index: tl.tensor, child: tl.tensor, sibling: tl.tensor, w: tl.tensor,
    pad_rows: tl.tensor, enabled: tl.tensor, BITS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Filter the lists of siblings of a lane; judge them where in doubt."""
    lane = tl.program_id(0).to(tl.int64)
    first = tl.program_id(0) * w
    live = lane < tl.load(live_count).to(tl.int64)
    size = node_count(sizes, lane, w)
    doubt = filter_links(first, w, size, child, sibling, BITS)
    if live & (doubt != 0):
        _link_report(
            state, slots, lane, first, w, size, parents, index, child, sibling, pad_rows, enabled,
            BLOCK,
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


@triton.jit
def _mask_program(
    state: tl.tensor, slots: tl.tensor, live_count: tl.tensor, lens: tl.tensor, mi: tl.tensor,
    mask: tl.tensor, parents: tl.tensor, depths: tl.tensor, sizes: tl.tensor, block: tl.tensor,
    w: tl.tensor, pad_rows: tl.tensor, enabled: tl.tensor, mask_numel: tl.tensor,
    HAS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Filter the tree cells of ROWS rows; judge them where in doubt."""
    lane = tl.program_id(0).to(tl.int64)
    first = tl.program_id(0) * w
    rows = block * ROWS + tl.arange(0, ROWS)[:, None]
    live = lane < tl.load(live_count).to(tl.int64)
    s = tl.load(lens + lane).to(tl.int64)
    start = tl.load(mi + lane).to(tl.int64)
    size = node_count(sizes, lane, w)
    parent = load_wide(parents, first + rows, rows < w)
    sane = cells_inside(s, start, w, mask_numel)
    inside = (rows < w) & live & sane
    node = inside & (rows < size)
    linked = node & (parent >= 0) & (parent < rows)
    up = tl.where(linked, parent, 0).to(tl.int32)
    doubt = filter_cells(
        mask + tl.where(sane, start + s, 0), rows, up, w, (s + w).to(tl.int32), inside, linked,
        node | (inside & (pad_rows == 1)), ROWS,
    )  # fmt: skip
    # Rows without a node that must not be there, or cells that the filter cannot reach.
    last = tl.minimum(w, (block + 1) * ROWS)
    if live & ((doubt != 0) | (sane == 0) | ((pad_rows == 0) & (size < last))):
        begin = builder_offset(lens, lane, w, LANES)
        for at in range(block * ROWS, last, cCOLD_ROWS):
            block_rows = at + tl.arange(0, cCOLD_ROWS)[:, None]
            flags = _mask_flags(
                first, block_rows, s, w, size, begin, mask, parents, pad_rows, mask_numel
            )
            report(slots, tl.load(state + 1) % 4, lane, block_rows, flags, enabled)
        if HAS & cFULL:
            for at in range(block * ROWS, tl.minimum(size, last)):
                _row_report(
                    state, slots, lane, at, begin, s, w, mask, depths, enabled, mask_numel, WIDE
                )


@triton.jit
def _row_report(
    state: tl.tensor, slots: tl.tensor, lane: tl.tensor, row: tl.tensor, begin: tl.tensor,
    s: tl.tensor, w: tl.tensor, mask: tl.tensor, depths: tl.tensor, enabled: tl.tensor,
    mask_numel: tl.tensor, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Cold: the whole-row rules of one row."""
    bits = judge_row(mask, begin, row, s, w, depths, mask_numel, WIDE)
    rows = tl.arange(0, 16) * 0 + row
    report(slots, tl.load(state + 1) % 4, lane, rows, rows * 0 + bits, enabled)


@triton.jit
def _mask_flags(
    first: tl.tensor, rows: tl.tensor, s: tl.tensor, w: tl.tensor, size: tl.tensor,
    start: tl.tensor, mask: tl.tensor, parents: tl.tensor, pad_rows: tl.tensor,
    mask_numel: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Cold: judge the rows' cells rule by rule, at the builder's own mask offset."""
    inside = rows < w
    node = inside & (rows < size)
    parent = load_wide(parents, first + rows, inside)
    linked = node & (parent >= 0) & (parent < rows)
    up = tl.where(linked, parent, 0).to(tl.int32)
    flags = (rows + tl.arange(0, cCOLD_COLS)[None, :]) * 0
    readable = readable_rows(rows, w, s, start, mask_numel) & inside
    for c in range(0, w, cCOLD_COLS):
        cols = c + tl.arange(0, cCOLD_COLS)[None, :]
        flags |= judge_mask(
            mask, start + s, rows, up, cols, s + w, linked, node, readable & (cols < w), pad_rows
        )
    flags |= judge_ends(mask, start, rows, s, w, node, readable)
    return tl.where(inside, flags, 0)


@triton.jit
def _pair_program(
    state: tl.tensor, slots: tl.tensor, live_count: tl.tensor, tokens: tl.tensor,
    parents: tl.tensor, sizes: tl.tensor, out: tl.tensor, begin: tl.tensor, before: tl.tensor,
    w: tl.tensor, enabled: tl.tensor, reserved: tl.tensor, HAS: tl.constexpr,
    PAIR_ROWS: tl.constexpr, PAIR_COLS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Filter a block of rows against a block of rows before them; judge them where in doubt."""
    lane = tl.program_id(0).to(tl.int64)
    first = tl.program_id(0) * w
    live = lane < tl.load(live_count).to(tl.int64)
    size = w
    if HAS & cTREE:
        size = node_count(sizes, lane, w)
    doubt = filter_pairs(
        first,
        begin,
        before,
        w,
        size,
        live,
        tokens,
        parents,
        out,
        reserved,
        HAS,
        PAIR_ROWS,
        PAIR_COLS,
        BLOCK,
    )
    if live & (doubt != 0):
        last = tl.minimum(w, begin + PAIR_ROWS)
        for at in range(begin, last, cCOLD_ROWS):
            rows = at + tl.arange(0, cCOLD_ROWS)[:, None]
            flags = (rows + tl.arange(0, cCOLD_COLS)[None, :]) * 0
            for c in range(0, last, cCOLD_COLS):
                cols = c + tl.arange(0, cCOLD_COLS)[None, :]
                flags |= judge_pairs(
                    first, rows, cols, w, rows < size, parents, tokens, out, reserved, HAS
                )
            flags = tl.where(rows < last, flags, 0)
            report(slots, tl.load(state + 1) % 4, lane, rows, flags, enabled)


@triton.jit
def _prefix_program(
    state: tl.tensor, slots: tl.tensor, live_count: tl.tensor, lens: tl.tensor, kv: tl.tensor,
    mi: tl.tensor, mask: tl.tensor, depths: tl.tensor, sizes: tl.tensor, kvi: tl.tensor,
    part: tl.tensor, parts: tl.tensor, w: tl.tensor, enabled: tl.tensor, pool: tl.tensor,
    mask_numel: tl.tensor, kvi_numel: tl.tensor, HAS: tl.constexpr, LANES: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Full depth: every `parts`th piece of the lane's prefix cells, and of its KV slots."""
    lane = tl.program_id(0).to(tl.int64)
    live = lane < tl.load(live_count).to(tl.int64)
    if HAS & cMASK:
        s = tl.load(lens + lane).to(tl.int64)
        start = tl.load(mi + lane).to(tl.int64)
        size = tl.minimum(tl.maximum(tl.load(sizes + lane).to(tl.int64), 0), w)
        sane = live & (s > 0) & (s <= mask_numel) & (start >= 0) & (start <= mask_numel)
        piece = WIDE * 8 if HAS & cWORDS_OK else WIDE
        pieces = (tl.where(sane, s, 0) + 16 + piece - 1) // piece
        for item in range(part, tl.where(sane, size, 0) * pieces, parts):
            row = item // pieces
            edge = start + row * (s + w)
            # Not a single `if`: cells are read only where the row lies inside the buffer. The mask
            # programs report rows that do not.
            if edge + s + w <= mask_numel:  # noqa: SIM102
                if not_solid(mask, edge, s, item - row * pieces, HAS, WIDE):
                    begin = builder_offset(lens, lane, w, LANES)
                    _row_report(
                        state, slots, lane, row, begin, s, w, mask, depths, enabled, mask_numel,
                        WIDE,
                    )  # fmt: skip
    if HAS & cKVI:
        stray = count_stray_kv(lane, part, parts, kv, kvi, kvi_numel, pool, WIDE)
        if live & (stray > 0):
            rows = tl.arange(0, 16) * 0
            report(slots, tl.load(state + 1) % 4, lane, rows, rows + cK1, enabled)


# One compiled kernel serves every size and address.
VERIFY_ARGS = [
    "state", "slots", "live_count", "lens", "qo", "kv", "mi", "stride", "mask", "tokens",
    "parents", "depths", "sizes", "index", "child", "sibling", "positions", "out", "kvi",
    "lanes", "w", "sections", "depth_max", "kv_extra", "pad_rows", "enabled", "host_bits",
    "host_lane", "host_row", "host_extent", "len_max", "vocab", "pool", "reserved", "mask_numel",
    "kvi_numel",
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
    pad_slot: tl.int64, HAS: tl.constexpr, LANES: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, PAIR_ROWS: tl.constexpr, PAIR_COLS: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Rules of the build site. Grid (lanes, `programs_per_lane`).

    By their second index programs judge the lane, its links, its rows twice, mask cells, pairs of
    rows, or pieces of the prefix. `operands.Buffers` has the shapes of the arrays.
    """
    part = tl.program_id(1)
    across = (w - 2 + PAIR_COLS) // PAIR_COLS
    nodes = 2
    places = nodes + (w + BLOCK - 1) // BLOCK
    cells = places + (w + BLOCK - 1) // BLOCK
    pairs = cells + (w + ROWS - 1) // ROWS
    prefix = pairs + (w - 2 + PAIR_ROWS) // PAIR_ROWS * across
    if part == 0:
        if HAS & cLINKS:
            _link_program(
                state, slots, live_count, parents, sizes, index, child, sibling, w, pad_rows,
                enabled, BITS, BLOCK,
            )  # fmt: skip
    elif part == 1:
        _lane_program(
            state, slots, live_count, lens, qo, kv, mi, stride, w, kv_extra, enabled, host_bits,
            host_lane, host_row, host_extent, len_max, HAS,
        )  # fmt: skip
    elif part < places:
        _node_program(
            state, slots, live_count, tokens, parents, depths, sizes, index, child, sibling, out,
            part - nodes, w, depth_max, pad_rows, enabled, vocab, pool, reserved, pad_slot, HAS,
            BLOCK,
        )  # fmt: skip
    elif part < cells:
        _place_program(
            state, slots, live_count, lens, kv, mi, mask, depths, sizes, positions, kvi,
            part - places, lanes, w, sections, enabled, pool, mask_numel, kvi_numel, pad_len,
            pad_position, HAS, LANES, BLOCK,
        )  # fmt: skip
    elif part < pairs:
        if HAS & cMASK:
            _mask_program(
                state, slots, live_count, lens, mi, mask, parents, depths, sizes, part - cells, w,
                pad_rows, enabled, mask_numel, HAS, LANES, ROWS, WIDE,
            )  # fmt: skip
    elif part < prefix:
        down = (part - pairs) // across
        begin = down * PAIR_ROWS + 1
        before = (part - pairs - down * across) * PAIR_COLS
        if before < begin + PAIR_ROWS - 1:
            _pair_program(
                state, slots, live_count, tokens, parents, sizes, out, begin, before, w, enabled,
                reserved, HAS, PAIR_ROWS, PAIR_COLS, BLOCK,
            )  # fmt: skip
    elif HAS & cFULL:
        _prefix_program(
            state, slots, live_count, lens, kv, mi, mask, depths, sizes, kvi, part - prefix,
            tl.num_programs(1) - prefix, w, enabled, pool, mask_numel, kvi_numel, HAS, LANES, WIDE,
        )  # fmt: skip
