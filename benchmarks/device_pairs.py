"""Pairs of rows, and paths to the root, which meet in shared memory: only a GPU can do that.

    python benchmarks/device_pairs.py --out benchmarks/results

In one request of three, each pair of rows (of wide trees a sample) gets the same slot, then the
same parent and token, then, in a sorted tree, one parent with other rows between; and of each row's
mask the root's cell moves to where there was a 0, so that it has as many ones as before. The device
must name the later row. Writes `device_pairs.json`; exit code 1 if it missed one.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from batches import batch, shape
from common import environment, write

from ddtree_guard.config import Depth
from ddtree_guard.device.launch import DeviceCheck
from ddtree_guard.device.operands import Buffers, Operands

# The least and the widest tree of each number of keys a thread, and those that DDTree has.
WIDTHS = (2, 8, 17, 65, 129, 130, 257, 258, 513, 514)
LANES, LANE = 3, 2
Edit = tuple[Any, int, int]


def edits(buffers: Buffers, rule: str, row: int, twin: int, w: int) -> list[Edit]:
    """What makes `twin` the twin of an earlier row: arrays, where, and the number to put there."""
    if rule == "M2":
        cells = buffers.mask.view(LANES, w, -1)[LANE, twin, -w:]
        free = torch.nonzero(cells == 0).flatten().tolist()
        return [(cells, 0, 0), (cells, free[0], 1)] if free else []
    names = {"K2": ("out_cache_loc",), "T4": ("parents", "tokens"), "T2": ("parents",)}[rule]
    found = []
    for name in names:
        values = getattr(buffers, name).view(-1)[LANE * w : (LANE + 1) * w]
        found.append((values, twin, int(values[row])))
    return found


def named(check: DeviceCheck, operands: Operands, changes: list[Edit]) -> Any:
    """First offenders of a launch with these changes, which are undone."""
    before = [int(values[at]) for values, at, _ in changes]
    for values, at, number in changes:
        values[at] = number
    check.check(operands)
    check.close()
    check.collect()
    torch.cuda.synchronize()
    for (values, at, _), number in zip(changes, before, strict=True):
        values[at] = number
    (verdict,) = check.poll()
    return verdict.first


def sorted_batch(w: int) -> Buffers:
    """Half of the rows below the root, the others one below each of these."""
    buffers = batch(LANES, w, 64)
    near = w // 2
    parents = [-1] + [0] * near + list(range(1, w - near))
    depths = [0] + [1] * near + [2] * (w - 1 - near)
    for name, values in (("parents", parents), ("depths", depths), ("tokens", range(w))):
        array = torch.tensor(list(values), dtype=torch.int64, device="cuda").repeat(LANES, 1)
        buffers = dataclasses.replace(buffers, **{name: array})
    links = dict.fromkeys(("retrieve_index", "retrieve_next_token", "retrieve_next_sibling"))
    return dataclasses.replace(buffers, mask=None, positions=None, **links)


def cases(w: int, most: int, rng: random.Random) -> Iterator[tuple[str, int, int]]:
    """Rule, earlier row and later row."""
    for twin in range(1, w):
        yield "M2", 0, twin
    pairs = list(itertools.combinations(range(w), 2))
    for row, twin in pairs if len(pairs) <= most else rng.sample(pairs, most):
        yield "K2", row, twin
        if row > 0:
            yield "T4", row, twin
        if row > w // 2 and twin - row > 1:
            yield "T2", row, twin


def sweep(w: int, most: int) -> dict[str, Any]:
    """All cases of one width: how many there were, and those that were missed."""
    check, rng = DeviceCheck("cuda"), random.Random(w)
    form = shape(LANES, w, 64, Depth.FAST)
    contract = dataclasses.replace(form.contract, depth_major=True)
    trees = {"": batch(LANES, w, 64), "T2": sorted_batch(w)}
    bound = {
        "": check.bind(trees[""], form),
        "T2": check.bind(trees["T2"], dataclasses.replace(form, contract=contract)),
    }
    result: dict[str, Any] = {"w": w, "K2": 0, "T4": 0, "T2": 0, "M2": 0, "missed": []}
    for name in ("", "T2"):
        first = named(check, bound[name], [])
        if first:
            result["missed"].append(f"sound tree: {first}")
    for rule, row, twin in cases(w, most, rng):
        kind = rule if rule == "T2" else ""
        changes = edits(trees[kind], rule, row, twin, w)
        if not changes:
            continue
        first = named(check, bound[kind], changes)
        result[rule] += 1
        if first.get(rule) != (LANE, twin):
            result["missed"].append(f"{rule} {row} {twin}: {first}")
    return result


def main() -> int:
    """Sweep all widths, and write the result after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--most", type=int, default=2500, help="pairs of a width")
    options = parser.parse_args()
    begin, rows = time.perf_counter(), []
    for w in WIDTHS:
        rows.append(sweep(w, options.most))
        seconds = round(time.perf_counter() - begin, 1)
        result = {"environment": environment(), "rows": rows, "seconds": seconds}
        write(options.out / "device_pairs.json", result)
        print(rows[-1] | {"missed": rows[-1]["missed"][:3]}, flush=True)
    return 1 if any(row["missed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
