"""The fused Triton kernels: one launch compares a verify step's buffers with its tree.

Verdict protocol. `state` holds int64 words: [0] A, steps begun; [1] B, steps closed; [2] launches
of `verify_kernel`; [3] launches of `close_kernel`. `slots` is int64 [4, WORDS]; a step's slot is
`B % 4` while it is open. Words:
    0 magic, 1 step counter, 2 rule bits, 3 launches, 4 live requests, 5 launches of `close_kernel`,
    8+k first offender of bit k
`verify_kernel` and `before_kernel` read B and never write it; of `verify_kernel`, the program of
lane 0's layout writes A = B + 1. `close_kernel` reads A and never writes it; its program 0 writes
magic and counter into the open slot, clears the next one and sets B = A. So no word is read and
written by different programs of one launch, and stream order does the rest: there is no ticket, no
fence and no atomic on a clean step. A verdict is valid once a copy queued after `close_kernel` has
arrived.
A launch that never ran leaves A = B: the counter stands still and the host sees a step unchecked.
The host knows its steps by word 5, which counts on: the steps after it keep their numbers.
What the launch packs for the recorder lies in slot (B + 1) % steps of the ring, see `ring_program`.

Bits accumulate by atomic OR; offenders by atomic minimum of `request * ROW_RADIX + row`, so the
first one does not depend on scheduling. Both are touched only on a hit.

Bounds. Arrays indexed by lane or row are at least lanes*w long (`launch` refuses others). Every
index taken from data (mask offsets, parents, links, slots) is range-checked in 64 bits before use.

The exact mask rules need no walk to the root: row r of a right mask is the row of its parent with
bit r added, and the root row is bit 0 alone. By induction over r the first wrong row is the same.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

MAGIC = 0x0DD7_9E57
SLOTS, WORDS, ROW_RADIX = 4, 32, 4096
NO_OFFENDER = 2**63 - 1
LINK_BLOCK = 256  # rows of links that a pass reads
FAR = 2_000_000  # prefix lengths below it keep all offsets of a lane's cells below 2^31
FAR_WORD = 2**28  # no word of a lane's cells lies further from the first
ROOT_CELLS = 256  # cells of a root row that a pass reads
BAD = 2**18  # more than the cells that a program counts
BITS = {
    "W1": 0, "W2": 1, "W3": 2, "W4": 3, "W8": 4, "M1": 5, "M2": 6, "M4": 7, "M6": 8, "T1": 9,
    "T2": 10, "T3": 11, "T4": 12, "T6": 13, "P1": 14, "K1": 15, "K2": 16, "G4": 17, "A1": 18,
    "A2": 19, "A3": 20, "K3": 21, "K4": 22, "M3": 23,
}  # fmt: skip
# Which operands a launch has, and how it reads them: bits of the constexpr HAS.
HAS_BITS = {
    "qo_indptr": 1, "kv_indptr": 2, "mask_indptr": 4, "mask": 8, "tree": 16, "links": 32,
    "positions": 64, "out_cache_loc": 128, "kv_indices": 256, "row_stride": 512,
    "depth_major": 1024, "full": 2048, "pad_len": 8192, "pad_slot": 16384,
    "pad_position": 32768, "outcome": 65536, "words": 131072, "shared": 262144, "wait": 524288,
}  # fmt: skip

# Kernels see globals as constexpr; the interpreter runs plain Python and wants plain integers.
_constant: Any = int if triton.knobs.runtime.interpret else tl.constexpr
cMAGIC, cWORDS, cRADIX = _constant(MAGIC), _constant(WORDS), _constant(ROW_RADIX)
cCOLD_ROWS, cCOLD_COLS = _constant(16), _constant(32)
cBAD, cFAR_WORD, cROOT = _constant(BAD), _constant(FAR_WORD), _constant(ROOT_CELLS)
cSEVENS = _constant(0x7F7F_7F7F_7F7F_7F7F)
cGATHER = _constant(0x0102_0408_1020_4080)  # times eight bytes of 0 or 1: their bits on top
cLINK_BLOCK, cFAR, cONES = _constant(LINK_BLOCK), _constant(FAR), _constant(0x0101_0101_0101_0101)
cNONE, cRULES = _constant(NO_OFFENDER), _constant(len(BITS))
cW1, cW2, cW3, cW4, cW8 = (_constant(BITS[n]) for n in ("W1", "W2", "W3", "W4", "W8"))
cM1, cM2, cM3, cM4, cM6 = (_constant(1 << BITS[n]) for n in ("M1", "M2", "M3", "M4", "M6"))
cT1, cT2, cT3, cT4, cT6 = (_constant(1 << BITS[n]) for n in ("T1", "T2", "T3", "T4", "T6"))
cP1, cK1, cK2, cK3, cK4 = (_constant(1 << BITS[n]) for n in ("P1", "K1", "K2", "K3", "K4"))
cG4, cA1, cA2, cA3 = (_constant(1 << BITS[n]) for n in ("G4", "A1", "A2", "A3"))
cQO, cKV, cMI, cMASK = (
    _constant(HAS_BITS[n]) for n in ("qo_indptr", "kv_indptr", "mask_indptr", "mask")
)
cTREE, cLINKS, cPOS, cOUT = (
    _constant(HAS_BITS[n]) for n in ("tree", "links", "positions", "out_cache_loc")
)
cKVI, cSTRIDE, cMAJOR, cFULL = (
    _constant(HAS_BITS[n]) for n in ("kv_indices", "row_stride", "depth_major", "full")
)
cPAD_LEN, cPAD_SLOT, cPAD_POS, cOUTCOME, cWORDS_OK = (
    _constant(HAS_BITS[n]) for n in ("pad_len", "pad_slot", "pad_position", "outcome", "words")
)
cSHARED, cWAIT = _constant(HAS_BITS["shared"]), _constant(HAS_BITS["wait"])


@triton.jit
def load_wide(pointer: tl.tensor, at: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Load integers as int64; 0 where not inside."""
    return tl.load(pointer + at, mask=inside, other=0).to(tl.int64)


@triton.jit
def node_count(sizes: tl.tensor, lane: tl.tensor, w: tl.tensor) -> tl.tensor:
    """How many of the lane's rows are nodes, 0 to w, in 32 bits."""
    return tl.minimum(tl.maximum(tl.load(sizes + lane).to(tl.int64), 0), w).to(tl.int32)


@triton.jit
def load_low(
    pointer: tl.tensor, at: tl.tensor, inside: tl.tensor, other: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """The low 32 bits of integers; `other` where not inside. For filters: half the registers."""
    if pointer.dtype.element_ty.primitive_bitwidth == 64:
        low = tl.load(pointer.to(tl.pointer_type(tl.int32)) + at * 2, mask=inside, other=other)
    else:
        low = tl.load(pointer + at, mask=inside, other=other).to(tl.int32)
    return low


@triton.jit
def flag(wrong: tl.tensor, bit: tl.tensor) -> tl.tensor:
    return tl.where(wrong, bit, 0)


@triton.jit
def report(
    slots: tl.tensor, slot: tl.tensor, lane: tl.tensor, rows: tl.tensor, flags: tl.tensor,
    enabled: tl.tensor,
) -> None:  # fmt: skip
    """Cold: OR the enabled bits of these flags into the slot, and lower the first offenders."""
    base = slots + slot * cWORDS
    bits = lane * 0
    flags = flags & enabled
    k = enabled * 0
    # The bound is data so that the loop is not unrolled: code that never runs costs fetches too.
    while (enabled >> k) != 0:
        row = tl.min(tl.where(((flags >> k) & 1) != 0, rows, cRADIX))
        if row < cRADIX:
            tl.atomic_min(base + 8 + k, lane * cRADIX + row, sem="relaxed")
            bits |= (lane * 0 + 1) << k
        k += 1
    tl.atomic_or(base + 2, bits, sem="relaxed")


@triton.jit
def report_lane(
    slots: tl.tensor, slot: tl.tensor, bits: tl.tensor, lane: tl.tensor, row: tl.tensor,
    w: tl.tensor, enabled: tl.tensor,
) -> None:  # fmt: skip
    """Cold: the same for bits about a whole lane; W1 and W8 name `row`, W4 the second one."""
    base = slots + slot * cWORDS
    bits = bits & enabled
    k = enabled * 0
    while (enabled >> k) != 0:
        if ((bits >> k) & 1) != 0:
            at = tl.where((k == cW1) | (k == cW8), row, tl.where(k == cW4, tl.minimum(1, w - 1), 0))
            tl.atomic_min(base + 8 + k, lane * cRADIX + at, sem="relaxed")
        k += 1
    tl.atomic_or(base + 2, bits, sem="relaxed")


@triton.jit
def begin_step(
    state: tl.tensor, slots: tl.tensor, closed: tl.tensor, launches: tl.tensor, bs: tl.tensor,
    host_bits: tl.tensor, host_lane: tl.tensor, host_row: tl.tensor, host_extent: tl.tensor,
    w: tl.tensor, enabled: tl.tensor,
) -> None:  # fmt: skip
    """Say that the step has begun, and report what the host saw when it built the operands.

    `closed` and `launches` are words 1 and 2 of `state`, loaded with everything else.
    """
    tl.store(state, closed + 1)
    tl.store(state + 2, launches + 1)
    tl.store(slots + (closed % 4) * cWORDS + 4, bs)
    if host_bits != 0:
        bits = host_bits.to(tl.int64)
        lane = host_lane.to(tl.int64)
        report_lane(slots, closed % 4, bits & (1 << cW1), lane, host_row.to(tl.int64), w, enabled)
        extent = host_extent.to(tl.int64)
        report_lane(slots, closed % 4, bits & (1 << cW8), lane * 0, extent, w, enabled)


@triton.jit
def close_step(
    state: tl.tensor, slots: tl.tensor, slot: tl.tensor, begun: tl.tensor, closes: tl.tensor,
) -> None:  # fmt: skip
    """Sign the open slot, clear the next one, and let the next step open it."""
    word = tl.arange(0, cWORDS)
    following = slots + (begun % 4) * cWORDS
    tl.store(following + word, tl.where((word >= 8) & (word < 8 + cRULES), cNONE, 0))
    tl.store(slots + slot * cWORDS, (begun * 0) + cMAGIC)
    tl.store(slots + slot * cWORDS + 1, begun)
    tl.store(slots + slot * cWORDS + 3, tl.load(state + 2))
    tl.store(slots + slot * cWORDS + 5, closes)
    tl.store(state + 1, begun)
