"""Time what runs without a GPU, each in a new process: `check` and `report` on a dump of 64 steps,
32 requests, w=65; `check` on one such step; `explain W3`; and the bare import.

    python benchmarks/offline_tools.py --out benchmarks/results

`ring` is what the recorder writes: 63 steps of the ring and the whole step of the finding. `whole`
holds 64 whole steps, masks and all. The first line of each result is the wall time of the process,
start of Python included; `bare_python_s` is that of `python -c pass`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ddtree_guard.config import Config
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.guard import Guard
from ddtree_guard.recorder import Recorder
from ddtree_guard.step import Step
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step

STEPS, REQUESTS, W = 64, 32, 65
LIMITS = {"check": 0.3, "report": 1.0}
START_LIMITS = {"import_over_bare": 0.015, "explain_W3": 0.15, "check_one_step": 0.5}


def steps() -> list[Step]:
    """64 steps of growing requests; the last one has a shifted mask offset."""
    lens = tuple(200 + 37 * i % 301 for i in range(REQUESTS))
    made = [
        sound_step(n, lens=tuple(s + 4 * n for s in lens), w=W).replace(who__step_id=n)
        for n in range(STEPS)
    ]
    return [*made[:-1], FAULTS["W3"](made[-1], REQUESTS - 1).step]


def dumps(root: Path) -> dict[str, Path]:
    """The two dumps."""
    config = Config(dump_dir=root, redact=False, ring_steps=STEPS)
    writer = DumpWriter("run", config)
    made, recorder = steps(), Recorder(config, writer)
    for step in made:
        recorder.step(step)
    found = Guard().check(made[-1]).findings
    ring = recorder.finding(made[-1], found)
    assert ring is not None
    whole = writer.write(made, [(STEPS - 1, finding) for finding in found])
    return {"ring": ring, "whole": whole}


def starts(root: Path, repeats: int) -> dict[str, object]:
    """The import, `explain W3` and `check` on one step, against their limits."""
    step = steps()[-1]
    found = Guard().check(step).findings
    one = DumpWriter("one", Config(dump_dir=root)).write([step], [(0, f) for f in found])
    tool = [sys.executable, "-m", "ddtree_guard"]
    bare = timed([sys.executable, "-c", "pass"], repeats)
    imported = timed([sys.executable, "-c", "import ddtree_guard"], repeats)
    measured: dict[str, dict[str, float]] = {
        "import_over_bare": {key: round(imported[key] - bare[key], 4) for key in bare},
        "explain_W3": timed([*tool, "explain", "W3"], repeats),
        "check_one_step": timed([*tool, "check", str(one)], repeats),
    }
    return {
        "bare_python_s": bare["median_s"],
        **{name: {**times, "limit_s": START_LIMITS[name]} for name, times in measured.items()},
    }


def timed(command: list[str], repeats: int) -> dict[str, float]:
    """Wall time of a process that ends with 0 or 1, after one run to warm the caches."""
    times, cpu = [], []
    for _ in range(repeats + 1):
        began, used = time.perf_counter(), _children()
        done = subprocess.run(command, capture_output=True, check=False)
        times.append(time.perf_counter() - began)
        cpu.append(_children() - used)
        assert done.returncode in (0, 1), done.stderr
    return {
        "median_s": round(statistics.median(times[1:]), 4),
        "min_s": round(min(times[1:]), 4),
        "cpu_median_s": round(statistics.median(cpu[1:]), 4),
    }


def _children() -> float:
    """CPU seconds of all processes that this one has waited for."""
    used = os.times()
    return used.children_user + used.children_system


def main() -> int:
    """Measure and write `offline_tools.json`. 1 when a median on the ring's dump is over."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    results: dict[str, object] = {}
    within = True
    with tempfile.TemporaryDirectory(prefix="offline-tools-") as folder:
        for kind, path in dumps(Path(folder)).items():
            size = sum(file.stat().st_size for file in path.iterdir())
            measured: dict[str, object] = {"mb": round(size / 2**20, 2)}
            for command, limit in LIMITS.items():
                argv = [sys.executable, "-m", "ddtree_guard", command, str(path)]
                argv += ["-o", f"{folder}/report.html"] if command == "report" else []
                times = timed(argv, args.repeats)
                measured[command] = {**times, "limit_s": limit}
                within &= kind != "ring" or times["median_s"] <= limit
            results[kind] = measured
        results |= starts(Path(folder), args.repeats)
    results |= {
        "steps": STEPS, "requests": REQUESTS, "w": W, "repeats": args.repeats,
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "cores": os.cpu_count(), "python": platform.python_version(),
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "offline_tools.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    return 0 if within else 1


if __name__ == "__main__":
    raise SystemExit(main())
