"""Speed of DDTREE: `python benchmarks/ddtree_speed.py OUT [--model MODEL] [--minutes M]`.

1. Tree building at the vocabulary of Qwen3: from the drafter's logits to the tree and its mask,
   against a heap on the host that gets the same candidates (copied there, as it must).
2. With --model: tokens per second and accept length of plain decoding, DFLASH and DDTREE on the
   tiny model. All engines are started at once and measured one after the other, so they share one
   box and one run. OUT/ddtree_speed.json is written after every cell.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from engines import Setup, generate, run_all, save, start, text_prompts

VOCAB, BLOCK = 151_936, 8
BUDGETS = (7, 16, 32, 64)
REPEATS = 20


def heap_tree(tokens: Any, logp: Any, root: int, budget: int) -> list[tuple[int, int, int]]:
    """(token, parent, depth) rows of one request, built on the host: spine, then a heap."""
    depth, top_k = len(logp), len(logp[0])
    rows, heap, score = [(root, -1, 0)], [], 0.0
    for level in range(min(depth, budget)):
        if top_k > 1:
            heapq.heappush(heap, (-score - logp[level][1], level, 1, level, score))
        score += logp[level][0]
        rows.append((tokens[level][0], level, level + 1))
    while heap and len(rows) <= budget:
        negative, parent, rank, level, above = heapq.heappop(heap)
        row = len(rows)
        rows.append((tokens[level][rank], parent, level + 1))
        if rank + 1 < top_k:
            offer = -above - logp[level][rank + 1]
            heapq.heappush(heap, (offer, parent, rank + 1, level, above))
        if level + 1 < depth:
            heapq.heappush(heap, (negative - logp[level + 1][0], row, 0, level + 1, -negative))
    return rows


def timed(call: Any, repeats: int = REPEATS) -> dict[str, float]:
    """Median and spread of wall time in microseconds, the device idle before and after."""
    import torch

    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1e6)
    return {"median_us": statistics.median(times), "min_us": min(times), "max_us": max(times)}


def tree_cells() -> list[dict[str, Any]]:
    """Device search, mask and candidates, and the host heap, for every budget and batch size."""
    import torch

    from ddtree_guard.ddtree import tree_kernel
    from ddtree_guard.ddtree.propose import Proposer
    from ddtree_guard.ddtree.tree import default_top_k

    torch.manual_seed(0)
    head = torch.randn(VOCAB, 256, device="cuda", dtype=torch.bfloat16) * 0.4
    rows = []
    for budget in (16, 64, 256):
        for bs in (1, 8, 32):
            hidden = torch.randn(bs * BLOCK, 256, device="cuda", dtype=torch.bfloat16)
            proposer = Proposer(head, VOCAB, 0, BLOCK, default_top_k(budget))
            tokens, logp = proposer.propose(hidden)
            roots = torch.zeros(bs, dtype=torch.int64, device="cuda")
            lens = torch.full((bs,), 1000, device="cuda")
            width = budget + 1
            mask = torch.zeros(bs * width * (1000 + width), dtype=torch.uint8, device="cuda")
            places = torch.empty(bs * width, dtype=torch.int64, device="cuda")
            trees = tree_kernel.build(tokens, logp, roots, budget)

            def on_host(t: Any = tokens, p: Any = logp, b: int = budget) -> None:
                for one, two in zip(t.tolist(), p.tolist(), strict=True):
                    heap_tree(one, two, 0, b)

            def on_device(t: Any = tokens, p: Any = logp, r: Any = roots, b: int = budget) -> None:
                tree_kernel.build(t, p, r, b)

            def painted(t: Any = trees, n: Any = lens, x: Any = places, m: Any = mask) -> None:
                tree_kernel.paint(t, n, x, m)

            def proposed(p: Any = proposer, h: Any = hidden) -> None:
                p.propose(h)

            cell = {"budget": budget, "bs": bs, "top_k": tokens.shape[-1]}
            for name, call in (("search", on_device), ("mask", painted),
                               ("candidates", proposed), ("host_heap", on_host)):  # fmt: skip
                cell[name] = timed(call, 5 if name == "host_heap" else REPEATS)
            cell["speedup"] = cell["host_heap"]["median_us"] / cell["search"]["median_us"]
            rows.append(cell)
            print(json.dumps(cell), flush=True)
    return rows


def engine_cell(setup: Setup, model: Path, folder: Path, turn: int, turns: int) -> None:
    """Start, warm up, wait for this engine's turn, measure."""
    engine, prompts = start(setup, model), text_prompts(16, seed=5)
    generate(engine, prompts, 64)
    (folder / f"ready.{turn}").touch()
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        ready = len(list(folder.glob("ready.*"))) >= turns
        if ready and (turn == 0 or (folder / f"done.{turn - 1}").exists()):
            break
        time.sleep(0.2)
    rows = []
    for bs in (1, 16):
        for repeat in range(3):
            begun = time.perf_counter()
            outs = generate(engine, prompts[:bs], 256)
            seconds = time.perf_counter() - begun
            tokens, steps = sum(len(o["ids"]) for o in outs), sum(o["steps"] for o in outs)
            accepts = [len(o["ids"]) / o["steps"] for o in outs if o["steps"]]
            rows.append({
                "algorithm": setup.algorithm or "plain", "budget": setup.budget, "bs": bs,
                "repeat": repeat, "tokens_per_second": tokens / seconds,
                "accept_length": tokens / steps if steps else 1.0, "accept_lengths": accepts,
            })  # fmt: skip
            save(folder / f"{setup.name}.json", rows)
    (folder / f"done.{turn}").touch()
    engine.shutdown()


def main() -> None:
    """Trees first, then the engines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--cell")
    args = parser.parse_args()
    folder = args.out / "ddtree_speed"
    folder.mkdir(parents=True, exist_ok=True)
    setups = [Setup(), Setup("DFLASH"), *(Setup("DDTREE", b) for b in BUDGETS)]
    if args.cell:
        setup = Setup(**json.loads(args.cell))
        engine_cell(setup, args.model, folder, setups.index(setup), len(setups))
        return
    result: dict[str, Any] = {"trees": tree_cells(), "engines": []}
    save(args.out / "ddtree_speed.json", result)
    if args.model:
        for stale in (*folder.glob("ready.*"), *folder.glob("done.*")):
            stale.unlink()
        run_all(__file__, setups, folder, 60 * args.minutes, [str(args.out), "--model",
                                                              str(args.model)])  # fmt: skip
        for setup in setups:
            if (folder / f"{setup.name}.json").exists():
                result["engines"] += json.loads((folder / f"{setup.name}.json").read_text())
        save(args.out / "ddtree_speed.json", result)
        for row in result["engines"]:
            row.pop("accept_lengths")
            print(json.dumps(row))


if __name__ == "__main__":
    sys.exit(main())
