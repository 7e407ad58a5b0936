"""Parents and depths from SGLang's left-child right-sibling links, in one small launch.

Rows are walked by pointer doubling, so the time grows with log2(w), not with w: a first child
gets its parent from the child link, later children through the sibling that points at them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def parents_kernel(
    child: tl.tensor, sibling: tl.tensor, parents: tl.tensor, depths: tl.tensor, w: tl.int32,
    W: tl.constexpr, ROUNDS: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (requests,). Links that lead backwards or out of the tree are not followed."""
    lane = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, W)
    first = tl.full([W], -1, tl.int32)
    before = tl.full([W], -1, tl.int32)
    for start in range(0, w, ROWS):
        rows = start + tl.arange(0, ROWS)
        down = tl.load(child + lane * w + rows, mask=rows < w, other=-1).to(tl.int32)
        side = tl.load(sibling + lane * w + rows, mask=rows < w, other=-1).to(tl.int32)
        down = tl.where((down > rows) & (down < w), down, -1)
        side = tl.where((side > rows) & (side < w), side, -1)
        held = rows[:, None].to(tl.int32)
        first = tl.maximum(
            first, tl.max(tl.where(down[:, None] == node[None, :], held, -1), axis=0)
        )
        before = tl.maximum(
            before, tl.max(tl.where(side[:, None] == node[None, :], held, -1), axis=0)
        )
    eldest = tl.where(before >= 0, before, node)
    for _ in tl.static_range(ROUNDS):
        eldest = tl.gather(eldest, eldest, axis=0)
    parent = tl.where(node == 0, -1, tl.gather(first, eldest, axis=0))
    above = tl.where(parent >= 0, parent, node)
    depth = (parent >= 0).to(tl.int32)
    for _ in tl.static_range(ROUNDS):
        depth += tl.gather(depth, above, axis=0)
        above = tl.gather(above, above, axis=0)
    tl.store(parents + lane * w + node, parent, mask=node < w)
    tl.store(depths + lane * w + node, depth, mask=node < w)


class ParentsOf:
    """Fills `parents` and `depths` (lanes, w) int32 from links, anew in each step.

    The links are other tensors in every step, so the compiled kernel is called with their
    addresses; an address that is not aligned as the compiled code assumes takes Triton's own path.
    """

    def __init__(self, parents: Any, depths: Any) -> None:
        self.parents, self.depths = parents, depths
        self.w = int(parents.shape[1])
        size = triton.next_power_of_2(max(self.w, 2))
        self._meta = {"W": size, "ROUNDS": size.bit_length() - 1, "ROWS": 16}
        self._own = (parents.data_ptr(), depths.data_ptr())
        self._aligned = all(pointer % 16 == 0 for pointer in self._own)
        self._index = parents.device.index or 0
        self._compiled: dict[Any, Any] = {}

    def __call__(self, child: Any, sibling: Any, bs: int) -> None:
        """Queue the launch for the first `bs` lanes; links (bs, w) of integers, contiguous."""
        args = (child, sibling, self.parents, self.depths, self.w)
        one, two = child.data_ptr(), sibling.data_ptr()
        aligned = self._aligned and one % 16 == 0 == two % 16
        if not aligned or not hasattr(parents_kernel, "device_caches"):
            parents_kernel[(bs,)](*args, num_warps=4, **self._meta)
            return
        kind = (child.dtype, sibling.dtype)
        if kind not in self._compiled:
            code = parents_kernel.warmup(*args, grid=(bs,), num_warps=4, **self._meta)
            run = code.run  # loads the module; `function` is set after that
            head = (code.function, code.packed_metadata, None, None, None)
            self._compiled[kind] = run, head, (*self._own, self.w, *self._meta.values())
        run, head, tail = self._compiled[kind]
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        run(bs, 1, 1, stream, *head, one, two, *tail)
