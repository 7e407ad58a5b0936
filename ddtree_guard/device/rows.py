"""Rules that one lane or one row shows by itself, in 64 bits."""

from __future__ import annotations

import triton
import triton.language as tl

from ddtree_guard.device.protocol import (
    cG4,
    cK1,
    cK2,
    cKV,
    cM4,
    cMAJOR,
    cMASK,
    cMI,
    cP1,
    cPAD_POS,
    cPAD_SLOT,
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
)


@triton.jit
def judge_layout(
    lane: tl.tensor, live: tl.tensor, s: tl.tensor, w: tl.tensor, qo: tl.tensor, kv: tl.tensor,
    mi: tl.tensor, stride: tl.tensor, kv_extra: tl.tensor, len_max: tl.tensor, HAS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """W1 to W4 of one lane as bits, and the row that W1 names."""
    bits = lane * 0
    row = lane * 0
    rows = lane * 0
    reach = lane * 0
    if HAS & cQO:
        start = tl.load(qo + lane).to(tl.int64)
        rows = tl.load(qo + lane + 1).to(tl.int64) - start
        shifted = (lane == 0) & (start != 0)
        row = tl.where(shifted, 0, tl.minimum(tl.maximum(rows, 0), w - 1))
        bits |= tl.where(shifted | (rows != w), 1 << cW1, 0)
    if HAS & cKV:
        start = tl.load(kv + lane).to(tl.int64)
        reach = tl.load(kv + lane + 1).to(tl.int64) - start
        wrong = ((lane == 0) & (start != 0)) | (reach != s + kv_extra) | (s < 0) | (s > len_max)
        bits |= tl.where(wrong, 1 << cW2, 0)
    if HAS & cMI:
        start = tl.load(mi + lane).to(tl.int64)
        cells = tl.load(mi + lane + 1).to(tl.int64) - start
        bits |= tl.where(((lane == 0) & (start != 0)) | (cells != w * (s + w)), 1 << cW3, 0)
    if HAS & cSTRIDE:
        walked = reach + tl.where(kv_extra > 0, 0, rows)
        built = tl.load(stride + lane).to(tl.int64)
        bits |= tl.where(live & (walked != built), 1 << cW4, 0)
    return bits, row


@triton.jit
def judge_nodes(
    first: tl.tensor, rows: tl.tensor, w: tl.tensor, size: tl.tensor, tokens: tl.tensor,
    parents: tl.tensor, depths: tl.tensor, depth_max: tl.tensor, vocab: tl.tensor,
    pad_rows: tl.tensor, HAS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """T1, T2, T6, T4 as far as one row shows it, and which rows are nodes."""
    inside = rows < w
    node = inside & (rows < size)
    parent = load_wide(parents, first + rows, inside)
    token = load_wide(tokens, first + rows, inside)
    depth = load_wide(depths, first + rows, inside)
    known = node & (parent >= 0) & (parent < w)
    linked = known & (parent < rows)
    up = tl.where(known, parent, 0).to(tl.int32)
    above = load_wide(depths, first + up, known)
    flags = flag(node & tl.where(rows == 0, parent != -1, linked == 0), cT1)
    deep = depth != tl.where(rows == 0, 0, tl.where(known, above + 1, depth))
    flags |= flag(node & (deep | (depth > depth_max)), cT2)
    flags |= flag(node & ((token < 0) | (token >= vocab)), cT6)
    ghost = inside & (node == 0) & (parent >= 0) & (pad_rows > 0)
    flags |= flag(((rows == 0) & ((size < 1) | (size > w))) | ghost, cT4)
    if HAS & cMASK:
        flags |= flag((rows == size) & (pad_rows == 0), cM4)
    if HAS & cMAJOR:
        before = load_wide(depths, first + rows - 1, node & (rows > 0))
        flags |= flag(node & (rows > 0) & (depth < before), cT2)
    return flags, node


@triton.jit
def judge_links(
    first: tl.tensor, rows: tl.tensor, w: tl.tensor, size: tl.tensor, parents: tl.tensor,
    index: tl.tensor, child: tl.tensor, sibling: tl.tensor, pad_rows: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Cold: T3 of these rows, siblings in any order."""
    inside = rows < w
    node = inside & (rows < size)
    parent = load_wide(parents, first + rows, inside)
    linked = node & (parent >= 0) & (parent < rows)
    up = tl.where(linked, parent, 0).to(tl.int32)
    wrong = node & (load_wide(index, first + rows, inside) != first + rows)
    down = load_wide(child, first + rows, inside)
    there = node & (down > 0) & (down < size)
    whose = load_wide(parents, first + tl.where(there, down, 0).to(tl.int32), there)
    wrong |= node & (down != -1) & ((there == 0) | (whose != rows))
    side = load_wide(sibling, first + rows, inside)
    there = node & (side > 0) & (side < size) & (side != rows) & (rows > 0)
    whose = load_wide(parents, first + tl.where(there, side, 0).to(tl.int32), there)
    wrong |= node & (side != -1) & ((there == 0) | (whose != parent))
    wrong |= inside & (node == 0) & (pad_rows > 0) & ((down != -1) | (side != -1))
    return flag(wrong, cT3) | _judge_chains(first, rows, w, up, linked, child, sibling)


@triton.jit
def _judge_chains(
    first: tl.tensor, rows: tl.tensor, w: tl.tensor, up: tl.tensor, linked: tl.tensor,
    child: tl.tensor, sibling: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """T3 by walking each row's list of siblings from its parent, w steps."""
    at = load_wide(child, first + up, linked)
    met = rows < 0
    for _ in range(w):
        there = linked & (at > 0) & (at < w)
        met |= there & (at == rows)
        following = load_wide(sibling, first + tl.where(there, at, 0).to(tl.int32), there)
        at = tl.where(there, following, -1)
    return flag(linked & ((met == 0) | (at > 0)), cT3)


@triton.jit
def judge_slots(
    slot: tl.tensor, inside: tl.tensor, node: tl.tensor, pool: tl.tensor, pad_slot: tl.tensor,
    reserved: tl.tensor, HAS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """K1 and K2 as far as one row shows them, in live and in padded lanes."""
    outside = flag(inside & ((slot < 0) | (slot >= pool)), cK1)
    stray = inside & (slot != pad_slot)
    pads = flag(stray, cK2)
    if HAS & cPAD_SLOT:
        pads |= tl.where(stray, outside, 0) | flag(stray, cG4)
    else:
        pads |= outside
    return outside | flag(node & (slot == reserved), cK2), pads


@triton.jit
def judge_positions(
    first: tl.tensor, rows: tl.tensor, w: tl.tensor, lanes: tl.tensor, s: tl.tensor,
    sections: tl.tensor, node: tl.tensor, depth: tl.tensor, positions: tl.tensor, depths: tl.tensor,
    pad_position: tl.tensor, HAS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """P1 and the pad value of these rows; mRoPE sections count from their root row."""
    inside = rows < w
    flags = (rows * 0).to(tl.int32)
    pads = (rows * 0).to(tl.int32)
    value = load_wide(positions, first + rows, inside)
    if HAS & cTREE:
        # The only section of most models, outside the loop so that its load is not held up.
        flags |= flag(node & (sections == 1) & (value != s + depth), cP1)
    if HAS & cPAD_POS:
        pads |= flag(inside & (value != pad_position), cG4)
    if sections > 1:
        root = first
        for _ in range(sections):
            value = load_wide(positions, root + rows, inside)
            if HAS & cTREE:
                base = tl.load(positions + root).to(tl.int64) - tl.load(depths + first)
                flags |= flag(node & (value != base + depth), cP1)
            if HAS & cPAD_POS:
                pads |= flag(inside & (value != pad_position), cG4)
            root += lanes * w
    return flags, pads


@triton.jit
def judge_kv_ends(
    lane: tl.tensor, rows: tl.tensor, w: tl.tensor, s: tl.tensor, kv: tl.tensor, kvi: tl.tensor,
    kvi_numel: tl.tensor, pool: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """K1 of the first and the last w prefix slots."""
    head = tl.load(kv + lane).to(tl.int64)
    flags = (rows * 0).to(tl.int32)
    for end in tl.static_range(2):
        at = tl.where(end == 0, head + rows, head + s - 1 - rows)
        there = (rows < w) & (rows < s) & (at >= 0) & (at < kvi_numel)
        entry = load_wide(kvi, tl.where(there, at, 0), there)
        flags |= flag(there & ((entry < 0) | (entry >= pool)), cK1)
    return flags
