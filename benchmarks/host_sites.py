"""Host time of the guard's sites inside one real engine, against its step. Needs a CUDA device.

    python benchmarks/host_sites.py [--w 8] [--seconds 55] [--shape small]

One guarded NGRAM engine with graphs and overlap; the probe measures the guard's own code around
each site with a clock. `sites_us` adds the medians up; `step_us` is the median time from one step
to the next. `paid_us` is the guard's time that lengthens a step, between the end of the host's wait
for the GPU and the moment at which the next replay is queued; `hidden_us` is the rest, which passes
while the GPU works; `wait_us` is how much longer that takes. `share` is paid over step. Unlike two
engines that are compared, this does not see what another process does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from serving import ROOT, Cell, Child

WINDOWS = ("paid", "hidden", "wait")  # of a step, see `testing.probe.Stopwatch`
LENGTHS = (64, 512)  # new tokens of a request


def measure(cell: Cell, deadline: float, loads: tuple[int, ...]) -> dict[str, Any]:
    """Load the engine with so many requests at once, and ask the probe."""
    child = Child(cell)
    try:
        ready = child.answer(deadline - time.monotonic() - 10)
        for concurrency in loads:
            for length in LENGTHS:
                if time.monotonic() < deadline - 8:
                    child.ask(30, do="block", concurrency=concurrency, length=length)
            child.ask(30, do="settled")
        found = child.fresh_probe()
    finally:
        child.stop(0.3)
    names = ("verify_steps", "steps_checked", "findings", "faults")
    return {
        "w": cell.w, "shape": cell.shape, "release": ready["release"],
        **{name: found.get(name) for name in names},
        "rows": [row(int(bs), sites) for bs, sites in found.get("host_us", {}).items()],
    }  # fmt: skip


def row(bs: int, sites: dict[str, Any]) -> dict[str, Any]:
    """One number of requests."""
    whole = {name: sites.pop(name, {}).get("median") for name in ("step", *WINDOWS)}
    total = sum(times["median"] for times in sites.values())
    step, paid = whole["step"], whole["paid"]
    share = round(paid / step, 5) if step and paid is not None else None
    return {
        "bs": bs, "step_us": step, "sites_us": round(total, 1),
        **{f"{name}_us": whole[name] for name in WINDOWS}, "share": share, "sites": sites,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Measure and write the result under its label."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--w", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=55.0)
    parser.add_argument("--shape", default="small", choices=("8b", "small"))
    parser.add_argument("--label", default="after")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/host_sites.json")
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 8], help="requests at once")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + options.seconds
    cell = Cell(
        "NGRAM", shape=options.shape, w=options.w, max_running=max(options.loads), pool=24_000,
        sizes=tuple(options.loads),
        asked=True, times=True,
    )  # fmt: skip
    result = json.loads(options.out.read_text()) if options.out.exists() else {}
    result[options.label] = measure(cell, deadline, tuple(options.loads))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result[options.label]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
