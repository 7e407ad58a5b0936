"""What the guard adds to a step of one real engine, in turns with nothing. Needs a CUDA device.

    python benchmarks/host_turns.py [--w 8,64] [--gpus 0,1] [--seconds 150] [--shape 8b]

One guarded NGRAM engine a width, with graphs and overlap. Its process mutes the guard's sites for a
few steps and lets them work for as many, again and again (`testing.probe.Turns`), and takes the
time from one step to the next. `added_us` is the median difference between turns at the same place
of neighbouring blocks, with the 95 % interval: for all sites, and for those before the replay
alone. Two engines that are compared differ by more than the guard adds; this sees nothing else, but
not the wrappers, the check inside the graph (`device_check.py`) nor the guard's threads
(`threads_s`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rounds import interval
from server_overhead import processors, where
from serving import ROOT, Cell, Child

LOADS = (8, 1, 32)
LENGTH = 1400  # new tokens of a request: at least six turns
POOL, SIZES = 64_000, (1, 8, 32)


def measure(cell: Cell, seconds: float) -> dict[str, Any]:
    """Load the engine, an equal time with each number of requests, and ask the probe."""
    deadline = time.monotonic() + seconds
    child = Child(cell)
    try:
        ready = child.answer(seconds - 30)
        for left, load in zip(range(len(LOADS), 0, -1), LOADS, strict=True):
            end = time.monotonic() + (deadline - 6 - time.monotonic()) / left
            child.ask(60, do="block", concurrency=load, length=64)
            child.ask(60, do="settled")
            while time.monotonic() < end:
                child.ask(60, do="block", concurrency=load, length=LENGTH)
        found = child.fresh_probe()
    finally:
        child.stop(0.3)
    names = ("verify_steps", "steps_checked", "skipped", "findings", "faults", "threads_s")
    turns = found.get("turns", {})
    return {
        "w": cell.w, "shape": cell.shape, "release": ready["release"],
        **{name: found.get(name) for name in names},
        "rows": [row(bs, turns[str(bs)]) for bs in sorted(LOADS) if str(bs) in turns],
    }  # fmt: skip


def row(bs: int, turns: list[list[Any]]) -> dict[str, Any]:
    """One number of requests, from turns as `testing.probe.Turns.table` gives them. Three blocks
    in a row have each state once at each place; those that are whole are compared.
    """
    threes: dict[tuple[int, int], dict[str, float]] = {}
    for block, place, state, took in turns:
        threes.setdefault((block // 3, place), {})[state] = took
    whole = [three for three in threes.values() if len(three) == 3]
    found: dict[str, Any] = {"bs": bs, "turns": len(turns), "compared": len(whole)}
    if len(whole) < 2:
        return found
    found["step_us"] = round(statistics.median(three["none"] for three in whole), 1)
    for name in ("all", "front"):
        added = [three[name] - three["none"] for three in whole]
        low, high = interval(added)
        found[name] = {
            "added_us": round(statistics.median(added), 1),
            "low": round(low, 1), "high": round(high, 1),
            "mean_us": round(statistics.fmean(added), 1),
        }  # fmt: skip
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure all widths at once, each on its own GPU, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--w", type=lambda t: [int(n) for n in t.split(",")], default=[8, 64])
    parser.add_argument("--gpus", type=lambda text: text.split(","), default=[""])
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--shape", default="8b", choices=("8b", "small"))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/host_turns.json")
    options = parser.parse_args(argv)
    groups = processors(len(options.gpus))
    result: dict[str, Any] = {"environment": {**where(), "shape": options.shape}, "rows": []}

    def work(at: int, w: int) -> None:
        gpu = at % len(options.gpus)
        cell = Cell(
            "NGRAM", shape=options.shape, w=w, max_running=32, pool=POOL, sizes=SIZES, asked=True,
            turns=True, gpu=options.gpus[gpu], cpus=tuple(groups[gpu]),
        )  # fmt: skip
        try:
            result["rows"].append(measure(cell, options.seconds))
        except Exception as error:  # the other width goes on
            result.setdefault("failed", {})[str(w)] = f"{type(error).__name__}: {error}"

    widths = dict.fromkeys(options.w)
    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(widths)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result["rows"].sort(key=lambda found: int(found["w"]))
    if result["rows"]:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if len(result["rows"]) == len(widths) else 1


if __name__ == "__main__":
    sys.exit(main())
