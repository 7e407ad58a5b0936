"""Faults of the mask family."""

from __future__ import annotations

import numpy as np

from ddtree_guard.step import Step
from ddtree_guard.testing.faults.registry import Planted, fault


def _flip(step: Step, request: int, row: int, column: int) -> Step:
    """The step with one mask cell inverted; columns count from the row's first prefix column."""
    stride = int(step.layout.prefix_lens[request]) + step.w
    at = int(step.layout.mask_indptr[request]) + row * stride + column
    cells = step.mask.cells.copy()
    cells[at] = 1 - cells[at]
    return step.replace(mask__cells=cells)


def _last_node(step: Step, request: int) -> int:
    return int(step.tree.sizes[request]) - 1


@fault("M1")
def hidden_prompt_token(step: Step, request: int) -> Planted:
    """The last real node does not see a token in the middle of the prefix."""
    row = _last_node(step, request)
    middle = int(step.layout.prefix_lens[request]) // 2
    return Planted(_flip(step, request, row, middle), request, row)


@fault("M2")
def hidden_root(step: Step, request: int) -> Planted:
    """The last real node does not see the root."""
    row = _last_node(step, request)
    s = int(step.layout.prefix_lens[request])
    return Planted(_flip(step, request, row, s), request, row)


@fault("M3")
def one_key_too_many(step: Step, request: int) -> Planted:
    """The root sees the last node of its own tree, or a padding row."""
    s = int(step.layout.prefix_lens[request])
    return Planted(_flip(step, request, 0, s + step.w - 1), request, 0)


@fault("M4")
def node_blind_to_itself(step: Step, request: int) -> Planted:
    """The last real node does not see itself."""
    row = _last_node(step, request)
    s = int(step.layout.prefix_lens[request])
    return Planted(_flip(step, request, row, s + row), request, row)


@fault("M5")
def buffer_ends_early(step: Step, request: int) -> Planted:
    """The mask buffer ends one cell before the segment of `request` does."""
    capacity = int(step.layout.mask_indptr[request + 1]) - 1
    return Planted(step.replace(mask__capacity=capacity), request, step.w - 1)


@fault("M6")
def later_row_granted(step: Step, request: int) -> Planted:
    """A causal kernel gets a mask in which the last row but one sees the last."""
    row = step.w - 2
    s = int(step.layout.prefix_lens[request])
    changed = _flip(step, request, row, s + row + 1)
    return Planted(changed.replace(contract__causal_with_mask=True), request, row)


@fault("M7")
def star_without_mask(step: Step, request: int) -> Planted:
    """Only `request` has a branch (a star), and the kernel got no mask."""
    sizes = np.ones_like(step.tree.sizes)
    sizes[request] = step.w
    parents = step.tree.parents.copy()
    parents[request, 1:] = 0
    changed = step.replace(tree__sizes=sizes, tree__parents=parents, mask__present=False)
    return Planted(changed, request, 2)


@fault("M8")
def stranger_in_mask(step: Step, request: int) -> Planted:
    """The mask of `request` was built for somebody else."""
    rids = list(step.mask.rids or ())
    rids[request] = "somebody-else"
    return Planted(step.replace(mask__rids=tuple(rids)), request)


@fault("M9")
def mask_cut_short(step: Step, request: int) -> Planted:
    """The mask ends one cell before the segment of `request` does."""
    end = int(step.layout.mask_indptr[request + 1]) - 1
    return Planted(step.replace(mask__cells=step.mask.cells[:end]), request, step.w - 1)
