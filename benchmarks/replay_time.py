"""What the guard does to a verify replay's GPU time, and to the host's time around it, in engines.

    python benchmarks/replay_time.py [--w 8,64] [--gpus 0,1] [--seconds 200] [--shape 8b]

NGRAM engines with graphs and overlap side by side, those of a width on one GPU: two without a guard
(off and control, which say how far two equal engines differ), one with it, and one whose check is
captured in line. `--engines` names others: twin and in_line2 are second ones, early has the check
captured where its branch begins, not where it ends; a GPU holds about six of the 8b shape. Blocks
of 1, 8 and 32 requests go round in turns, every other time backwards. The prompts are the same and
decoding is greedy, so that the n-th step of a block is the same work in all engines: `steps`, of
all requests of a block, shows it. Steps get longer with the text, so rows of other
lengths are not to be compared.

The probe times each replay (`testing.replays`): `graph_us` of the GPU, `gap_us` to the next one,
`launch_us`, `forward_us` and `step_us` of the host, as the median and the mean of the middle 80 %
over steady steps, those behind the first eight of a block. `runs` has the steps and the median
`graph_us` of each block, in order; `graph_low` and `graph_high` are the 95 % interval of the median
block. `graph_to_off` is how much longer a block's replays took than those of `off` in the same
round. Both are of one engine, and know nothing of how engines differ. A GPU that has nothing else
to do waits for the launch: `graph_us` then has part of `launch_us` in it. `beside` is the number of
graphs whose check is on a branch, `ahead` that of steps with nothing launched before their replay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from files import put, sources
from rounds import ENGINES, Case, interval
from server_overhead import Bench, asked, numbers, processors, start, stop, where
from serving import PLACES, ROOT, Cell, Child, kind_of

CHOSEN = ("off", "control", "guard", "in_line")
KNOWN = (*ENGINES, *(f"{place}{more}" for place in PLACES for more in ("", "2")))
LOADS = (1, 8, 32)
POOL, SIZES, PROMPT = 44_000, LOADS, 64  # KV slots, captured batch sizes, tokens of a prompt
LEAST = 30  # steady steps of a block
SAME = 1.02  # how far the steps of equal blocks may differ: n-grams come in by a thread
PARTS = ("graph_us", "gap_us", "launch_us", "forward_us", "step_us")
FACTS = ("verify_steps", "steps_checked", "findings", "faults", "beside", "ahead")


def length_of(w: int, requests: int) -> int:
    """New tokens of a request, so that a block has LEAST steady steps: a wide step may accept many.
    All requests fit into the pool with what SGLang allots ahead.
    """
    return min(500 if w <= 16 else 1000, POOL // requests - PROMPT - 4 * w)


# --- one width ---
def lane(bench: Bench, deadline: float, steps: dict[tuple[str, int], list[int]]) -> None:
    """Warm all engines, then go round until the deadline. `steps`: of each block, by engine."""
    for case in bench.cases:
        bench.settle(case, 0.0)
    read(bench)  # and so forgets what was replayed until now
    longest, turn = 0.0, 0
    while bench.children and (not turn or time.monotonic() + longest < deadline):
        begun = time.monotonic()
        for case in bench.cases:
            for tool in list(bench.children)[:: -1 if turn % 2 else 1]:
                found = bench.block(tool, case)
                steps.setdefault((tool, case.concurrency), []).append(found["steps"])
        longest, turn = max(longest, time.monotonic() - begun), turn + 1


def read(bench: Bench) -> dict[str, dict[str, Any]]:
    """What each engine's probe says, once it rests; takes a second."""
    return dict(zip(bench.children, asked(bench.children.values()), strict=True))


def rows(bench: Bench, steps: dict[tuple[str, int], list[int]]) -> list[dict[str, Any]]:
    """One row a number of requests and engine, of what the probes have now."""
    probes = read(bench)
    return [
        row(bench, case, tool, probes[tool], steps.get((tool, case.concurrency), []))
        for case in bench.cases
        for tool in bench.children
    ]


def row(
    bench: Bench, case: Case, tool: str, probe: dict[str, Any], steps: list[int]
) -> dict[str, Any]:
    """One number of requests in one engine; without replays its counts alone."""
    found = {
        "w": bench.w, "requests": case.concurrency, "engine": tool, "tool": kind_of(tool),
        "length": case.length, "blocks": len(steps),
        "steps": round(statistics.fmean(steps), 1) if steps else None,
        **{name: probe.get(name) for name in FACTS},
    }  # fmt: skip
    replays = probe.get("replays", {}).get(str(case.concurrency))
    if replays is None:
        return found | {"n": 0, "runs": []}
    runs = replays["runs"]
    low, high = interval([median for _, median in runs]) if len(runs) > 1 else (None, None)
    return found | {
        "n": replays["n"], **{part: replays[part] for part in PARTS},
        "graph_low": low, "graph_high": high, "runs": runs,
    }  # fmt: skip


# --- all widths ---
def cells(options: argparse.Namespace) -> list[Cell]:
    """All engines, the widths in turn: a GPU each where there are as many."""
    groups = processors(len(options.gpus))
    return [
        Cell(
            "NGRAM", tool=tool, shape=options.shape, w=w, max_running=max(LOADS), pool=POOL,
            sizes=SIZES, asked=True, replays=True, gpu=options.gpus[at % len(options.gpus)],
            cpus=tuple(groups[at % len(options.gpus)]),
        )
        for tool in options.engines
        for at, w in enumerate(options.w)
    ]  # fmt: skip


def measure(options: argparse.Namespace, failed: dict[str, str]) -> list[dict[str, Any]]:
    """Start everything, measure each GPU's widths one after another, stop."""
    end, found = time.monotonic() + options.seconds - 8, []
    benches = [Bench(w, {}, [Case(load, length_of(w, load)) for load in LOADS]) for w in options.w]
    made = [Child(cell) for cell in cells(options)]

    def work(mine: list[Bench]) -> None:
        for left, bench in zip(range(len(mine), 0, -1), mine, strict=True):
            steps: dict[tuple[str, int], list[int]] = {}
            try:
                now = time.monotonic()
                lane(bench, now + (end - now) / left, steps)
            except Exception as error:  # what was measured counts
                failed[f"w{bench.w}"] = f"{type(error).__name__}: {error}"
            found.extend(rows(bench, steps))

    try:
        start(benches, made, end, failed)
        gpus = len(options.gpus)
        threads = [
            threading.Thread(target=work, args=(benches[at::gpus],))
            for at in range(min(gpus, len(benches)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stop(made)
    return sorted(found, key=lambda one: (one["w"], one["requests"]))


def cases(found: list[dict[str, Any]]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Each width and number of requests, with its rows by engine."""
    for w, load in sorted({(one["w"], one["requests"]) for one in found}):
        mine = [one for one in found if (one["w"], one["requests"]) == (w, load)]
        yield w, load, {one["engine"]: one for one in mine}


def faults(found: list[dict[str, Any]], options: argparse.Namespace) -> list[str]:
    """What makes rows no evidence, in words."""
    texts = []
    held = {(one["w"], one["engine"]): one for one in found}
    for w in options.w:
        for tool in options.engines:
            texts += [] if (w, tool) in held else [f"w={w} {tool}: not measured"]
    for one in found:
        name = f"w={one['w']} requests={one['requests']} {one['engine']}"
        if not one["runs"] or min(n for n, _ in one["runs"]) < LEAST:
            texts.append(f"{name}: expected {LEAST} steady steps a block, found {one['runs']}")
        texts += [f"{name}: {text}" for text in guard_faults(one)]
    for w, load, mine in cases(found):
        steps = [one["steps"] for one in mine.values() if one["steps"]]
        if steps and max(steps) > SAME * min(steps):
            texts.append(f"w={w} requests={load}: blocks are not the same work: {steps} steps")
    return texts


def guard_faults(one: dict[str, Any]) -> list[str]:
    """What a row says against its guard: nothing checked, a finding, the check at another place."""
    if one["tool"] == "off":
        return []
    texts = []
    if not 0 < (one["verify_steps"] or 0) == one["steps_checked"] or one["findings"]:
        texts.append("not every step was checked and sound")
    if one["tool"] in PLACES and bool(one["beside"]) is (one["tool"] == "in_line"):
        texts.append(f"the check is not at its place: beside={one['beside']}")
    return texts


def table(found: list[dict[str, Any]], part: str, engines: tuple[str, ...]) -> list[str]:
    """Lines of one part's medians: a row a width and number of requests, a column an engine."""
    lines = [f"{part:>13}{'requests':>9}" + "".join(f"{tool:>11}" for tool in engines)]
    for w, load, mine in cases(found):
        medians = [mine.get(tool, {}).get(part, {}).get("median") for tool in engines]
        shown = ("-" if median is None else f"{median:.1f}" for median in medians)
        lines.append(f"{f'w={w}':>13}{load:>9}" + "".join(f"{text:>11}" for text in shown))
    return lines


def compare(found: list[dict[str, Any]]) -> None:
    """Each row beside that of `off`, block by block: `graph_to_off`, how much longer the median
    replay of a block took than in the same round there, in us, and its 95 % interval.
    """
    for _, _, mine in cases(found):
        off = mine.get("off", {}).get("runs", [])
        for one in mine.values():
            pairs = list(zip(one["runs"], off, strict=False))
            if len(one["runs"]) == len(off) == one["blocks"] and len(pairs) > 1:
                added = [run[1] - other[1] for run, other in pairs]
                low, high = (round(end, 2) for end in interval(added))
                median = round(statistics.median(added), 2)
                one["graph_to_off"] = {"median": median, "low": low, "high": high}


def note(found: list[dict[str, Any]]) -> str:
    """How far apart engines without a guard are, in words: less than that is not resolved."""
    apart = []
    for _, _, rows_ in cases(found):
        mine = [one["graph_us"]["median"] for one in rows_.values()
                if one["tool"] == "off" and one["n"]]  # fmt: skip
        apart += [max(mine) - min(mine)] if len(mine) > 1 else []
    if not apart:
        return "There are no two engines without a guard to compare with."
    return (
        f"Engines without a guard differ by up to {max(apart):.0f} us of graph_us (median "
        f"{statistics.median(apart):.0f})."
    )


def main(argv: list[str] | None = None) -> int:
    """Measure and write the result; 1 if something in it is no evidence."""
    options = _parser().parse_args(argv)
    failed: dict[str, str] = {}
    found = measure(options, failed)
    compare(found)
    wrong = faults(found, options)
    result = {
        "environment": {
            **where(), "gpus": options.gpus, "shape": options.shape, "seconds": options.seconds,
            "guard": sources(), "note": note(found),
        },
        "rows": found, "failed": failed, "faults": wrong,
    }  # fmt: skip
    if any(one["n"] for one in found):  # else what was measured before stays
        put(options.out, json.dumps(result, indent=1) + "\n")
    for part in ("graph_us", "graph_to_off", "launch_us", "forward_us"):
        print("\n".join(table(found, part, options.engines)))
    for text in (result["environment"]["note"], *wrong, *failed.values()):
        print(text)
    return 1 if wrong or failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--w", type=numbers, default=[8, 64], help="verify widths")
    parser.add_argument("--gpus", type=lambda text: text.split(","), default=[""])
    parser.add_argument("--seconds", type=float, default=200.0, help="in all, start included")
    parser.add_argument("--shape", default="8b", choices=("8b", "small"))
    parser.add_argument("--engines", type=_engines, default=CHOSEN, help=f"of {', '.join(KNOWN)}")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/replay_time.json")
    return parser


def _engines(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := set(names) - set(KNOWN):
        known = ", ".join(KNOWN)
        raise argparse.ArgumentTypeError(f"expected {known}, found {', '.join(sorted(unknown))}")
    return names


if __name__ == "__main__":
    sys.exit(main())
