"""Pictures of a step as plain text: stride ruler, mask heat map, tree. NumPy only, no colour.

Every picture says with characters what colour would add, so it survives a pipe and NO_COLOR.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ddtree_guard.fold import fold
from ddtree_guard.render import plain
from ddtree_guard.step import Step

WIDTH = 100
_NODE = 40  # columns for a node of a tree: its row, its token, as a hash of 19 digits, and marks
_MARGIN = 10  # "expected  "

# Heat map states, least to most alarming: pooling several cells into one keeps the worst.
HIDDEN, SEEN, LOST, LEAKED, UNWRITTEN, OUTSIDE = range(6)
GLYPHS = ("··", "██", "--", "++", "xx", "??")
LEGEND = (
    "██ sees  ·· does not see  -- should, does not  ++ should not, does  xx never computed  "
    "?? no mask"
)


def ruler(
    title: str,
    unit: str,
    expected: Sequence[int],
    actual: Sequence[int],
    request: int = 0,
    width: int = WIDTH,
) -> list[str]:
    """Expected and actual request boundaries to one scale, around a request, with the misreading.

    Both sequences hold one more offset than there are requests. A stretch of the actual line is
    solid where it covers the request's own cells and shaded where it covers another's.
    """
    low, high = window(request, len(expected) - 1)
    own, used = list(expected[low : high + 1]), list(actual[low : high + 1])
    first, last = min(own + used), max(own + used)
    span = width - _MARGIN - 2
    scale = span / max(last - first, 1)
    where = f", requests {low} to {high - 1} of {len(expected) - 1}"
    marks = [round((v - first) * scale) for v in own], [round((v - first) * scale) for v in used]
    shades = [_shade(own, used, i, span) for i in range(high - low)]
    return [
        f"{title}, in {unit}{where}",
        _row("", _labels(own, marks[0], span)),
        _row("expected", _bar(marks[0], ["━" * span] * (high - low), span)),
        _row("actual", _bar(marks[1], shades, span)),
        _row("", _labels(used, marks[1], span)),
        *(fold(_row("", text), width) for text in _misread(unit, own, used, low)),
    ]


def window(request: int, count: int, size: int = 4) -> tuple[int, int]:
    """A stretch of at most `size` requests that holds the request and its neighbours."""
    low = max(0, min(request - 1, count - size))
    return low, min(count, low + size)


def _row(name: str, text: str) -> str:
    return f"{name:{_MARGIN}}{text}".rstrip()


def _shade(own: Sequence[int], used: Sequence[int], i: int, span: int) -> str:
    """The fill of request i's stretch, one character per step of the scale."""
    if used[i + 1] <= used[i]:
        return ""
    cells = np.linspace(used[i], used[i + 1], span, endpoint=False)
    return "".join("━" if own[i] <= c < own[i + 1] else "░" for c in cells)


def _bar(marks: Sequence[int], fills: Sequence[str], span: int) -> str:
    line = [" "] * (span + 2)
    for (begin, end), fill in zip(pairwise(marks), fills, strict=True):
        for at in range(begin, end):
            inside = (at - begin) * len(fill) // max(end - begin, 1)
            line[at] = fill[inside] if fill else " "
    for at in marks:
        line[at] = "┃"
    return "".join(line)


def _labels(values: Sequence[int], marks: Sequence[int], span: int) -> str:
    """The numbers under their marks; one that would touch its neighbour is left out."""
    line = ""
    for value, mark in zip(values, marks, strict=True):
        text = str(value)
        at = min(mark, span + 2 - len(text))
        if at > len(line) or not line:
            line = line.ljust(at) + text
    return line


def _misread(unit: str, own: Sequence[int], used: Sequence[int], low: int) -> list[str]:
    lines = []
    for i in range(len(own) - 1):
        if (used[i], used[i + 1]) == (own[i], own[i + 1]):
            continue
        reads = f"request {low + i} gets {unit} {used[i]} to {used[i + 1] - 1}"
        if used[i + 1] <= used[i]:
            reads = f"request {low + i} gets no {unit}"
        lines.append(f"{reads}; its own are {own[i]} to {own[i + 1] - 1}")
    if not lines:
        return ["as expected"]
    if used[-1] < own[-1]:
        lines.append(f"{unit} {used[-1]} to {own[-1] - 1} belong to nobody")
    return lines


def offsets(step: Step) -> list[tuple[str, str, list[int], list[int]]]:
    """What `ruler` takes for the query rows and the mask cells, where the step holds them."""
    found: list[tuple[str, str, list[int], list[int]]] = []
    layout, w = step.layout, step.w
    if _whole(layout.qo_indptr, step.padded_bs + 1):
        own = [i * w for i in range(step.padded_bs + 1)]
        found.append(("query rows", "rows", own, layout.qo_indptr.tolist()))
    if _whole(layout.mask_indptr, step.padded_bs + 1) and _whole(
        layout.prefix_lens, step.padded_bs
    ):
        own = [0]
        for s in layout.prefix_lens.tolist():
            own.append(own[-1] + w * (s + w))
        found.append(("mask cells", "cells", own, layout.mask_indptr.tolist()))
    return found


def rulers(step: Step, request: int = 0, width: int = WIDTH) -> list[str]:
    """The rulers of the query rows and of the mask cells, where the step holds them."""
    lines = [line for one in offsets(step) for line in (*ruler(*one, request, width), "")]
    return lines or ["offsets: not in this step", ""]


def _whole(array: Any, size: int) -> bool:
    return array is not None and array.shape == (size,) and array.dtype.kind in "iu"


def mask_states(step: Step, request: int) -> Any:
    """(w, w) states of a request's tree block: the tree's word against what the kernel reads.

    Raises ValueError when the step does not hold tree, mask and offsets in whole.
    """
    w, parents, bits = step.w, step.tree.parents, step.mask.tree_bits
    if parents is None or parents.shape != (step.bs, w):
        raise ValueError("the tree is not whole in this step")
    rows, row, column = w, np.arange(w)[:, None], np.arange(w)[None, :]
    if step.mask.cells is None and bits is not None and bits.shape == (step.bs, w, -(-w // 8)):
        if bits.dtype != np.uint8:
            raise ValueError("the bits of the mask are not bytes")
        read = np.unpackbits(bits[request], axis=1, count=w, bitorder="little") != 0
        inside = np.ones((w, w), bool)
        if _whole(step.layout.qo_indptr, step.padded_bs + 1):
            rows = int(step.layout.qo_indptr[request + 1]) - int(step.layout.qo_indptr[request])
    else:
        rows, inside, read = _read_cells(step, request)
    wanted = _visible(parents[request])
    states = np.where(wanted, np.where(read, SEEN, LOST), np.where(read, LEAKED, HIDDEN))
    states = np.where(inside | (column >= rows), states, OUTSIDE)
    return np.where(row >= rows, UNWRITTEN, states)


def _read_cells(step: Step, request: int) -> tuple[int, Any, Any]:
    """Rows that are computed, and which cells of the tree block are inside the mask and set."""
    w, layout = step.w, step.layout
    fits = step.mask.cells is not None and step.mask.cells.ndim == 1 and len(step.mask.cells) > 0
    for array, size in (
        (layout.mask_indptr, step.padded_bs + 1),
        (layout.qo_indptr, step.padded_bs + 1),
        (layout.prefix_lens, step.padded_bs),
    ):
        fits = fits and _whole(array, size)
    if not fits:
        raise ValueError("mask or offsets are not whole in this step")
    s, start = layout.prefix_lens[request], layout.mask_indptr[request]
    rows = np.int64(layout.qo_indptr[request + 1]) - np.int64(layout.qo_indptr[request])
    row, column = np.arange(w)[:, None], np.arange(w)[None, :]
    with np.errstate(over="ignore"):  # absurd offsets wrap and fall outside
        at = np.int64(start) + row * (np.int64(s) + rows) + np.int64(s) + column
    inside = (at >= 0) & (at < len(step.mask.cells))
    read = (step.mask.cells[np.where(inside, at, 0)] != 0) & (column < rows)
    return int(rows), inside, read


def _visible(parents: Any) -> Any:
    """(w, w) ancestor-or-self matrix of one tree. A parent that does not come first is ignored."""
    w = len(parents)
    visible = np.eye(w, dtype=bool)
    for node in range(w):
        parent = int(parents[node])
        if 0 <= parent < node:
            visible[node] |= visible[parent]
    return visible


def heatmap(step: Step, request: int, width: int = WIDTH) -> list[str]:
    """The request's tree block as a picture: rows are queries, columns are keys of the tree."""
    w = step.w
    head = f"mask of request {request}{_rid(step, request)}, {w} x {w} tree block"
    try:
        states = mask_states(step, request)
    except ValueError as why:
        return [f"{head}: {why}"]
    wrong = int((states > SEEN).sum())
    head += ": as the tree says" if not wrong else f": {wrong} of {w * w} cells are wrong"
    pool = -(-w // (width - _MARGIN))
    if pool > 1:
        states = pooled(states, pool)
        head += f"; one character is {pool} x {pool} cells, the worst of them"
    wide = 2 if len(states) * 2 <= width - _MARGIN else 1
    lines = [
        f"{'row ' + str(at * pool):>8}  " + "".join(GLYPHS[s][:wide] for s in row)
        for at, row in enumerate(states)
    ]
    return [head, *lines]


def pooled(states: Any, pool: int) -> Any:
    size = -(-len(states) // pool)
    padded = np.full((size * pool, size * pool), HIDDEN)
    padded[: len(states), : len(states)] = states
    return padded.reshape(size, pool, size, pool).max(axis=(1, 3))


def _rid(step: Step, request: int) -> str:
    rid = step.who.rid(request)
    return f" (rid {plain(rid)})" if rid else ""


def tree(step: Step, request: int, limit: int = 80, width: int = WIDTH) -> list[str]:
    """The request's tree, one node a line; `*` marks the accepted path.

    Deep branches of a chain leave out the beginning of their indentation: its depth stands there.
    """
    parents, tokens = step.tree.parents, step.tree.tokens
    if parents is None or parents.shape != (step.bs, step.w):
        return [f"tree of request {request}: not in this step"]
    mine = parents[request].tolist()
    size = _size(step, request)
    accepted = _accepted(step, request)
    children: dict[int, list[int]] = {}
    for node in range(1, size):
        children.setdefault(mine[node] if 0 <= mine[node] < node else -1, []).append(node)
    lines: list[str] = []
    # Depth first with an explicit stack: a tree from a file may be deeper than Python recurses.
    stack = [(0, "", "")]
    while stack and len(lines) < limit:
        node, before, branch = stack.pop()
        token = f" token {tokens[request][node]}" if _fits(tokens, parents) else ""
        deep = len(before) > width - _NODE
        shown = f"{len(before) // 3 + 1:<4}…  " if deep else before
        lines.append(f"{shown}{branch}{node}{token}{'  *' if node in accepted else ''}")
        inner = before + {"├─ ": "│  ", "└─ ": "   "}.get(branch, "")
        below = children.get(node, [])
        stack += [(kid, inner, "└─ " if kid is below[-1] else "├─ ") for kid in reversed(below)]
    orphans = children.get(-1, [])
    if len(lines) + len(orphans) < size:
        lines.append(f"... and {size - len(lines) - len(orphans)} more nodes")
    for node in orphans[:8]:
        lines.append(f"row {node} has parent {mine[node]}, which does not come before it")
    path = f", accepted path {' '.join(map(str, accepted))}" if accepted else ""
    head = f"tree of request {request}{_rid(step, request)}: {size} nodes in {step.w} rows{path}"
    return [head, *lines]


def tree_shape(step: Step, request: int) -> tuple[list[int], int, list[int]] | None:
    """Parents, number of nodes and accepted path of a request, or None where there is no tree."""
    parents = step.tree.parents
    if parents is None or parents.shape != (step.bs, step.w) or parents.dtype.kind not in "iu":
        return None
    return parents[request].tolist(), _size(step, request), _accepted(step, request)


def _fits(array: Any, like: Any) -> bool:
    return array is not None and array.shape == like.shape


def _size(step: Step, request: int) -> int:
    sizes = step.tree.sizes
    whole = _whole(sizes, step.bs)
    return min(max(int(sizes[request]), 1), step.w) if whole else step.w


def _accepted(step: Step, request: int) -> list[int]:
    index = step.outcome.accept_index
    if index is None or index.ndim != 2 or len(index) != step.bs:
        return []
    return [int(node) for node in index[request] if node >= 0]
