"""Write the README's tables from the raw results: `python tools/readme.py [--check]`.

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`. With `--check` nothing is written and
the exit code says whether the README is current. Standard library only.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def load(name: str) -> Any:
    """A result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def device_check() -> str:
    """GPU time per clean step inside a graph, against its floor."""
    found = load("device_check")
    rows = [
        [
            row["bs"],
            row["w"],
            row["context"],
            row["depth"],
            "{median:.1f} ({min:.1f}-{max:.1f})".format(**row["gpu_us"]),
            f"{row['gpu_us']['median'] / row['floor_us']['median']:.1f}",
        ]
        for row in found["rows"]
        if row["mode"] == "graph" and (row["bs"], row["w"]) in ((8, 17), (8, 65), (32, 257))
    ]
    where = found["environment"]
    note = f"{where['device']}, torch {where['torch']}, Triton {where['triton']}; microseconds."
    head = ("requests", "w", "context", "depth", "GPU time, median (range)", "times the floor")
    return f"{table(head, rows)}\n\n{note}"


def engines() -> str:
    """Guarded engines under mixed traffic."""
    rows = [
        [
            row["algorithm"],
            row["w"],
            "on" if row["graphs"] else "off",
            "on" if row["overlap"] else "off",
            f"{row['steps_checked']} of {row['verify_steps']}",
            row["findings"],
        ]
        for row in load("soak")["rows"]
    ]
    head = ("algorithm", "w", "graphs", "overlap", "steps checked", "findings")
    return table(head, sorted(rows, key=str))


def lossless() -> str:
    """DDTREE against plain decoding, and the incident."""
    rows = [
        [
            row["algorithm"] + (", stock backend" if row["incident"] else ""),
            row["block"],
            row["budget"] or "-",
            "on" if row["graphs"] else "off",
            f"{row['differing']} of {row['bs']}",
            f"{row['accept_length']:.2f}",
        ]
        for row in load("losslessness")["rows"]
        if row["bs"] == 16 and row["algorithm"] != "plain"
    ]
    head = ("algorithm", "block", "budget", "graphs", "texts that differ beyond ties", "accepted")
    return table(head, rows)


def shadow_cost() -> str:
    """One comparison of shadow mode, by size."""
    found = load("shadow")
    rows = [
        [
            row["w"],
            row["s"],
            "{median:.0f} ({min:.0f}-{max:.0f})".format(**row["gpu_us"]),
            "{median:.0f} ({min:.0f}-{max:.0f})".format(**row["host_us"]),
        ]
        for row in found["cost"]
    ]
    head = ("w", "committed tokens", "GPU time, median (range)", "host time")
    return f"{table(head, rows)}\n\n{found['environment']['device']}; microseconds."


def shadow_engines() -> str:
    """Engines with every fourth step shadowed."""
    rows = [
        [
            row["algorithm"] + (", stock backend" if row["incident"] else ""),
            "on" if row["graphs"] else "off",
            row["planted"] or "-",
            row["verify_steps"],
            row["steps_shadowed"],
            f"{row['shadow']['worst']:.2f}",
            ", ".join(row["rules"]) or "none",
        ]
        for row in load("shadow")["rows"]
    ]
    head = (
        "algorithm", "graphs", "planted", "verify steps", "shadowed",
        "largest error of a right step, of what is allowed", "rules found",
    )  # fmt: skip
    return table(head, sorted(rows, key=str))


TABLES: dict[str, Callable[[], str]] = {
    "device_check": device_check,
    "engines": engines,
    "lossless": lossless,
}
SHADOW: dict[str, Callable[[], str]] = {
    "shadow_cost": shadow_cost,
    "shadow_engines": shadow_engines,
}
PLACES = {README: TABLES, ROOT / "docs" / "shadow.md": SHADOW}


def render(path: Path) -> str:
    """A document's text with every table made anew."""
    text = path.read_text()
    for name, make in PLACES[path].items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.S)
        if not place.search(text):
            raise SystemExit(f"{path.name} has no place for the table {name}")
        made = make()
        text = place.sub(lambda match, made=made: f"{match[1]}{made}\n{match[2]}", text)
    return text


def main() -> int:
    """Write the documents, or compare them."""
    made = {path: render(path) for path in PLACES}
    if "--check" in sys.argv:
        return 0 if all(text == path.read_text() for path, text in made.items()) else 1
    for path, text in made.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
