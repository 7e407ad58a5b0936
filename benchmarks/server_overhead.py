"""What the guard costs a server: engines side by side on one GPU, measured in turns.

    python benchmarks/server_overhead.py --w 8,64 --seconds 280 [--tools guard,kv_canary]

All engines are resident and started together. Each round runs the same block on every engine of a
width, in another order each time, and the ratio to the engine without any tool is taken within the
round: drift hits both sides. Blocks are as long as the unguarded engine needs for `--block`
seconds. SGLang's own tools run at the first width only, in every sixth round. The result file is
rewritten after every round; rows of other widths stay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from serving import ROOT, Cell, Child

TOOLS = ("guard", "kv_canary", "async_assert")
CONCURRENCY = (1, 8, 32)
LENGTH = 64  # tokens per request
SELDOM = 6  # every n-th round has SGLang's own tools in it
Children = dict[tuple[str, int], Child]  # by tool and width


def interval(ratios: list[float], seed: int = 0, draws: int = 4000) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def paired(ratios: list[float]) -> list[float]:
    """Geometric means of neighbouring rounds, in which the engines took turns in going first."""
    if len(ratios) < 2:
        return ratios
    return [math.sqrt(a * b) for a, b in zip(ratios[::2], ratios[1::2], strict=False)]


def percentile(values: list[float], count: int, share: float) -> float | None:
    """A high percentile of `count` values of which the largest are given, sorted."""
    rank = count - int(share * count)
    return values[-rank] if values and rank <= len(values) else None


def summary(
    tool: str, w: int, concurrency: int, rounds: list[dict[str, Any]], more: dict[str, Any]
) -> dict[str, Any]:
    """One row: a tool at a width and a concurrency, over the rounds that it took part in."""
    rounds = [one for one in rounds if tool in one]
    speeds = [one[tool]["tokens_per_s"] for one in rounds]
    ratios = [one[tool]["tokens_per_s"] / one["off"]["tokens_per_s"] for one in rounds]
    pairs = paired(ratios) if tool == "guard" else ratios
    low, high = interval(pairs) if len(pairs) > 1 else (None, None)
    gaps = [
        found
        for one in rounds
        if (found := percentile(one[tool]["gaps"], one[tool]["count"], 0.99)) is not None
    ]
    return {
        "tool": tool, "mode": "log" if tool in ("guard", "kv_canary") else tool,
        "algorithm": "NGRAM", "w": w, "concurrency": concurrency, "blocks": len(rounds),
        "tokens_per_s": round(statistics.median(speeds), 1),
        "ratio_to_off": round(statistics.median(pairs), 4),
        "ratio_low": low and round(low, 4), "ratio_high": high and round(high, 4),
        "p99_ms": round(1000 * statistics.median(gaps), 3) if gaps else None,
        "ratios": [round(ratio, 4) for ratio in ratios], **more,
    }  # fmt: skip


def one_round(
    children: dict[str, Child], concurrency: int, requests: int, number: int
) -> dict[str, Any]:
    """The same block on every engine, in a rotating order."""
    names = list(children)
    names = names[number % len(names) :] + names[: number % len(names)]
    return {
        name: children[name].ask(
            120, do="block", concurrency=concurrency, requests=requests, length=LENGTH,
            seed=1000 * concurrency + number,
        )
        for name in names
    }  # fmt: skip


def start(
    widths: list[int], tools: list[str], deadline: float, shape: str
) -> tuple[Children, dict[Any, Any], dict[str, str]]:
    """All engines, started together: children, facts, and reasons of the failed ones."""
    wanted = [(tool, w) for w in widths for tool in ("off", "guard") if tool in ("off", *tools)]
    wanted += [(tool, widths[0]) for tool in tools if tool != "guard"]
    made = {
        key: Child(Cell("NGRAM", tool=key[0], shape=shape, w=key[1], max_running=32))
        for key in wanted
    }
    children, facts, failed = {}, {}, {}
    for key, child in made.items():
        try:
            facts[key] = child.answer(min(240.0, deadline - time.monotonic()))
            children[key] = child
        except RuntimeError as error:
            failed[f"w{key[1]}-{key[0]}"] = str(error)
            child.stop()
    return children, facts, failed


def measure(options: argparse.Namespace, result: dict[str, Any], save: Any) -> None:
    """All widths and concurrencies, as far as the time goes."""
    deadline = time.monotonic() + options.seconds
    children, facts, failed = start(options.w, options.tools, deadline, options.shape)
    result["failed"] |= failed
    save()
    try:
        cases = list(itertools.product(options.w, CONCURRENCY))
        for at, (w, concurrency) in enumerate(cases):
            mine = {tool: child for (tool, width), child in children.items() if width == w}
            if "off" not in mine:
                continue
            end = time.monotonic() + (deadline - time.monotonic() - 3) / (len(cases) - at)
            _case(mine, facts, w, concurrency, end, options, result, save)
    finally:
        for child in children.values():
            child.stop()


def _case(
    children: dict[str, Child], facts: dict[Any, Any], w: int, concurrency: int, end: float,
    options: argparse.Namespace, result: dict[str, Any], save: Any,
) -> None:  # fmt: skip
    """Rounds of one width and concurrency until `end`."""
    warm = one_round(children, concurrency, concurrency, -1)
    speed = one_round({"off": children["off"]}, concurrency, 2 * concurrency, -2)["off"]
    count = round(options.block * speed["tokens_per_s"] / LENGTH / concurrency)
    requests, rounds = concurrency * max(1, count), []
    often = {name: child for name, child in children.items() if name in ("off", "guard")}
    longest = 0.0
    while len(rounds) < options.blocks and time.monotonic() + longest < end:
        begun = time.monotonic()
        taking = children if len(rounds) % SELDOM == 0 else often
        rounds.append(one_round(taking, concurrency, requests, len(rounds)))
        longest = max(longest, time.monotonic() - begun)
    rows = [
        summary(tool, w, concurrency, rounds, _more(facts[tool, w], child, requests))
        for tool, child in children.items()
        if rounds and tool in warm
    ]
    _replace_rows(result, rows)
    save()


def _more(facts: dict[str, Any], child: Child, requests: int) -> dict[str, Any]:
    probe = child.probe()
    names = ("verify_steps", "steps_checked", "findings", "gpu_bytes", "pinned_bytes")
    counted = {name: probe.get(name) for name in names}
    log = child.cell.path("log.txt").read_text(errors="replace")
    return {"start_s": facts.get("start_s"), **counted, "requests": requests,
            "violations_logged": log.count("iolation")}  # fmt: skip


def _replace_rows(result: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    new = {(r["tool"], r["w"], r["concurrency"]): r for r in rows}
    old = {(r["tool"], r["w"], r["concurrency"]): r for r in result["rows"]}
    result["rows"] = list({**old, **new}.values())


def main(argv: list[str] | None = None) -> int:
    """Measure; 1 if the guard costs more than it may, or was not measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--w", type=lambda text: [int(w) for w in text.split(",")], default=[8, 64],
        help="verify widths",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=540.0, help="in all, start included")
    parser.add_argument("--blocks", type=int, default=60, help="most rounds per case")
    parser.add_argument("--block", type=float, default=0.5, help="seconds per block")
    parser.add_argument("--shape", default="8b", choices=("8b", "small"))
    parser.add_argument("--tools", type=lambda text: text.split(","), default=list(TOOLS))
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results/server_overhead.json"
    )
    options = parser.parse_args(argv)
    result: dict[str, Any] = {"environment": {}, "rows": [], "failed": {}}
    if options.out.exists():
        result |= json.loads(options.out.read_text())
    result["environment"] = environment()

    def save() -> None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        part = options.out.with_suffix(".part")
        part.write_text(json.dumps(result, indent=1) + "\n")
        part.replace(options.out)

    measure(options, result, save)
    save()
    mine = [r for r in result["rows"] if r["tool"] == "guard" and r["w"] in options.w]
    for row in mine:
        print(json.dumps(row))
    slow = [r for r in mine if r["ratio_to_off"] < 0.995 or (r["ratio_low"] or 0) < 0.99]
    return 1 if slow or not mine else 0


def environment() -> dict[str, Any]:
    """Versions and the device."""
    import platform

    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


if __name__ == "__main__":
    sys.exit(main())
