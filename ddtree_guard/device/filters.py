"""Filters for the hot path: they let nothing bad through but may suspect too much.

Only where one has a doubt are the exact rules of `cells` and `rows` asked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ddtree_guard.device.protocol import (
    cCELL_LANES,
    cCELL_WORDS,
    cFAR,
    cLINK_BLOCK,
    cMAJOR,
    cOUT,
    cTREE,
    load_low,
    load_wide,
)


@triton.jit
def filter_cells(
    cells: tl.tensor, rows: tl.tensor, up: tl.tensor, w: tl.tensor, step: tl.tensor,
    inside: tl.tensor, linked: tl.tensor, diagonal_on: tl.tensor, ROWS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """M2, M4 and M6 of a block of rows: nonzero where a row is not its parent's with the diagonal
    added, or holds anything to the right of it. `cells` is the address of the tree's first cell.

    Four cells at a time, by the aligned words that lie wholly inside the row; its first and last
    four cells, by which the words may fall short, one by one. So nothing is read but cells of
    these rows and, a word further than they are compared, of earlier ones. The caller has
    checked that the lane's cells lie inside the buffer, less than 2^31 bytes apart.
    """
    address = cells.to(tl.int64)
    odd = (address & 3).to(tl.int32)
    words = (address - odd).to(tl.pointer_type(tl.int32))
    own_word = (odd + rows * step + 3) >> 2
    head = own_word * 4 - odd - rows * step  # cells before the first word
    count = tl.where(inside, (w - head) >> 2, 0)
    seen_at = odd + up * step + head
    shift = ((seen_at & 3) * 8).to(tl.uint64)
    ahead = rows - head
    below = tl.where(linked, tl.minimum((ahead >> 2) + 1, count), 0)
    diagonal_word = tl.where(diagonal_on & ((ahead >> 2) < count), ahead >> 2, -cFAR)
    diagonal_bit = 1 << ((ahead & 3) * 8)
    lane = tl.arange(0, cCELL_LANES)[None, :]
    own_words, seen_words = words + own_word + lane, words + (seen_at >> 2) + lane
    count, below, diagonal_word = count - lane, below - lane, diagonal_word - lane
    bad = tl.zeros([ROWS, cCELL_LANES], tl.int32)
    for _ in range(0, w >> 2, cCELL_WORDS):
        for k in tl.static_range(0, cCELL_WORDS, cCELL_LANES):
            own = tl.load(own_words + k, mask=count > k, other=0)
            low = tl.load(seen_words + k, mask=below > k, other=0)
            high = tl.load(seen_words + k + 1, mask=below > k, other=0)
            both = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(
                tl.uint32, bitcast=True
            ).to(tl.uint64)
            seen = (both >> shift).to(tl.uint32).to(tl.int32, bitcast=True)
            bad |= own ^ seen ^ tl.where(diagonal_word == k, diagonal_bit, 0)
        own_words += cCELL_WORDS
        seen_words += cCELL_WORDS
        count -= cCELL_WORDS
        below -= cCELL_WORDS
        diagonal_word -= cCELL_WORDS
    k = tl.arange(0, 8)[None, :]
    cols = tl.where(k < 4, k, w - 8 + k)
    there = inside & (cols >= 0) & (cols < w)
    own = tl.load(cells + rows * step + cols, mask=there, other=0).to(tl.int32)
    seen = tl.load(cells + up * step + cols, mask=there & linked, other=0).to(tl.int32)
    ends = own ^ seen ^ (there & diagonal_on & (cols == rows)).to(tl.int32)
    return tl.max(((bad | ends) != 0).to(tl.int32))


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
def _apart(row: tl.tensor, column: tl.tensor, later: tl.tensor) -> tl.tensor:
    """Zero where the keys of a row and of an earlier column are equal."""
    return ((row ^ column) | later).to(tl.uint32, bitcast=True)


@triton.jit
def _either(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return a | b


@triton.jit
def filter_links(
    first: tl.tensor, w: tl.tensor, size: tl.tensor, child: tl.tensor, sibling: tl.tensor,
    BITS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """T3 of a lane: nonzero unless a link leads on to every node but the root. `strange_links` sees
    to it that links do not lead elsewhere.

    That is enough. Going back from a node by the links that lead to it, always to an earlier row
    of the same parent, ends at that parent's first child; and a row has one next sibling, so the
    list that begins there holds the node. Builders list siblings in row order.
    """
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
