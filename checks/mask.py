"""Mask content: who sees whom.

Rules that read cells find request i at its correct offset, the sum of w*(s+w) before it: they judge
what the builder wrote, not the offsets that the backend uses to read it (W3, W4, M5 judge those).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ddtree_guard.checks.cells import (
    Block,
    closures,
    first_block,
    inside_window,
    parents_inside_window,
    tree_depths,
    tree_sizes,
)
from ddtree_guard.checks.common import first, first_cell, ints
from ddtree_guard.checks.mask_delivery import (
    branch_without_mask,
    mask_buffer_too_small,
    mask_length,
    mask_of_another_request,
)
from ddtree_guard.rule import Cost, Finding, NotApplicable, Rule, Scope, Site, rule
from ddtree_guard.step import Array, Step


@rule(
    "M1", "hidden-prefix", site=Site.BUILD, cost=Cost.MASK, scope=Scope.REQUEST, bit=5,
    needs=("mask.cells", "layout.prefix_lens"),
)  # fmt: skip
def hidden_prefix(step: Step) -> Finding | None:
    """Every live row sees every committed token of its request.

    Holds when: `mask[i, r, c] = 1` for all `c < s_i` and rows `r < tree_size`; under a sliding
    window for the columns inside the window of the row's position. Request i is looked up at its
    correct offset.
    Breaks as: the node attends to a part of the prompt only. Kernels that skip the prefix part of
    the mask (Triton) are not affected; the finding is then latent.
    Usual cause: cells of an earlier, shorter step were left in a reused buffer, or the rows were
    written with another stride.
    Seen in: I13, H4.
    """
    sizes = tree_sizes(step)
    depths = tree_depths(step, sizes) if step.mask.window is not None else None
    lens = ints(step, "layout.prefix_lens")

    def judge(block: Block) -> Finding | None:
        wrong = block.prefix[: block.live] != 1
        if depths is not None:
            i = block.request
            wrong &= inside_window(step, block, int(lens[i]), depths[i])
        at = first_cell(wrong) if wrong.size else None
        if at is None:
            return None
        row, column = at
        return Finding(
            headline=f"node {row} of request {block.request} misses a prefix token",
            equation=f"mask[{block.request}, {row}, {column}] = {int(block.prefix[at])}, "
            f"expected 1 for columns 0..{block.prefix.shape[1] - 1}",
            expected="1",
            actual=str(int(block.prefix[at])),
            request=block.request,
            row=row,
            latent=not step.contract.reads_prefix_mask,
            cause="the prefix part of the row was not written in this step",
        )

    return first_block(step, sizes, judge)


@rule(
    "M2", "wrong-ancestor-visibility", site=Site.BUILD, cost=Cost.BLOCKS, scope=Scope.REQUEST,
    bit=6, needs=("mask.cells", "layout.prefix_lens"),
)  # fmt: skip
def wrong_ancestor_visibility(step: Step) -> Finding | None:
    """A live row sees exactly its ancestors and itself among the tree columns.

    Holds when: `mask[i, r, s_i + c] = 1` if node c is node r or one of its ancestors, else 0, for
    rows `r < tree_size` and all w columns; ancestors follow from `tree.parents`. Request i is
    looked up at its correct offset.
    Breaks as: a node sees a sibling's branch, or misses its own past, so its logits belong to a
    text that nobody wrote; chains stay right and branches go wrong.
    Usual cause: masks of two requests were swapped, the buffer was filled with ones and never
    painted, or a causal mask was used for a tree.
    Seen in: I19, I21, I40.
    """
    sizes = tree_sizes(step)
    parents = parents_inside_window(step, sizes)
    expected = closures(parents)  # one matrix per request, in the order of the blocks

    def judge(block: Block) -> Finding | None:
        want = next(expected)
        at = first_cell(block.tree[: block.live] != want[: block.live])
        if at is None:
            return None
        row, column = at
        cause, confidence, victims = _mask_cause(block, parents)
        return Finding(
            headline=_visibility(row, column, bool(want[at])),
            equation=f"mask[{block.request}, {row}, s+{column}] = {int(block.tree[at])}, "
            f"expected {int(want[at])}",
            expected=str(int(want[at])),
            actual=str(int(block.tree[at])),
            request=block.request,
            row=row,
            victims=victims,
            cause=cause,
            confidence=confidence,
        )

    return first_block(step, sizes, judge)


def _visibility(row: int, column: int, wanted: bool) -> str:
    if row == column:
        return f"node {row} does not see itself"
    if wanted:
        return f"node {row} does not see its ancestor {column}"
    return f"node {row} sees node {column}, not an ancestor"


def _mask_cause(block: Block, parents: Array) -> tuple[str, str, tuple[int, ...]]:
    """Likely cause, confidence and victims of a wrong tree block."""
    rows = block.tree
    for other, want in enumerate(closures(parents)):
        if other != block.request and rows.shape == want.shape and (rows == want).all():
            cause = f"the block is request {other}'s: masks were assigned by order or by shape"
            return cause, "likely", (other,)
    if (rows == 1).all():
        return "the buffer was filled with ones and never painted", "likely", ()
    live = rows[: block.live, : block.live]
    if (live == np.tri(len(live), dtype=live.dtype)).all():
        return "the builder wrote a causal (chain) mask for a tree", "likely", ()
    return "the mask was built from another tree or with another row length", "possible", ()


@rule(
    "M3", "wrong-visible-count", site=Site.BUILD, cost=Cost.MASK, scope=Scope.REQUEST, bit=23,
    needs=("mask.cells", "layout.prefix_lens"),
)  # fmt: skip
def wrong_visible_count(step: Step) -> Finding | None:
    """A live row sees as many keys as its position says.

    Holds when: the ones of row r number `s_i + depth(r) + 1`; under a sliding window W, those
    inside the window number `min(W, s_i + depth(r) + 1)`. The depth follows from `tree.parents`.
    Request i is looked up at its correct offset.
    Breaks as: whatever M1 or M2 describe; the count catches it in one reduction.
    Usual cause: rows written with another stride, or cells left from an earlier step.
    Seen in: I13, I14.
    """
    sizes = tree_sizes(step)
    parents_inside_window(step, sizes)
    depths, lens = tree_depths(step, sizes), ints(step, "layout.prefix_lens")
    window = step.mask.window

    def judge(block: Block) -> Finding | None:
        i, live = block.request, block.live
        prefix = block.prefix[:live]
        if window is not None:
            prefix = prefix * inside_window(step, block, int(lens[i]), depths[i])
        in_prefix = prefix.sum(axis=1, dtype=np.int64)
        in_tree = block.tree[:live].sum(axis=1, dtype=np.int64)
        want = lens[i] + depths[i, :live] + 1
        want = want if window is None else np.minimum(want, window)
        row = first(in_prefix + in_tree != want)
        if row is None:
            return None
        count, depth = int(in_prefix[row] + in_tree[row]), int(depths[i, row])
        return Finding(
            headline=f"node {row} of request {i} sees {count} keys, not {int(want[row])}",
            equation=f"ones in row {row} = {int(in_prefix[row])} + {int(in_tree[row])} = {count}, "
            f"expected s+depth+1 = {int(lens[i])}+{depth}+1"
            + (f" within W = {window}" if window is not None else "")
            + f" = {int(want[row])}",
            expected=str(int(want[row])),
            actual=str(count),
            request=i,
            row=row,
            latent=not step.contract.reads_prefix_mask and int(in_tree[row]) == depth + 1,
            cause="the row holds cells of another row, request or step",
            confidence="possible",
        )

    return first_block(step, sizes, judge)


@rule(
    "M4", "blind-row", site=Site.BUILD, cost=Cost.ROWS, scope=Scope.REQUEST, bit=7,
    needs=("mask.cells", "layout.prefix_lens"),
)  # fmt: skip
def blind_row(step: Step) -> Finding | None:
    """Every live row sees itself, and padding rows look as the contract declares.

    Holds when: `mask[i, r, s_i + r] = 1` for rows `r < tree_size`. For rows beyond: with policy
    "self" the tree columns show the row itself only, with "masked" none, with "none" there are no
    such rows. Request i is looked up at its correct offset.
    Breaks as: softmax over nothing gives a NaN row, which becomes token 0 or spreads through MoE
    routing.
    Usual cause: an under-filled tree whose padding rows were never painted.
    Seen in: I48, H1.
    """
    sizes = tree_sizes(step)
    policy = step.contract.pad_rows

    def judge(block: Block) -> Finding | None:
        rows = np.arange(len(block.tree))
        diagonal = block.tree[rows, rows]
        blind = first(diagonal[: block.live] != 1)
        if blind is not None:
            return _blind(block, blind, 1, int(diagonal[blind]))
        pads = block.tree[block.live :]
        if policy == "none":
            return _unwanted_pad(block) if len(pads) else None
        want = (rows[block.live :, None] == np.arange(block.tree.shape[1])) & (policy == "self")
        at = first_cell(pads != want) if pads.size else None
        if at is None:
            return None
        row, column = block.live + at[0], at[1]
        return replace(
            _blind(block, row, int(want[at]), int(pads[at]), column),
            headline=f"padding row {row} of request {block.request} is not {policy!r}",
        )

    return first_block(step, sizes, judge)


def _blind(block: Block, row: int, want: int, value: int, column: int | None = None) -> Finding:
    return Finding(
        headline=f"node {row} of request {block.request} does not see itself",
        equation=f"mask[{block.request}, {row}, s+{row if column is None else column}] = {value}, "
        f"expected {want}",
        expected=str(want),
        actual=str(value),
        request=block.request,
        row=row,
        cause="the row was not painted in this step",
    )


def _unwanted_pad(block: Block) -> Finding:
    return Finding(
        headline=f"request {block.request} has padding rows",
        equation=f"tree_size = {block.size}, expected w = {block.tree.shape[1]} (no padding rows)",
        expected=str(block.tree.shape[1]),
        actual=str(block.size),
        request=block.request,
        row=block.size,
        cause="the tree is under-filled where the contract allows no padding rows",
    )


@rule(
    "M6", "mask-above-diagonal", site=Site.LAUNCH, cost=Cost.BLOCKS, scope=Scope.REQUEST, bit=8,
    needs=("mask.cells", "layout.prefix_lens"),
)  # fmt: skip
def mask_above_diagonal(step: Step) -> Finding | None:
    """Where the kernel also applies causality by row, the mask grants nothing above the diagonal.

    Holds when: `mask[i, r, s_i + c] = 0` for all `c > r`, in kernels that are causal on top of the
    mask. Request i is looked up at its correct offset.
    Breaks as: the kernel hides keys that the mask grants, so a row sees less than its mask says.
    Usual cause: nodes are not sorted parents first, or the causal flag stayed on for a tree.
    Seen in: I18, I20.
    """
    if not step.contract.causal_with_mask:
        raise NotApplicable("this kernel does not apply causality on top of the mask")

    def judge(block: Block) -> Finding | None:
        at = first_cell(np.triu(block.tree, 1) != 0) if block.tree.size else None
        if at is None:
            return None
        row, column = at
        return Finding(
            headline=f"the kernel hides node {column} from node {row}",
            equation=f"mask[{block.request}, {row}, s+{column}] = {int(block.tree[at])}, expected 0"
            f" because {column} > {row}",
            expected="0",
            actual=str(int(block.tree[at])),
            request=block.request,
            row=row,
            cause="the causal flag is on for a mask that is not lower-triangular",
        )

    return first_block(step, np.full(step.bs, step.w), judge)


RULES: tuple[Rule, ...] = (
    hidden_prefix,
    wrong_ancestor_visibility,
    wrong_visible_count,
    blind_row,
    mask_buffer_too_small,
    mask_above_diagonal,
    branch_without_mask,
    mask_of_another_request,
    mask_length,
)
