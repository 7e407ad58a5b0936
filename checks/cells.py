"""Where a request's mask cells are, and what the tree says they must be.

Mask rows of request i, by the lengths and w (not by the offsets that the backend computed):
    cells[w*(s_0+w) + .. + w*(s_{i-1}+w)  ..  + w*(s_i+w))      one element per cell
    columns [0, s)      committed prefix
    columns [s, s+w)    tree nodes: 1 on ancestors and on the node itself
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree_guard.checks.common import (
    first,
    first_cell,
    ints,
    mask_columns,
    numbers,
    sizes_of_batch,
)
from ddtree_guard.rule import Finding, NotApplicable, NotEvaluable
from ddtree_guard.step import Step

_CLOSURE_CELLS = 1 << 26  # largest ancestor matrix held at once


@dataclass(frozen=True, slots=True)
class Block:
    """The readable mask rows of one live request: `prefix` (n, s) and `tree` (n, w), n <= w."""

    request: int
    size: int
    prefix: Any
    tree: Any

    @property
    def live(self) -> int:
        """Readable rows that belong to real nodes."""
        return min(self.size, len(self.tree))


def tree_sizes(step: Step) -> Any:
    """Nodes per live request, each in 1..w. A chain contract without sizes has w."""
    w, _ = sizes_of_batch(step)
    if step.contract.chain and step.tree.sizes is None:
        return np.full(step.bs, w, np.int64)
    sizes = ints(step, "tree.sizes")
    at = first((sizes < 1) | (sizes > w))
    if at is not None:
        raise NotEvaluable(f"the tree of request {at} has {int(sizes[at])} nodes (see T4)")
    return sizes


def tree_parents(step: Step, sizes: Any) -> Any:
    """Parents (bs, w), parents first; -1 for roots and padding rows."""
    w, _ = sizes_of_batch(step)
    rows = np.arange(w)
    real = rows < sizes[:, None]
    if step.contract.chain and step.tree.parents is None:
        return np.where(real, rows - 1, -1)
    parents = ints(step, "tree.parents")
    lowest = np.where(rows == 0, -1, 0)
    at = first_cell(real & ((parents < lowest) | (parents >= rows)))
    if at is not None:
        raise NotEvaluable(
            f"node {at[1]} of request {at[0]} has parent {int(parents[at])} (see T1)"
        )
    return np.where(real, parents, -1)


def closures(parents: Any) -> Iterator[Any]:
    """For each request the (w, w) matrix with True where column is ancestor-or-self of row.

    A node's row is its parent's row plus itself, so one pass in row order fills every request.
    """
    bs, w = parents.shape
    chunk = max(1, _CLOSURE_CELLS // (w * w))
    for start in range(0, bs, chunk):
        part = parents[start : start + chunk]
        seen = np.zeros((len(part), w, w), np.bool_)
        each = np.arange(len(part))
        for row in range(w):
            above = part[:, row]
            seen[:, row] = seen[each, above] & (above >= 0)[:, None]
            seen[:, row, row] = True
        yield from seen


def blocks(step: Step, sizes: Any) -> list[Block]:
    """The readable rows of every live request, lowest first."""
    cells = _usable_cells(step)
    w, _ = sizes_of_batch(step)
    columns = mask_columns(step)[: step.bs]
    found, start = [], 0
    for i, prefix in enumerate(columns.tolist()):
        stride = prefix + w
        rows = min(max(len(cells) - start, 0) // stride, w)
        whole = cells[start : start + rows * stride].reshape(rows, stride)
        found.append(Block(i, int(sizes[i]), whole[:, :prefix], whole[:, prefix:]))
        start += w * stride
    return found


def first_block(step: Step, sizes: Any, judge: Callable[[Block], Finding | None]) -> Finding | None:
    """The first finding over the live requests; no pass unless every row could be read."""
    found = blocks(step, sizes)
    for block in found:
        finding = judge(block)
        if finding is not None:
            return finding
    for block in found:
        if len(block.tree) < step.w:
            raise NotEvaluable(
                f"the mask ends before row {len(block.tree)} of request {block.request} (see M9)"
            )
    return None


def tree_depths(step: Step, sizes: Any) -> Any:
    """Depth (bs, w) by the parent array; 0 for padding rows."""
    parents = tree_parents(step, sizes)
    depths = np.zeros_like(parents)
    each = np.arange(len(parents))
    for row in range(1, parents.shape[1]):
        above = parents[:, row]
        depths[:, row] = np.where(above >= 0, depths[each, above] + 1, 0)
    return depths


def inside_window(step: Step, block: Block, s: int, depths: Any) -> Any:
    """(live, prefix columns) True where the column is inside the sliding window of the row."""
    kept = block.prefix.shape[1]
    positions = s - kept + np.arange(kept)
    return positions > (s + depths[: block.live, None]) - int(step.mask.window)


def parents_inside_window(step: Step, sizes: Any) -> Any:
    """The parents, where a sliding window is long enough for every root-to-leaf path."""
    window = step.mask.window
    if window is not None and window <= int(tree_depths(step, sizes).max(initial=0)):
        raise NotEvaluable(f"the sliding window of {window} tokens cuts through the tree")
    return tree_parents(step, sizes)


def _usable_cells(step: Step) -> Any:
    cells = numbers(step, "mask.cells")
    if cells is None:
        raise NotApplicable("mask.cells is not in this step")
    if step.contract.mask_unit != 1:
        raise NotApplicable(f"the mask is packed, {step.contract.mask_unit} cells per element")
    return cells
