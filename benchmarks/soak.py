"""Zero false alarms: guarded engines under mixed traffic, cell after cell, on one GPU.

    python benchmarks/soak.py --minutes 9 [--parallel 3] [--only NGRAM] [--plant] [--list]
                              [--site 0.5.17=FOLDER] [--again] [--faults A1]

Cells cover algorithm x graphs x overlap x release pairwise: the SGLang of this interpreter, and one
that lies in a folder. The result file is rewritten after every cell; a later call goes on with the
cells that are missing, and with `--again` also with those that another version of the device check
was measured in or that missed a fault (`guard` in a row: hashes of the sources and of their folder
device/). With `--plant` faults are planted afterwards in the same engines, through
`ddtree_guard.testing`; each must be found on its own step. Their rows go to a file of their own.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from files import sources, write
from serving import ROOT, Cell, Child

sys.path.insert(0, str(ROOT))

from ddtree_guard import render

START_S = 230.0  # the first start on a fresh box compiles for more than a minute
WIDTHS = {"NGRAM": (16, 8), "DFLASH": (8, 8), "EAGLE": (8, 12), "DDTREE": (17, 33)}
PATHS = ((True, True), (False, False), (True, False), (False, True))  # graphs, overlap
# Faults of each site, per algorithm: built offsets, mask, positions and slots, padded lanes of a
# replay, the walk, and the commit. DFLASH passes no mask and walks no tree. The first finding of
# a rule is logged at once, so none comes behind one whose fault it may follow from.
PLANTS = {
    "NGRAM": ("G4", "M2", "W3", "A4", "A1"),
    "DFLASH": ("K2", "P1", "G4", "A4"),
    "EAGLE": ("G4", "P1", "A4", "A1", "M2", "W3"),
    "DDTREE": ("P1", "K2", "G4", "A4", "M2"),
}
# The device looks for shared slots within a request; one of another request is not in the table.
FOUND_AS = {"K2": ("K2", "K3")}
PLANT_S = 6.0  # seconds for one of them, half of it traffic
SETTLE_S = 1.2  # the probe writes twice a second
LEAST_S = 8.0  # seconds of traffic without which a cell is no evidence


def cells(site: tuple[str, str] = ("", "")) -> list[Cell]:
    """All engines. `site` is (release, folder) of a second SGLang; it takes half of the cells and
    repeats those with graphs and overlap, which is how servers run.
    """
    release, folder = site
    found = [Cell("NONE")]
    for algorithm, widths in WIDTHS.items():
        for at, (graphs, overlap) in enumerate(PATHS):
            cell = Cell(
                algorithm, graphs, overlap, w=widths[at // 2], depth=("fast", "full")[at % 2]
            )
            other = replace(cell, release=release, site=folder)
            found.append(other if at >= 2 else cell)
            if at == 0 and folder:
                found.append(other)
    return found


def plants_of(cell: Cell, faults: str = "") -> tuple[str, ...]:
    """Rules whose faults are planted in an engine of this cell, in this order; of `faults` only,
    where they are given.
    """
    chosen = PLANTS.get(cell.algorithm, ())
    return tuple(
        rule
        for rule in chosen
        if (cell.graphs or not rule.startswith("G")) and (not faults or rule in faults.split(","))
    )


def measure(
    cell: Cell, seconds: float, deadline: float, plants: tuple[str, ...] = ()
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run one cell: fixed prompts, traffic, the guard's counters; then one fault after another."""
    child = Child(cell)
    try:
        start = child.answer(min(START_S, deadline - time.monotonic()))
        outputs = child.ask(120, do="fixed")["outputs"]
        left = deadline - time.monotonic() - 4 - PLANT_S * len(plants)
        if left < min(LEAST_S, seconds):
            raise RuntimeError(f"no time left for traffic after a start of {start['start_s']} s")
        traffic = child.ask(seconds + 90, do="soak", seconds=min(seconds, left),
                            seed=len(cell.name))  # fmt: skip
        time.sleep(SETTLE_S)
        sound = row(cell, start, outputs, traffic, child.probe(), log_of(cell))
        return sound, list(_planted(child, sound, plants))
    finally:
        child.stop()


def _planted(child: Child, sound: dict[str, Any], plants: tuple[str, ...]) -> Iterator[Any]:
    """Plant each fault in the running engine, and what became of it."""
    for at, rule in enumerate(plants):
        child.cell.path("probe.plant").write_text("\n".join(plants[: at + 1]))
        try:
            child.ask(60, do="soak", seconds=PLANT_S / 2, seed=1000 + at)
        except RuntimeError as error:  # a fault may end the server; what was sound stays
            sound["plant_error"] = f"{rule}: {error}"[-2000:]
            return
        time.sleep(SETTLE_S)
        probe = child.probe()
        plan = [p for p in probe.get("plants", []) if p["rule"] == rule][-1:]
        lines = [found for text in log_of(child.cell).splitlines()
                 if (found := render.parse_line(text))]  # fmt: skip
        kept = ("release", "guard", "algorithm", "graphs", "overlap", "w", "depth")
        found = {"cell": f"{sound['cell']}-{rule}", **{name: sound[name] for name in kept},
                 "planted": plan[0] if plan else {"rule": rule, "at": None}, "lines": lines,
                 "faults": probe.get("faults", {})}  # fmt: skip
        yield {**found, "plant_verdict": judge_plant(found)}


def log_of(cell: Cell) -> str:
    """The engine's log."""
    return cell.path("log.txt").read_text(errors="replace")


def row(
    cell: Cell, start: dict[str, Any], outputs: Any, traffic: Any, probe: dict[str, Any], log: str
) -> dict[str, Any]:
    """One row of the result file."""
    lines = [found for text in log.splitlines() if (found := render.parse_line(text))]
    boot = [text for text in log.splitlines() if "ddtree_guard armed=" in text]
    return {
        "cell": cell.name, "release": start["release"], "guard": sources(),
        "algorithm": cell.algorithm, "graphs": cell.graphs, "overlap": cell.overlap,
        "w": cell.w, "depth": cell.depth,
        "steps_checked": probe.get("steps_checked", 0),
        "verify_steps": probe.get("verify_steps", 0),
        "findings": probe.get("findings", 0), "latent": probe.get("latent", 0),
        "skipped": probe.get("skipped", {}), "faults": probe.get("faults", {}),
        "checker": probe.get("checker"), "start_s": start["start_s"], "traffic": traffic,
        "lines": lines, "boot": boot[:1], "outputs": outputs, "outputs_identical": None,
        "tainted": log.count("ddtree_guard tainted"), "ahead": probe.get("ahead"),
    }  # fmt: skip


def judge_plant(found: dict[str, Any]) -> dict[str, Any]:
    """Whether the planted fault was the one that was found, on its step, before tokens left."""
    plan, lines = found["planted"] or {}, found["lines"]
    rules = FOUND_AS.get(plan.get("rule"), (plan.get("rule"),))
    own = [line for line in lines if line["rule"] in rules]
    first = own[0] if own else {}
    return {
        "planted_at": plan.get("at"),
        "found_as": first.get("rule"),
        "found_at": first.get("step"),
        "right_step": str(plan.get("at")) == first.get("step"),
        "right_rid": first.get("rid") in (plan.get("rid"), "-"),
        "tokens_left": first.get("tokens_left"),
    }


def compare(rows: dict[str, dict[str, Any]], reference: dict[str, Any]) -> None:
    """Fill `outputs_identical`: guarded against unguarded, one cell per algorithm."""
    for found in rows.values():
        outputs = reference.get(found["cell"])
        if outputs is not None:
            found["outputs_identical"] = outputs == found["outputs"]


def reference_cells(chosen: list[Cell]) -> list[Cell]:
    """Engines without the guard: the cell with graphs and overlap of each algorithm."""
    own = [c for c in chosen if c.tool != "off" and not c.site and c.graphs and c.overlap]
    return [replace(c, tool="off") for c in own]


def reference_outputs(cell: Cell, deadline: float) -> Any:
    """What an unguarded engine answers to the fixed prompts."""
    child = Child(cell)
    try:
        child.answer(min(START_S, deadline - time.monotonic()))
        return child.ask(120, do="fixed")["outputs"]
    finally:
        child.stop()


class Results:
    """The result file: rows by cell, and the outputs of unguarded engines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        held = json.loads(path.read_text()) if path.exists() else {}
        self.rows = {found["cell"]: found for found in held.get("rows", [])}
        self.reference: dict[str, Any] = held.get("reference", {})
        self.failed: dict[str, str] = {}
        self.lock = threading.Lock()

    def save(self) -> None:
        """Rewrite the file as a whole."""
        with self.lock:
            self._save()

    def _save(self) -> None:
        compare(self.rows, self.reference)
        value = {
            "rows": list(self.rows.values()),
            "reference": self.reference,
            "failed": self.failed,
            "totals": totals(list(self.rows.values())),
        }
        write(self.path, value)


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over sound cells. No finding in n steps bounds the rate by 3/n (95 %)."""
    sound = [found for found in rows if "plant_verdict" not in found]
    steps = sum(found["steps_checked"] for found in sound)
    findings = sum(found["findings"] for found in sound)
    return {
        "engines": len(sound),
        "verify_steps": sum(found["verify_steps"] for found in sound),
        "steps_checked": steps,
        "findings": findings,
        "rate_below": round(3 / steps, 8) if steps and not findings else None,
    }


def run(
    results: Results, planted: Results, chosen: list[Cell], options: argparse.Namespace
) -> None:
    """Measure the missing cells, several at a time, until the time is over."""
    deadline = time.monotonic() + options.minutes * 60

    def one(cell: Cell) -> None:
        if deadline - time.monotonic() < options.room:
            return  # left for the next call
        try:
            if cell.tool == "off":
                results.reference[_reference(cell)] = reference_outputs(cell, deadline)
            else:
                plants = plants_of(cell, options.faults) if options.plant else ()
                found, bad = measure(cell, options.seconds, deadline, plants)
                if not (options.faults and cell.name in results.rows and _covered(found)
                        and not found["findings"]):  # fmt: skip
                    results.rows[cell.name] = found  # else its traffic only led to the faults
                planted.rows |= {one["cell"]: one for one in bad}
            print(f"done {cell.name}", flush=True)
        except Exception as error:
            results.failed[cell.name] = str(error)
            print(f"FAILED {cell.name}: {error}", flush=True)
        results.save()
        if options.plant:
            planted.save()

    missing = [c for c in chosen if c.tool != "off" and c.name not in results.rows]
    missing += [c for c in chosen if c.tool == "off" and _reference(c) not in results.reference]
    # as servers run first, in case the time does not do for all
    missing.sort(key=lambda c: (not (c.graphs and c.overlap), not c.site))
    if options.again:
        again = {c.name: results.rows[c.name] for c in chosen if c.name in results.rows}
        missed = {name for name in again for row in planted.rows.values()
                  if row["cell"].rpartition("-")[0] == name and not _hit(row)}  # fmt: skip
        old = [c for c in chosen if c.name in again
               and (not _current(again[c.name]) or c.name in missed)]  # fmt: skip
        # what was missed first, then the oldest
        missing += sorted(old, key=lambda c: (c.name not in missed, "guard" in again[c.name]))
    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(one, missing))
    results.save()


def _current(row: dict[str, Any]) -> bool:
    """Whether today's device check was what this row was measured in."""
    return bool(row.get("guard", {}).get("device") == sources()["device"])


def _reference(cell: Cell) -> str:
    """Name of the guarded cell that an unguarded one is compared with."""
    return replace(cell, tool="guard").name


def main(argv: list[str] | None = None) -> int:
    """Run what is missing; 1 if a sound cell has a finding or a planted one was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="traffic per cell")
    parser.add_argument("--room", type=float, default=120.0, help="least seconds left for a cell")
    parser.add_argument("--parallel", type=int, default=3, help="engines on the GPU at a time")
    parser.add_argument("--only", action="append", default=[], help="algorithm, may be repeated")
    parser.add_argument("--plant", action="store_true", help="plant faults afterwards")
    parser.add_argument("--faults", default="", help="plant those of these rules only: A1,W3")
    parser.add_argument("--again", action="store_true", help="measure old rows again")
    parser.add_argument("--list", action="store_true", help="print the cells and stop")
    parser.add_argument(
        "--site", type=_site, default=("", ""), help="RELEASE=FOLDER of a second SGLang"
    )
    parser.add_argument("--match", default="", help="only cells whose name fits this pattern")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/soak.json")
    options = parser.parse_args(argv)
    chosen = [c for c in cells(options.site) if not options.only or c.algorithm in options.only]
    chosen = [c for c in chosen if re.search(options.match, c.name)]
    if find_spec("ddtree_guard.ddtree") is None:
        chosen = [c for c in chosen if c.algorithm != "DDTREE"]
    chosen += reference_cells(chosen)
    if options.list:
        print("\n".join(cell.name for cell in chosen))
        return 0
    results = Results(options.out)
    planted = Results(options.out.with_name(f"{options.out.stem}_planted.json"))
    run(results, planted, chosen, options)
    print(json.dumps(totals(list(results.rows.values()))))
    bad = [r for r in results.rows.values() if r["findings"]]
    missed = [r for r in planted.rows.values() if not _hit(r)]
    gaps = [r for r in results.rows.values() if not _covered(r)]
    ended = [r for r in results.rows.values() if r.get("plant_error")]
    named = (("FINDING", bad), ("MISSED", missed), ("NOT COVERED", gaps), ("ENDED", ended))
    for word, rows in named:
        for found in rows:
            print(f"{word} {found['cell']}")
    return 1 if bad or missed or gaps or ended or results.failed else 0


def _site(text: str) -> tuple[str, str]:
    release, _, folder = text.partition("=")
    if not (release and folder):
        raise argparse.ArgumentTypeError(f"expected RELEASE=FOLDER, found {text}")
    return release, folder


def _covered(found: dict[str, Any]) -> bool:
    """Whether the guard checked every verify step, and there were some."""
    if found["algorithm"] == "NONE":
        return True
    return 0 < found["verify_steps"] == found["steps_checked"] and not found["faults"]


def _hit(found: dict[str, Any]) -> bool:
    verdict = found["plant_verdict"]
    return verdict["right_step"] and verdict["right_rid"] and verdict["tokens_left"] == "no"


if __name__ == "__main__":
    sys.exit(main())
