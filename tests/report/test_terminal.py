"""Colour on a terminal, none in a pipe or with NO_COLOR; tables that quote what they show."""

import io
import re

import pytest
from rich.console import Console

from ddtree_guard.report import rows, terminal
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step

BROKEN = FAULTS["W3"](sound_step(3, lens=(37, 21, 50)), 2).step
PICTURES = (terminal.ruler, terminal.heatmap, terminal.tree)


def drawn(console: Console, out: io.StringIO) -> str:
    for picture in PICTURES:
        console.print(picture(BROKEN, 2))
    console.print(terminal.requests_table(BROKEN))
    return out.getvalue()


def test_a_pipe_gets_no_colour_and_at_most_100_columns() -> None:
    out = io.StringIO()
    text = drawn(terminal.console(out), out)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_terminal_gets_colour_over_the_same_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain, colour = io.StringIO(), io.StringIO()
    without = drawn(terminal.console(plain), plain)
    with_colour = drawn(Console(file=colour, force_terminal=True, width=100, highlight=False,
                                color_system="standard"), colour)  # fmt: skip
    assert "\x1b[32m" in with_colour
    assert re.sub(r"\x1b\[[0-9;]*m", "", with_colour) == without


def test_no_color_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    text = drawn(Console(file=out, force_terminal=True, width=100, highlight=False), out)
    assert not re.search(r"\x1b\[(?:[0-9;]*;)?3[0-9]", text)


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_no_color_means_no_bold_and_no_dim_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    out = Screen()
    assert "\x1b" not in drawn(terminal.console(out), out)


@pytest.mark.parametrize(("columns", "width"), [(40, 60), (60, 60), (80, 80), (200, 100)])
def test_pictures_fit_the_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int, width: int
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Screen()
    console = terminal.console(out)
    assert console.width == width
    for w in (17, 65):
        step = FAULTS["W3"](sound_step(3, lens=(37, 21, 50), w=w), 2).step
        console.print(terminal.ruler(step, 2, console.width))
        console.print(terminal.heatmap(step, 2, console.width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert max(len(line) for line in lines if line.startswith("expected")) > width - 5


def test_the_table_shows_right_and_found_values() -> None:
    out = io.StringIO()
    terminal.console(out).print(terminal.requests_table(BROKEN))
    row = next(line for line in out.getvalue().splitlines() if "r2" in line)
    assert "1139 -> 1072" in row
    assert "50" in row.split()


def test_a_table_cell_cannot_command_the_terminal_or_the_markup() -> None:
    out = io.StringIO()
    terminal.console(out).print(terminal.table(("a", "b"), [("[red]x[/red]", "\x1b[2J")]))
    assert "[red]x[/red]" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_missing_parts_are_dashes() -> None:
    step = BROKEN.replace(layout__qo_indptr=None, tree__sizes=None, tree__depths=None)
    row = rows.request_rows(step)[0]
    assert (row["query rows"], row["nodes"], row["depth"]) == ("-", "-", "-")
