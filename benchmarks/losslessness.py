"""Greedy text of DDTREE against plain decoding: `python benchmarks/losslessness.py MODEL OUT`.

Every engine runs at once on one GPU, each in its own process, and writes what it has after every
cell, so an interrupted run keeps its results and a second run skips what is there. Texts are
compared up to the first token that differs; there the plain engine says how far the two tokens'
log-probabilities are apart. Half-precision arithmetic depends on the batch shape, so plain decoding
differs from itself at near ties: its largest such gap is the yardstick. Rows go to
OUT/losslessness.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from engines import Setup, generate, run_all, save, start, text_prompts

WAVE = 10  # engines that start at once beside the plain one
COUNT = 96  # tokens per request
BATCHES = (3, 16, 1)
PLAIN_SHAPES = (1, 2, 4, 5, 8)  # further batch shapes of plain decoding, for the yardstick
SWEEP = (*range(1, 33), 48, 64, 128, 256)
GRAPHS = (7, 8, 15, 16, 17, 31, 32, 64, 256)


def setups(quick: bool) -> list[Setup]:
    """Plain, one eager sweep per block, and the captured budgets."""
    plan = [Setup(), Setup("DDTREE", 256, 8, graphs=False), Setup("DFLASH", 0, 8)]
    plan += [Setup("DDTREE", b, 8) for b in ((7, 16, 64) if quick else GRAPHS)]
    plan += [Setup("DDTREE", 16, 8, incident=True), Setup("DDTREE", 7, 8, incident=True)]
    plan += [Setup("DDTREE", 16, 8, graphs=False, incident=True)]
    plan += [Setup("DDTREE", 16, 16)]
    if not quick:
        plan += [Setup("DDTREE", 64, 16, graphs=False), Setup("DDTREE", 64, 16)]
    return plan


def cell(setup: Setup, model: Path, folder: Path, minutes: float, wait: float) -> None:
    """Run one engine over its budgets and batch sizes."""
    path, begun = folder / f"{setup.name}.json", time.monotonic()
    done: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    seen = {(row["budget"], row["bs"], row["first"]) for row in done}
    prompts, budgets = text_prompts(max(BATCHES)), [setup.budget]
    if setup.algorithm == "DDTREE" and not setup.graphs and not setup.incident:
        budgets = [b for b in SWEEP if b <= setup.budget]
    jobs = [(bs, budget, 0) for bs in BATCHES for budget in budgets]
    if not setup.algorithm:
        jobs += [(bs, 0, at) for bs in PLAIN_SHAPES for at in range(0, len(prompts), bs)]
    elif all((budget, bs, first) in seen for bs, budget, first in jobs):
        return
    engine = start(setup, model)
    print("started after", round(time.monotonic() - begun), "s", flush=True)
    for bs, budget, first in jobs:
        late = time.monotonic() - begun > 60 * minutes
        if (budget, bs, first) in seen or late:
            continue
        tick = time.monotonic()
        outs = generate(engine, prompts[first : first + bs], COUNT, budget)
        seconds = time.monotonic() - tick
        done.append({"budget": budget, "bs": bs, "first": first, "outs": outs, "seconds": seconds})
        save(path, done)
    if not setup.algorithm:
        score(engine, prompts, folder, wait - (time.monotonic() - begun))
    engine.shutdown()


def score(engine: Any, prompts: list[list[int]], folder: Path, seconds: float) -> None:
    """The plain engine waits for the others, then measures the gap at every first difference."""
    deadline = time.monotonic() + seconds
    while not (folder / "texts.done").exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    wanted = sorted(differences(folder))
    if not wanted:
        save(folder / "gaps.json", [])
        return
    reference = plain_texts(folder)
    inputs = [prompts[i] + reference[i][:at] for i, at, _ in wanted]
    params = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
    gaps = []
    outs = engine.generate(
        input_ids=inputs, sampling_params=params, return_logprob=True, top_logprobs_num=20
    )
    for (i, at, token), out in zip(wanted, outs, strict=True):
        top = out["meta_info"]["output_top_logprobs"][0]
        known = {entry[1]: entry[0] for entry in top}
        low = known.get(token, min(known.values()))
        gaps.append([i, at, token, max(known.values()) - low])
    save(folder / "gaps.json", gaps)


def plain_texts(folder: Path) -> list[list[int]]:
    """Plain greedy texts: each prompt in the first batch that held it."""
    texts: dict[int, list[int]] = {}
    for row in json.loads((folder / f"{Setup().name}.json").read_text()):
        for i, out in enumerate(row["outs"], row["first"]):
            texts.setdefault(i, out["ids"])
    return [texts[i] for i in range(len(texts))]


def first_difference(left: list[int], right: list[int]) -> int | None:
    """Index of the first token that differs, or None."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)


def differences(folder: Path) -> set[tuple[int, int, int]]:
    """(prompt, position, other token) of every first difference in any cell."""
    reference, found = plain_texts(folder), set()
    for path in folder.glob("*-*.json"):
        if "incident" in path.name:
            continue
        for row in json.loads(path.read_text()):
            for i, out in enumerate(row["outs"], row["first"]):
                at = first_difference(reference[i], out["ids"])
                if at is not None:
                    found.add((i, at, out["ids"][at]))
    return found


def report(folder: Path, everything: list[Setup]) -> dict[str, Any]:
    """Rows per cell, and the yardstick from plain decoding."""
    reference = plain_texts(folder)
    gap_of = {(i, at, t): g for i, at, t, g in json.loads((folder / "gaps.json").read_text())}
    rows, plain_gaps = [], []
    for setup in everything:
        path = folder / f"{setup.name}.json"
        if not path.exists():
            continue
        for run in json.loads(path.read_text()):
            gaps, tokens, steps = [], 0, 0
            for i, out in enumerate(run["outs"], run["first"]):
                tokens, steps = tokens + len(out["ids"]), steps + out["steps"]
                at = first_difference(reference[i], out["ids"])
                if at is not None:
                    gaps.append(gap_of.get((i, at, out["ids"][at]), float("inf")))
            if not setup.algorithm:
                plain_gaps += gaps
                if run["first"] or run["bs"] not in BATCHES:
                    continue
            rows.append({
                "algorithm": setup.algorithm or "plain", "block": setup.block,
                "budget": run["budget"], "bs": run["bs"], "graphs": setup.graphs,
                "backend": "stock" if setup.incident else "corrected",
                "incident": setup.incident, "tokens": tokens, "sequences_differing": len(gaps),
                "gaps": gaps, "accept_length": tokens / steps if steps else 1.0,
            })  # fmt: skip
    yardstick = max(plain_gaps, default=0.0)
    for row in rows:
        gaps = row.pop("gaps")
        row["differing"] = sum(g > yardstick for g in gaps)
        largest = max(gaps, default=0.0)  # not measured where the incident is on
        row["max_logit_gap_of_differing"] = None if largest == float("inf") else largest
    return {"rows": rows, "plain_gaps": sorted(plain_gaps), "yardstick": yardstick}


def main() -> None:
    """Master: start every cell at once, then put the rows together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--wait", type=float, default=0.0)
    parser.add_argument("--cell")
    args = parser.parse_args()
    folder = args.out / "losslessness"
    if args.cell:
        cell(Setup(**json.loads(args.cell)), args.model, folder, args.minutes, args.wait)
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "texts.done").unlink(missing_ok=True)
    everything = setups(args.quick)
    extra = [str(args.model), str(args.out), "--minutes", str(args.minutes)]
    run_with_plain(everything, folder, args.minutes, extra)
    result = report(folder, everything)
    save(args.out / "losslessness.json", result)
    for row in result["rows"]:
        print(json.dumps(row))
    print("yardstick", result["yardstick"])


def run_with_plain(everything: list[Setup], folder: Path, minutes: float, extra: list[str]) -> None:
    """The plain engine runs beside waves of others and is released to score when they are done."""
    plain, others = everything[:1], everything[1:]
    waves = [others[at : at + WAVE] for at in range(0, len(others), WAVE)]
    total = 60 * minutes * len(waves) + 60
    command = [*extra, "--wait", str(total)]
    scorer = threading.Thread(target=run_all, args=(__file__, plain, folder, total + 60, command))
    scorer.start()
    for wave in waves:
        run_all(__file__, wave, folder, 60 * minutes + 15, extra)
    (folder / "texts.done").touch()
    scorer.join()


if __name__ == "__main__":
    sys.exit(main())
