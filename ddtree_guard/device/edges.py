"""The small kernels around it: slots against the table before, acceptance after."""

from __future__ import annotations

import triton
import triton.language as tl

from ddtree_guard.device.protocol import (
    cA1,
    cA2,
    cA3,
    cK3,
    cK4,
    cKVI,
    close_step,
    cNONE,
    cOUTCOME,
    cTREE,
    flag,
    load_wide,
    report,
    report_lane,
)

# One compiled kernel serves every size and address.
TABLE_ARGS = [
    "state", "slots", "live_count", "lens", "kv", "kvi", "out", "sizes", "table", "pool_rows",
    "w", "kv_extra", "enabled", "chunk", "kvi_numel", "table_rows", "table_cols", "table_stride",
    "room", "reserved",
]  # fmt: skip


@triton.jit(do_not_specialize=TABLE_ARGS, do_not_specialize_on_alignment=TABLE_ARGS)
def table_kernel(
    state: tl.tensor, slots: tl.tensor, live_count: tl.tensor, lens: tl.tensor, kv: tl.tensor,
    kvi: tl.tensor, out: tl.tensor, sizes: tl.tensor, table: tl.tensor, pool_rows: tl.tensor,
    w: tl.int32, kv_extra: tl.int32, enabled: tl.int32, chunk: tl.int64, kvi_numel: tl.int64,
    table_rows: tl.int64, table_cols: tl.int64, table_stride: tl.int64, room: tl.int64,
    reserved: tl.int64, HAS: tl.constexpr, COLS: tl.constexpr,
) -> None:  # fmt: skip
    """K3 and K4, from the pre-replay hook. Grid (lanes, chunks): `chunk` columns a program."""
    lane = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    live = lane < tl.load(live_count).to(tl.int64)
    s = tl.load(lens + lane).to(tl.int64)
    mine = tl.load(pool_rows + lane).to(tl.int64)
    known = live & (mine >= 0) & (mine < table_rows)
    line = tl.where(known, mine, 0) * table_stride
    flags = tl.zeros([1, COLS], tl.int32)
    where = tl.zeros([1, COLS], tl.int64)
    if part == 0:
        flags |= flag(live & ((known == 0) | (s > room)), cK3)
        size = w.to(tl.int64)
        if HAS & cTREE:
            size = tl.load(sizes + lane).to(tl.int64)
        for c in range(0, w, COLS):
            cols = (c + tl.arange(0, COLS)[None, :]).to(tl.int64)
            row = known & (cols < w)
            slot = load_wide(out, lane * w + cols, row)
            there = row & (s >= 0) & (s < table_cols) & (s + cols < table_cols)
            entry = load_wide(table, line + tl.where(there, s + cols, 0), there)
            wrong = row & ((there == 0) | (entry != slot)) & ((cols < size) | (slot != reserved))
            where = tl.where(wrong & ((flags & cK3) == 0), cols, where)
            flags |= flag(wrong, cK3)
    if HAS & cKVI:
        head = tl.load(kv + lane).to(tl.int64)
        most = s + kv_extra
        fits = known & (most >= 0) & (most <= table_cols)
        most = tl.where(fits, most, 0)
        ends = (head < 0) | (head > kvi_numel - most)
        flags |= flag(fits & ends, cK4)
        for c in range(part * chunk, tl.minimum(most, (part + 1) * chunk), COLS):
            cols = c + tl.arange(0, COLS)[None, :]
            here = fits & (ends == 0) & (cols < most)
            entry = load_wide(table, line + cols, here)
            flags |= flag(
                here & (entry != load_wide(kvi, tl.where(here, head + cols, 0), here)), cK4
            )
    flags = flags & enabled
    if tl.max(flags) != 0:
        report(slots, tl.load(state + 1) % 4, lane, where, flags, enabled)


@triton.jit
def _walk(
    lane: tl.tensor, w: tl.tensor, size: tl.tensor, tokens: tl.tensor, parents: tl.tensor,
    predict: tl.tensor, accept: tl.tensor, path: tl.tensor, base: tl.tensor, PATH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A1 of one request: bits and rows per column of its path, the path's length and last row."""
    step = tl.arange(0, PATH)
    row = _row_of(accept, lane * path + step, step < path, base)
    length = tl.minimum(tl.min(tl.where(row < 0, step, PATH)), path).to(tl.int64)
    used = (step < tl.maximum(length, 1)) & (step < path)
    before = _row_of(accept, lane * path + step - 1, (step > 0) & (step < path), base)
    node = used & (row >= 0) & (row < w) & (row < size)
    here = lane * w + tl.where(node, row, 0)
    above = lane * w + tl.minimum(tl.maximum(before, 0), w - 1)
    linked = load_wide(parents, here, node) == before
    chosen = load_wide(tokens, here, node) == load_wide(predict, above, node & (step > 0))
    good = node & tl.where(step == 0, row == 0, linked & chosen)
    wrong = (used & (good == 0)) | ((used == 0) & (row >= 0) & (step < path))
    named = tl.where((row >= 0) & (row < w), row, tl.minimum(tl.maximum(before, 0), w - 1))
    return flag(wrong, cA1), named, length, tl.max(tl.where(step == length - 1, row, -1))


@triton.jit
def _row_of(accept: tl.tensor, at: tl.tensor, inside: tl.tensor, base: tl.tensor) -> tl.tensor:
    """Rows within the request; -1 for padding, far out of range for another request's rows."""
    raw = tl.load(accept + at, mask=inside, other=-1).to(tl.int64)
    row = raw - base
    return tl.where(raw < 0, -1, tl.where(row < 0, cNONE, row))


# One compiled kernel serves every size and address.
CLOSE_ARGS = [
    "state", "slots", "live_count", "tokens", "parents", "sizes", "predict", "accept",
    "accept_lens", "cut", "greedy", "w", "path", "most", "accept_stride", "enabled",
]  # fmt: skip


@triton.jit(do_not_specialize=CLOSE_ARGS, do_not_specialize_on_alignment=CLOSE_ARGS)
def close_kernel(
    state: tl.tensor, slots: tl.tensor, live_count: tl.tensor, tokens: tl.tensor,
    parents: tl.tensor, sizes: tl.tensor, predict: tl.tensor, accept: tl.tensor,
    accept_lens: tl.tensor, cut: tl.tensor, greedy: tl.tensor, w: tl.int32, path: tl.int32,
    most: tl.int64, accept_stride: tl.int32, enabled: tl.int32, HAS: tl.constexpr,
    PATH: tl.constexpr, COLS: tl.constexpr,
) -> None:  # fmt: skip
    """A1 to A3 after verification, then close the step. Grid (lanes,), or (1,) without outcome."""
    lane = tl.program_id(0).to(tl.int64)
    begun = tl.load(state)
    slot = (begun + 3) % 4
    if HAS & cOUTCOME:
        live = lane < tl.load(live_count).to(tl.int64)
        size = tl.load(sizes + lane).to(tl.int64)
        lens = tl.load(accept_lens + lane).to(tl.int64)
        gone = tl.load(cut + lane).to(tl.int64)
        flags, row, length, end = _walk(
            lane, w, size, tokens, parents, predict, accept, path, lane * accept_stride, PATH
        )
        wrong = (lens < 1) | (lens > most) | (gone < 0) | (gone > length) | (lens != length - gone)
        flags = tl.where(live, flags, 0) & enabled
        lane_bits = tl.where(live & wrong, cA3, 0) & enabled
        ended = live & (length > 0) & (end >= 0) & (end < w) & (tl.load(greedy + lane) != 0)
        chosen = load_wide(predict, lane * w + tl.where(ended, end, 0), ended)
        if (tl.max(flags) != 0) | (lane_bits != 0):
            report(slots, slot, lane, row, flags, enabled)
            report_lane(slots, slot, lane_bits.to(tl.int64), lane, lane, w, enabled)
        for c in range(0, w, COLS):
            cols = c + tl.arange(0, COLS)
            kid = ended & (cols > 0) & (cols < size) & (cols < w)
            kid = kid & (load_wide(parents, lane * w + cols, kid) == end)
            kid = kid & (load_wide(tokens, lane * w + cols, kid) == chosen)
            found = flag(kid, cA2) & enabled
            if tl.max(found) != 0:
                report(slots, slot, lane, cols, found, enabled)
    if lane == 0:
        closed = tl.load(state + 1)
        closes = tl.load(state + 3) + 1
        tl.store(state + 3, closes)
        if begun != closed:
            close_step(state, slots, slot, begun, closes)
