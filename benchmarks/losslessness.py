"""Greedy text of DDTREE against plain decoding: `python benchmarks/losslessness.py MODEL OUT`.

Engines share one GPU, a few at a time, each in a process of its own that writes what it has after
every cell: an interrupted run keeps its results, and a second run skips what is there. One eager
engine sweeps every budget, because each request may ask for a smaller one.

Texts are compared up to the first token that differs. Half-precision arithmetic depends on the
batch shape, so plain decoding differs from itself at near ties. Two yardsticks say how near, both
from plain decoding alone, over batch sizes 1 to 16, prefill chunks, and with and without graphs:
`plain_gaps`, the logit gaps at the first differences between its own texts, and `plain_noise`, how
far the gap between a row's two best tokens moves from one shape to another where the texts agree.
A first difference of DDTREE is a tie if its gap is within the larger one.

The float32 engines need no yardstick: they serve the same weights with SGLang's PyTorch layers,
where two shapes differ by rounding in the seventh digit only. Rows go to OUT/losslessness.json.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from cells import EXACT, histogram, merged, totals
from common import write
from ddtree_watch import live_file, watched
from engines import Setup, generate, run_all, save, start, text_prompts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ddtree_guard.render import parse_line

COUNT, PROMPTS = 96, 48  # tokens per request, prompts
SWEEP = (*range(1, 33), 48, 64, 128, 256)
GRAPHS = (7, 8, 15, 16, 17, 31, 32, 64, 256)
SIZES = tuple(range(1, 17))
PLAIN, PLAIN_EXACT = Setup(), Setup(dtype=EXACT)
NOISE_SHAPES = (1, 2, 4, 8, 16)
BUDGET_MAX = max(SWEEP)


def setups() -> list[Setup]:
    """Plain decoding in several shapes, eager sweeps, captured budgets, the incident, 0.5.17.

    What matters most comes first. Engines of one precision are guarded, at full depth, so that
    their steps say how silent the checks are.
    """
    exact, tree = Setup("DDTREE", 64, dtype=EXACT), Setup("DDTREE", 16, guard="log", depth="full")
    sweep, broken = replace(tree, budget=BUDGET_MAX, graphs=False), replace(tree, incident=True)
    exact_sweep = replace(exact, budget=BUDGET_MAX, graphs=False)
    plan = [PLAIN, PLAIN_EXACT, exact_sweep, sweep]
    plan += [replace(exact_sweep, block=16), replace(sweep, block=16)]
    plan += [replace(tree, site="SITE17"), replace(tree, site="SITE17", graphs=False)]
    plan += [exact, replace(tree, budget=64), tree, Setup("DFLASH")]
    plan += [broken, replace(broken, graphs=False), replace(exact, block=16)]
    plan += [replace(tree, budget=7), replace(exact, budget=16)]
    plan += [replace(tree, budget=b) for b in GRAPHS if b not in (7, 16, 64)]
    plan += [replace(tree, block=16), replace(tree, block=16, budget=64)]
    # widest first: what a run cut short would miss most
    plan += [replace(tree, block=16, budget=b) for b in (256, 7, 31, 8, 15, 17, 32)]
    plan += [replace(PLAIN, graphs=False), replace(PLAIN, chunk=32)]
    return plan + [replace(broken, budget=b, graphs=g) for g in (True, False) for b in (7, 8, 64)]


def jobs_of(setup: Setup, sizes: Sequence[int] = SIZES) -> list[tuple[int, int, int]]:
    """(batch size, budget, first prompt) of every cell of an engine; `sizes` are of plain ones."""
    if not setup.algorithm:
        return [(bs, 0, at) for bs in sizes for at in range(0, PROMPTS - bs + 1, bs)]
    sweeps = setup.algorithm == "DDTREE" and not setup.graphs and setup.budget == BUDGET_MAX
    if not sweeps:
        batches = (3, 16) if setup.incident else SIZES
        return [(bs, setup.budget, _first(bs, bs)) for bs in batches]
    # widest first, so that a run cut short has the cells that stress most
    return [(bs, b, _first(bs, b)) for bs in (16, 5, 1) for b in reversed(SWEEP)]


def _first(bs: int, turn: int) -> int:
    """Where a cell begins in the list of prompts: another place for each."""
    return (5 * turn) % (PROMPTS - bs + 1)


def cell(setup: Setup, args: argparse.Namespace, folder: Path) -> None:
    """Run one engine over its cells."""
    path, begun = folder / f"{setup.name}.json", time.monotonic()
    done: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    seen = {(row["bs"], row["budget"], row["first"]) for row in done}
    jobs = [job for job in jobs_of(setup, args.plain) if job not in seen and job[1] <= args.widest]
    prompts, score = text_prompts(PROMPTS), setup in (PLAIN, PLAIN_EXACT)
    if not jobs and not score:
        return
    engine = start(setup, args.model)
    print("started after", round(time.monotonic() - begun), "s", flush=True)
    for bs, budget, first in jobs:
        if time.monotonic() - begun > args.seconds - 15:
            print("no time for", bs, budget, flush=True)
            continue
        outs = generate(engine, prompts[first : first + bs], COUNT, budget)
        done.append({"budget": budget, "bs": bs, "first": first, "outs": outs})
        save(path, done)
    print("cells done after", round(time.monotonic() - begun), "s", flush=True)
    if score:
        (folder / f"{setup.name}.ready").touch()
        if setup == PLAIN and args.plain == SIZES:
            save(folder / "noise.json", noise(engine, prompts, folder))
        answer(setup, engine, prompts, folder, args.wait - (time.monotonic() - begun))
    if setup.guard != "off":
        time.sleep(1.2)  # its live file is written twice a second
    engine.shutdown()


def answer(
    setup: Setup, engine: Any, prompts: list[list[int]], folder: Path, seconds: float
) -> None:
    """A plain engine waits for the others, then measures the gap at every first difference."""
    deadline = time.monotonic() + seconds
    while not (folder / "texts.done").exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    wanted = sorted(differences(folder, setup.dtype))
    if not wanted:
        save(folder / f"gaps-{setup.dtype}.json", [])
        return
    reference = plain_texts(folder, setup.dtype)
    outs = engine.generate(
        input_ids=[prompts[i] + reference[i][:at] for i, at, _ in wanted],
        sampling_params={"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
        return_logprob=True, top_logprobs_num=20,
    )  # fmt: skip
    gaps = []
    for (i, at, token), out in zip(wanted, outs, strict=True):
        known = _top(out)[0]
        gaps.append([i, at, token, max(known.values()) - known.get(token, min(known.values()))])
    save(folder / f"gaps-{setup.dtype}.json", gaps)


def _top(out: dict[str, Any]) -> list[dict[int, float]]:
    """Log-probabilities of the best tokens per place of an answer."""
    return [{e[1]: e[0] for e in place} for place in out["meta_info"]["output_top_logprobs"]]


def noise(engine: Any, prompts: list[list[int]], folder: Path) -> list[float]:
    """How far plain decoding moves the gap of a row's two best tokens from shape to shape."""
    reference = plain_texts(folder, PLAIN.dtype)
    first: dict[tuple[int, int], dict[int, float]] = {}
    moved: list[float] = []
    params = {"temperature": 0.0, "max_new_tokens": COUNT, "ignore_eos": True}
    for bs in NOISE_SHAPES:
        for at in range(0, PROMPTS, bs):
            outs = engine.generate(
                input_ids=prompts[at : at + bs], sampling_params=params, return_logprob=True,
                top_logprobs_num=4,
            )  # fmt: skip
            for i, out in enumerate(outs, at):
                for place, known in enumerate(_top(out)):
                    if out["output_ids"][:place] != reference[i][:place]:
                        break
                    moved += _moved(first.setdefault((i, place), known), known)
    return moved


def _moved(before: dict[int, float], now: dict[int, float]) -> list[float]:
    one, two = sorted(before, key=lambda token: -before[token])[:2]
    if before is now or one not in now or two not in now:
        return []
    return [abs((before[one] - before[two]) - (now[one] - now[two]))]


def plain_texts(folder: Path, dtype: str) -> list[list[int]]:
    """Plain greedy texts: each prompt in the first batch that held it."""
    texts: dict[int, list[int]] = {}
    for row in json.loads((folder / f"{Setup(dtype=dtype).name}.json").read_text()):
        for i, out in enumerate(row["outs"], row["first"]):
            texts.setdefault(i, out["ids"])
    return [texts[i] for i in range(len(texts))]


def first_difference(left: list[int], right: list[int]) -> int | None:
    """Index of the first token that differs, or None."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)


def differences(folder: Path, dtype: str) -> set[tuple[int, int, int]]:
    """(prompt, position, other token) of every first difference in any cell of this precision."""
    reference, found = plain_texts(folder, dtype), set()
    for path in folder.glob("*-*.json"):
        if (EXACT in path.name) != (dtype == EXACT) or path.name.endswith(".live.json"):
            continue
        value = json.loads(path.read_text())
        for row in value if value and isinstance(value[0], dict) else ():
            for i, out in enumerate(row["outs"], row["first"]):
                at = first_difference(reference[i], out["ids"])
                if at is not None:
                    found.add((i, at, out["ids"][at]))
    return found


def read(path: Path, default: Any) -> Any:
    """JSON, or the default where the file is not there."""
    return json.loads(path.read_text()) if path.exists() else default


def report(folder: Path, everything: list[Setup]) -> dict[str, Any]:
    """Rows per cell, and the yardsticks from plain decoding."""
    rows: list[dict[str, Any]] = []
    for setup in everything:
        runs = read(folder / f"{setup.name}.json", [])
        if not runs or not (folder / f"{Setup(dtype=setup.dtype).name}.json").exists():
            continue
        reference = plain_texts(folder, setup.dtype)
        gap_of = {(i, at, t): g for i, at, t, g in read(folder / f"gaps-{setup.dtype}.json", [])}
        rows += [row_of(setup, run, reference, gap_of) for run in runs]
    plain = [row for row in rows if row["algorithm"] == "plain" and row["dtype"] != EXACT]
    plain_gaps = sorted(gap for row in plain for gap in row["gaps"] if gap is not None)
    moved = read(folder / "noise.json", [])
    yardstick = max([*plain_gaps, *moved], default=0.0)
    for row in rows:
        gaps, limit = row.pop("gaps"), 0.0 if row["dtype"] == EXACT else yardstick
        row["differing"] = sum(gap is None or gap > limit for gap in gaps)
        known = [gap for gap in gaps if gap is not None]
        row["max_logit_gap_of_differing"] = max(known, default=0.0) if None not in gaps else None
        row["logit_gaps"] = sorted(known)
    return {
        "rows": [row for row in rows if row["algorithm"] != "plain"],
        "plain": totals([row for row in rows if row["algorithm"] == "plain"]),
        "yardstick": yardstick,
        "plain_gaps": histogram(plain_gaps),
        "plain_noise": histogram(moved),
        "ddtree_gaps": histogram(
            [gap for row in rows if row["algorithm"] != "plain" and not row["incident"]
             and row["dtype"] != EXACT for gap in row["logit_gaps"]]
        ),
        "acceptance": acceptance(folder, everything),
        "guarded": [watched(setup, folder) for setup in everything
                    if setup.plain_guard and live_file(setup, folder).exists()],
        "incidents": [incident(setup, folder) for setup in everything if setup.incident],
    }  # fmt: skip


def incident(setup: Setup, folder: Path) -> dict[str, Any]:
    """What the guard said first about an engine with the incident switch on; None if nothing."""
    log = folder / f"{setup.name}.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    found = [parse_line(line) for line in lines if "ddtree_guard finding" in line]
    found = [{name: one[name] for name in one if name not in ("dump", "name")} for one in found]
    return {"budget": setup.budget, "graphs": setup.graphs,
            "at_start": [one["rule"] for one in found if one["step"] == "0"],
            "first_step": next((one for one in found if one["step"] != "0"), None)}  # fmt: skip


def row_of(setup: Setup, run: dict[str, Any], reference: Any, gap_of: Any) -> dict[str, Any]:
    """One cell. A gap of None was not measured."""
    gaps: list[float | None] = []
    tokens = steps = compared = 0
    for i, out in enumerate(run["outs"], run["first"]):
        tokens, steps = tokens + len(out["ids"]), steps + out["steps"]
        at = first_difference(reference[i], out["ids"])
        compared += len(out["ids"]) if at is None else at + 1
        if at is not None:
            gaps.append(gap_of.get((i, at, out["ids"][at])))
    return {
        "algorithm": setup.algorithm or "plain", "block": setup.block, "budget": run["budget"],
        "bs": run["bs"], "graphs": setup.graphs,
        "backend": "stock" if setup.incident else "corrected", "incident": setup.incident,
        "dtype": "bfloat16" if setup.dtype == "auto" else setup.dtype,
        "release": "0.5.17" if setup.site else "0.5.16", "chunk": setup.chunk, "tp": setup.tp,
        "tokens": tokens, "compared": compared, "sequences_differing": len(gaps), "gaps": gaps,
        "accept_length": tokens / steps if steps else 1.0,
    }  # fmt: skip


def acceptance(folder: Path, everything: list[Setup]) -> list[dict[str, Any]]:
    """Mean accept length per engine with graphs, and what it gains on DFLASH, 95 % intervals.

    Prompts are drawn anew, each with all that it was asked, and the same ones for both sides.
    """
    import numpy as np

    found: dict[Setup, Any] = {}
    for setup in everything:
        runs = read(folder / f"{setup.name}.json", [])
        plain = setup.incident or setup.dtype == EXACT or setup.site or not setup.graphs
        if setup.algorithm and not plain and runs:
            found[setup] = np.array(per_prompt(runs))
    draws = np.random.default_rng(0).integers(0, PROMPTS, (4000, PROMPTS))
    means = {setup: sums[draws].sum(1) for setup, sums in found.items()}
    means = {setup: sums[:, 0] / sums[:, 1] for setup, sums in means.items()}
    base = means.get(Setup("DFLASH"))
    rows = []
    for setup, sums in found.items():
        total = sums.sum(0)
        rows.append({
            "algorithm": setup.algorithm, "block": setup.block, "budget": setup.budget,
            "prompts": int((sums[:, 1] > 0).sum()), "steps": int(total[1]),
            "mean": float(total[0] / total[1]), "interval": interval(means[setup]),
            "gain_on_dflash": None if base is None else interval(means[setup] - base),
        })  # fmt: skip
    return rows


def per_prompt(runs: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Tokens and verify steps by prompt, over all cells of an engine."""
    sums = [[0, 0] for _ in range(PROMPTS)]
    for run in runs:
        for i, out in enumerate(run["outs"], run["first"]):
            sums[i][0] += len(out["ids"])
            sums[i][1] += out["steps"]
    return [(tokens, steps) for tokens, steps in sums]


def interval(values: Any) -> list[float]:
    """The middle 95 %."""
    import numpy as np

    return [float(edge) for edge in np.nanquantile(values, (0.025, 0.975))]


def main() -> None:
    """Master: run the cells, a few at a time, then put the rows together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0, help="of one engine")
    parser.add_argument("--total", type=float, default=270.0, help="of everything")
    parser.add_argument("--parallel", type=int, default=4, help="engines beside the plain ones")
    parser.add_argument("--hold", type=float, default=0.0, help="seconds until the fifth starts")
    parser.add_argument("--only", default="", help="a pattern of engine names; plain ones always")
    parser.add_argument("--widest", type=int, default=BUDGET_MAX, help="budget of the cells to run")
    parser.add_argument(
        "--plain",
        type=int,
        nargs="+",
        default=SIZES,
        help="batch sizes of the plain engines; some of them measure no yardstick",
    )
    parser.add_argument("--wait", type=float, default=0.0)
    parser.add_argument("--merge", nargs="+", type=Path, help="results to put together into OUT")
    parser.add_argument("--cell")
    args = parser.parse_args()
    args.plain = tuple(args.plain)
    folder = args.out / "losslessness"
    if args.merge:
        write(
            args.out / "losslessness.json", merged([json.loads(p.read_text()) for p in args.merge])
        )
        return
    if args.cell:
        cell(Setup(**json.loads(args.cell)), args, folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.ready"), folder / "texts.done"):
        old.unlink(missing_ok=True)
    chosen = [s for s in setups() if s not in (PLAIN, PLAIN_EXACT) and re.search(args.only, s.name)]
    precisions = {setup.dtype for setup in chosen}
    everything = [s for s in (PLAIN, PLAIN_EXACT) if s.dtype in precisions] + chosen
    run_engines(everything, folder, args)
    result = report(folder, everything)
    save(args.out / "losslessness.json", result)
    for row in result["rows"]:
        print({key: value for key, value in row.items() if key != "logit_gaps"})
    print("yardstick", result["yardstick"], result["plain_gaps"], result["plain_noise"])


def run_engines(everything: list[Setup], folder: Path, args: argparse.Namespace) -> None:
    """The plain engines run beside the others and are released to score when those are done."""
    begun = time.monotonic()
    extra = [str(args.model), str(args.out), "--widest", str(args.widest)]
    extra += ["--plain", *map(str, args.plain)]

    def one(setup: Setup, spare: float) -> None:
        left = args.total - (time.monotonic() - begun) - spare
        seconds = min(args.seconds, left)
        if seconds < 30:
            print(f"no time for {setup.name}", flush=True)
            return
        words = ["--seconds", str(seconds), "--wait", str(left)]
        run_all(__file__, [setup], folder, left, [*extra, *words])

    plain = [setup for setup in everything if setup in (PLAIN, PLAIN_EXACT)]
    others = [setup for setup in everything if setup not in plain]
    scorers = [threading.Thread(target=one, args=(setup, 2.0)) for setup in plain]
    for scorer in scorers:
        scorer.start()

    def other(at: int) -> None:
        if at >= 4:
            time.sleep(max(0.0, args.hold - (time.monotonic() - begun)))
        one(others[at], 20.0)

    with ThreadPoolExecutor(args.parallel) as pool:
        list(pool.map(other, range(len(others))))
    (folder / "texts.done").touch()
    for scorer in scorers:
        scorer.join()


if __name__ == "__main__":
    sys.exit(main())
