"""What the rules about rows, slots and acceptance share: integers, live rows, the accepted path."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_guard.checks.common import hint, ints, optional_ints
from ddtree_guard.rule import Finding, NotApplicable, NotEvaluable
from ddtree_guard.step import Step


def live_lens(step: Step) -> Any:
    """Committed prefix length of each live request, from the device. int64, (bs,)."""
    if not 0 <= step.bs <= step.padded_bs:
        raise NotEvaluable(f"BS = {step.padded_bs} lanes cannot hold bs = {step.bs} requests")
    return ints(step, "layout.prefix_lens")[: step.bs]


def by_lane(step: Step, path: str) -> Any:
    """A per-row array as int64 (BS, w). Raises NotEvaluable if it holds another number of rows."""
    values, rows = ints(step, path), step.padded_bs * step.w
    if not 0 <= step.bs <= step.padded_bs or step.w < 1 or values.size != rows:
        raise NotEvaluable(f"{path} holds {values.size} values, expected BS*w = {rows} (see W1)")
    return values.reshape(step.padded_bs, step.w)


def node_rows(step: Step) -> Any:
    """True for the rows that hold a node, False for padding. bool, (bs, w)."""
    sizes = optional_ints(step, "tree.sizes")
    if sizes is None and step.contract.chain:
        sizes = np.full(step.bs, step.w)
    if sizes is None:
        raise NotApplicable("tree.sizes is not in this step")
    if step.w < 1:
        raise NotEvaluable(f"w = {step.w}, expected at least one row per request")
    return np.arange(step.w) < sizes[:, None]


def parent_rows(step: Step) -> Any:
    """Parent of each row; under a chain contract the row before it. int64, (bs, w)."""
    parents = optional_ints(step, "tree.parents")
    if parents is None and step.contract.chain:
        parents = np.broadcast_to(np.arange(step.w) - 1, (step.bs, step.w))
    if parents is None:
        raise NotApplicable("tree.parents is not in this step")
    return parents


def gather(matrix: Any, rows: Any) -> Any:
    """matrix[i, rows[i, j]], with rows out of range clipped: test those with `inside` first."""
    clipped = np.minimum(np.maximum(rows, 0), matrix.shape[1] - 1)
    return matrix[np.arange(len(matrix))[:, None], clipped]  # faster than take_along_axis


def inside(rows: Any, width: int) -> Any:
    """Which entries are valid row indices."""
    return (rows >= 0) & (rows < width)


def accepted(step: Step) -> tuple[Any, Any]:
    """The accepted paths (bs, *) and their lengths (bs,): entries before the first negative one."""
    index = ints(step, "outcome.accept_index")
    if index.shape[1] == 0:
        raise NotEvaluable("outcome.accept_index has no columns")
    return index, np.logical_and.accumulate(index >= 0, axis=1).sum(axis=1)


def path_row(step: Step, request: int, at: int) -> int | None:
    """Row of the `at`-th node on the accepted path, if the path is known and in range."""
    index = hint(step, "outcome.accept_index")
    if index is None or not 0 <= at < index.shape[1]:
        return None
    row = int(index[request, at])
    return row if 0 <= row < step.w else None


def previous_equal(live: Any, *keys: Any) -> Any:
    """For each live cell the last earlier row of its request with equal keys, or -1. (bs, w)."""
    found = np.full(live.shape, -1)
    at = np.flatnonzero(live)
    request, row = np.divmod(at, live.shape[1])
    columns = [request, *(key.reshape(-1)[at] for key in keys)]
    order = np.lexsort(columns)  # stable: rows stay in order
    same = np.logical_and.reduce([c[order][1:] == c[order][:-1] for c in columns])
    later, earlier = order[1:][same], order[:-1][same]
    found[request[later], row[later]] = row[earlier]
    return found


def lowest(*findings: Finding | None) -> Finding | None:
    """The finding with the lowest request, then the lowest row; those without a request last."""
    return min(filter(None, findings), key=_place, default=None)


def _place(found: Finding) -> tuple[bool, int, int]:
    row = -1 if found.row is None else found.row
    return found.request is None, found.request or 0, row
