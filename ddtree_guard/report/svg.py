"""Pictures of a step as inline SVG: offsets, mask, tree, timeline. NumPy only.

Colours are classes that the page's style sheet defines for light and dark; every state that has a
colour also has a pattern, a sign or a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np

from ddtree_guard.render import plain
from ddtree_guard.report import drawing
from ddtree_guard.step import Step

WIDE = 720
STATES = ("hidden", "seen", "lost", "leaked", "unwritten", "outside")
MEANINGS = ("does not see", "sees", "should see, does not", "should not see, does",
            "row never computed", "outside the mask")  # fmt: skip
MAX_NODES = 400
MAX_CELLS = 128  # a side of the mask picture


def text(value: object) -> str:
    """A value from a dump as harmless HTML."""
    return escape(plain(str(value)), quote=True)


def prose(value: object) -> str:
    """A sentence as harmless HTML: what stands in backticks as code, long names may break."""
    words = re.sub(r"\S{24,}", lambda found: re.sub(r"(?<=[_=/])", "<wbr>", found[0]), text(value))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", words)


def _svg(width: float, height: float, body: Iterable[str], label: str, style: str = "") -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{text(label)}"'
        f"{f' style={chr(34)}{style}{chr(34)}' if style else ''}>{''.join(body)}</svg>"
    )


# --- offsets --------------------------------------------------------------------------------------
def ruler(title: str, unit: str, own: Sequence[int], used: Sequence[int], request: int) -> str:
    """Where each request's cells are, above where the kernel looks for them, to one scale."""
    low, high = drawing.window(request, len(own) - 1)
    mine, found = list(own[low : high + 1]), list(used[low : high + 1])
    first, last = min(mine + found), max(mine + found)
    scale = (WIDE - 2) / max(last - first, 1)

    def x(value: float) -> float:
        return round(1 + (value - first) * scale, 1)

    body = []
    for i in range(high - low):
        body.append(_segment(x(mine[i]), x(mine[i + 1]), 8, "own", f"request {low + i}"))
        body += _reading(low + i, unit, (mine[i], mine[i + 1]), (found[i], found[i + 1]), x)
    body += [_tick(x(v), 8, v, 44) for v in _apart(mine, x)]
    body += [_tick(x(v), 52, v, 88) for v in _apart(found, x)]
    body += [_name(x((a + b) / 2), 24, low + i) for i, (a, b) in _middles(mine, x)]
    body += [_name(x((a + b) / 2), 68, low + i) for i, (a, b) in _middles(found, x)]
    more = f", requests {low} to {high - 1} of {len(own) - 1}" if high - low < len(own) - 1 else ""
    caption = f"{text(title)}, in {text(unit)}{more}: where they are, and below where they are read"
    return f"<figure><figcaption>{caption}</figcaption>{_svg(WIDE, 94, body, title)}</figure>"


def _reading(
    request: int, unit: str, own: tuple[int, int], used: tuple[int, int], x: Any
) -> list[str]:
    """What a request reads: its own cells plain, those of others as misread."""
    (begin, end), last = used, own[1] - 1
    if end <= begin:
        title = f"<title>request {request} reads nothing</title>"
        return [f'<path class="wrong-line" d="M{x(begin)} 52v24">{title}</path>']
    label = f"request {request} reads {unit} {begin} to {end - 1}; own {own[0]} to {last}"
    first, second = max(begin, own[0]), min(end, own[1])
    if first >= second:
        return [_segment(x(begin), x(end), 52, "misread", label)]
    return [
        _segment(x(begin), x(first), 52, "misread", label),
        _segment(x(first), x(second), 52, "own", label),
        _segment(x(second), x(end), 52, "misread", label),
    ]


def _segment(begin: float, end: float, top: int, kind: str, label: str) -> str:
    if end <= begin:
        return ""
    width = round(end - begin, 1)
    shape = f'x="{begin}" y="{top}" width="{width}" height="24"'
    hatch = f'<rect class="hatch" {shape}/>' if kind == "misread" else ""
    return f'<rect class="{kind}" {shape}><title>{text(label)}</title></rect>{hatch}'


def _tick(at: float, top: int, value: int, base: int) -> str:
    anchor = "start" if at < 40 else "end" if at > WIDE - 40 else "middle"
    return (
        f'<path class="edge" d="M{at} {top}v24"/><text x="{at}" y="{base}" class="num" '
        f'text-anchor="{anchor}">{value}</text>'
    )


def _name(at: float, base: int, request: int) -> str:
    return f'<text x="{at}" y="{base}" class="on" text-anchor="middle">{request}</text>'


def _middles(marks: list[int], x: Any) -> Iterable[tuple[int, tuple[int, int]]]:
    return [(i, (a, b)) for i, (a, b) in enumerate(pairwise(marks)) if x(b) - x(a) > 18]


def _apart(marks: list[int], x: Any) -> list[int]:
    """The marks whose numbers do not touch each other."""
    kept: list[int] = []
    for value in sorted(set(marks)):
        if not kept or x(value) - x(kept[-1]) > 62:
            kept.append(value)
    return kept


def rulers(step: Step, request: int) -> str:
    """Rulers of query rows and mask cells, where the step holds them."""
    found = [ruler(*one, request) for one in drawing.offsets(step)]
    return "".join(found) or "<p>The offsets are not in this step.</p>"


# --- mask -----------------------------------------------------------------------------------------
def mask(step: Step, request: int) -> str:
    """The request's tree block, one square a cell: what the tree says against what is read."""
    try:
        states = drawing.mask_states(step, request)
    except ValueError as why:
        return f"<p>No picture of the mask: {text(why)}.</p>"
    pool = -(-len(states) // MAX_CELLS)
    wrong = int((states > drawing.SEEN).sum())
    cells = drawing.pooled(states, pool) if pool > 1 else states
    size = len(cells)
    body = [f'<rect class="cell-hidden" width="{size}" height="{size}"/>']
    for state in range(1, len(STATES)):
        path = _runs(cells == state)
        if path:
            body.append(f'<path class="cell-{STATES[state]}" d="{path}"><title>'
                        f"{MEANINGS[state]}</title></path>")  # fmt: skip
    head = f"request {request}: {wrong} of {step.w * step.w} cells are wrong" if wrong else (
        f"request {request}: as the tree says"
    )  # fmt: skip
    if pool > 1:
        head += f"; one square is {pool} x {pool} cells, the worst of them"
    present = [s for s in range(len(STATES)) if (cells == s).any()]
    legend = "".join(
        f'<li><svg viewBox="0 0 1 1" class="key"><rect class="cell-{STATES[s]}" width="1" '
        f'height="1"/></svg>{MEANINGS[s]}</li>'
        for s in present
    )
    picture = _svg(size, size, body, head, f"max-width:{min(560, max(size * 14, 300))}px")
    return (
        f"<figure class='mask'><figcaption>{head}. Rows are queries, columns are the keys of the "
        f"tree.</figcaption>{picture}<ul class='legend'>{legend}</ul></figure>"
    )


def _runs(cells: Any) -> str:
    """Path data of a boolean picture, one rectangle for each horizontal run."""
    parts = []
    for y, row in enumerate(cells):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(np.int8), [0]])))
        parts += [
            f"M{a} {y}h{b - a}v1h{a - b}z" for a, b in zip(edges[::2], edges[1::2], strict=True)
        ]
    return "".join(parts)


# --- tree -----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Place:
    x: float
    y: float


def tree(step: Step, request: int) -> str:
    """The request's tree from the root down, the accepted path marked by thick lines and rings."""
    shape = drawing.tree_shape(step, request)
    if shape is None:
        return "<p>The tree is not in this step.</p>"
    parents, size, accepted = shape
    shown = min(size, MAX_NODES)
    places = _places(parents, shown)
    path, tokens = set(accepted), step.tree.tokens
    has_tokens = tokens is not None and tokens.shape == (step.bs, step.w)
    lines, dots = [], []
    for node in range(shown):
        at, parent = places[node], parents[node]
        on = " path" if node in path else ""
        if 0 <= parent < node:
            up = places[parent]
            thick = on if parent in path else ""
            lines.append(f'<path class="branch{thick}" d="M{up.x} {up.y}L{at.x} {at.y}"/>')
        token = f", token {tokens[request][node]}" if has_tokens else ""
        depth = "" if 0 <= parent < node or node == 0 else ", its parent does not come before it"
        dots.append(
            f'<g><title>{text(f"row {node}{token}{depth}")}</title><circle class="node{on}" '
            f'cx="{at.x}" cy="{at.y}" r="11"/><text class="id{on}" x="{at.x}" y="{at.y + 3.5}" '
            f'text-anchor="middle">{node}</text></g>'
        )
    width = max(p.x for p in places) + 18
    height = max(p.y for p in places) + 18
    more = f", the first {shown} of them drawn" if shown < size else ""
    told = f"; accepted path {' '.join(map(str, accepted))}" if accepted else ""
    head = f"request {request}: {size} nodes in {step.w} rows{more}{told}"
    picture = _svg(width, height, lines + dots, head, f"width:{width:g}px;max-width:none")
    return (
        f"<figure><figcaption>{text(head)}</figcaption><div class='scroll'>{picture}</div></figure>"
    )


def _places(parents: Sequence[int], size: int) -> list[_Place]:
    """Leaves side by side, a parent above the middle of its children; depth goes down.

    In a tree that has to be scrolled, above its first child: the root is then in sight.
    """
    depth, children = [0] * size, [[] for _ in range(size)]  # type: ignore[var-annotated]
    for node in range(1, size):
        parent = parents[node]
        if 0 <= parent < node:
            depth[node] = depth[parent] + 1
            children[parent].append(node)
    x, free = [0.0] * size, 0
    # Children come after their parents, so going backwards meets every child before its parent;
    # leaves get their places in the order of a walk from the root.
    stack, order = [n for n in range(size - 1, -1, -1) if n == 0 or not 0 <= parents[n] < n], []
    while stack:
        node = stack.pop()
        order.append(node)
        stack += reversed(children[node])
    for node in order:
        if not children[node]:
            x[node], free = float(free), free + 1
    for node in range(size - 1, -1, -1):
        if children[node]:
            first, last = children[node][0], children[node][-1]
            x[node] = (x[first] + x[last]) / 2 if free * 28 <= WIDE else x[first]
    return [_Place(18 + x[n] * 28, 18 + depth[n] * 40) for n in range(size)]


# --- timeline -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Moment:
    """One step of the timeline. A value that is not known is None."""

    step_id: int
    requests: int
    width: int
    length: float | None
    accepted: float | None
    rules: tuple[str, ...] = ()


def timeline(moments: Sequence[Moment]) -> str:
    """Rows per request, mean committed length and mean accepted tokens of each step."""
    lanes: tuple[tuple[str, list[float | None]], ...] = (
        ("rows per request", [float(m.width) for m in moments]),
        ("mean prefix length", [m.length for m in moments]),
        ("mean accepted tokens", [m.accepted for m in moments]),
    )
    left, gap = 8.0, (WIDE - 16) / max(len(moments) - 1, 1)
    body = _flags(moments, left, gap)
    for row, (name, values) in enumerate(lanes):
        body += _lane(name, values, 18.0 + row * 70, left, gap)
    for at, moment in enumerate(moments):
        place = f'x="{left + (at - 0.5) * gap:.1f}" width="{gap:.1f}"'
        label = f"<title>{text(_label(moment))}</title>"
        body.append(f'<rect class="touch" {place} y="14" height="206">{label}</rect>')
    ends = (8, "start", moments[0]), (WIDE - 8, "end", moments[-1])
    for x, anchor, moment in ends[: min(len(moments), 2)]:
        place = f'x="{x}" y="236" text-anchor="{anchor}"'
        body.append(f'<text class="num" {place}>step {moment.step_id}</text>')
    return _svg(WIDE, 242, body, f"timeline of {len(moments)} steps")


def _label(moment: Moment) -> str:
    shown = [f"step {moment.step_id}", f"{moment.requests} requests", f"w={moment.width}"]
    shown += [f"mean length {moment.length:.1f}"] if moment.length is not None else []
    shown += [f"accepted {moment.accepted:.2f}"] if moment.accepted is not None else []
    shown += [f"broken: {', '.join(moment.rules)}"] if moment.rules else []
    return ", ".join(shown)


def _flags(moments: Sequence[Moment], left: float, gap: float) -> list[str]:
    """A line at each step with a finding; its rules above, where there is room."""
    body, free = [], 0.0
    for at, moment in enumerate(moments):
        if not moment.rules:
            continue
        x = round(left + at * gap, 1)
        body.append(f'<path class="wrong-line" d="M{x} 14v206"/>')
        if x >= free:
            anchor = "start" if x < 60 else "end" if x > WIDE - 60 else "middle"
            more = [f"+{len(moment.rules) - 3}"] if len(moment.rules) > 3 else []
            words = text(" ".join([*moment.rules[:3], *more]))
            body.append(f'<text class="flag" x="{x}" y="11" text-anchor="{anchor}">{words}</text>')
            free = x + 90
    return body


def _lane(name: str, values: list[float | None], top: float, left: float, gap: float) -> list[str]:
    known = [v for v in values if v is not None]
    if not known:
        return [f'<text class="lane" x="8" y="{top + 12}">{name}: not in this dump</text>']
    low, high = min(known), max(known)
    spread = (high - low) or 1.0
    parts, pen = [], "M"
    for at, value in enumerate(values):
        if value is None:
            pen = "M"
            continue
        y = top + 56 - (value - low) / spread * 28 if high > low else top + 40
        parts.append(f"{pen}{left + at * gap:.1f} {y:.1f}")
        pen = "L"
    if len(known) == 1:
        parts.append("h.1")
    span = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    return [
        f'<path class="grid" d="M8 {top + 60}H{WIDE - 8}"/>',
        f'<path class="line" d="{"".join(parts)}"/>',
        f'<text class="lane" x="8" y="{top + 12}">{name}: {span}</text>',
    ]
