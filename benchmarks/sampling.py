"""Sampled text of DDTREE against plain sampling: `python benchmarks/sampling.py MODEL OUT`.

Both engines continue one prompt thousands of times at temperature 1.2 with top-p 0.98; half of the
requests of every batch are greedy, so that batches are mixed. A two-sample chi-square test compares
the tokens at each place. The 262,144 draws of tests/gpu/test_ddtree.py test the same code without
an engine around it. Rows go to OUT/sampling.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from engines import Setup, run_all, save, start

PROMPT = list(b"    def __init__(self, ")
PLACES, WAVE = 4, 256
SETUPS = (Setup(max_bs=64), Setup("DDTREE", 16, max_bs=64))


def cell(setup: Setup, model: Path, out: Path, minutes: float) -> None:
    """Draw until the time is up; counts per place are saved after every wave."""
    engine, begun = start(setup, model), time.monotonic()
    counts = [Counter[int]() for _ in range(PLACES)]
    greedy: set[tuple[int, ...]] = set()
    warm = {"max_new_tokens": PLACES, "ignore_eos": True, "temperature": 1.2, "top_p": 0.98}
    cold = {**warm, "temperature": 0.0, "top_p": 1.0}
    while time.monotonic() - begun < 60 * minutes:
        outs = engine.generate(
            input_ids=[PROMPT] * WAVE, sampling_params=[warm, cold] * (WAVE // 2)
        )
        for i, one in enumerate(outs):
            if i % 2:
                greedy.add(tuple(one["output_ids"]))
                continue
            for place, token in enumerate(one["output_ids"]):
                counts[place][token] += 1
        save(out / f"sampling-{setup.name}.json",
             {"counts": [dict(c) for c in counts], "greedy": sorted(greedy)})  # fmt: skip
    engine.shutdown()


def chi_square(left: dict[str, int], right: dict[str, int]) -> tuple[float, int]:
    """Two-sample statistic and degrees of freedom; tokens seen fewer than ten times are pooled."""
    both = Counter(left) + Counter(right)
    keys = [key for key, n in both.items() if n >= 10]
    rare = [sum(n for key, n in side.items() if both[key] < 10) for side in (left, right)]
    pairs = [(left.get(key, 0), right.get(key, 0)) for key in keys]
    pairs += [(rare[0], rare[1])] if sum(rare) >= 10 else []
    total = [sum(p[k] for p in pairs) for k in (0, 1)]
    value = 0.0
    for pair in pairs:
        for k in (0, 1):
            expected = sum(pair) * total[k] / sum(total)
            value += (pair[k] - expected) ** 2 / expected
    return value, len(pairs) - 1


def report(out: Path) -> list[dict[str, Any]]:
    """One row per place. The bound is the normal approximation's p = 0.001."""
    plain, tree = (json.loads((out / f"sampling-{s.name}.json").read_text()) for s in SETUPS)
    rows = []
    for place, (a, b) in enumerate(zip(plain["counts"], tree["counts"], strict=True)):
        value, free = chi_square(a, b)
        bound = free * (1 - 2 / (9 * free) + 3.09 * (2 / (9 * free)) ** 0.5) ** 3
        rows.append({"place": place, "draws": [sum(a.values()), sum(b.values())],
                     "chi_square": value, "degrees": free, "bound": bound,
                     "greedy_equal": plain["greedy"] == tree["greedy"]})  # fmt: skip
    return rows


def main() -> None:
    """Both engines at once, then the test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--cell")
    args = parser.parse_args()
    if args.cell:
        cell(Setup(**json.loads(args.cell)), args.model, args.out, args.minutes)
        return
    extra = [str(args.model), str(args.out), "--minutes", str(args.minutes)]
    run_all(__file__, SETUPS, args.out / "sampling", 60 * args.minutes + 120, extra)
    rows = report(args.out)
    save(args.out / "sampling.json", {"rows": rows})
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    sys.exit(main())
