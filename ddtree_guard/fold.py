"""Text for people within the columns of the output, broken between words: an id stays whole.

What machines read (the log line, JSON, annotations) never comes here.
"""

from __future__ import annotations

import re
import textwrap
from typing import TextIO

WIDTH, LEAST = 100, 60  # columns where the output is no terminal, and the fewest that are used
_HELD = "\0"  # a blank at which no line is broken; `render.plain` leaves no such character
_TO_COPY = re.compile(r"`[^`]{1,50}`|\bddtree-guard [a-z-]+ [A-Z]+\d+\b")
_COMMAND = re.compile(r"\s*(next: )?ddtree-guard ", re.IGNORECASE)  # a line to copy: left as it is
_COMMANDS = ("::", "##[")  # what a CI runner obeys at the start of any line


def columns() -> int:
    """COLUMNS where it is set, else those of the terminal, else 100; at least 60."""
    import shutil

    return max(LEAST, shutil.get_terminal_size((WIDTH, 24)).columns)


def fold(text: str, width: int | None = None, hang: int = 2) -> str:
    """The text in lines of at most `width` columns, so far as its words allow.

    What follows a break stands `hang` columns to the right of where its line began.
    """
    width = columns() if width is None else width
    return "\n".join(part for line in text.split("\n") for part in _folded(line, width, hang))


def say(text: str, file: TextIO | None = None, hang: int = 2) -> None:
    """Print the text, folded."""
    print(fold(text, hang=hang), file=file)


def _folded(line: str, width: int, hang: int) -> list[str]:
    if len(line) <= width or _COMMAND.match(line):
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + hang)
    whole = _TO_COPY.sub(lambda found: found[0].replace(" ", _HELD), line)
    wrapped = textwrap.wrap(
        whole, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    first, *rest = [part.replace(_HELD, " ") for part in wrapped] or [line]
    return [first, *(f"| {x}" if x.lstrip().startswith(_COMMANDS) else x for x in rest)]
