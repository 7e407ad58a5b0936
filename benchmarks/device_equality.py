"""Fused device bits against the NumPy rules on random Steps, half of them corrupted.

    python benchmarks/device_equality.py --steps 20000 --out benchmarks/results

Each worker process generates its share, checks it on the GPU and compares. Writes
`device_equality.json`; exit code 1 if the two checkers differ on any step.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from common import environment, write

from ddtree_guard.device.from_step import operands_from_step, run_step
from ddtree_guard.device.launch import DeviceCheck
from ddtree_guard.device.operands import pack_of, tile_for
from ddtree_guard.testing.device_cases import Case, compare, random_case

WIDE = (130, 257, 258, 300)  # more than one block, and more than one pass, of every filter


def case_of(seed: int) -> Case:
    """The case of a seed; one in 25 is wide."""
    return random_case(seed, WIDE) if seed % 50 in (24, 49) else random_case(seed)


@dataclass
class Tally:
    """What a share of the steps gave."""

    steps: int = 0
    corrupted: int = 0
    alarmed: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    differences: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Take in another share."""
        self.steps += other.steps
        self.corrupted += other.corrupted
        self.alarmed += other.alarmed
        self.hits.update(other.hits)
        self.differences += other.differences
        self.errors += other.errors


def variant(case: Case) -> tuple[Any, ...]:
    """What a compiled kernel depends on: operand types, depth, tile and contract."""
    step = case.step
    kinds = (step.tree.parents.dtype, step.mask.cells.dtype, step.layout.qo_indptr.dtype)
    path = step.outcome.accept_index.shape[1]
    return (
        *map(str, kinds),
        case.depth,
        tile_for(step.w),
        pack_of(step.w, tile_for(step.w)),
        step.w <= 257,
        step.contract.name,
        (path - 1).bit_length(),
    )


def run_share(seeds: list[int], device: str = "cuda") -> Tally:
    """Check these seeds. Runs in a worker process."""
    torch.set_num_threads(1)
    check, tally = DeviceCheck(device), Tally()
    for seed in seeds:
        case = case_of(seed)
        try:
            operands = operands_from_step(check, case.step, case.depth)
            run_step(check, operands)
            if device == "cuda":
                torch.cuda.synchronize()
            (verdict,) = check.poll()
        except Exception as error:
            tally.errors.append(f"seed {seed}: {error!r}"[:300])
            continue
        _, difference = compare(case, verdict, operands.rules)
        tally.steps += 1
        tally.corrupted += bool(case.done)
        tally.alarmed += bool(verdict.bits)
        tally.hits.update(verdict.rules)
        if difference:
            tally.differences.append({"seed": seed, "done": case.done, "text": difference})
    return tally


def one_per_variant(first: int, count: int) -> list[int]:
    """Seeds that between them need every compiled kernel of a sample of the steps."""
    seeds: dict[tuple[Any, ...], int] = {}
    for seed in range(first, first + count):
        seeds.setdefault(variant(case_of(seed)), seed)
    return list(seeds.values())


def main() -> int:
    """Compile every variant once, then share the steps out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=170, help="stop handing out after this")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args()
    begin, total = time.perf_counter(), Tally()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    spawn = get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=spawn) as pool:
        kinds = one_per_variant(options.seed, min(400, options.steps))
        list(pool.map(run_share, [[seed] for seed in kinds], [device] * len(kinds)))
        compiled = time.perf_counter() - begin
        size = max(1, min(250, options.steps // (4 * options.workers)))
        seeds = range(options.seed, options.seed + options.steps)
        shares = [list(seeds[at : at + size]) for at in range(0, len(seeds), size)]
        futures = [pool.submit(run_share, share, device) for share in shares]
        for future in as_completed(futures):
            if not future.cancelled():
                total.add(future.result())
            if time.perf_counter() - begin > options.seconds:
                for waiting in futures:
                    waiting.cancel()
            _save(options, total, time.perf_counter() - begin, compiled)
    print(total.steps, "steps,", len(total.differences), "differences,", total.errors[:3])
    return 1 if total.differences or total.errors or total.steps < options.steps else 0


def _save(options: Any, total: Tally, seconds: float, compiled: float) -> None:
    result = {
        "environment": environment(),
        "seed": options.seed,
        "wanted": options.steps,
        "steps": total.steps,
        "corrupted": total.corrupted,
        "alarmed": total.alarmed,
        "hits": dict(sorted(total.hits.items())),
        "differences": total.differences[:50],
        "difference_count": len(total.differences),
        "errors": total.errors[:20],
        "seconds": round(seconds, 1),
        "compile_seconds": round(compiled, 1),
    }
    write(options.out / "device_equality.json", result)


if __name__ == "__main__":
    sys.exit(main())
