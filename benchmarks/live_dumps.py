"""The flight recorder in real engines: dumps asked for and found under load, and read back.

    python benchmarks/live_dumps.py --out benchmarks/results [--only NGRAM]

Per engine: traffic; `ddtree-guard dump --pid` on the scheduler once the ring is full; then one
planted fault. Every dump goes through `check`, `show` and `report`; what `check` finds in the
fault's dump must be what the server's log said; `request` must name the rule for the fault's
request, and acquit another one. `live_dumps.json` is rewritten after every engine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serving import ROOT, Cell, Child

sys.path.insert(0, str(ROOT))

from ddtree_guard import render
from ddtree_guard.config import Config
from ddtree_guard.dump.find import find_dumps
from ddtree_guard.dump.read import Dump
from ddtree_guard.guard import Guard

FULL = 100  # steps after which the ring is full and a dump is asked for
PLANT_AT = 240
START_S = 270.0  # a fresh box compiles for minutes when others share its cores
RULES = ("W3", "P1", "M2", "W1")
LATENT = ("M5",)  # stock's captured mask lacks the tree columns; no kernel reads beyond its end


def cells() -> list[Cell]:
    """NGRAM and DDTREE, graphs and eager, a fault of another kind in each."""
    kinds = [(name, w, graphs) for name, w in (("NGRAM", 16), ("DDTREE", 17))
             for graphs in (True, False)]  # fmt: skip
    return [
        Cell(
            name, graphs, overlap=graphs, w=w, plant=f"{rule}@{PLANT_AT}", folder="/tmp/live-dumps"
        )
        for (name, w, graphs), rule in zip(kinds, RULES, strict=True)
    ]


def tool(*words: str) -> dict[str, Any]:
    """One run of the command line: exit code, output, seconds."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "ddtree_guard", *words],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    seconds = round(time.perf_counter() - began, 2)
    return {"exit": done.returncode, "out": done.stdout + done.stderr, "seconds": seconds}


def wait_for(found: Callable[[], Any], seconds: float) -> Any:
    """What `found` returns once that is something. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not (value := found()):
        if time.monotonic() > end:
            raise TimeoutError(f"nothing within {seconds:.0f} s")
        time.sleep(0.1)
    return value


def dump_of(cell: Cell, kind: str, word: str = "") -> Path | None:
    """The first dump with this trigger, whose reason has this word."""
    root = cell.path("dumps")
    dumps = {path: Dump(path).trigger for path in (find_dumps(root) if root.is_dir() else [])}
    return next((p for p, t in dumps.items() if t["kind"] == kind and word in t["why"]), None)


def asked(cell: Cell, child: Child) -> dict[str, Any]:
    """Ask the scheduler for a dump once its ring is full."""
    wait_for(lambda: child.probe().get("verify_steps", 0) >= FULL, 60)
    told = tool("dump", "--pid", str(child.probe()["recorder"]["pid"]))
    wait_for(lambda: dump_of(cell, "signal"), 20)
    return {"exit": told["exit"], "at_step": child.probe()["verify_steps"]}


def readers(path: Path) -> dict[str, Any]:
    """What the offline tools make of a dump."""
    page = path.parent / f"{path.name}.html"
    runs = {
        "check": tool("check", str(path), "--json"),
        "show": tool("show", str(path)),
        "report": tool("report", str(path), "-o", str(page)),
    }
    dump, guard = Dump(path), Guard(Config())
    reports = [guard.check(step) for step in dump.steps()]
    return {
        "steps": len(reports),
        "rules_checked": sorted({rule for report in reports for rule in report.checked}),
        "findings": [
            [n, f.rule]
            for n, report in enumerate(reports)
            for f in report.findings
            if f.rule not in LATENT
        ],
        "latent": sum(f.rule in LATENT for report in reports for f in report.findings),
        "mb": round(sum(file.stat().st_size for file in path.iterdir()) / 2**20, 2),
        "exits": {name: run["exit"] for name, run in runs.items()},
        "seconds": {name: run["seconds"] for name, run in runs.items()},
        "said": {name: run["out"][-300:] for name, run in runs.items() if run["exit"] > 1},
        "page_kb": page.stat().st_size >> 10 if page.exists() else 0,
        "suppressed": dump.trigger["suppressed"],
        "doctor": len(dump.doctor),
        "requests": len(dump.requests()),
    }


def fault(cell: Cell, child: Child, path: Path) -> dict[str, Any]:
    """Log line, manifest and offline check of the planted fault, side by side."""
    text = cell.path("log.txt").read_text(errors="replace")
    lines = [line for found in text.splitlines() if (line := render.parse_line(found))]
    plan = child.probe()["planted"]
    own = [line for line in lines if line["step"] == str(plan["at"])]
    dump = Dump(path)
    last = list(dump.steps())[-1]
    online = {f.rule: (f.rid, f.request, f.row) for _, f in dump.findings()}
    offline = {f.rule: (f.rid, f.request, f.row) for f in Guard(Config()).check(last).findings}
    sites = {rule: offline.get(rule) == place for rule, place in online.items()}
    name = next((line["name"] for line in own if line["name"] != "-"), None)
    clean = next((r["rid"] for r in map(_trail, dump.requests()) if r["clean"]), None)
    return {
        "planted": plan["rule"], "planted_at": plan["at"], "dumped_step": last.who.step_id,
        "logged": [line["rule"] for line in own], "online": sorted(online),
        "offline": sorted(offline), "equal": all(sites.values()) and bool(sites),
        "more_offline": sorted(set(offline) - set(online)),
        "others_logged": [
            line["rule"] for line in lines if line not in own and line["rule"] not in LATENT
        ],
        "latent_logged": [line["rule"] for line in lines if line["rule"] in LATENT],
        "request_hit": _asked(cell, name), "request_clean": _asked(cell, clean),
    }  # fmt: skip


def _trail(trail: Any) -> dict[str, Any]:
    return {"rid": trail.rid, "clean": trail.clean}


def _asked(cell: Cell, name: str | None) -> dict[str, Any] | None:
    """`ddtree-guard request NAME`: exit code and verdict."""
    if name is None:
        return None
    told = tool("request", name, str(cell.path("dumps")))
    return {"exit": told["exit"], "verdict": told["out"].splitlines()[:1]}


def measure(cell: Cell, seconds: float) -> dict[str, Any]:
    """One engine."""
    child = Child(cell)
    row: dict[str, Any] = {"cell": cell.name}
    try:
        row["release"] = child.answer(START_S)["release"]
        child.send(do="soak", seconds=seconds, seed=5)
        row["asked"] = asked(cell, child)
        rule = cell.plant.partition("@")[0]
        path = wait_for(lambda: dump_of(cell, "finding", rule), 2 * seconds)
        row["traffic"] = child.answer(seconds + 60)
        time.sleep(1.0)  # the probe writes twice a second
        row["probe"] = child.probe()
        row["boot"] = [t for t in _log(cell).splitlines() if "ddtree_guard armed=" in t][:1]
        signal = dump_of(cell, "signal")
        assert signal is not None
        row["signal_dump"] = readers(signal)
        row["finding_dump"] = readers(path)
        row["fault"] = fault(cell, child, path)
        row["good"] = good(row)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        print(traceback.format_exc(), _log(cell)[-3000:], flush=True)
    finally:
        child.stop()
    return row


def _log(cell: Cell) -> str:
    return cell.path("log.txt").read_text(errors="replace")


def good(row: dict[str, Any]) -> dict[str, bool]:
    """What must hold of an engine."""
    told, ring, found = row["signal_dump"], row["probe"]["recorder"]["ring"], row["fault"]
    hit, clean = found["request_hit"], found["request_clean"]
    return {
        "ring_full": told["steps"] == Config().ring_steps,
        "nothing_dropped": ring["dropped"] == 0,
        "no_faults": row["probe"]["recorder"]["faults"] == 0 and not row["probe"]["faults"],
        "signal_dump_clean": told["exits"]
        == {"check": int(told["latent"] > 0), "show": 0, "report": 0},
        "no_false_finding": not told["findings"] and not found["others_logged"],
        "fault_dumped": found["dumped_step"] == found["planted_at"],
        "offline_is_online": found["equal"] and found["planted"] in found["offline"],
        "hit_named": hit is None or (hit["exit"] == 1 and found["planted"] in str(hit)),
        "clean_acquitted": clean is not None and clean["exit"] == 0,
    }


def main() -> int:
    """Run the engines side by side. 1 unless everything that must hold does."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="traffic per engine")
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--only", action="append", default=[], help="algorithm, may be repeated")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    options = parser.parse_args()
    chosen = [c for c in cells() if not options.only or c.algorithm in options.only]
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    lock = threading.Lock()

    def one(cell: Cell) -> None:
        row = measure(cell, options.seconds)
        with lock:
            rows.append(row)
            text = json.dumps({"engines": sorted(rows, key=lambda r: str(r["cell"]))}, indent=1)
            (options.out / "live_dumps.json").write_text(text + "\n")
        print(row["cell"], row.get("good") or row.get("error"), flush=True)

    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(one, chosen))
    return 0 if rows and all(all(r.get("good", {"": False}).values()) for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
