"""The fused Triton kernel of the build site. See `protocol` for the verdict it writes.

A clean step pays for the rules about rows, one row a thread, and for filters over mask cells and
over pairs of rows; only a program whose filter has a doubt judges exactly and reports. The
kinds of program run side by side, so that none waits for another's loads.

Row indices are below MAX_LANES * MAX_W < 2^31 and fit 32 bits; everything read from data is
compared and added in 64 bits, except where a filter asks only whether values are equal or has
checked that offsets are below 2^31.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ddtree_guard.device.cells import (
    builder_offset,
    count_stray_kv,
    filter_bytes,
    filter_pairs,
    filter_words,
    judge_ends,
    judge_mask,
    judge_pairs,
    judge_row,
    not_solid,
    readable_rows,
)
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
    cROW_BLOCK,
    cTREE,
    cWORDS_OK,
    flag,
    load_low,
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
    kv: tl.tensor, mi: tl.tensor, stride: tl.tensor, mask: tl.tensor, tokens: tl.tensor,
    parents: tl.tensor, depths: tl.tensor, sizes: tl.tensor, index: tl.tensor, child: tl.tensor,
    sibling: tl.tensor, positions: tl.tensor, out: tl.tensor, kvi: tl.tensor, lanes: tl.tensor,
    w: tl.tensor, sections: tl.tensor, depth_max: tl.tensor, kv_extra: tl.tensor,
    pad_rows: tl.tensor, enabled: tl.tensor, host_bits: tl.tensor, host_lane: tl.tensor,
    host_row: tl.tensor, host_extent: tl.tensor, len_max: tl.tensor, vocab: tl.tensor,
    pool: tl.tensor, reserved: tl.tensor, mask_numel: tl.tensor, kvi_numel: tl.tensor,
    pad_len: tl.tensor, pad_position: tl.tensor, pad_slot: tl.tensor, HAS: tl.constexpr,
    LANES: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Judge ROW_BLOCK rows of a lane, one a thread; the first program also its layout."""
    lane = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    first = tl.program_id(0) * w
    rows = block * cROW_BLOCK + tl.arange(0, cROW_BLOCK)
    inside = rows < w
    bs = tl.load(live_count).to(tl.int64)
    s = tl.load(lens + lane).to(tl.int64)
    closed = tl.load(state + 1)
    launches = tl.load(state + 2)
    live = lane < bs
    head, w1_row = judge_layout(lane, live, s, w, qo, kv, mi, stride, kv_extra, len_max, HAS)
    flags = (rows * 0).to(tl.int32)
    pads = (rows * 0).to(tl.int32)
    doubt = (rows * 0).to(tl.int32)
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
            doubt |= (disorder & live).to(tl.int32)
    if HAS & cOUT:
        slot = load_wide(out, first + rows, inside)
        found, stray = judge_slots(slot, inside, node, pool, pad_slot, reserved, HAS)
        flags |= found
        pads |= stray
    if HAS & cPAD_LEN:
        pads |= flag((rows == 0) & (s != pad_len), cG4)
    if HAS & cKVI:
        flags |= judge_kv_ends(lane, rows, w, s, kv, kvi, kvi_numel, pool)
    if (HAS & cMASK) and not (HAS & cFULL):
        start = tl.load(mi + lane).to(tl.int64)
        readable = readable_rows(rows, w, s, start, mask_numel) & live
        doubt |= judge_ends(mask, start, rows, s, w, node, readable)
    if HAS & cPOS:
        found, stray = judge_positions(
            first, rows, w, lanes, s, sections, node, depth, positions, depths, pad_position, HAS
        )
        flags |= found
        pads |= stray
    flags = tl.where(inside, tl.where(live, flags, pads), 0) & enabled
    head = tl.where(block == 0, head & enabled, 0)
    if (tl.max(flags | doubt) != 0) | (head != 0):
        if HAS & cLINKS:
            chains = judge_chains(first, rows, w, up, linked & live, child, sibling)
            flags |= chains & enabled
        if (HAS & cMASK) and not (HAS & cFULL):
            start = builder_offset(lens, lane, w, LANES)
            readable = readable_rows(rows, w, s, start, mask_numel) & live
            flags |= judge_ends(mask, start, rows, s, w, node, readable)
        current = closed % 4
        report_lane(slots, current, head, lane, w1_row, w, enabled)
        report(slots, current, lane, rows, flags, enabled)
    if (lane == 0) & (block == 0):
        begin_step(
            state, slots, closed, launches, bs, host_bits, host_lane, host_row, host_extent, w,
            enabled,
        )  # fmt: skip


@triton.jit
def _mask_program(
    state: tl.tensor, slots: tl.tensor, live_count: tl.tensor, lens: tl.tensor, mi: tl.tensor,
    mask: tl.tensor, parents: tl.tensor, depths: tl.tensor, sizes: tl.tensor, block: tl.tensor,
    w: tl.tensor, pad_rows: tl.tensor, enabled: tl.tensor, mask_numel: tl.tensor,
    HAS: tl.constexpr, LANES: tl.constexpr, ITEMS: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Filter ITEMS of the lane's w * ceil(w / 4) words of tree cells, whatever their rows; judge
    those rows exactly where in doubt.
    """
    lane = tl.program_id(0).to(tl.int64)
    first = tl.program_id(0) * w
    words = (w + 3) // 4
    item = block * ITEMS + tl.arange(0, ITEMS)
    rows = item // words
    s = tl.load(lens + lane).to(tl.int64)
    start = tl.load(mi + lane).to(tl.int64)
    size = tl.load(sizes + lane)
    live = lane < tl.load(live_count).to(tl.int64)
    inside = (rows < w) & live
    node = inside & (rows < size)
    parent = load_wide(parents, first + rows, rows < w)
    linked = node & (parent >= 0) & (parent < rows)
    up = tl.where(linked, parent, 0).to(tl.int32)
    judged = inside & (node | (pad_rows > 0))
    diagonal_on = node | (pad_rows == 1)
    sane = (s >= 0) & (s < 1 << 31) & (start >= 0) & (start <= mask_numel)
    cells = w * (tl.where(sane, s, 0) + w)
    if (HAS & cWORDS_OK) and (sane & (cells < 1 << 31) & (start + cells + 8 <= mask_numel)):
        doubt = filter_words(
            mask, start + s, rows, item - rows * words, up, w, s + w, linked, judged, diagonal_on
        )
    else:
        readable = judged & readable_rows(rows, w, s, start, mask_numel)
        doubt = filter_bytes(
            mask, start + s, rows, item - rows * words, up, w, s + w, linked, readable, diagonal_on
        ) | (judged & (readable == 0)).to(tl.int32)
    if pad_rows == 0:  # rows without a node cannot be judged and must not be there
        doubt |= (inside & (node == 0)).to(tl.int32)
    if tl.max(doubt) != 0:
        begin = builder_offset(lens, lane, w, LANES)
        last = tl.minimum(w - 1, (block * ITEMS + ITEMS - 1) // words)
        for at in range((block * ITEMS) // words, last + 1, cCOLD_ROWS):
            block_rows = at + tl.arange(0, cCOLD_ROWS)[:, None]
            flags = _mask_flags(
                first, block_rows, s, w, size, live, begin, mask, parents, pad_rows, mask_numel, HAS
            )
            report(slots, tl.load(state + 1) % 4, lane, block_rows, flags, enabled)
        if HAS & cFULL:
            nodes = tl.minimum(tl.where(live, size, 0), last + 1)
            for at in range((block * ITEMS) // words, nodes):
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
    live: tl.tensor, start: tl.tensor, mask: tl.tensor, parents: tl.tensor, pad_rows: tl.tensor,
    mask_numel: tl.tensor, HAS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Cold: judge the rows' cells rule by rule, at the builder's own mask offset."""
    inside = (rows < w) & live
    node = inside & (rows < size)
    parent = load_wide(parents, first + rows, rows < w)
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
    parents: tl.tensor, sizes: tl.tensor, child: tl.tensor, sibling: tl.tensor, out: tl.tensor,
    block: tl.tensor, w: tl.tensor, enabled: tl.tensor, reserved: tl.tensor, HAS: tl.constexpr,
    PAIR: tl.constexpr,
) -> None:  # fmt: skip
    """Filter one square block of pairs of rows, the other row an earlier one; judge in doubt."""
    lane = tl.program_id(0).to(tl.int64)
    first = tl.program_id(0) * w
    # Blocks of the lower triangle, row by row.
    down = ((tl.sqrt(8.0 * block + 1.0) - 1.0) * 0.5).to(tl.int32)
    down -= ((down * (down + 1)) // 2 > block).to(tl.int32)
    down += (((down + 1) * (down + 2)) // 2 <= block).to(tl.int32)
    rows = down * PAIR + tl.arange(0, PAIR)[:, None]
    cols = (block - (down * (down + 1)) // 2) * PAIR + tl.arange(0, PAIR)[None, :]
    inside = (rows < w) & (lane < tl.load(live_count).to(tl.int64))
    node = inside
    # A row without a node gets keys that match nothing.
    parent, token, slot = rows * 0 - 7, rows * 0, -7 - rows
    if HAS & cTREE:
        node = node & (rows < tl.load(sizes + lane))
        parent = load_low(parents, first + rows, node, -7)
        token = load_low(tokens, first + rows, node, 0)
    if HAS & cOUT:
        slot = load_low(out, first + rows, inside, -7)
        slot = tl.where(inside & (slot != reserved.to(tl.int32)), slot, -7 - rows)
    doubt = filter_pairs(
        first, rows, cols, w, parent, token, slot, parents, tokens, sibling, out, HAS
    )
    if tl.max(doubt) != 0:
        flags = judge_pairs(first, rows, cols, w, node, parents, tokens, out, reserved, HAS)
        if HAS & cLINKS:
            whose = load_wide(parents, first + rows, node)
            linked = node & (whose >= 0) & (whose < rows)
            up = tl.where(linked, whose, 0).to(tl.int32)
            flags |= judge_chains(first, rows, w, up, linked, child, sibling)
        flags = tl.where(inside, flags, 0)
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
    pad_slot: tl.int64, HAS: tl.constexpr, LANES: tl.constexpr, ITEMS: tl.constexpr,
    PAIR: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Rules of the build site. Grid (lanes, `programs_per_lane`).

    By their second index programs judge rows, mask cells, pairs of rows, or pieces of the prefix.
    `operands.Buffers` has the shapes of the arrays.
    """
    row_blocks = (w + cROW_BLOCK - 1) // cROW_BLOCK
    blocks = (w * ((w + 3) // 4) + ITEMS - 1) // ITEMS
    across = (w + PAIR - 1) // PAIR
    pair_blocks = across * (across + 1) // 2
    part = tl.program_id(1)
    if part < row_blocks:
        _row_program(
            state, slots, live_count, lens, qo, kv, mi, stride, mask, tokens, parents, depths,
            sizes, index, child, sibling, positions, out, kvi, lanes, w, sections, depth_max,
            kv_extra, pad_rows, enabled, host_bits, host_lane, host_row, host_extent, len_max,
            vocab, pool, reserved, mask_numel, kvi_numel, pad_len, pad_position, pad_slot, HAS,
            LANES, WIDE,
        )  # fmt: skip
    elif part < row_blocks + blocks:
        if HAS & cMASK:
            _mask_program(
                state, slots, live_count, lens, mi, mask, parents, depths, sizes,
                part - row_blocks, w, pad_rows, enabled, mask_numel, HAS, LANES, ITEMS, WIDE,
            )  # fmt: skip
    elif part < row_blocks + blocks + pair_blocks:
        _pair_program(
            state, slots, live_count, tokens, parents, sizes, child, sibling, out,
            part - row_blocks - blocks, w, enabled, reserved, HAS, PAIR,
        )  # fmt: skip
    elif HAS & cFULL:
        before = row_blocks + blocks + pair_blocks
        _prefix_program(
            state, slots, live_count, lens, kv, mi, mask, depths, sizes, kvi, part - before,
            tl.num_programs(1) - before, w, enabled, pool, mask_numel, kvi_numel, HAS, LANES, WIDE,
        )  # fmt: skip
