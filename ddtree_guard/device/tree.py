"""Parents and depths from SGLang's left-child right-sibling arrays, on the device.

Rows are walked by pointer doubling, so the time grows with log2(w), not with w: a first child
gets its parent from the child link, later children through the sibling that points at them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_constant: Any = int if triton.knobs.runtime.interpret else tl.constexpr
cROWS = _constant(16)  # links that a pass reads


@triton.jit
def parents_of_links(
    child: tl.tensor, sibling: tl.tensor, parents: tl.tensor, depths: tl.tensor, lane: tl.tensor,
    w: tl.tensor, W: tl.constexpr, ROUNDS: tl.constexpr,
) -> None:  # fmt: skip
    """One request, in one program. Links backwards or out of the tree are not followed."""
    node = tl.arange(0, W)
    first = tl.full([W], -1, tl.int32)
    before = tl.full([W], -1, tl.int32)
    for start in range(0, w, cROWS):
        rows = start + tl.arange(0, cROWS)
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


@triton.jit
def parents_kernel(
    child: tl.tensor, sibling: tl.tensor, parents: tl.tensor, depths: tl.tensor, w: tl.int32,
    W: tl.constexpr, ROUNDS: tl.constexpr,
) -> None:  # fmt: skip
    """The same on its own. Grid (requests,)."""
    parents_of_links(
        child, sibling, parents, depths, tl.program_id(0).to(tl.int64), w, W, ROUNDS
    )  # fmt: skip


def sizes_for(w: int) -> dict[str, int]:
    """The constexpr arguments for trees of w rows."""
    size = triton.next_power_of_2(max(w, 2))
    return {"W": size, "ROUNDS": size.bit_length() - 1}


def fill_parents(parents: Any, depths: Any, child: Any, sibling: Any, bs: int) -> None:
    """Fill the first `bs` lanes of `parents` and `depths` (lanes, w) int32 from links (bs, w) of
    integers, contiguous. Queued on the current stream.
    """
    w = int(parents.shape[1])
    parents_kernel[(bs,)](child, sibling, parents, depths, w, num_warps=4, **sizes_for(w))
