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

# What a launch packs: bits of the constexpr PACK.
PACKED = {"tokens": 1, "parents": 2, "positions": 4, "out_cache_loc": 8, "mask": 16, "sizes": 32,
          "qo_indptr": 64, "kv_indptr": 128, "mask_indptr": 256, "depths": 512}  # fmt: skip
HEADER, ROWS, WORDS, FARTHEST = 4, 32, 2, 1 << 20
_constant: Any = int if triton.knobs.runtime.interpret else tl.constexpr
(pTOKENS, pPARENTS, pPOSITIONS, pSLOTS, pMASK, pSIZES, pQO, pKV, pMI, pDEPTHS) = map(
    _constant, PACKED.values()
)
cHEADER, cROWS, cBIT_WORDS = _constant(HEADER), _constant(ROWS), _constant(WORDS)
cFARTHEST = _constant(FARTHEST)


@triton.jit
def pack_programs(w: tl.tensor) -> tl.tensor:
    """Programs of a lane: blocks of rows, times groups of mask columns."""
    return (w + cROWS - 1) // cROWS * ((w + 32 * cBIT_WORDS - 1) // (32 * cBIT_WORDS))


def programs_of(w: int) -> int:
    """The same on the host."""
    return -(-w // ROWS) * -(-w // (32 * WORDS))


@triton.jit
def pack_program(
    state: tl.tensor, lens: tl.tensor, qo: tl.tensor, kv: tl.tensor, mi: tl.tensor,
    mask: tl.tensor, tokens: tl.tensor, parents: tl.tensor, depths: tl.tensor, sizes: tl.tensor,
    positions: tl.tensor, out: tl.tensor, part: tl.tensor, lanes: tl.tensor, w: tl.tensor,
    mask_numel: tl.tensor, ring: tl.tensor, ring_steps: tl.tensor, ring_lanes: tl.tensor,
    ring_w: tl.tensor, PACK: tl.constexpr,
) -> None:  # fmt: skip
    """A block of a request's rows with a group of their mask columns; the first program also packs
    what is per request.

    All loads come before the first store: a store may alias a later load, so the compiler would
    wait for each. The slot comes last of all, for its division takes longer than a load.
    """
    lane = tl.program_id(0).to(tl.int64)
    number = tl.load(state + 1) + 1
    blocks = (w + cROWS - 1) // cROWS
    group = part // blocks
    row = (part - group * blocks) * cROWS + tl.arange(0, cROWS)
    at = tl.program_id(0) * w + row
    mine = row < w
    first = mine & (group == 0)
    edge = lane + tl.arange(0, 2)  # the last lane has the end of the offsets, too
    edges = ((edge == lane) | (edge == lanes)) & (part == 0)
    length = tl.load(lens + lane).to(tl.int64)
    if PACK & pQO:
        q = tl.load(qo + edge, edges, 0).to(tl.int64)
    if PACK & pKV:
        k = tl.load(kv + edge, edges, 0).to(tl.int64)
    if PACK & pMI:
        m = tl.load(mi + edge, edges, 0).to(tl.int64)
    if PACK & pSIZES:
        size = tl.load(sizes + lane).to(tl.int64)
    if PACK & pTOKENS:
        token = tl.load(tokens + at, first, 0).to(tl.int64)
    if PACK & pPARENTS:
        parent = tl.load(parents + at, first, 0).to(tl.int64)
    if PACK & pDEPTHS:
        depth = tl.load(depths + at, first, 0).to(tl.int64)
    if PACK & pPOSITIONS:
        position = tl.load(positions + at, first, 0).to(tl.int64)
    if PACK & pSLOTS:
        place = tl.load(out + at, first, 0).to(tl.int64)
    if PACK & pMASK:
        bits = _bits(lane, row, group, w, length, qo, mi, mask, mask_numel)

    # the slot's fields, in the order of `recorder.ring.FIELDS`
    row_words = (ring_w + 63) // 64
    room = ring_lanes * ring_w
    rows_at = cHEADER + 5 * ring_lanes + 3
    bits_at = rows_at + 5 * room
    slot = ring + (number % ring_steps) * (bits_at + row_words * room)
    offsets = slot + cHEADER
    per_lane = offsets + 3 * (ring_lanes + 1) + lane
    per_row = slot + rows_at + at
    if PACK & pQO:
        tl.store(offsets + edge, q, edges)
    if PACK & pKV:
        tl.store(offsets + ring_lanes + 1 + edge, k, edges)
    if PACK & pMI:
        tl.store(offsets + 2 * (ring_lanes + 1) + edge, m, edges)
    tl.store(per_lane, length, part == 0)
    if PACK & pSIZES:
        tl.store(per_lane + ring_lanes, size, part == 0)
    if PACK & pTOKENS:
        tl.store(per_row, token, first)
    if PACK & pPARENTS:
        tl.store(per_row + room, parent, first)
    if PACK & pDEPTHS:
        tl.store(per_row + 2 * room, depth, first)
    if PACK & pPOSITIONS:
        tl.store(per_row + 3 * room, position, first)
    if PACK & pSLOTS:
        tl.store(per_row + 4 * room, place, first)
    if PACK & pMASK:
        to = slot + bits_at + at * row_words
        to = to.to(tl.pointer_type(tl.int32))[:, None]
        word = group * cBIT_WORDS + tl.arange(0, cBIT_WORDS)[None, :]
        tl.store(to + word, bits, mine[:, None] & (word * 32 < w))
    tl.store(slot, number, (part == 0) & (lane == 0))


@triton.jit
def _bits(
    lane: tl.tensor, row: tl.tensor, group: tl.tensor, w: tl.tensor, s: tl.tensor, qo: tl.tensor,
    mi: tl.tensor, mask: tl.tensor, numel: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """32 tree cells a word, at the offsets that attention uses; a cell outside the mask is 0.

    A warp reads a word's cells side by side. Offsets are data: they may wrap, and whatever they are
    then, only columns inside the mask are read.
    """
    rows = tl.load(qo + lane + 1).to(tl.int64) - tl.load(qo + lane).to(tl.int64)
    begin = tl.load(mi + lane).to(tl.int64) + s + row.to(tl.int64) * (s + rows)
    begin = tl.minimum(tl.maximum(begin, -cFARTHEST), numel)
    least = tl.maximum(-begin, 0).to(tl.int32)
    most = tl.minimum(tl.minimum(tl.maximum(rows, 0), w), numel - begin).to(tl.int32)
    most = tl.where(row < w, most, 0)
    bit = tl.arange(0, 32)[None, None, :]
    column = (group * cBIT_WORDS + tl.arange(0, cBIT_WORDS))[None, :, None] * 32 + bit
    inside = (column >= least[:, None, None]) & (column < most[:, None, None])
    seen = tl.load((mask + begin)[:, None, None] + column, inside, 0) != 0
    return tl.sum(tl.where(seen, 1 << bit, 0), 2)
