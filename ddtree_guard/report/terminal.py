"""The terminal: tables, and colour laid over the plain pictures of `drawing`. Rich is loaded here.

Without colour (a pipe, NO_COLOR) nothing is lost: the pictures carry their meaning in characters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from ddtree_guard.render import plain
from ddtree_guard.report import drawing
from ddtree_guard.step import Step

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_GLYPH_STYLES = {
    "█": "green", "·": "dim", "-": "bold red", "+": "bold magenta", "x": "red", "?": "bold red",
}  # fmt: skip
_RULER_STYLES = {"━": "green", "░": "bold red", "┃": "bold"}


def console(file: TextIO | None = None) -> Console:
    """A console of at most 100 columns; 100 when the output is not a terminal."""
    from rich.console import Console

    file = file or sys.stdout
    found = Console(file=file)
    width = min(found.width, drawing.WIDTH) if found.is_terminal else drawing.WIDTH
    return Console(file=file, highlight=False, width=width)


def table(head: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> Table:
    """A table of text cells. A row whose last cell starts with `!` is printed in bold red."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name in head:
        grid.add_column(name, overflow="fold")
    for row in rows:
        cells = [plain(str(cell)) for cell in row]
        alarm = cells[-1].startswith("!")
        cells[-1] = cells[-1].removeprefix("!")
        grid.add_row(*map(Text, cells), style="bold red" if alarm else None)
    return grid


def requests_table(step: Step) -> Table:
    """One row per live request: lengths, tree, acceptance, and what its offsets should be."""
    rows = [[row[key] for key in _COLUMNS] for row in request_rows(step)]
    return table(list(_COLUMNS), rows, title="requests (right value -> value in this step)")


_COLUMNS = ("request", "rid", "s", "nodes", "depth", "accepted", "query rows", "mask cells")


def request_rows(step: Step) -> list[dict[str, Any]]:
    """The values of `requests_table`, one mapping per live request."""
    return [
        {
            "request": i,
            "rid": step.who.rid(i) or "-",
            "s": _item(step.layout.prefix_lens, i),
            "nodes": _item(step.tree.sizes, i),
            "depth": _largest(step.tree.depths, i),
            "accepted": _item(step.outcome.accept_lens, i),
            "query rows": _against(step.w, _gap(step.layout.qo_indptr, i)),
            "mask cells": _against(_cells(step, i), _gap(step.layout.mask_indptr, i)),
        }
        for i in range(step.bs)
    ]


def heatmap(step: Step, request: int) -> Any:
    """The coloured mask picture of a request, with its legend."""
    head, *lines = drawing.heatmap(step, request)
    body = [_coloured(line, _GLYPH_STYLES, skip=10) for line in lines]
    return _join([_bold(head), *body, _coloured(drawing.LEGEND if lines else "", {})])


def ruler(step: Step, request: int) -> Any:
    """The coloured rulers of query rows and mask cells around a request."""
    lines = drawing.rulers(step, request)
    return _join([_coloured(line, _RULER_STYLES, skip=10) for line in lines])


def tree(step: Step, request: int) -> Any:
    """The tree of a request, the accepted path in green."""
    from rich.text import Text

    head, *lines = drawing.tree(step, request)
    styled = [Text(line, style="green" if line.endswith("*") else "") for line in lines]
    return _join([_bold(head), *styled])


def _coloured(line: str, styles: dict[str, str], skip: int = 0) -> Any:
    from rich.text import Text

    text = Text(line, no_wrap=True, overflow="ignore")
    for at, character in enumerate(line[skip:], skip):
        if character in styles:
            text.stylize(styles[character], at, at + 1)
    return text


def _bold(line: str) -> Any:
    from rich.text import Text

    return Text(line, style="bold")


def _join(lines: Iterable[Any]) -> Any:
    from rich.text import Text

    return Text("\n").join(lines)


def _item(array: Any, at: int) -> Any:
    whole = array is not None and array.ndim == 1 and at < len(array)
    return array[at].item() if whole else "-"


def _largest(array: Any, at: int) -> Any:
    whole = array is not None and array.ndim == 2 and at < len(array) and array.shape[1]
    return array[at].max().item() if whole else "-"


def _gap(offsets: Any, at: int) -> Any:
    end, begin = _item(offsets, at + 1), _item(offsets, at)
    return "-" if "-" in (end, begin) else end - begin


def _cells(step: Step, at: int) -> Any:
    s = _item(step.layout.prefix_lens, at)
    return "-" if s == "-" else step.w * (s + step.w)


def _against(right: Any, found: Any) -> str:
    return str(found) if right == found or "-" in (right, found) else f"{right} -> {found}"
