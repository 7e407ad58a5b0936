"""The fused Triton kernel of the build site. See `protocol` for the verdict it writes.

A clean step pays for the rules about rows, one row a thread, and for filters over links, mask
cells and pairs of rows; only a program whose filter has a doubt judges exactly and reports. The
kinds of program run side by side, so that none waits for another's loads: a step costs little
more than its longest chain of loads, and each kind is kept to two, one after the other.

Row indices are below MAX_LANES * MAX_W < 2^31 and fit 32 bits; everything read from data is
compared and added in 64 bits, except where a filter asks only whether values are equal or has
checked that offsets are below 2^31.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ddtree_guard.device.block_programs import mask_program, pair_program, prefix_program
from ddtree_guard.device.protocol import cFULL, cLINKS, cMASK
from ddtree_guard.device.ring_program import pack_program, pack_programs
from ddtree_guard.device.row_programs import (
    lane_program,
    link_program,
    node_program,
    place_program,
)


@triton.jit
def _block_program(
    state: tl.tensor, slots: tl.tensor, live_count: tl.tensor, lens: tl.tensor, kv: tl.tensor,
    mi: tl.tensor, mask: tl.tensor, tokens: tl.tensor, parents: tl.tensor, depths: tl.tensor,
    sizes: tl.tensor, out: tl.tensor, kvi: tl.tensor, part: tl.tensor, parts: tl.tensor,
    w: tl.tensor, pad_rows: tl.tensor, enabled: tl.tensor, pool: tl.tensor, reserved: tl.tensor,
    mask_numel: tl.tensor, kvi_numel: tl.tensor, HAS: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr, DEEP: tl.constexpr, COLS: tl.constexpr, WARPS: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Mask cells, pairs of rows, or a piece of the prefix, by `part`."""
    across = (w - 2 + COLS * 32) // (COLS * 32)
    pairs = (w + ROWS - 1) // ROWS
    prefix = pairs + (w - 2 + DEEP * WARPS) // (DEEP * WARPS) * across
    if part < pairs:
        if HAS & cMASK:
            mask_program(
                state, slots, live_count, lens, mi, mask, parents, depths, sizes, part, w,
                pad_rows, enabled, mask_numel, HAS, LANES, ROWS, WIDE,
            )  # fmt: skip
    elif part < prefix:
        down = (part - pairs) // across
        begin = down * (DEEP * WARPS) + 1
        before = (part - pairs - down * across) * (COLS * 32)
        if before < begin + DEEP * WARPS - 1:
            pair_program(
                state, slots, live_count, tokens, parents, sizes, out, begin, before, w, enabled,
                reserved, HAS, DEEP, COLS, WARPS,
            )  # fmt: skip
    elif HAS & cFULL:
        prefix_program(
            state, slots, live_count, lens, kv, mi, mask, depths, sizes, kvi, part - prefix,
            parts - prefix, w, enabled, pool, mask_numel, kvi_numel, HAS, LANES, WIDE,
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
    ROWS: tl.constexpr, DEEP: tl.constexpr, COLS: tl.constexpr, WARPS: tl.constexpr,
    WIDE: tl.constexpr, RING: tl.constexpr,
) -> None:  # fmt: skip
    """Rules of the build site. Grid (lanes, `programs_per_lane`, and with RING `pack_programs`).

    By their second index programs judge the lane, its links, its rows twice, mask cells, pairs of
    rows, or pieces of the prefix; the last ones pack the step into the recorder's ring.
    `operands.Buffers` has the shapes of the arrays.
    """
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    if RING:
        parts -= pack_programs(w)
    BLOCK: tl.constexpr = 32 * WARPS
    nodes = 2
    places = nodes + (w + BLOCK - 1) // BLOCK
    cells = places + (w + BLOCK - 1) // BLOCK
    if part == 0:
        if HAS & cLINKS:
            link_program(
                state, slots, live_count, parents, sizes, index, child, sibling, w, pad_rows,
                enabled, BITS, BLOCK,
            )  # fmt: skip
    elif part == 1:
        lane_program(
            state, slots, live_count, lens, qo, kv, mi, stride, w, kv_extra, enabled, host_bits,
            host_lane, host_row, host_extent, len_max, HAS,
        )  # fmt: skip
    elif part < places:
        node_program(
            state, slots, live_count, tokens, parents, depths, sizes, index, child, sibling, out,
            part - nodes, w, depth_max, pad_rows, enabled, vocab, pool, reserved, pad_slot, HAS,
            BLOCK,
        )  # fmt: skip
    elif part < cells:
        place_program(
            state, slots, live_count, lens, kv, mi, mask, depths, sizes, positions, kvi,
            part - places, lanes, w, sections, enabled, pool, mask_numel, kvi_numel, pad_len,
            pad_position, HAS, LANES, BLOCK,
        )  # fmt: skip
    elif part < parts:
        _block_program(
            state, slots, live_count, lens, kv, mi, mask, tokens, parents, depths, sizes, out, kvi,
            part - cells, parts - cells, w, pad_rows, enabled, pool, reserved, mask_numel,
            kvi_numel, HAS, LANES, ROWS, DEEP, COLS, WARPS, WIDE,
        )  # fmt: skip
    elif RING:
        pack_program(
            state, lens, qo, kv, mi, mask, tokens, parents, depths, sizes, positions, out,
            part - parts, lanes, w, mask_numel, ring, ring_steps, ring_lanes, ring_w, RING,
        )  # fmt: skip
