"""Mask delivery: the buffer, the launch and the batch that the mask belongs to."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_guard.checks.cells import tree_parents, tree_sizes
from ddtree_guard.checks.common import (
    first,
    first_cell,
    hint,
    ints,
    mask_columns,
    mask_offsets,
    optional_ints,
    sizes_of_batch,
)
from ddtree_guard.rule import Cost, Finding, NotApplicable, Scope, Site, rule
from ddtree_guard.step import Step


@rule(
    "M5", "mask-buffer-too-small", site=Site.CAPTURE, cost=Cost.HOST, scope=Scope.BATCH,
    needs=("mask.capacity", "layout.mask_indptr"),
)  # fmt: skip
def mask_buffer_too_small(step: Step) -> Finding | None:
    """No mask cell outside the buffer is read, now or at full context.

    Holds when: every mask offset, padded lanes included, lies in `0..capacity`; a captured buffer
    also holds `BS*w*(C+w)` cells. Judged on the offsets that the kernel uses.
    Breaks as: an illegal memory access or a silent read of foreign cells. A buffer that is too
    small only at full context is latent until then.
    Usual cause: the mask was built for bs requests and the offsets for BS lanes, or the captured
    buffer was sized `BS*w*C`, without the w tree columns.
    Seen in: I01, I10, I11, I16.
    """
    w, lanes = sizes_of_batch(step)
    offsets, capacity = ints(step, "layout.mask_indptr"), step.mask.capacity
    at = first((offsets < 0) | (offsets > capacity))
    if at is not None:
        return _outside(step, at, offsets, capacity)
    context = step.limits.context
    captured = step.who.path == "graph"  # an eager mask is made for this step
    if not captured or context is None or capacity >= lanes * w * (context + w):
        return None
    need = lanes * w * (context + w)
    without = capacity == lanes * w * context
    return Finding(
        headline="the captured mask buffer is too small at full context",
        equation=f"capacity = {capacity}, expected >= BS*w*(C+w) = "
        f"{lanes}*{w}*({context}+{w}) = {need}",
        expected=f">= {need}",
        actual=str(capacity),
        latent=True,
        cause="the buffer was sized BS*w*C, without the w tree columns"
        if without
        else "the buffer was sized with another width or another maximum",
        confidence="very likely" if without else "possible",
    )


def _outside(step: Step, at: int, offsets: Any, capacity: int) -> Finding:
    i, offset = max(at - 1, 0), int(offsets[at])
    lens = hint(step, "layout.prefix_lens")
    stride = step.w + int(lens[i]) if lens is not None else 0
    rows = (capacity - int(offsets[i])) // stride if stride > 0 and offset > capacity else 0
    return Finding(
        headline=f"request {i} reads mask cells outside the buffer",
        equation=f"mask_indptr[{at}] = {offset}, expected 0..capacity = 0..{capacity}",
        expected=f"0..{capacity}",
        actual=str(offset),
        request=i if step.padded_bs else None,
        row=min(max(rows, 0), step.w - 1),
        cause="the mask was built for fewer lanes or another width than the offsets",
    )


@rule(
    "M7", "branch-without-mask", site=Site.LAUNCH, cost=Cost.HOST, scope=Scope.REQUEST,
    needs=("mask.present",),
)  # fmt: skip
def branch_without_mask(step: Step) -> Finding | None:
    """A tree with a branch reaches the kernel with its mask, and is walked as a tree.

    Holds when: if some node's parent is not the row before it, the launch has a mask and acceptance
    walks the tree; a request whose tree was dropped commits the root's token only.
    Breaks as: without a mask every node sees all rows before it, siblings included; a chain walk
    reads siblings as successors.
    Usual cause: the decode path looks for spec info that it is never passed and falls back to
    causal attention.
    Seen in: I18, I19.
    """
    sizes = tree_sizes(step)
    parents = tree_parents(step, sizes)
    rows = np.arange(step.w)
    branch = (parents != rows - 1) & (rows < sizes[:, None])
    at = first_cell(branch)
    if at is None:
        return None
    if step.mask.present and step.outcome.walk != "chain":
        return _dropped_tree(step, branch)
    request, row = at
    what = "was walked as a chain" if step.mask.present else "got no mask"
    return Finding(
        headline=f"request {request} has a branch and {what}",
        equation=f"parent[{request}, {row}] = {int(parents[at])}, a chain has {row - 1}; "
        f"mask present = {bool(step.mask.present)}, walk = {step.outcome.walk or 'not known'}",
        expected="a mask and a tree walk",
        actual=what,
        request=request,
        row=row,
        cause="the mask was dropped between builder and kernel"
        if not step.mask.present
        else "the acceptance took the chain path",
    )


def _dropped_tree(step: Step, branch: Any) -> Finding | None:
    """A finding if a branching request that was not walked committed more than the root's token."""
    walked = optional_ints(step, "outcome.masked_walk")
    lens = optional_ints(step, "outcome.accept_lens")
    if walked is None or lens is None:
        return None
    i = first(branch.any(axis=1) & (walked == 0) & (lens > 1))
    if i is None:
        return None
    return Finding(
        headline=f"request {i}: a dropped tree committed {int(lens[i])} tokens",
        equation=f"accept_lens[{i}] = {int(lens[i])}, expected 1 where the tree was not walked",
        expected="1",
        actual=str(int(lens[i])),
        request=i,
        row=int(np.argmax(branch[i])),
        cause="the request's tree was dropped and its rows were accepted as a chain",
    )


@rule(
    "M8", "mask-of-another-request", site=Site.BUILD, cost=Cost.HOST, scope=Scope.BATCH,
    needs=("mask.rids", "who.rids"),
)  # fmt: skip
def mask_of_another_request(step: Step) -> Finding | None:
    """The mask was built for the requests of this batch, in this order.

    Holds when: the request ids that the mask builder used equal the batch's request ids.
    Breaks as: request i verifies with request j's tree. With equal sizes nothing looks wrong, and
    tokens of a stranger's branch are accepted.
    Usual cause: masks are assigned by batch order or by shape after the batch was reordered.
    Seen in: I19.
    """
    mask, batch = tuple(step.mask.rids or ()), tuple(step.who.rids)
    if not batch:
        raise NotApplicable("the request ids of the batch are not in this step")
    if mask == batch:
        return None
    pairs = zip(mask, batch, strict=False)
    i = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(mask), len(batch)))
    actual = mask[i] if i < len(mask) else "no mask"
    wanted = batch[i] if i < len(batch) else "no request"
    return Finding(
        headline=f"request {i} has the mask of another request",
        equation=f"mask.rids[{i}] = {actual}, expected {wanted}",
        expected=wanted,
        actual=actual,
        request=i if i < len(batch) else None,
        victims=(batch.index(actual),) if actual in batch and batch.index(actual) != i else (),
        cause="masks were assigned by order or by shape after the batch changed",
    )


@rule(
    "M9", "mask-length", site=Site.BUILD, cost=Cost.HOST, scope=Scope.BATCH,
    needs=("mask.cells", "layout.prefix_lens"),
)  # fmt: skip
def mask_length(step: Step) -> Finding | None:
    """The mask holds exactly the cells of its requests.

    Holds when: its elements number the sum of `w*(s_i+w)` over all lanes, each request rounded up
    to whole elements where cells are packed. Where the contract passes a whole captured buffer, it
    holds at least the cells of the live requests.
    Breaks as: too short, and some code path extends it with ones or zeros: wrong visibility without
    an error; too long, and it belongs to another batch.
    Usual cause: built with another width, for bs requests instead of BS lanes, or from the lengths
    of an earlier step.
    Seen in: I01, I10, I21, H2.
    """
    w, _ = sizes_of_batch(step)
    columns, unit = mask_columns(step), max(1, step.contract.mask_unit)
    exact = step.contract.mask_length == "exact"
    ends = np.cumsum(-(-w * (columns + w) // unit))
    ends = ends if exact else ends[: step.bs]
    want, actual = int(ends[-1]) if len(ends) else 0, len(step.mask.cells)
    if actual == want or (actual > want and not exact):
        return None
    i = first(ends > actual)
    starts = mask_offsets(step) if unit == 1 else None
    row = None
    if i is not None and starts is not None:
        row = min((actual - int(starts[i])) // (int(columns[i]) + w), w - 1)
    return Finding(
        headline=f"the mask holds {actual} cells, not {want}"
        if unit == 1
        else f"the mask holds {actual} elements, not {want}",
        equation=f"mask.numel() = {actual}, expected {'' if exact else '>= '}sum of w*(s+w)"
        + (f" / {unit}" if unit > 1 else "")
        + f" = {want}",
        expected=str(want) if exact else f">= {want}",
        actual=str(actual),
        request=i,
        row=row,
        cause="it was built with another width, for fewer lanes, or from other lengths",
        confidence="possible",
    )
