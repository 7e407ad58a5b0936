"""Filters for the hot path: they let nothing bad through but may suspect too much.

Only where one has a doubt are the exact rules of `cells` and `rows` asked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ddtree_guard.device.protocol import (
    cBAD,
    cFAR_WORD,
    cLINK_BLOCK,
    cMAJOR,
    cOUT,
    cSHARED,
    cTREE,
    load_low,
    load_wide,
)
from ddtree_guard.device.shared import meet, unreached, walk


@triton.jit
def filter_cells(
    mask: tl.tensor, begin: tl.tensor, top: tl.tensor, bottom: tl.tensor, w: tl.tensor,
    want: tl.tensor, step: tl.tensor, mask_numel: tl.tensor, ROWS: tl.constexpr,
    WORDS: tl.constexpr, WARPS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Nonzero unless the rows from `top` to before `bottom`, at most ROWS, hold as many ones as the
    sum of `want` says, and nothing that is neither 0 nor 1.

    `begin` is the offset of the lane's first tree cell, `step` that from row to row. Cells are read
    sixteen at a time, by the aligned words that hold any of a row. Of the first and the last of
    them only the row's own bytes count; where they leave the buffer, these are read one by one.
    The caller has checked that the lane's cells lie inside the buffer, less than 2^31 bytes apart.
    """
    tl.static_assert(ROWS == 16 * WARPS)
    odd = ((mask + begin).to(tl.int64) & 15).to(tl.int32)
    address = (mask + begin).to(tl.int64) - odd
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    # Which words lie inside the buffer.
    low = tl.where(begin < odd, 1, 0)
    high = tl.minimum((mask_numel - begin + odd) >> 4, cFAR_WORD).to(tl.int32)
    # Words that a row owns wholly, a thread a few of each of its rows; more than one pass only in
    # wide trees. Triton deals out the last axis to threads and then the first ones.
    SPAN: tl.constexpr = min(WORDS, 8)
    LINES: tl.constexpr = 32 // SPAN
    down = tl.arange(0, LINES)[None, :, None, None, None, None]
    down += tl.arange(0, WARPS)[None, None, :, None, None, None] * LINES
    down += tl.arange(0, ROWS // (LINES * WARPS))[None, None, None, :, None, None] * (LINES * WARPS)
    k = 1 + tl.arange(0, SPAN)[:, None, None, None, None, None]
    k += tl.arange(0, WORDS // SPAN)[None, None, None, None, :, None] * SPAN
    edge = odd + (top + down) * step
    last = tl.where(top + down < bottom, ((edge & 15) + w - 1) >> 4, 0)
    inner = words + ((edge >> 4) + k) * 4 + tl.arange(0, 4)[None, None, None, None, None, :]
    own = tl.load(inner, mask=k < last, other=0)
    ends = _end_words(words, odd, top, bottom, w, step, low, high, WARPS)
    total = _ones(_inner_sum(own), _inner_or(own))
    for more in range(WORDS, w // 16, WORDS):
        own = tl.load(inner + more * 4, mask=k + more < last, other=0)
        total += _ones(_inner_sum(own), _inner_or(own))
    total = tl.reshape(total, [32 * WARPS], can_reorder=True)
    doubt = tl.sum(total + _ones(tl.sum(ends, axis=1), tl.reduce(ends, 1, _either)) - want)
    rows = top + tl.arange(0, ROWS)[:, None]
    out = ((odd + top * step) >> 4) < low
    out |= ((odd + (bottom - 1) * step + w - 1) >> 4) >= high
    if out & (bottom > top):
        doubt += _lone_bytes(mask + begin, odd, rows, bottom, w, step, low, high)
    return doubt


@triton.jit
def _end_words(
    words: tl.tensor, odd: tl.tensor, top: tl.tensor, bottom: tl.tensor, w: tl.tensor,
    step: tl.tensor, low: tl.tensor, high: tl.tensor, WARPS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The first word of each row and, if that is another, the last one, a word a thread, without
    the bytes that belong to other rows; zeros where a word does not lie inside the buffer.
    """
    thread = tl.arange(0, 32 * WARPS)[:, None]
    rows = top + (thread >> 1)
    edge = odd + rows * step
    tail = tl.where((thread & 1) == 0, 0, ((edge & 15) + w - 1) >> 4)
    word = (edge >> 4) + tail
    there = (rows < bottom) & (((thread & 1) == 0) | (tail > 0)) & (word >= low) & (word < high)
    found = tl.load(words + (word * 4 + tl.arange(0, 4)[None, :]), mask=there, other=0)
    col = tail * 16 - (edge & 15) + tl.arange(0, 4)[None, :] * 4
    return found & _bytes(-col, w - col)


@triton.jit
def _lone_bytes(
    cells: tl.tensor, odd: tl.tensor, rows: tl.tensor, bottom: tl.tensor, w: tl.tensor,
    step: tl.tensor, low: tl.tensor, high: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Ones in the words of which the buffer holds only a part, byte by byte; at least cBAD where
    one is neither 0 nor 1.
    """
    edge = odd + rows * step
    byte = tl.arange(0, 32)[None, :]
    tail = ((edge & 15) + w - 1) >> 4
    at = tl.where(byte < 16, 0, tail)
    word = (edge >> 4) + at
    col = at * 16 + (byte & 15) - (edge & 15)
    there = (rows < bottom) & ((byte < 16) | (tail > 0)) & ((word < low) | (word >= high))
    cell = tl.load(cells + (rows * step + col), mask=there & (col >= 0) & (col < w), other=0)
    return tl.sum(tl.where(cell > 1, cBAD, cell.to(tl.int32)))


@triton.jit
def _bytes(skip: tl.tensor, end: tl.tensor) -> tl.tensor:
    """Ones in a word's bytes from `skip` to before `end`, as far as these are within 0 to 4."""
    one = (skip * 0 + 1).to(tl.int64)
    skip = one << (tl.minimum(tl.maximum(skip, 0), 4) * 8)
    end = one << (tl.minimum(tl.maximum(end, 0), 4) * 8)
    return ((end - 1) ^ (skip - 1)).to(tl.int32)


@triton.jit
def _inner_sum(words: tl.tensor) -> tl.tensor:
    """Of each thread's words."""
    return tl.sum(tl.sum(tl.sum(words, axis=5), axis=4), axis=3)


@triton.jit
def _inner_or(words: tl.tensor) -> tl.tensor:
    """Of each thread's words."""
    return tl.reduce(tl.reduce(tl.reduce(words, 5, _either), 4, _either), 3, _either)


@triton.jit
def _ones(total: tl.tensor, either: tl.tensor) -> tl.tensor:
    """How many bytes of words with this sum, at most 255 in all, are 1; cBAD more where any is
    above 1.
    """
    count = ((total * 0x01010101).to(tl.uint32, bitcast=True) >> 24).to(tl.int32)
    return count + tl.where((either & ~0x01010101) != 0, cBAD, 0)


@triton.jit
def filter_paths(
    scratch: tl.tensor, cells: tl.tensor, rows: tl.tensor, first: tl.tensor, w: tl.tensor,
    parents: tl.tensor,
    nodes: tl.tensor, shown: tl.tensor, step: tl.tensor, depth: tl.tensor, HAS: tl.constexpr,
    PACK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Nonzero unless each row before `nodes` holds 1 for itself and for every node on its path to
    the root, of which there are `depth`; others before `shown` hold 1 for themselves.
    """
    node, going = rows < nodes, rows < shown
    line = cells + tl.where(going, rows * step, 0)
    if HAS & cSHARED:
        kind = going.to(tl.int32) + node.to(tl.int32)
        met = walk(scratch, rows, kind, line.to(tl.int64), parents, first, w, PACK)
    else:
        at = rows
        linked = node
        met = going.to(tl.int32)
        wrong = tl.load(line + rows, mask=going, other=1).to(tl.int32) ^ 1
        while tl.max(linked.to(tl.int32)) != 0:
            parent = load_wide(parents, first + at, linked)
            linked = linked & (parent >= 0) & (parent < at)
            at = tl.where(linked, parent, 0).to(tl.int32)
            wrong |= tl.load(line + at, mask=linked, other=1).to(tl.int32) ^ 1
            met += linked.to(tl.int32)
        met = tl.where(wrong != 0, -1, met)
    want = tl.where(node, depth + 1, going.to(tl.int64))
    return ((met < 0) | (met != want)).to(tl.int32)


@triton.jit
def filter_pairs(
    first: tl.tensor, begin: tl.tensor, before: tl.tensor, w: tl.tensor, size: tl.tensor,
    live: tl.tensor, tokens: tl.tensor, parents: tl.tensor, out: tl.tensor, reserved: tl.tensor,
    HAS: tl.constexpr, DEEP: tl.constexpr, COLS: tl.constexpr, WARPS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """T4, T2 of sorted trees, and K2 between DEEP * WARPS rows from `begin` on and COLS * 32 rows
    from `before` on, as far as these come first: nonzero where two rows have an equal key. A row's
    parent and token in one number are a key; it tells all tokens below 2^20 apart. Keys are
    compared by their low 32 bits: equal values have equal low bits.

    A thread holds DEEP rows against COLS columns. The shapes of rows and columns carry the
    dimensions of warps and lanes so that Triton deals them out like that.
    """
    warp, lane = tl.arange(0, WARPS)[None, None, :, None], tl.arange(0, 32)[None, None, None, :]
    rows = begin + warp * DEEP + tl.arange(0, DEEP)[:, None, None, None] + lane * 0
    cols = before + tl.arange(0, COLS)[None, :, None, None] * 32 + lane + warp * 0
    inside = (rows < w) & live
    node = inside & (rows < size)
    later = (rows - 1 - cols) >> 31  # all bits where the column is not earlier
    least = tl.full([DEEP, COLS, WARPS, 32], 1, tl.uint32)
    # Where a row has no key, one that no row has: token ids and slots are not negative.
    if HAS & cTREE:
        up = load_low(parents, first + rows, inside, -1)
        twin = load_low(tokens, first + rows, inside, -1) * 2048 + up
        parent = load_low(parents, first + cols, cols < w, -1)
        key = load_low(tokens, first + cols, cols < w, -1) * 2048 + parent
        least = tl.minimum(least, _apart(tl.where(node, twin, -7 - rows), key, later))
        if HAS & cMAJOR:
            above = load_low(parents, first + rows - 1, inside, -1)
            apart = tl.where(node & (above != up), up, -7 - rows)
            least = tl.minimum(least, _apart(apart, parent, later))
    if HAS & cOUT:
        slot = load_low(out, first + rows, inside, 0)
        slot = tl.where(inside & (slot != reserved.to(tl.int32)), slot, -7 - rows)
        found = load_low(out, first + cols, cols < w, -1)
        least = tl.minimum(least, _apart(slot, found, later))
    least = tl.reshape(least, [DEEP * COLS * WARPS * 32], can_reorder=True)
    return (tl.min(least) == 0).to(tl.int32)


@triton.jit
def filter_twins(
    scratch: tl.tensor, first: tl.tensor, w: tl.tensor, size: tl.tensor, tokens: tl.tensor,
    parents: tl.tensor,
    out: tl.tensor, reserved: tl.tensor, HAS: tl.constexpr, PACK: tl.constexpr, WARPS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """T4, K2, and T2 of sorted trees, of a whole lane, with the keys of `filter_pairs`: nonzero
    where two rows have an equal key, and seldom else.

    Rows meet in tables of shared memory: each leaves a tag of its key and its own number at the
    place that the key says. A row that then finds itself is done; one that finds its tag with
    another number may have a twin; one that finds another key goes on to the next table. Of twins,
    whichever key keeps their place, either one of them finds the tag there, or all of them go on;
    and who gets past the last table is a doubt: of 257 rows, in about one lane of 5000. The root
    has a token like no other row's, and only its slot to compare.
    """
    rows = 1 + tl.arange(0, PACK * 16 * WARPS)
    inside = rows < w
    none = -7 - rows
    kin, slot = none, none
    twin = rows * 0
    if HAS & cTREE:
        up = load_low(parents, first + rows, inside, -1)
        kin = load_low(tokens, first + rows, inside, -1) * 2048 + up
        kin = tl.where(inside & (rows < size), kin, none)
        if HAS & cMAJOR:
            above = load_low(parents, first + rows - 1, inside, -1)
            apart = inside & (rows < size) & (above != up)
            place = tl.where(apart & (up >= 0) & (up < w), up * 4, -1)
            twin |= (apart & ((place < 0) | (meet(scratch, place, rows, PACK // 2) != rows))).to(
                tl.int32
            )
    if HAS & cOUT:
        slot = load_low(out, first + rows, inside, 0)
        slot = tl.where(inside & (slot != reserved.to(tl.int32)), slot, none)
        twin |= (slot == load_low(out, first, first >= 0, 0)).to(tl.int32)
    key = tl.join(kin, slot)
    alone = key == tl.join(none, none)
    name = tl.join(rows, rows + 2048)
    tag = (key * -2048144789) & ~4095 | name
    place = tl.where(alone, -1, _place(key, -1640531535))
    pair = name * 0
    for table in tl.static_range(3):
        found = meet(scratch, place, tag, PACK)
        same = (found ^ tag) & ~2047  # the tag, and which of the two keys it is
        pair |= ((place >= 0) & (same == 0) & (found != tag)).to(tl.int32)
        # In each table elsewhere: what meets in one does not meet in all.
        following = _place(key + (key >> 7), 1566083941 - table * 538083336)
        place = tl.where((place >= 0) & (found != tag), following, -1)
    return tl.max(pair | (place >= 0).to(tl.int32) | tl.join(twin, twin))


@triton.jit
def _place(key: tl.tensor, factor: tl.constexpr) -> tl.tensor:
    """The upper 11 bits of a product, as the offset of a word."""
    return ((key * factor).to(tl.uint32, bitcast=True) >> 21).to(tl.int32) * 4


@triton.jit
def _apart(row: tl.tensor, column: tl.tensor, later: tl.tensor) -> tl.tensor:
    """Zero where the keys of a row and of an earlier column are equal."""
    return ((row ^ column) | later).to(tl.uint32, bitcast=True)


@triton.jit
def _either(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return a | b


@triton.jit
def filter_links(
    scratch: tl.tensor, first: tl.tensor, w: tl.tensor, size: tl.tensor, child: tl.tensor,
    sibling: tl.tensor,
    HAS: tl.constexpr, BITS: tl.constexpr, PACK: tl.constexpr, WARPS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """T3 of a lane: nonzero unless a link leads on to every node but the root. `strange_links` sees
    to it that links do not lead elsewhere.

    That is enough. Going back from a node by the links that lead to it, always to an earlier row
    of the same parent, ends at that parent's first child; and a row has one next sibling, so the
    list that begins there holds the node. Builders list siblings in row order.
    """
    if HAS & cSHARED:
        rows = 1 + tl.arange(0, PACK * 16 * WARPS)
        down = load_low(child, first + rows, rows < w, -1)
        side = load_low(sibling, first + rows, rows < w, -1)
        down = tl.where((rows < size) & (down > 0) & (down < size), down, -1)
        side = tl.where((rows < size) & (side > 0) & (side < size), side, -1)
        lost = unreached(scratch, rows, down, side, PACK)
        lost = tl.max(tl.where((rows < size) & (rows != tl.load(child + first)), lost, 0))
    else:
        lost = _missing_bits(first, w, size, child, sibling, BITS)
    return lost


@triton.jit
def _missing_bits(
    first: tl.tensor, w: tl.tensor, size: tl.tensor, child: tl.tensor, sibling: tl.tensor,
    BITS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The same with a bit for each row."""
    word = tl.arange(0, BITS)[:, None]
    reached = tl.zeros([BITS], tl.int32)
    for begin in range(0, w - 1, cLINK_BLOCK):  # no link leads on from the last row
        rows = begin + tl.arange(0, cLINK_BLOCK)
        down = load_low(child, first + rows, rows < w, -1)
        side = load_low(sibling, first + rows, rows < w, -1)
        down = tl.where(rows < size, down, 0)[None, :] - 1
        side = tl.where(rows < size, side, 0)[None, :] - 1
        both = tl.where((down >> 5) == word, 1 << (down & 31), 0)
        both |= tl.where((side >> 5) == word, 1 << (side & 31), 0)
        reached |= tl.reduce(both, 1, _either)
    left = size - 1 - tl.arange(0, BITS) * 32
    nodes = tl.where(left >= 32, -1, tl.where(left > 0, (1 << (left & 31)) - 1, 0))
    return tl.max(((nodes & ~reached) != 0).to(tl.int32))


@triton.jit
def strange_links(
    first: tl.tensor, rows: tl.tensor, w: tl.tensor, size: tl.tensor, pad_rows: tl.tensor,
    parents: tl.tensor, index: tl.tensor, child: tl.tensor, sibling: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """T3 row by row: nonzero where a link does not lead on to a node of the right parent."""
    inside = rows < w
    node = inside & (rows < size)
    parent = load_wide(parents, first + rows, inside)
    down = load_wide(child, first + rows, inside)
    side = load_wide(sibling, first + rows, inside)
    strange = load_wide(index, first + rows, inside) != first + rows
    below = node & (down > rows) & (down < size)
    beside = node & (side > rows) & (side < size)
    kid = load_wide(parents, first + tl.where(below, down, 0).to(tl.int32), below)
    next_kid = load_wide(parents, first + tl.where(beside, side, 0).to(tl.int32), beside)
    strange |= tl.where(below, kid != rows, down != -1)
    strange |= tl.where(beside, next_kid != parent, side != -1)
    judged = node | (inside & (pad_rows > 0))
    return (judged & (strange != 0)).to(tl.int32)
