"""Kernels that do next to nothing: what a launch costs before it checks anything."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chain_kernel(
    zeros: tl.tensor, found: tl.tensor, count: tl.int32, LOADS: tl.constexpr
) -> None:  # fmt: skip
    """LOADS loads a thread, each at an address that the one before gives, and one reduction.

    `zeros` holds `count` of them for each load. A check of any kind is at least this: it learns
    where a row's cells are before it reads them.
    """
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    value = at * 0
    for load in tl.static_range(LOADS):
        value = tl.load(zeros + load * count + at + value).to(tl.int32)
    if tl.max(value) != 0:
        tl.atomic_or(found, 1)
