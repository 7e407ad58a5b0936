"""Programs of the fused kernel that pack a step into the recorder's ring (`recorder.ring`).

They judge nothing and wait for no other program: each reads its share of the step's arrays once
and writes it to the slot of this step. That is the number of steps closed, plus one: a word that no
program of the launch writes, so a captured launch fills the next slot in every replay, and the
step's verdict tells the host which slot holds it.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ddtree_guard.device.cells import cells_inside
from ddtree_guard.device.protocol import cFAR_WORD, cGATHER, cONES, cSEVENS

# What a launch packs: bits of the constexpr RING.
PACKED = {"tokens": 1, "parents": 2, "positions": 4, "out_cache_loc": 8, "mask": 16, "sizes": 32,
          "qo_indptr": 64, "kv_indptr": 128, "mask_indptr": 256, "depths": 512}  # fmt: skip
HEADER, ROWS, FARTHEST, NEAR = 4, 128, 1 << 20, 2**31 - 1
CELL_ROWS, COLD_ROWS, COLD_BYTES = 32, 16, 16  # mask bits: rows of a program; a pass where cold
_constant: Any = int if triton.knobs.runtime.interpret else tl.constexpr
(pTOKENS, pPARENTS, pPOSITIONS, pSLOTS, pMASK, pSIZES, pQO, pKV, pMI, pDEPTHS) = map(
    _constant, PACKED.values()
)
cHEADER, cROWS, cFARTHEST, cNEAR = map(_constant, (HEADER, ROWS, FARTHEST, NEAR))
cCELL_ROWS, cCOLD_ROWS, cCOLD_BYTES = map(_constant, (CELL_ROWS, COLD_ROWS, COLD_BYTES))


@triton.jit
def row_programs(w: tl.tensor) -> tl.tensor:
    """Blocks of rows of a lane."""
    return (w + cROWS - 1) // cROWS


@triton.jit
def pack_programs(w: tl.tensor, RING: tl.constexpr) -> tl.tensor:
    """Programs of a lane: blocks of rows, and smaller ones of the rows' mask cells."""
    programs = row_programs(w)
    if RING & pMASK:
        programs += (w + cCELL_ROWS - 1) // cCELL_ROWS
    return programs


def programs_of(w: int, has: int) -> int:
    """The same on the host."""
    return -(-w // ROWS) - (-w // CELL_ROWS if has & PACKED["mask"] else 0)


@triton.jit
def pack_program(
    state: tl.tensor, lens: tl.tensor, qo: tl.tensor, kv: tl.tensor, mi: tl.tensor,
    tokens: tl.tensor, parents: tl.tensor, depths: tl.tensor, sizes: tl.tensor,
    positions: tl.tensor, out: tl.tensor, part: tl.tensor, lanes: tl.tensor, w: tl.tensor,
    ring: tl.tensor, ring_steps: tl.tensor, ring_lanes: tl.tensor, ring_w: tl.tensor,
    RING: tl.constexpr,
) -> None:  # fmt: skip
    """A block of a request's rows; the first program also packs what is per request.

    The loads come before the first store: a store may alias a later load, so the compiler would
    wait for each. The slot comes last of all, for its division takes longer than a load.
    """
    lane = tl.program_id(0).to(tl.int64)
    number = tl.load(state + 1) + 1
    row = part * cROWS + tl.arange(0, cROWS)
    at = tl.program_id(0) * w + row
    mine = row < w
    edge = lane + tl.arange(0, 2)  # the last lane has the end of the offsets, too
    edges = ((edge == lane) | (edge == lanes)) & (part == 0)
    length = tl.load(lens + lane).to(tl.int64)
    if RING & pQO:
        q = tl.load(qo + edge, edges, 0).to(tl.int64)
    if RING & pKV:
        k = tl.load(kv + edge, edges, 0).to(tl.int64)
    if RING & pMI:
        m = tl.load(mi + edge, edges, 0).to(tl.int64)
    if RING & pSIZES:
        size = tl.load(sizes + lane).to(tl.int64)
    if RING & pTOKENS:
        token = tl.load(tokens + at, mine, 0).to(tl.int64)
    if RING & pPARENTS:
        parent = tl.load(parents + at, mine, 0).to(tl.int64)
    if RING & pDEPTHS:
        depth = tl.load(depths + at, mine, 0).to(tl.int64)
    if RING & pPOSITIONS:
        position = tl.load(positions + at, mine, 0).to(tl.int64)
    if RING & pSLOTS:
        place = tl.load(out + at, mine, 0).to(tl.int64)

    # the slot's fields, in the order of `recorder.ring.FIELDS`
    room = ring_lanes * ring_w
    slot = slot_of(number, ring, ring_steps, ring_lanes, ring_w)
    offsets = slot + cHEADER
    per_lane = offsets + 3 * (ring_lanes + 1) + lane
    per_row = slot + rows_at(ring_lanes) + at
    if RING & pQO:
        tl.store(offsets + edge, q, edges)
    if RING & pKV:
        tl.store(offsets + ring_lanes + 1 + edge, k, edges)
    if RING & pMI:
        tl.store(offsets + 2 * (ring_lanes + 1) + edge, m, edges)
    tl.store(per_lane, length, part == 0)
    if RING & pSIZES:
        tl.store(per_lane + ring_lanes, size, part == 0)
    if RING & pTOKENS:
        tl.store(per_row, token, mine)
    if RING & pPARENTS:
        tl.store(per_row + room, parent, mine)
    if RING & pDEPTHS:
        tl.store(per_row + 2 * room, depth, mine)
    if RING & pPOSITIONS:
        tl.store(per_row + 3 * room, position, mine)
    if RING & pSLOTS:
        tl.store(per_row + 4 * room, place, mine)
    tl.store(slot, number, (part == 0) & (lane == 0))


@triton.jit
def rows_at(ring_lanes: tl.tensor) -> tl.tensor:
    """Words of a slot before the fields of rows."""
    return cHEADER + 5 * ring_lanes + 3


@triton.jit
def slot_of(
    number: tl.tensor, ring: tl.tensor, ring_steps: tl.tensor, ring_lanes: tl.tensor,
    ring_w: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """The address of a step's slot. A division of 64 bits takes long, and few steps need one."""
    if number < cNEAR:  # noqa: SIM108
        at = number.to(tl.int32) % ring_steps
    else:
        at = (number % ring_steps).to(tl.int32)
    words = rows_at(ring_lanes) + ring_lanes * ring_w * (5 + (ring_w + 63) // 64)
    return ring + at.to(tl.int64) * words


@triton.jit
def bits_of(
    slot: tl.tensor, at: tl.tensor, ring_lanes: tl.tensor, ring_w: tl.tensor
) -> tl.tensor:  # fmt: skip
    """The addresses in a slot of the mask bits of these rows."""
    bits = slot + rows_at(ring_lanes) + 5 * ring_lanes * ring_w
    return (bits + at * ((ring_w + 63) // 64)).to(tl.pointer_type(tl.uint8))


@triton.jit
def bits_program(
    state: tl.tensor, live_count: tl.tensor, lens: tl.tensor, qo: tl.tensor, mi: tl.tensor,
    mask: tl.tensor, block: tl.tensor, w: tl.tensor, mask_numel: tl.tensor, ring: tl.tensor,
    ring_steps: tl.tensor, ring_lanes: tl.tensor, ring_w: tl.tensor, WORDS: tl.constexpr,
    WARPS: tl.constexpr,
) -> None:  # fmt: skip
    """The mask bits of a block of a request's rows, at the offsets that attention uses.

    Where these are the right ones, cells are read eight at a time: by the aligned word that holds
    the first of them, and the following one. A thread packs a few words of each of its rows; Triton
    deals out the last axis to threads and then the first ones.
    """
    SPAN: tl.constexpr = min(WORDS, 8)
    LINES: tl.constexpr = 32 // SPAN
    lane = tl.program_id(0).to(tl.int64)
    number = tl.load(state + 1) + 1
    live = lane < tl.load(live_count).to(tl.int64)
    s = tl.load(lens + lane).to(tl.int64)
    start = tl.load(mi + lane).to(tl.int64)
    stride = tl.load(qo + lane + 1).to(tl.int64) - tl.load(qo + lane).to(tl.int64)
    plain = (stride == w) & cells_inside(s, start, w, mask_numel)
    top = block * cCELL_ROWS
    last = tl.minimum(w, top + cCELL_ROWS)
    rows = tl.arange(0, LINES)[:, None, None, None, None]
    rows += tl.arange(0, WARPS)[None, :, None, None, None] * LINES
    rows += tl.arange(0, cCELL_ROWS // (LINES * WARPS))[None, None, :, None, None] * (LINES * WARPS)
    rows += top
    k = tl.arange(0, SPAN)[None, None, None, None, :]
    k += tl.arange(0, WORDS // SPAN)[None, None, None, :, None] * SPAN

    begin = tl.where(plain, start + s, 0)
    odd = ((mask + begin).to(tl.int64) & 7).to(tl.int32)
    words = ((mask + begin).to(tl.int64) - odd).to(tl.pointer_type(tl.int64))
    left = mask_numel - begin + odd
    room = tl.minimum(left >> 3, cFAR_WORD).to(tl.int32)  # words that the mask holds wholly
    step = tl.where(plain, s + w, 0).to(tl.int32)
    ends = live & plain & (((odd + (last - 1) * step + w + 7) >> 3) >= room)
    part = _last_word(words + room, left.to(tl.int32) & 7, ends)
    there = rows < tl.where(live & plain, last, 0)
    edge = odd + rows * step
    at = edge >> 3
    full = w >> 3
    own = tl.load(words + (at + k), mask=there & (k < full), other=0)
    after = _word(words, at + k + 1, there & (k < full), room, part)
    end = _word(words, at + full, there, room, part)
    end_after = _word(words, at + full + 1, there, room, part)
    slot = slot_of(number, ring, ring_steps, ring_lanes, ring_w)
    to = bits_of(slot, tl.program_id(0) * w + rows, ring_lanes, ring_w)
    shift = (edge & 7) * 8
    tl.store(to + k, _cell_bits(own, after, shift), there & (k < full))
    few = (1 << (w & 7)) - 1  # the last columns
    tl.store(to + full, _cell_bits(end, end_after, shift) & few, there & (few > 0))
    for more in range(WORDS, full, WORDS):
        own = tl.load(words + (at + k + more), mask=there & (k + more < full), other=0)
        after = _word(words, at + k + more + 1, there & (k + more < full), room, part)
        tl.store(to + k + more, _cell_bits(own, after, shift), there & (k + more < full))
    if live & (plain == 0):
        _pack_anywhere(slot, lane, top, last, w, s, qo, mi, mask, mask_numel, ring_lanes, ring_w)


@triton.jit
def _word(
    words: tl.tensor, at: tl.tensor, there: tl.tensor, room: tl.tensor, part: tl.tensor
) -> tl.tensor:  # fmt: skip
    """The words at these indices; of what lies beyond the mask, only its last cells."""
    return tl.load(words + at, mask=there & (at < room), other=part)


@triton.jit
def _last_word(word: tl.tensor, count: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    """A word of which the mask holds only so many bytes, with zeros behind them."""
    two, four = count & 4, count & 6  # what lies before its two and its one last bytes
    low = tl.load(word.to(tl.pointer_type(tl.uint32)), mask=wanted & (count >= 4), other=0)
    pair = word.to(tl.pointer_type(tl.uint16)) + (two >> 1)
    middle = tl.load(pair, mask=wanted & ((count & 2) != 0), other=0)
    byte = word.to(tl.pointer_type(tl.uint8)) + four
    high = tl.load(byte, mask=wanted & ((count & 1) != 0), other=0)
    found = low.to(tl.int64) | (middle.to(tl.int64) << (two * 8))
    return found | (high.to(tl.int64) << (four * 8))


@triton.jit
def _cell_bits(low: tl.tensor, high: tl.tensor, shift: tl.tensor) -> tl.tensor:
    """Eight cells, from so many bits behind the begin of the first word on: a byte with a bit for
    each, the first one the lowest, set where the cell is not 0.
    """
    low, high = low.to(tl.uint64, bitcast=True), high.to(tl.uint64, bitcast=True)
    shift = shift.to(tl.uint64)
    cells = (low >> shift) | ((high << 1) << (63 - shift))
    some = ((((cells & cSEVENS) + cSEVENS) | cells) >> 7) & cONES
    return ((some * cGATHER) >> 56).to(tl.uint8)


@triton.jit
def _pack_anywhere(
    slot: tl.tensor, lane: tl.tensor, top: tl.tensor, last: tl.tensor, w: tl.tensor, s: tl.tensor,
    qo: tl.tensor, mi: tl.tensor, mask: tl.tensor, mask_numel: tl.tensor, ring_lanes: tl.tensor,
    ring_w: tl.tensor,
) -> None:  # fmt: skip
    """Cold: the mask bits of the rows from `top` to before `last`, whatever their offsets are."""
    words, head, tail, end, odd = _ends(mask, mask_numel)
    for at in range(top, last, cCOLD_ROWS):
        row = at + tl.arange(0, cCOLD_ROWS)
        begin, least, most = _columns(lane, row, w, s, qo, mi, mask_numel)
        to = bits_of(slot, tl.program_id(0) * w + row, ring_lanes, ring_w)[:, None]
        for before in range(0, (w + 7) // 8, cCOLD_BYTES):
            byte = before + tl.arange(0, cCOLD_BYTES)[None, :]
            bits = _bits(words, begin + odd, least, most, before, head, tail, end)
            tl.store(to + byte, bits, (row < last)[:, None] & (byte * 8 < w))


@triton.jit
def _ends(mask: tl.tensor, numel: tl.tensor) -> tl.tensor:
    """The mask as aligned words: their address, the first and the last word with zeros for what is
    not of the mask, the last one's index, and cells before the mask in the first.
    """
    odd = (mask.to(tl.int64) & 3).to(tl.int32)
    last = (numel + odd) >> 2
    head, tail = odd.to(tl.uint32) * 0, odd.to(tl.uint32) * 0
    for k in tl.static_range(0, 4):
        front, back = (k - odd).to(tl.int64), last * 4 + k - odd
        cell = tl.load(mask + front, (front >= 0) & (front < numel), 0)
        head |= cell.to(tl.uint32) << (8 * k)
        cell = tl.load(mask + back, (back >= 0) & (back < numel), 0)
        tail |= cell.to(tl.uint32) << (8 * k)
    words = (mask.to(tl.int64) - odd).to(tl.pointer_type(tl.uint32))
    return words, head, tail, last, odd


@triton.jit
def _columns(
    lane: tl.tensor, row: tl.tensor, w: tl.tensor, s: tl.tensor, qo: tl.tensor, mi: tl.tensor,
    numel: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Where the rows' tree cells begin, at the offsets that attention uses, and which columns of
    them, from and to, lie in the mask. Offsets are data: they may wrap.
    """
    rows = tl.load(qo + lane + 1).to(tl.int64) - tl.load(qo + lane).to(tl.int64)
    begin = tl.load(mi + lane).to(tl.int64) + s + row.to(tl.int64) * (s + rows)
    begin = tl.minimum(tl.maximum(begin, -cFARTHEST), numel)
    least = tl.maximum(-begin, 0).to(tl.int32)
    most = tl.minimum(tl.minimum(tl.maximum(rows, 0), w), numel - begin).to(tl.int32)
    return begin, least, tl.where(row < w, most, 0)


@triton.jit
def _bits(
    words: tl.tensor, begin: tl.tensor, least: tl.tensor, most: tl.tensor, before: tl.tensor,
    head: tl.tensor, tail: tl.tensor, last: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Eight cells a byte, from byte `before` of each row on; 0 for columns outside the mask."""
    first = begin >> 2
    odd = (begin & 3).to(tl.int32)
    low = tl.maximum(1 - first, 0).to(tl.int32)[:, None]
    high = tl.minimum(last - first, (most + odd + 3) >> 2).to(tl.int32)[:, None]
    byte = before + tl.arange(0, cCOLD_BYTES)[None, :]
    at = words + first[:, None] + byte * 2
    shift = (odd * 8)[:, None]
    k = byte * 2
    a = tl.where(k == low - 1, head, tl.load(at, (k >= low) & (k < high), tail)).to(tl.uint64)
    k += 1
    b = tl.where(k == low - 1, head, tl.load(at + 1, (k >= low) & (k < high), tail)).to(tl.uint64)
    k += 1
    c = tl.where(k == low - 1, head, tl.load(at + 2, (k >= low) & (k < high), tail)).to(tl.uint64)
    front = _nibble((((b << 32) | a) >> shift).to(tl.uint32))
    back = _nibble((((c << 32) | b) >> shift).to(tl.uint32))
    to = tl.minimum(tl.maximum(most[:, None] - byte * 8, 0), 8)
    since = tl.minimum(tl.maximum(least[:, None] - byte * 8, 0), 8)
    inside = ((1 << to) - 1) & ~((1 << since) - 1)
    return ((front | (back << 4)).to(tl.int32) & inside).to(tl.uint8)


@triton.jit
def _nibble(cells: tl.tensor) -> tl.tensor:
    """A word of four cells as four bits."""
    some = ((cells & 0x7F7F7F7F) + 0x7F7F7F7F) | cells  # bit 7 of each cell that is not 0
    return (((some >> 7) & 0x01010101) * 0x10204080) >> 28
