"""The incident and its cure: `python examples/garbled_poem.py MODEL` (from tiny_model.py).

A target recites the Zen of Python with DDTREE at budgets 7 and 16, graphs on and off. On the left
its backend is told the draft block size (8), as in the incident: 7 + 1 rows are 8, 16 + 1 are not.
On the right it is the corrected one. The guard names the fault in its first step. Needs a GPU.
"""

from __future__ import annotations

import json
import re
import sys
from itertools import product, zip_longest
from pathlib import Path
from textwrap import TextWrapper

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from engines import POEM, Setup, generate, run_all, save, start

WRAP = TextWrapper(50, break_on_hyphens=False)


def engines(bad: bool) -> list[Setup]:
    cells = product((7, 16), (True, False))
    return [Setup("DDTREE", b, graphs=g, incident=bad, guard="log") for b, g in cells]


def recite(setup: Setup, model: Path, folder: Path) -> None:
    """One engine: what it says after the prompt, twice in one batch."""
    engine = start(setup, model)
    ids = generate(engine, [list(POEM.encode())] * 2, 130)[-1]["ids"]
    save(folder / f"{setup.name}.json", bytes(i % 256 for i in ids).decode("ascii", "replace"))
    engine.shutdown()


def said(setup: Setup, folder: Path) -> list[str]:
    """The poem as this engine tells it, then the guard's first words about a step of it."""
    path, log = (folder / f"{setup.name}.{end}" for end in ("json", "log"))
    text = POEM.splitlines()[-1] + (json.loads(path.read_text()) if path.exists() else "(no text)")
    found = re.findall("ddtree_guard finding.* step=[1-9].*", log.read_text())
    lines = re.sub(r"[^\n -~]", "?", text).splitlines()
    lines += ["", *(found[:1] or ["the guard: no finding"])]
    return [part for line in lines for part in WRAP.wrap(line) or [""]]


def main() -> None:
    if sys.argv[1] == "--cell":
        return recite(Setup(**json.loads(sys.argv[2])), Path(sys.argv[3]), Path(sys.argv[4]))
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else "garbled-poem")
    run_all(__file__, engines(True) + engines(False), folder, 200, [sys.argv[1], str(folder)])
    for broken, whole in zip(engines(True), engines(False), strict=True):
        name = f"budget {broken.budget}, graphs {'on' if broken.graphs else 'off'}, stock backend"
        print(f"\n{name:<{WRAP.width}} | corrected backend\n{'-' * 2 * WRAP.width}")
        for left, right in zip_longest(said(broken, folder), said(whole, folder), fillvalue=""):
            print(f"{left:<{WRAP.width}} | {right}".rstrip())


if __name__ == "__main__":
    main()
