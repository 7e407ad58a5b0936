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

# What a launch packs: bits of the constexpr RING.
PACKED = {"tokens": 1, "parents": 2, "positions": 4, "out_cache_loc": 8, "mask": 16, "sizes": 32,
          "qo_indptr": 64, "kv_indptr": 128, "mask_indptr": 256, "depths": 512}  # fmt: skip
HEADER, ROWS, BYTES, FARTHEST = 4, 32, 16, 1 << 20  # BYTES: of mask bits, in a pass
_constant: Any = int if triton.knobs.runtime.interpret else tl.constexpr
(pTOKENS, pPARENTS, pPOSITIONS, pSLOTS, pMASK, pSIZES, pQO, pKV, pMI, pDEPTHS) = map(
    _constant, PACKED.values()
)
cHEADER, cROWS, cBYTES, cFARTHEST = map(_constant, (HEADER, ROWS, BYTES, FARTHEST))


@triton.jit
def pack_programs(w: tl.tensor) -> tl.tensor:
    """Programs of a lane: blocks of rows."""
    return (w + cROWS - 1) // cROWS


def programs_of(w: int) -> int:
    """The same on the host."""
    return -(-w // ROWS)


@triton.jit
def pack_program(
    state: tl.tensor, lens: tl.tensor, qo: tl.tensor, kv: tl.tensor, mi: tl.tensor,
    mask: tl.tensor, tokens: tl.tensor, parents: tl.tensor, depths: tl.tensor, sizes: tl.tensor,
    positions: tl.tensor, out: tl.tensor, part: tl.tensor, lanes: tl.tensor, w: tl.tensor,
    mask_numel: tl.tensor, ring: tl.tensor, ring_steps: tl.tensor, ring_lanes: tl.tensor,
    ring_w: tl.tensor, RING: tl.constexpr,
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
    if RING & pMASK:
        words, head, tail, last, odd = _ends(mask, mask_numel)
        begin, least, most = _columns(lane, row, w, length, qo, mi, mask_numel)
        bits = _bits(words, begin + odd, least, most, 0, head, tail, last)

    # the slot's fields, in the order of `recorder.ring.FIELDS`
    row_words = (ring_w + 63) // 64
    room = ring_lanes * ring_w
    rows_at = cHEADER + 5 * ring_lanes + 3
    bits_at = rows_at + 5 * room
    slot = ring + (number % ring_steps) * (bits_at + row_words * room)
    offsets = slot + cHEADER
    per_lane = offsets + 3 * (ring_lanes + 1) + lane
    per_row = slot + rows_at + at
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
    if RING & pMASK:
        byte = tl.arange(0, cBYTES)[None, :]
        to = (slot + bits_at + at * row_words).to(tl.pointer_type(tl.uint8))[:, None] + byte
        tl.store(to, bits, mine[:, None] & (byte * 8 < w))
        for before in range(cBYTES, (w + 7) // 8, cBYTES):
            bits = _bits(words, begin + odd, least, most, before, head, tail, last)
            tl.store(to + before, bits, mine[:, None] & ((before + byte) * 8 < w))
    tl.store(slot, number, (part == 0) & (lane == 0))


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
    byte = before + tl.arange(0, cBYTES)[None, :]
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
