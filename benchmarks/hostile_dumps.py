"""Attack every reader with mutated dumps, once at length, and keep the count as JSON.

    python benchmarks/hostile_dumps.py --count 50000 --seed 1 --out benchmarks/results

Exit 0 when no command did anything but refuse or answer, touched nothing outside, and the process
stayed below 200 MB. The test suite runs 2,000 other seeds.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

import ddtree_guard
from ddtree_guard.testing.hostile import MUTATIONS, Arena, attack
from ddtree_guard.testing.watch import peak_mb

LIMIT_MB = 200


def main() -> int:
    """Run the attack and write `hostile_dumps.json`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    codes: Counter[int] = Counter()
    kinds: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    faults: list[str] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hostile-dumps-") as folder:
        arena = Arena(Path(folder))
        for n in range(args.count):
            outcome = attack(arena, args.seed * 1_000_000 + n)
            codes.update(outcome.codes)
            kinds[outcome.kind] += 1
            refused[outcome.kind] += outcome.codes.count(4)
            faults += outcome.faults
            if (n + 1) % 1000 == 0:
                print(f"{n + 1} dumps, {time.monotonic() - began:.0f} s, {len(faults)} faults",
                      flush=True)  # fmt: skip
        outside = sorted(path.name for path in arena.root.iterdir())
    peak = peak_mb()
    result = {
        "dumps": args.count,
        "seed": args.seed,
        "commands": sum(codes.values()),
        "exit_codes": {str(code): codes[code] for code in sorted(codes)},
        "mutations": {kind: kinds[kind] for kind in MUTATIONS},
        "refused_commands": {kind: refused[kind] for kind in MUTATIONS},
        "faults": faults[:100],
        "fault_count": len(faults),
        "peak_rss_mb": round(peak, 1),
        "limit_mb": LIMIT_MB,
        "left_beside_the_dumps": outside,
        "seconds": round(time.monotonic() - began, 1),
        "version": ddtree_guard.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, CPU only",
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "hostile_dumps.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: result[k] for k in ("exit_codes", "fault_count", "peak_rss_mb")}))
    return 1 if faults or peak > LIMIT_MB else 0


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    raise SystemExit(main())
