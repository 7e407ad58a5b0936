"""Speed of DDTREE: `python benchmarks/ddtree_speed.py OUT [--model MODEL] [--minutes M]`.

1. Tree building at the vocabulary of Qwen3: from the drafter's logits to the tree and its mask,
   against a heap on the host that gets the same candidates (copied there, as it must).
2. With --model: tokens per second and accept length of plain decoding, DFLASH and DDTREE on the
   tiny model, in rounds: every engine once, then every engine again, so that a drift of the box
   meets all of them.
3. With --shaped: GPU time of the target's forward in a step, on a dummy of Qwen3-8B's shape.

All engines are started at once and measured one after the other, so they share one box and one run.
OUT/ddtree_speed.json is written after every part.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from common import environment, write
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


QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12_288, "vocab_size": VOCAB,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SHAPED = tuple(
    Setup(name, budget, max_bs=8, time=True, memory=0.9, pool=9000)
    for name, budget in (("", 0), ("DFLASH", 0), *(("DDTREE", b) for b in BUDGETS))
)
TINY = tuple(
    Setup(name, budget)
    for name, budget in (("", 0), ("DFLASH", 0), *(("DDTREE", b) for b in BUDGETS))
)


def write_shaped(folder: Path) -> Path:
    """Configurations of a dummy target of Qwen3-8B's shape and of its drafter."""
    layers = 36
    target = {**QWEN3_8B, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": layers}
    taps = {"mask_token_id": VOCAB - 1, "target_layer_ids": [1, layers // 2, layers - 2]}
    draft = {
        **QWEN3_8B, "architectures": ["DFlashDraftModel"], "num_hidden_layers": 2,
        "block_size": BLOCK, "num_target_layers": layers, "dflash_config": taps,
    }  # fmt: skip
    for name, config in (("target", target), ("draft", draft)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def come_up(folder: Path, engine: int) -> None:
    """Say that an engine is up. Raises RuntimeError where it comes too late: it would disturb."""
    if (folder / "go").exists():
        raise RuntimeError("this engine came up too late to be measured")
    (folder / f"ready.{engine}").touch()


def await_turn(folder: Path, slot: int, turns: int) -> None:
    """Until every engine is up (or `go` says not to wait longer) and all earlier slots are over.

    Engine e has the slots e, e + turns, e + 2 * turns, ..
    """
    changed, last = time.monotonic(), (set[int](), set[int]())
    while True:
        up, done, failed = (numbers(folder, word) for word in ("ready", "done", "failed"))
        if (done, failed) != last:
            changed, last = time.monotonic(), (done, failed)
        begun = (folder / "go").exists() or len(up | failed) == turns
        if not begun:
            changed = time.monotonic()
        dead = time.monotonic() - changed > 30  # an engine that ended without a word
        missing = [at for at in range(slot) if at not in done and at % turns in up - failed]
        if begun and (dead or not missing):
            return
        time.sleep(0.02)


def numbers(folder: Path, word: str) -> set[int]:
    """Slots or engines that have left a file `word.N`."""
    return {int(path.suffix[1:]) for path in folder.glob(f"{word}.*")}


def engine_cell(setup: Setup, args: argparse.Namespace, folder: Path) -> None:
    """Start, warm up, measure whenever it is this engine's turn."""
    names = args.names.split(",")
    turn, turns = names.index(setup.name), len(names)
    try:
        if setup.time:
            shaped_cell(setup, args, folder, turn, turns)
        else:
            tiny_cell(setup, args, folder, turn, turns)
    except BaseException:
        (folder / f"failed.{turn}").touch()
        raise


def tiny_cell(setup: Setup, args: argparse.Namespace, folder: Path, turn: int, turns: int) -> None:
    """Tokens per second of one tiny engine, until the rounds or their time are over."""
    engine, prompts = start(setup, args.model), text_prompts(16, seed=5)
    for bs in (1, 4, 16):
        generate(engine, prompts[:bs], 64)
    come_up(folder, turn)
    rows: list[dict[str, Any]] = []
    for repeat in range(args.rounds):
        slot = turn + repeat * turns
        await_turn(folder, slot, turns)
        if time.time() < args.until:
            rows += measured(setup, engine, prompts, repeat)
            save(folder / f"{setup.name}.json", rows)
        (folder / f"done.{slot}").touch()
    (folder / f"done.{turn + args.rounds * turns}").touch()
    await_turn(folder, turns * args.rounds, turns)  # nobody ends while another is measured
    engine.shutdown()


def measured(setup: Setup, engine: Any, prompts: Any, repeat: int) -> list[dict[str, Any]]:
    """One round of an engine."""
    rows = []
    generate(engine, prompts, 24)  # awake: an engine sleeps between its turns
    for bs in (1, 4, 16):
        begun = time.perf_counter()
        outs = generate(engine, prompts[:bs], 192)
        seconds = time.perf_counter() - begun
        tokens, steps = sum(len(o["ids"]) for o in outs), sum(o["steps"] for o in outs)
        rows.append({
            "algorithm": setup.algorithm or "plain", "budget": setup.budget, "bs": bs,
            "repeat": repeat, "tokens_per_second": tokens / seconds,
            "accept_length": tokens / steps if steps else 1.0,
        })  # fmt: skip
    return rows


def shaped_cell(
    setup: Setup, args: argparse.Namespace, folder: Path, turn: int, turns: int
) -> None:
    """GPU time of the target's forwards of one dummy engine, by number of requests, once, behind
    all rounds of the tiny engines.
    """
    import random

    engine = start(setup, write_shaped(folder / "shaped"), load_format="dummy")
    rng = random.Random(turn)
    prompts = [[rng.randrange(1000, 100_000) for _ in range(512)] for _ in range(8)]
    generate(engine, prompts, 8)
    generate(engine, prompts[:1], 8)
    for repeat in range(args.rounds):
        (folder / f"done.{turn + repeat * turns}").touch()
    come_up(folder, turn)
    slot = turn + args.rounds * turns
    await_turn(folder, slot, turns)
    rows = measured_shaped(setup, engine, prompts)
    save(folder / f"shaped-{setup.name}.json", rows)
    (folder / f"done.{slot}").touch()
    engine.shutdown()


def measured_shaped(setup: Setup, engine: Any, prompts: Any) -> list[dict[str, Any]]:
    """What the probe in the engine timed, for one request and for eight."""
    live = Path(os.environ["DDTREE_LIVE"])
    time.sleep(1.2)  # the live file is written twice a second
    skip = len(json.loads(live.read_text())["forward_ms"])
    rows = []
    for bs in (1, 8):
        begun = time.perf_counter()
        outs = generate(engine, prompts[:bs], 48)
        rows.append({"bs": bs, "seconds": time.perf_counter() - begun,
                     "tokens": sum(len(o["ids"]) for o in outs),
                     "steps": sum(o["steps"] for o in outs)})  # fmt: skip
    time.sleep(1.2)
    taken = json.loads(live.read_text())["forward_ms"][skip:]
    for row in rows:
        mine = sorted(ms for bs, ms in taken if bs == row["bs"])
        row |= {"algorithm": setup.algorithm or "plain", "budget": setup.budget, "context": 512,
                "forwards": len(mine), "forward_ms": summary(mine)}  # fmt: skip
    return rows


def summary(sample: list[float]) -> dict[str, float] | None:
    """Median and the middle 80 % of a sorted sample."""
    if not sample:
        return None
    last = len(sample) - 1
    return {"median": statistics.median(sample), "p10": sample[last // 10],
            "p90": sample[last - last // 10]}  # fmt: skip


def main() -> None:
    """The engines, then the trees if there is time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shaped", action="store_true")
    parser.add_argument("--budgets", type=int, nargs="*", help="of the shaped engines only these")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--until", type=float, default=0.0, help="end of the rounds, epoch seconds")
    parser.add_argument("--wave", type=int, default=10, help="engines that are up at a time")
    parser.add_argument("--names", default="")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--cell")
    args = parser.parse_args()
    folder, path = args.out / "ddtree_speed", args.out / "ddtree_speed.json"
    folder.mkdir(parents=True, exist_ok=True)
    shaped = [s for s in SHAPED if args.budgets is None or s.budget in args.budgets]
    setups = [*(TINY if args.model else ()), *(shaped if args.shaped else ())]
    if args.cell:
        engine_cell(Setup(**json.loads(args.cell)), args, folder)
        return
    deadline = time.monotonic() + args.seconds
    for at in range(0, len(setups), args.wave):
        run_wave(setups[at : at + args.wave], args, folder, deadline - time.monotonic())
        result: dict[str, Any] = {"environment": environment(), **collected(folder)}
        write(path, result)
    if deadline - time.monotonic() > 10:
        result["trees"] = tree_cells()
        write(path, result)
    print(json.dumps(result))


def run_wave(setups: list[Setup], args: argparse.Namespace, folder: Path, left: float) -> None:
    """Start these engines at once; they measure one after the other."""
    if left < 40:
        print("no time for", [setup.name for setup in setups], flush=True)
        return
    for word in ("ready", "done", "failed", "go"):
        for stale in folder.glob(f"{word}*"):
            stale.unlink()
    extra = [str(args.out), *(["--model", str(args.model)] if args.model else [])]
    extra += ["--names", ",".join(setup.name for setup in setups), "--rounds", str(args.rounds)]
    once = 4.0 * sum(setup.time for setup in setups)  # a shaped engine's turn
    extra += ["--until", str(time.time() + left - once - 8)]
    go = threading.Timer(max(0.5 * left, left - once - 45), (folder / "go").touch)
    go.daemon = True
    go.start()
    run_all(__file__, setups, folder, left, extra)
    go.cancel()


def collected(folder: Path) -> dict[str, Any]:
    """Rows of all engines that have any, the tiny model's and the dummy's."""
    return {"engines": collect(folder, "", TINY), "shaped": collect(folder, "shaped-", SHAPED)}


def collect(folder: Path, prefix: str, setups: tuple[Setup, ...]) -> list[dict[str, Any]]:
    """Rows of all engines that have any."""
    found = [folder / f"{prefix}{setup.name}.json" for setup in setups]
    return [row for path in found if path.exists() for row in json.loads(path.read_text())]


if __name__ == "__main__":
    sys.exit(main())
