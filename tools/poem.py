"""Draw docs/garbled_poem.svg from docs/garbled_poem.txt: `python tools/poem.py [--check]`.

The text is what examples/garbled_poem.py printed on a GPU. Needs rich.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

COLUMN = 50  # width of the left column
DOCS = Path(__file__).resolve().parents[1] / "docs"


def drawn(text: str) -> str:
    """An SVG of a terminal with this text; the guard's words stand out."""
    from rich.console import Console
    from rich.text import Text

    width = max(map(len, text.splitlines())) + 1
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    guard = [False, False]  # whether the words of the left and right column have begun
    for line in text.rstrip().splitlines():
        row = Text()
        if line[COLUMN : COLUMN + 2] != " |":
            console.print(line)
            continue
        for at, part in enumerate((line[:COLUMN], line[COLUMN + 3 :])):
            guard[at] = guard[at] or part.startswith("ddtree_guard")
            row.append(" | " if at else "").append(part, "bold red" if guard[at] else "")
        if line.startswith("budget"):
            row, guard = Text(line, style="bold"), [False, False]
        console.print(row)
    return console.export_svg(title="examples/garbled_poem.py", unique_id="garbled-poem")


def main() -> int:
    """Write the picture, or compare it."""
    made = drawn((DOCS / "garbled_poem.txt").read_text())
    target = DOCS / "garbled_poem.svg"
    if "--check" in sys.argv:
        return 0 if target.read_text() == made else 1
    target.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
