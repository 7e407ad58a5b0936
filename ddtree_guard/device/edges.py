"""The small kernels around it: trees and slots before, acceptance after."""

from __future__ import annotations

from typing import Any

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
from ddtree_guard.device.tree import parents_of_links

_constant: Any = int if triton.knobs.runtime.interpret else tl.constexpr

# One compiled kernel serves every size and address.
BEFORE_ARGS = [
    "one", "two", "three", "bs", "lens", "kv", "kvi", "out", "pool_rows", "kvi_numel", "state",
    "slots", "live_count", "sizes", "parents", "depths", "table", "w", "kv_extra", "enabled",
    "chunk", "table_rows", "table_cols", "table_stride", "room", "reserved",
]  # fmt: skip
NO_TREES, LINKS, PARENTS = 0, 1, 2  # what a step brings: nothing new, links, or parents and depths
TOLD = 5  # links whose addresses lie on the device
cPARENTS, cTOLD = _constant(PARENTS), _constant(TOLD - LINKS)


@triton.jit(do_not_specialize=BEFORE_ARGS, do_not_specialize_on_alignment=BEFORE_ARGS)
def before_kernel(
    one: tl.tensor, two: tl.tensor, three: tl.tensor, bs: tl.int32, lens: tl.tensor, kv: tl.tensor,
    kvi: tl.tensor, out: tl.tensor, pool_rows: tl.tensor, kvi_numel: tl.int64, state: tl.tensor,
    slots: tl.tensor, live_count: tl.tensor, sizes: tl.tensor, parents: tl.tensor,
    depths: tl.tensor, table: tl.tensor, w: tl.int32, kv_extra: tl.int32, enabled: tl.int32,
    chunk: tl.int64, table_rows: tl.int64, table_cols: tl.int64, table_stride: tl.int64,
    room: tl.int64, reserved: tl.int64, HAS: tl.constexpr, COLS: tl.constexpr,
    TREES: tl.constexpr, W: tl.constexpr, ROUNDS: tl.constexpr,
) -> None:  # fmt: skip
    """What comes before the check: bs, the live trees, and K3 and K4. Grid (lanes, chunks), with
    TREES (lanes, chunks + 1).

    `bs` is written to `live_count`; where it is negative it is read from there. With TREES the last
    programs fill `parents` and `depths`: from links `one` and `two`, or from `one`, `two` and
    `three`, which are parents, depths and sizes (bs, w) or (bs,). With TOLD `one` holds the
    addresses of two arrays of int64 links instead, (2,) int64; where they are 0 nothing is done.
    """
    lane = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    chunks = tl.num_programs(1)
    held = tl.load(live_count).to(tl.int64)
    live = lane < tl.where(bs >= 0, bs.to(tl.int64), held)
    child, sibling = one, two
    if TREES & cTOLD:
        first = tl.load(one)
        live = live & (first != 0)
        child = first.to(tl.pointer_type(tl.int64))
        sibling = tl.load(one + 1).to(tl.pointer_type(tl.int64))
    if TREES:
        chunks -= 1
    if part < chunks:
        size = tl.load(sizes + lane).to(tl.int64)
        if TREES & cPARENTS:
            size = tl.load(three + lane, mask=live, other=0).to(tl.int64)
        _table(
            lane, part.to(tl.int64), live, size, lens, kv, kvi, out, pool_rows, kvi_numel, state,
            slots, table, w, kv_extra, enabled, chunk, table_rows, table_cols, table_stride, room,
            reserved, HAS, COLS,
        )  # fmt: skip
        if (bs >= 0) & (lane == 0) & (part == 0):
            tl.store(live_count, bs)
    elif live:
        if TREES & cPARENTS:
            for c in range(0, w, COLS):
                at = lane * w + c + tl.arange(0, COLS)
                row = c + tl.arange(0, COLS) < w
                tl.store(parents + at, load_wide(one, at, row).to(tl.int32), mask=row)
                tl.store(depths + at, load_wide(two, at, row).to(tl.int32), mask=row)
            tl.store(sizes + lane, tl.load(three + lane).to(tl.int32))
        else:
            parents_of_links(child, sibling, parents, depths, lane, w, W, ROUNDS)


@triton.jit
def _table(
    lane: tl.tensor, part: tl.tensor, live: tl.tensor, size: tl.tensor, lens: tl.tensor,
    kv: tl.tensor, kvi: tl.tensor, out: tl.tensor, pool_rows: tl.tensor, kvi_numel: tl.tensor,
    state: tl.tensor, slots: tl.tensor, table: tl.tensor, w: tl.tensor, kv_extra: tl.tensor,
    enabled: tl.tensor, chunk: tl.tensor, table_rows: tl.tensor, table_cols: tl.tensor,
    table_stride: tl.tensor, room: tl.tensor, reserved: tl.tensor, HAS: tl.constexpr,
    COLS: tl.constexpr,
) -> None:  # fmt: skip
    """K3 and K4 of a lane, the latter for `chunk` columns from number `part * chunk` on."""
    s = tl.load(lens + lane).to(tl.int64)
    mine = tl.load(pool_rows + lane).to(tl.int64)
    known = live & (mine >= 0) & (mine < table_rows)
    line = tl.where(known, mine, 0) * table_stride
    flags = tl.zeros([1, COLS], tl.int32)
    where = tl.zeros([1, COLS], tl.int64)
    if part == 0:
        flags |= flag(live & ((known == 0) | (s > room)), cK3)
        if (HAS & cTREE) == 0:
            size = w.to(tl.int64)
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
    lane: tl.tensor, live: tl.tensor, w: tl.tensor, size: tl.tensor, tokens: tl.tensor,
    parents: tl.tensor, predict: tl.tensor, accept: tl.tensor, path: tl.tensor, base: tl.tensor,
    PATH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A1 of one request: bits and rows per column of its path, the path's length and last row."""
    step = tl.arange(0, PATH)
    row = _row_of(accept, lane * path + step, live & (step < path), base)
    length = tl.minimum(tl.min(tl.where(row < 0, step, PATH)), path).to(tl.int64)
    used = (step < tl.maximum(length, 1)) & (step < path)
    before = _row_of(accept, lane * path + step - 1, live & (step > 0) & (step < path), base)
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
    "predict", "accept", "accept_lens", "greedy", "state", "slots", "live_count", "tokens",
    "parents", "sizes", "cut", "w", "path", "most", "accept_stride", "enabled",
]  # fmt: skip


@triton.jit(do_not_specialize=CLOSE_ARGS, do_not_specialize_on_alignment=CLOSE_ARGS)
def close_kernel(
    predict: tl.tensor, accept: tl.tensor, accept_lens: tl.tensor, greedy: tl.tensor,
    state: tl.tensor, slots: tl.tensor, live_count: tl.tensor, tokens: tl.tensor,
    parents: tl.tensor, sizes: tl.tensor, cut: tl.tensor, w: tl.int32, path: tl.int32,
    most: tl.int64, accept_stride: tl.int32, enabled: tl.int32, HAS: tl.constexpr,
    PATH: tl.constexpr, COLS: tl.constexpr,
) -> None:  # fmt: skip
    """A1 to A3 after verification, then close the step. Grid (lanes,), or (1,) without outcome.

    Of `predict`, `accept` and `accept_lens` the live lanes are read, and there need be no others.
    """
    lane = tl.program_id(0).to(tl.int64)
    begun = tl.load(state)
    slot = (begun + 3) % 4
    if HAS & cOUTCOME:
        live = lane < tl.load(live_count).to(tl.int64)
        size = tl.load(sizes + lane).to(tl.int64)
        lens = tl.load(accept_lens + lane, mask=live, other=0).to(tl.int64)
        gone = tl.load(cut + lane).to(tl.int64)
        flags, row, length, end = _walk(
            lane, live, w, size, tokens, parents, predict, accept, path, lane * accept_stride, PATH
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
