"""What the guard costs a server: engines side by side on one GPU, measured in turns.

    python benchmarks/server_overhead.py --w 8 --minutes 9 [--tools guard,kv_canary,async_assert]

All engines of a width are resident; each round runs the same block on every one of them, in
another order each time, and the ratio to the engine without any tool is taken within the round:
drift hits both sides. The result file is rewritten after every round; rows of other widths stay.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from serving import ROOT, Cell, Child

TOOLS = ("guard", "kv_canary", "async_assert")
CONCURRENCY = (1, 8, 32)
REQUESTS = {1: 2, 8: 16, 32: 64}  # per block: a second or two on an H200
LENGTH = 128


def interval(ratios: list[float], seed: int = 0, draws: int = 4000) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def percentile(values: list[float], count: int, share: float) -> float | None:
    """A high percentile of `count` values of which the largest are given, sorted."""
    rank = count - int(share * count)
    return values[-rank] if values and rank <= len(values) else None


def summary(
    tool: str, w: int, concurrency: int, rounds: list[dict[str, Any]], more: dict[str, Any]
) -> dict[str, Any]:
    """One row: a tool at a width and a concurrency, over all rounds."""
    speeds = [one[tool]["tokens_per_s"] for one in rounds]
    ratios = [one[tool]["tokens_per_s"] / one["off"]["tokens_per_s"] for one in rounds]
    low, high = interval(ratios) if len(ratios) > 1 else (None, None)
    gaps = [
        found
        for one in rounds
        if (found := percentile(one[tool]["gaps"], one[tool]["count"], 0.99)) is not None
    ]
    return {
        "tool": tool, "mode": "log" if tool in ("guard", "kv_canary") else tool,
        "algorithm": "NGRAM", "w": w, "concurrency": concurrency, "blocks": len(rounds),
        "tokens_per_s": round(statistics.median(speeds), 1),
        "ratio_to_off": round(statistics.median(ratios), 4),
        "ratio_low": low, "ratio_high": high,
        "p99_ms": round(1000 * statistics.median(gaps), 3) if gaps else None, **more,
    }  # fmt: skip


def gpu_memory(pids: set[int]) -> int | None:
    """MiB that these processes use on the GPU, where nvidia-smi says so."""
    try:
        out = subprocess.run(
            ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout  # fmt: skip
        rows = [line.split(",") for line in out.splitlines() if line.strip()]
        used = [int(memory) for pid, memory in rows if int(pid) in pids]
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return sum(used) or None


def group_of(child: Child) -> set[int]:
    """Process ids of an engine: a session of its own."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == child.process.pid:
            found.add(int(stat.parent.name))
    return found


def one_round(
    children: dict[str, Child], concurrency: int, number: int, scale: float
) -> dict[str, Any]:
    """The same block on every engine, in a rotating order."""
    names = list(children)
    names = names[number % len(names) :] + names[: number % len(names)]
    requests = max(concurrency, round(REQUESTS[concurrency] * scale))
    found = {}
    for name in names:
        found[name] = children[name].ask(
            120, do="block", concurrency=concurrency, requests=requests, length=LENGTH,
            seed=1000 * concurrency + number,
        )  # fmt: skip
    return found


def start(w: int, tools: list[str], deadline: float, shape: str) -> tuple[Any, Any, Any]:
    """All engines of a width, started together: children, facts, and reasons of the failed."""
    made = {
        tool: Child(Cell("NGRAM", tool=tool, shape=shape, w=w, max_running=32))
        for tool in ("off", *tools)
    }
    children, facts, failed = {}, {}, {}
    for tool, child in made.items():
        try:
            facts[tool] = child.answer(min(240.0, deadline - time.monotonic()))
            children[tool] = child
        except RuntimeError as error:
            failed[tool] = str(error)
            child.stop()
    for tool, child in children.items():
        facts[tool]["gpu_mib"] = gpu_memory(group_of(child))
        facts[tool]["pinned_bytes"] = child.probe().get("pinned_bytes")
    return children, facts, failed


def measure(options: argparse.Namespace, result: dict[str, Any], save: Any) -> None:
    """All concurrencies of one width."""
    deadline = time.monotonic() + options.minutes * 60
    children, facts, failed = start(options.w, options.tools, deadline, options.shape)
    result["failed"] |= {f"w{options.w}-{tool}": why for tool, why in failed.items()}
    try:
        if "off" not in children:
            raise RuntimeError(f"no engine to compare with: {failed.get('off')}")
        for concurrency in CONCURRENCY:  # warm every engine before the first round counts
            one_round(children, concurrency, -1, 0.5)
        share = (deadline - time.monotonic()) / len(CONCURRENCY)
        for concurrency in CONCURRENCY:
            end, rounds = time.monotonic() + share, []
            while len(rounds) < options.blocks and time.monotonic() < end - 5:
                rounds.append(one_round(children, concurrency, len(rounds), options.scale))
                rows = [
                    summary(tool, options.w, concurrency, rounds, _more(facts[tool], child))
                    for tool, child in children.items()
                ]
                _replace_rows(result, rows)
                save()
    finally:
        for child in children.values():
            child.stop()


def _more(facts: dict[str, Any], child: Child) -> dict[str, Any]:
    probe = child.probe()
    counted = {name: probe.get(name) for name in ("verify_steps", "steps_checked", "findings")}
    kept = ("start_s", "gpu_mib", "pinned_bytes")
    log = child.cell.path("log.txt").read_text(errors="replace")
    return {**{name: facts.get(name) for name in kept}, **counted,
            "violations_logged": log.count("iolation")}  # fmt: skip


def _replace_rows(result: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    new = {(r["tool"], r["w"], r["concurrency"]): r for r in rows}
    old = {(r["tool"], r["w"], r["concurrency"]): r for r in result["rows"]}
    result["rows"] = list({**old, **new}.values())


def main(argv: list[str] | None = None) -> int:
    """Measure one width; 1 if the guard costs more than it may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--w", type=int, default=8, help="verify width: 8, then 64")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--scale", type=float, default=1.0, help="requests per block")
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
    mine = [r for r in result["rows"] if r["tool"] == "guard" and r["w"] == options.w]
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
