"""The incident and its cure: `python examples/garbled_poem.py MODEL`, MODEL from tiny_model.py.

A target trained on the Zen of Python recites it with DDTREE at budgets 7 and 16. With the incident
switch on, its attention backend is told the draft block size (8) instead of the tree's width:
budget 7 is 8 rows and stays clean, budget 16 is 17 rows and does not. Turning CUDA graphs off does
not help; the corrected backend does. Needs a GPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from engines import POEM, Setup, generate, run_all, save, start

SETUPS = (
    Setup(guard="off"),
    Setup("DDTREE", 7, incident=True, guard="log"),
    Setup("DDTREE", 16, incident=True, guard="log"),
    Setup("DDTREE", 16, incident=True, graphs=False, guard="log"),
    Setup("DDTREE", 16, guard="log"),
)


def recite(setup: Setup, model: Path, folder: Path) -> None:
    """One engine: what it prints after the prompt."""
    engine = start(setup, model)
    ids = generate(engine, [list(POEM.encode())] * 2, 120)[-1]["ids"]
    save(folder / f"{setup.name}.json", bytes(i % 256 for i in ids).decode("ascii", "replace"))
    engine.shutdown()


def main() -> None:
    """Run the five engines at once and print their texts and the guard's sentences."""
    if sys.argv[1] == "--cell":
        recite(Setup(**json.loads(sys.argv[2])), Path(sys.argv[3]), Path(sys.argv[4]))
        return
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp())
    run_all(__file__, SETUPS, folder, 400, [sys.argv[1], str(folder)])
    for setup in SETUPS:
        path, log = folder / f"{setup.name}.json", folder / f"{setup.name}.log"
        text = json.loads(path.read_text()) if path.exists() else "(no text)"
        print(f"--- {setup.name}\n{POEM.splitlines()[-1]}{text}\n")
        findings = [line for line in log.read_text().splitlines() if "ddtree_guard finding" in line]
        print("\n".join(findings[:1]), end="\n\n" if findings else "")


if __name__ == "__main__":
    main()
