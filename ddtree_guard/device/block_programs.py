"""Programs of the fused kernel that filter blocks of mask cells and of pairs of rows."""

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
from ddtree_guard.device.filters import (
    filter_cells,
    filter_pairs,
    filter_paths,
    filter_twins,
)
from ddtree_guard.device.protocol import (
    cCOLD_COLS,
    cCOLD_ROWS,
    cFULL,
    cK1,
    cKVI,
    cMASK,
    cROOT,
    cTREE,
    cWORDS_OK,
    load_low,
    load_wide,
    node_count,
    report,
)


@triton.jit
def mask_program(
    state: tl.tensor, slots: tl.tensor, live_count: tl.tensor, lens: tl.tensor, mi: tl.tensor,
    mask: tl.tensor, parents: tl.tensor, depths: tl.tensor, sizes: tl.tensor, block: tl.tensor,
    w: tl.tensor, pad_rows: tl.tensor, enabled: tl.tensor, mask_numel: tl.tensor,
    HAS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    WARPS: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Filter the tree cells of ROWS rows; judge them where in doubt.

    Rows whose paths are right (`path_program`) have no other cell than these if they hold no more
    ones in all than paths have nodes, and nothing but 0 and 1.
    """
    lane = tl.program_id(0).to(tl.int64)
    first = tl.program_id(0) * w
    live = lane < tl.load(live_count).to(tl.int64)
    s = tl.load(lens + lane).to(tl.int64)
    start = tl.load(mi + lane).to(tl.int64)
    size = node_count(sizes, lane, w)
    top = 1 + block * ROWS
    last = tl.minimum(w, top + ROWS)
    rows = top + tl.arange(0, 32 * WARPS)
    depth = load_low(depths, first + rows, rows < last, 0)
    want = tl.where(rows < size, depth + 1, (pad_rows == 1).to(tl.int32))
    sane = cells_inside(s, start, w, mask_numel)
    begin = tl.where(sane, start + s, 0)
    step = tl.where(sane, s + w, 0).to(tl.int32)
    bottom = tl.where(live & sane, last, 0)
    doubt = filter_cells(
        mask, begin, top, bottom, w, tl.where(rows < bottom, want, 0), step, mask_numel, ROWS,
        WORDS, WARPS,
    )  # fmt: skip
    # Rows without a node that must not be there, or cells that the filter cannot reach.
    if live & ((doubt != 0) | (sane == 0) | ((pad_rows == 0) & (size < last))):
        _judge_rows(
            state, slots, lens, mask, parents, depths, s, w, size, top, last, pad_rows, enabled,
            mask_numel, HAS, LANES, WIDE,
        )  # fmt: skip


@triton.jit
def path_program(
    scratch: tl.tensor, state: tl.tensor, slots: tl.tensor, live_count: tl.tensor, lens: tl.tensor,
    mi: tl.tensor,
    mask: tl.tensor, parents: tl.tensor, depths: tl.tensor, sizes: tl.tensor, block: tl.tensor,
    w: tl.tensor, pad_rows: tl.tensor, enabled: tl.tensor, mask_numel: tl.tensor,
    HAS: tl.constexpr, LANES: tl.constexpr, PACK: tl.constexpr, WARPS: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Filter the cells on the paths of a block of rows. Where one is in doubt, judge all rows:
    `mask_program` takes for granted that paths are right.
    """
    lane = tl.program_id(0).to(tl.int64)
    first = tl.program_id(0) * w
    live = lane < tl.load(live_count).to(tl.int64)
    s = tl.load(lens + lane).to(tl.int64)
    start = tl.load(mi + lane).to(tl.int64)
    size = node_count(sizes, lane, w)
    rows = 1 + block * 32 * WARPS + tl.arange(0, 32 * WARPS)
    depth = load_wide(depths, first + rows, rows < w)
    ok = live & cells_inside(s, start, w, mask_numel)
    bottom = tl.where(ok, w, 0)
    nodes = tl.minimum(size, bottom)
    doubt = filter_paths(
        scratch, mask + tl.where(ok, start + s, 0), rows, first, w, parents, nodes,
        tl.where(pad_rows == 1, bottom, nodes), tl.where(ok, s + w, 0).to(tl.int32), depth, HAS,
        PACK,
    )  # fmt: skip
    if ok & (tl.max(doubt) != 0):
        _judge_rows(
            state, slots, lens, mask, parents, depths, s, w, size, 1, w, pad_rows, enabled,
            mask_numel, HAS, LANES, WIDE,
        )  # fmt: skip


@triton.jit
def root_program(
    state: tl.tensor, slots: tl.tensor, live_count: tl.tensor, lens: tl.tensor, mi: tl.tensor,
    mask: tl.tensor, parents: tl.tensor, depths: tl.tensor, sizes: tl.tensor, w: tl.tensor,
    pad_rows: tl.tensor, enabled: tl.tensor, mask_numel: tl.tensor, HAS: tl.constexpr,
    LANES: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """The same for row 0: without it, the rows of most trees fill whole blocks."""
    lane = tl.program_id(0).to(tl.int64)
    live = lane < tl.load(live_count).to(tl.int64)
    s = tl.load(lens + lane).to(tl.int64)
    start = tl.load(mi + lane).to(tl.int64)
    size = node_count(sizes, lane, w)
    sane = cells_inside(s, start, w, mask_numel)
    cells = mask + tl.where(sane, start + s, 0)
    wrong = tl.zeros([cROOT], tl.int32)
    for at in range(0, w, cROOT):
        cols = at + tl.arange(0, cROOT)
        want = ((cols == 0) & ((size > 0) | (pad_rows == 1))).to(tl.int32)
        cell = tl.load(cells + cols, mask=(cols < w) & sane & live, other=0).to(tl.int32)
        wrong |= tl.where((cols < w) & sane & live, cell ^ want, 0)
    if live & ((tl.max(wrong) != 0) | (sane == 0) | ((pad_rows == 0) & (size < 1))):
        _judge_rows(
            state, slots, lens, mask, parents, depths, s, w, size, 0, 1, pad_rows, enabled,
            mask_numel, HAS, LANES, WIDE,
        )  # fmt: skip


@triton.jit
def _judge_rows(
    state: tl.tensor, slots: tl.tensor, lens: tl.tensor, mask: tl.tensor, parents: tl.tensor,
    depths: tl.tensor, s: tl.tensor, w: tl.tensor, size: tl.tensor, top: tl.tensor,
    last: tl.tensor, pad_rows: tl.tensor, enabled: tl.tensor, mask_numel: tl.tensor,
    HAS: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Cold: the mask rules of rows `top` to before `last`."""
    lane = tl.program_id(0).to(tl.int64)
    first = tl.program_id(0) * w
    begin = builder_offset(lens, lane, w, LANES)
    for at in range(top, last, cCOLD_ROWS):
        rows = at + tl.arange(0, cCOLD_ROWS)[:, None]
        flags = _mask_flags(first, rows, s, w, size, begin, mask, parents, pad_rows, mask_numel)
        flags = tl.where(rows < last, flags, 0)
        report(slots, tl.load(state + 1) % 4, lane, rows, flags, enabled)
    if HAS & cFULL:
        for at in range(top, tl.minimum(size, last)):
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
def twin_program(
    scratch: tl.tensor, state: tl.tensor, slots: tl.tensor, live_count: tl.tensor,
    tokens: tl.tensor,
    parents: tl.tensor, sizes: tl.tensor, out: tl.tensor, w: tl.tensor, enabled: tl.tensor,
    reserved: tl.tensor, HAS: tl.constexpr, DEEP: tl.constexpr, COLS: tl.constexpr,
    PACK: tl.constexpr, WARPS: tl.constexpr,
) -> None:  # fmt: skip
    """Filter all pairs of rows of a lane by tables; go through them where in doubt."""
    lane = tl.program_id(0).to(tl.int64)
    first = tl.program_id(0) * w
    live = lane < tl.load(live_count).to(tl.int64)
    size = w
    if HAS & cTREE:
        size = node_count(sizes, lane, w)
    doubt = filter_twins(scratch, first, w, size, tokens, parents, out, reserved, HAS, PACK, WARPS)
    if live & (doubt != 0):
        for begin in range(1, w, DEEP * WARPS):
            for before in range(0, begin + DEEP * WARPS - 1, COLS * 32):
                pair_program(
                    state, slots, live_count, tokens, parents, sizes, out, begin, before, w,
                    enabled, reserved, HAS, DEEP, COLS, WARPS,
                )  # fmt: skip


@triton.jit
def pair_program(
    state: tl.tensor, slots: tl.tensor, live_count: tl.tensor, tokens: tl.tensor,
    parents: tl.tensor, sizes: tl.tensor, out: tl.tensor, begin: tl.tensor, before: tl.tensor,
    w: tl.tensor, enabled: tl.tensor, reserved: tl.tensor, HAS: tl.constexpr,
    DEEP: tl.constexpr, COLS: tl.constexpr, WARPS: tl.constexpr,
) -> None:  # fmt: skip
    """Filter a block of rows against a block of rows before them; judge them where in doubt."""
    lane = tl.program_id(0).to(tl.int64)
    first = tl.program_id(0) * w
    live = lane < tl.load(live_count).to(tl.int64)
    size = w
    if HAS & cTREE:
        size = node_count(sizes, lane, w)
    doubt = filter_pairs(
        first, begin, before, w, size, live, tokens, parents, out, reserved, HAS, DEEP, COLS,
        WARPS,
    )  # fmt: skip
    if live & (doubt != 0):
        last = tl.minimum(w, begin + DEEP * WARPS)
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
def prefix_program(
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
