"""The fused Triton kernel of the build site. See `protocol` for the verdict it writes.

A clean step pays for the rules about rows, one row a thread, and for filters over links, mask
cells and pairs of rows; only a program whose filter has a doubt judges exactly and reports. The
kinds of program run side by side, so that none waits for another's loads: a step costs little
more than its longest chain of loads, and each kind is kept to two, one after the other. What rows
tell each other goes through shared memory where a kernel is compiled for NVIDIA GPUs (`shared`).

From sm_90 on a launch may begin while the launch before it ends, and waits here until that has
written everything: its programs are in place by then (`operands.waits`).

Row indices are below MAX_LANES * MAX_W < 2^31 and fit 32 bits; everything read from data is
compared and added in 64 bits, except where a filter asks only whether values are equal or has
checked that offsets are below 2^31.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ddtree_guard.device.block_programs import (
    mask_program,
    pair_program,
    path_program,
    prefix_program,
    root_program,
    twin_program,
)
from ddtree_guard.device.protocol import cFULL, cLINKS, cMASK, cSHARED, cWAIT
from ddtree_guard.device.ring_program import (
    bits_program,
    pack_program,
    pack_programs,
    row_programs,
)
from ddtree_guard.device.row_programs import (
    lane_program,
    link_program,
    node_program,
    place_program,
)
from ddtree_guard.device.shared import scratch_of


@triton.jit
def _pairs_program(
    scratch: tl.tensor, state: tl.tensor, slots: tl.tensor, live_count: tl.tensor,
    tokens: tl.tensor,
    parents: tl.tensor, sizes: tl.tensor, out: tl.tensor, part: tl.tensor, w: tl.tensor,
    enabled: tl.tensor, reserved: tl.tensor, HAS: tl.constexpr, DEEP: tl.constexpr,
    COLS: tl.constexpr, PACK: tl.constexpr, WARPS: tl.constexpr,
) -> None:  # fmt: skip
    """Pairs of rows: all of a lane by tables, or block by block."""
    if HAS & cSHARED:
        twin_program(
            scratch, state, slots, live_count, tokens, parents, sizes, out, w, enabled, reserved,
            HAS, DEEP,
            COLS, PACK, WARPS,
        )  # fmt: skip
    else:
        across = (w - 2 + COLS * 32) // (COLS * 32)
        down = part // across
        begin = down * (DEEP * WARPS) + 1
        before = (part - down * across) * (COLS * 32)
        if before < begin + DEEP * WARPS - 1:
            pair_program(
                state, slots, live_count, tokens, parents, sizes, out, begin, before, w, enabled,
                reserved, HAS, DEEP, COLS, WARPS,
            )  # fmt: skip


@triton.jit
def _ring_program(
    state: tl.tensor, live_count: tl.tensor, lens: tl.tensor, qo: tl.tensor, kv: tl.tensor,
    mi: tl.tensor, mask: tl.tensor, tokens: tl.tensor, parents: tl.tensor, depths: tl.tensor,
    sizes: tl.tensor, positions: tl.tensor, out: tl.tensor, part: tl.tensor, lanes: tl.tensor,
    w: tl.tensor, mask_numel: tl.tensor, ring: tl.tensor, ring_steps: tl.tensor,
    ring_lanes: tl.tensor, ring_w: tl.tensor, WORDS: tl.constexpr, WARPS: tl.constexpr,
    RING: tl.constexpr,
) -> None:  # fmt: skip
    """Mask bits, or the other arrays of a block of rows."""
    bits = pack_programs(w, RING) - row_programs(w)
    if part < bits:
        bits_program(
            state, live_count, lens, qo, mi, mask, part, w, mask_numel, ring, ring_steps,
            ring_lanes, ring_w, WORDS * 2, WARPS,
        )  # fmt: skip
    else:
        pack_program(
            state, lens, qo, kv, mi, tokens, parents, depths, sizes, positions, out, part - bits,
            lanes, w, ring, ring_steps, ring_lanes, ring_w, RING,
        )  # fmt: skip


# One compiled kernel serves every size and address.
VERIFY_ARGS = [
    "state", "slots", "live_count", "lens", "qo", "kv", "mi", "stride", "mask", "tokens",
    "parents", "depths", "sizes", "index", "child", "sibling", "positions", "out", "kvi",
    "lanes", "w", "sections", "depth_max", "kv_extra", "pad_rows", "enabled", "host_bits",
    "host_lane", "host_row", "host_extent", "len_max", "vocab", "pool", "reserved", "mask_numel",
    "kvi_numel",
    "pad_len", "pad_position", "pad_slot", "ring", "ring_steps", "ring_lanes", "ring_w",
]  # fmt: skip


@triton.jit(do_not_specialize=VERIFY_ARGS, do_not_specialize_on_alignment=VERIFY_ARGS)
def verify_kernel(
    state: tl.tensor, slots: tl.tensor, live_count: tl.tensor, lens: tl.tensor, qo: tl.tensor,
    kv: tl.tensor, mi: tl.tensor, stride: tl.tensor, mask: tl.tensor, tokens: tl.tensor,
    parents: tl.tensor, depths: tl.tensor, sizes: tl.tensor, index: tl.tensor, child: tl.tensor,
    sibling: tl.tensor, positions: tl.tensor, out: tl.tensor, kvi: tl.tensor, lanes: tl.int32,
    w: tl.int32, sections: tl.int32, depth_max: tl.int32, kv_extra: tl.int32, pad_rows: tl.int32,
    enabled: tl.int32, host_bits: tl.int32, host_lane: tl.int32, host_row: tl.int32,
    host_extent: tl.int32, len_max: tl.int64, vocab: tl.int64, pool: tl.int64, reserved: tl.int64,
    mask_numel: tl.int64, kvi_numel: tl.int64, pad_len: tl.int64, pad_position: tl.int64,
    pad_slot: tl.int64, ring: tl.tensor, ring_steps: tl.int32, ring_lanes: tl.int32,
    ring_w: tl.int32, HAS: tl.constexpr, LANES: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, DEEP: tl.constexpr, COLS: tl.constexpr,
    PACK: tl.constexpr, WARPS: tl.constexpr, WIDE: tl.constexpr, RING: tl.constexpr,
) -> None:  # fmt: skip
    """Rules of the build site. Grid (lanes, `programs_per_lane`, and with RING `pack_programs`).

    By their second index programs judge paths to the root, mask cells, pairs of rows, a lane's
    links, its rows twice, its layout and root, or pieces of the prefix; the last ones pack the step
    into the recorder's ring.
    `operands.Buffers` has the shapes of the arrays.
    """
    if HAS & cWAIT:
        gdc_wait()
    part = tl.program_id(1)
    scratch = part
    if HAS & cSHARED:
        scratch = scratch_of(part)
    parts = tl.num_programs(1)
    if RING:
        parts -= pack_programs(w, RING)
    BLOCK: tl.constexpr = 32 * WARPS
    # The longest first: programs start in this order.
    masks = (w - 2 + BLOCK) // BLOCK
    pairs = masks + (w - 2 + ROWS) // ROWS
    links = pairs + 1
    if not (HAS & cSHARED):
        across = (w - 2 + COLS * 32) // (COLS * 32)
        links = pairs + (w - 2 + DEEP * WARPS) // (DEEP * WARPS) * across
    nodes = links + 1
    places = nodes + (w + BLOCK - 1) // BLOCK
    layout = places + (w + BLOCK - 1) // BLOCK
    if part < masks:
        if HAS & cMASK:
            path_program(
                scratch, state, slots, live_count, lens, mi, mask, parents, depths, sizes, part, w,
                pad_rows, enabled, mask_numel, HAS, LANES, PACK, WARPS, WIDE,
            )  # fmt: skip
    elif part < pairs:
        if HAS & cMASK:
            mask_program(
                state, slots, live_count, lens, mi, mask, parents, depths, sizes, part - masks, w,
                pad_rows, enabled, mask_numel, HAS, LANES, ROWS, WORDS, WARPS, WIDE,
            )  # fmt: skip
    elif part < links:
        _pairs_program(
            scratch, state, slots, live_count, tokens, parents, sizes, out, part - pairs, w,
            enabled,
            reserved, HAS, DEEP, COLS, PACK, WARPS,
        )  # fmt: skip
    elif part < nodes:
        if HAS & cLINKS:
            link_program(
                scratch, state, slots, live_count, parents, sizes, index, child, sibling, w,
                pad_rows,
                enabled, HAS, BITS, PACK, WARPS,
            )  # fmt: skip
    elif part < places:
        node_program(
            state, slots, live_count, tokens, parents, depths, sizes, index, child, sibling, out,
            part - nodes, w, depth_max, pad_rows, enabled, vocab, pool, reserved, pad_slot, HAS,
            BLOCK,
        )  # fmt: skip
    elif part < layout:
        place_program(
            state, slots, live_count, lens, kv, mi, mask, depths, sizes, positions, kvi,
            part - places, lanes, w, sections, enabled, pool, mask_numel, kvi_numel, pad_len,
            pad_position, HAS, LANES, BLOCK,
        )  # fmt: skip
    elif part == layout:
        lane_program(
            state, slots, live_count, lens, qo, kv, mi, stride, w, kv_extra, enabled, host_bits,
            host_lane, host_row, host_extent, len_max, HAS,
        )  # fmt: skip
        if HAS & cMASK:
            root_program(
                state, slots, live_count, lens, mi, mask, parents, depths, sizes, w, pad_rows,
                enabled, mask_numel, HAS, LANES, WIDE,
            )  # fmt: skip
    elif part >= parts:
        if RING:
            _ring_program(
                state, live_count, lens, qo, kv, mi, mask, tokens, parents, depths, sizes,
                positions, out, part - parts, lanes, w, mask_numel, ring, ring_steps, ring_lanes,
                ring_w, WORDS, WARPS, RING,
            )  # fmt: skip
    elif HAS & cFULL:
        prefix_program(
            state, slots, live_count, lens, kv, mi, mask, depths, sizes, kvi, part - layout - 1,
            parts - layout - 1, w, enabled, pool, mask_numel, kvi_numel, HAS, LANES, WIDE,
        )  # fmt: skip
