"""The terminal: tables, and colour laid over the plain pictures of `drawing`. Rich is loaded here.

Without colour (a pipe, NO_COLOR) nothing is lost: the pictures carry their meaning in characters.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from ddtree_guard.fold import WIDTH, columns, fold
from ddtree_guard.render import plain
from ddtree_guard.report import drawing
from ddtree_guard.report.rows import COLUMNS, request_rows
from ddtree_guard.step import Step

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_GLYPH_STYLES = {
    "█": "green", "·": "dim", "-": "bold red", "+": "bold magenta", "x": "red", "?": "bold red",
}  # fmt: skip
_RULER_STYLES = {"━": "green", "░": "bold red", "┃": "bold"}


def console(file: TextIO | None = None) -> Console:
    """A console of 60 to 100 columns: COLUMNS, those of the terminal, or 100 where there is none.

    With NO_COLOR nothing is sent but text: no bold and no dim either.
    """
    from rich.console import Console

    file = file or sys.stdout
    width = min(columns(), WIDTH)
    bare: dict[str, Any] = {"color_system": None} if Console(file=file).no_color else {}
    made = Console(file=file, highlight=False, width=width, **bare)
    made.on_broken_pipe = _reader_gone  # type: ignore[method-assign]
    return made


def _reader_gone() -> NoReturn:
    """rich would end the process with 1, which is the code of a finding."""
    raise BrokenPipeError


def table(head: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> Table:
    """A table of text cells. A row whose last cell starts with `!` is printed in bold red."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(
        title=title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False,
        collapse_padding=True,
    )  # fmt: skip
    for name in head:
        grid.add_column(name, overflow="fold")
    for row in rows:
        cells = [plain(str(cell)) for cell in row]
        alarm = cells[-1].startswith("!")
        cells[-1] = cells[-1].removeprefix("!")
        grid.add_row(*map(Text, cells), style="bold red" if alarm else None)
    return grid


def requests_table(step: Step, width: int = WIDTH) -> Any:
    """One row per live request: lengths, tree, acceptance, and what its offsets should be.

    Where `width` has no room for a row, a sentence each: an id is not broken.
    """
    from rich.text import Text

    title = "requests (right value -> value in this step)"
    listed = [[plain(str(row[key])) for key in COLUMNS] for row in request_rows(step)]
    sizes = [max(map(len, column)) for column in zip(COLUMNS, *listed, strict=True)]
    if sum(sizes) + 2 * len(sizes) <= width:
        return table(list(COLUMNS), listed, title=title)
    told = [", ".join(map(" ".join, zip(COLUMNS, row, strict=True))) for row in listed]
    return Text("\n".join([title, *(fold(text, width, hang=4) for text in told), ""]))


def heatmap(step: Step, request: int, width: int = drawing.WIDTH) -> Any:
    """The coloured mask picture of a request, with its legend."""
    from rich.text import Text

    head, *lines = drawing.heatmap(step, request, width)
    body = [_coloured(line, _GLYPH_STYLES, skip=10) for line in lines]
    return _join([_bold(head), *body, *(Text(part) for part in _legend(width) if lines)])


def _legend(width: int) -> list[str]:
    """The legend, broken between its entries only."""
    entries = [entry.replace(" ", "\0") for entry in drawing.LEGEND.split("  ")]
    return [x.replace("\0", " ") for x in textwrap.wrap("  ".join(entries), width)]


def ruler(step: Step, request: int, width: int = drawing.WIDTH) -> Any:
    """The coloured rulers of query rows and mask cells around a request."""
    lines = drawing.rulers(step, request, width)
    return _join([_coloured(line, _RULER_STYLES, skip=10) for line in lines])


def tree(step: Step, request: int, width: int = drawing.WIDTH) -> Any:
    """The tree of a request, the accepted path in green."""
    from rich.text import Text

    head, *lines = drawing.tree(step, request, width=width)
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
