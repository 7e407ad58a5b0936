"""What the guard costs a server: engines side by side on one GPU, measured in turns.

    python benchmarks/server_overhead.py --w 64,8 --seconds 520 [--gpus 0,1] [--tools kv_canary]

For each width two engines without a guard and two with it are resident on one GPU: two processes
that run the same code differ by up to a percent, for as long as they live. A block is the same
requests on one engine; a round is one block on each of the four, and rounds alternate which side
goes first, and which engine of it. One ratio comes from two neighbouring rounds, so that drift and
order fall out; the interval is a bootstrap over those. The engine that runs has the same processors
as the others when those run, one core of them for its scheduler's main thread alone; the engines
that wait sleep on others. `ratio_to_off` is of tokens per second of decoding, over whole blocks,
`step_to_off` of the median time between two steps, which a pause of the host does not move.
`control` is what the method says of nothing: the second engine without a guard to the first, in the
same blocks. SGLang's own tools are measured at the last width, in fewer rounds, against one engine.
With two GPUs the widths are measured at the same time, each on its own GPU with half of the
processors. The result file is rewritten every few seconds; rows of other widths stay.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving import ANSWERED_S, ROOT, Cell, Child

TOOLS = ("kv_canary", "async_assert")
FOUR = ("off", "guard", "control", "twin")  # the second ones of both sides last
CONCURRENCY = (8, 32, 1)  # the ones that matter most first
MODES = {"guard": "log", "kv_canary": "log", "control": "off"}
POOL = 24_000  # KV slots: 32 requests with their lookahead, and their prompts in the radix cache
SIZES = (1, 2, 4, 8, 16, 24, 32)  # captured batch sizes: the less of them, the sooner it starts
LENGTHS = (64, 1536)  # new tokens of a request
START_S, TOOL_S = 150.0, 30.0  # most seconds until the engines that matter are up; then the others
GATE, LOW = 0.995, 0.99  # what the median and the interval's lower end must reach


def interval(ratios: list[float], seed: int = 0, draws: int = 2000) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def paired(ratios: list[float]) -> list[float]:
    """Geometric means of neighbouring rounds, in which the engines took turns in going first."""
    if len(ratios) < 2:
        return ratios
    return [math.sqrt(a * b) for a, b in zip(ratios[::2], ratios[1::2], strict=False)]


def percentile(values: list[float], share: float) -> float | None:
    """The smallest value that at least `share` of all do not exceed; None without values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


# --- one width ---
Block = dict[str, Any]
Round = tuple[list[Block], list[Block]]


@dataclass(slots=True)
class Case:
    """A width at a concurrency. `rounds` are, by tool, the unguarded engines' blocks and the
    tool's.
    """

    concurrency: int
    length: int = 0
    rounds: dict[str, list[Round]] = field(default_factory=dict)


@dataclass(slots=True)
class Bench:
    """The engines of one width, by tool."""

    w: int
    children: dict[str, Child]
    facts: dict[str, dict[str, Any]]
    cases: list[Case]
    warm_s: float = 0.1  # of each block, before what is measured
    cores: tuple[Any, Any, Any] = ((), (), ())  # of a scheduler, of its engine, of those that wait
    running: str = ""

    def block(self, tool: str, case: Case) -> dict[str, Any]:
        """One block on one engine."""
        scheduler, engine, others = self.cores
        if others and tool != self.running:
            for name, child in self.children.items():
                if name == self.running or not self.running:
                    child.pin(others)
            self.children[tool].pin(engine, scheduler)
            self.running = tool
        return self.children[tool].ask(
            150, do="block", concurrency=case.concurrency, length=case.length, warm_s=self.warm_s
        )

    def round(self, tool: str, case: Case) -> None:
        """One block on each engine of both sides."""
        held = case.rounds.setdefault(tool, [])
        sides = [["off"], [tool]]
        if tool == "guard" and {"control", "twin"} <= set(self.children):
            sides = [["off", "control"], ["guard", "twin"]]
        first, last = sides if len(held) % 2 == 0 else sides[::-1]
        way = -1 if len(held) % 4 in (1, 2) else 1  # the second engines come first as often
        (head, *tail), inner = first[::way], last[::way]
        found = {name: self.block(name, case) for name in (head, *inner, *tail)}
        held.append(([found[name] for name in sides[0]], [found[name] for name in sides[1]]))

    def settle(self, case: Case, block_s: float) -> None:
        """Blocks that are not measured: lengths, radix cache, n-grams, clocks; and each engine told
        once, as SGLang offers it, that what it holds is no garbage.
        """
        if not case.length:
            case.length = LENGTHS[0]
            self.block("off", case)
            speed = self.block("off", case)["tokens_per_s"] / case.concurrency
            case.length = min(max(LENGTHS[0], round(block_s * speed)), LENGTHS[1])
            for tool, child in self.children.items():
                self.block(tool, case)
                child.ask(60, do="settled")
        for tool in self.children:
            self.block(tool, case)

    def rows(self) -> list[dict[str, Any]]:
        """One row a tool and case."""
        return [
            summary(tool, self.w, case, self.facts.get(tool, {}))
            for case in self.cases
            for tool in dict.fromkeys(("off", *self.children))
            if self.measured(tool, case)
        ]

    def measured(self, tool: str, case: Case) -> bool:
        """Whether there is something to say about a tool; a twin is part of the guard's row."""
        rounds = case.rounds.get(rounds_of(tool))
        alone = tool == "control" and rounds and len(rounds[0][0]) < 2
        return bool(rounds) and tool != "twin" and not alone


def rounds_of(tool: str) -> str:
    """The tool in whose rounds these engines ran."""
    return "guard" if tool in FOUR else tool


def summary(tool: str, w: int, case: Case, facts: dict[str, Any]) -> dict[str, Any]:
    """One row: a tool at a width and a concurrency, over its rounds."""
    rounds = case.rounds[rounds_of(tool)]
    if tool == "control":
        rounds = [(off[:1], off[1:]) for off, _ in rounds]
    mine = [block for sides in rounds for block in sides[tool != "off"]]
    ratios = [mean("tokens_per_s", one) / mean("tokens_per_s", off) for off, one in rounds]
    pairs = paired(ratios) if tool != "off" else [1.0]
    low, high = interval(pairs) if len(pairs) > 1 else (None, None)
    step = paired([mean("step_s", off) / mean("step_s", one) for off, one in rounds])
    step = step if tool != "off" else [1.0]
    step_low, step_high = interval(step) if len(step) > 1 else (None, None)
    steps, tokens = (sum(one[name] for one in mine) for name in ("steps", "tokens"))
    p99 = percentile([gap for one in mine for gap in one["gaps"]], 0.99)
    return {
        "tool": tool, "mode": MODES.get(tool, tool), "algorithm": "NGRAM", "w": w,
        "concurrency": case.concurrency, "blocks": len(rounds), "pairs": len(pairs),
        "engines": len(rounds[0][tool != "off"]),
        "tokens_per_s": round(statistics.median(one["tokens_per_s"] for one in mine), 1),
        "ratio_to_off": round(statistics.median(pairs), 4),
        "ratio_low": low and round(low, 4), "ratio_high": high and round(high, 4),
        "step_ms": round(1000 * statistics.median(one["step_s"] for one in mine), 4),
        "step_to_off": round(statistics.median(step), 4),
        "step_low": step_low and round(step_low, 4), "step_high": step_high and round(step_high, 4),
        "accept_length": round(tokens / steps, 4) if steps else None,
        "steps_to_off": steps_to_off(rounds) if tool != "off" else 1.0,
        "p99_ms": None if p99 is None else round(1000 * p99, 3),
        "new_tokens": case.length, **facts,
        "ratios": [round(ratio, 4) for ratio in ratios] if tool != "off" else [],
    }  # fmt: skip


def mean(name: str, blocks: list[Block]) -> float:
    """The geometric mean over one side's engines."""
    return statistics.geometric_mean(block[name] for block in blocks)


def steps_to_off(rounds: list[Round]) -> float | None:
    """Verify steps of the tool's engines to the others', for the same requests: 1 if it is fair."""
    off, mine = (sum(block["steps"] for sides in rounds for block in sides[at]) for at in (0, 1))
    return round(mine / off, 5) if off else None


# --- all widths ---
def cells(options: argparse.Namespace) -> list[Cell]:
    """All engines, the ones that are needed most first."""
    gpus, groups = options.gpus, processors(len(options.gpus))
    fit = FOUR if len(gpus) >= len(options.w) else FOUR[:2]  # a GPU holds seven engines
    wanted = [(tool, at) for tool in fit for at in range(len(options.w))]
    wanted += [(tool, len(options.w) - 1) for tool in TOOLS if tool in options.tools]
    return [
        Cell(
            "NGRAM", tool=tool, shape=options.shape, w=options.w[at], max_running=32, pool=POOL,
            sizes=SIZES, asked=True, gpu=gpus[at % len(gpus)], cpus=tuple(groups[at % len(gpus)]),
        )
        for tool, at in wanted
    ]  # fmt: skip


def processors(parts: int) -> list[list[int]]:
    """The processors of this machine in `parts` groups; threads of one core stay together. One
    part is all that this process may use.
    """
    if parts == 1:
        return [sorted(os.sched_getaffinity(0))]
    names = sorted({_siblings(n) for n in range(os.cpu_count() or 1)}, key=_spelled)
    share = len(names) // parts
    groups = [names[at * share : (at + 1) * share] for at in range(parts)]
    return [sorted(n for name in group for n in _spelled(name)) for group in groups]


def shares(cpus: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Processors for a scheduler, for the rest of its engine, and for engines that wait: a core,
    then the others but for a quarter of all. Nothing where there are fewer than four cores.
    """
    cores: dict[str, list[int]] = {}
    for cpu in cpus:
        cores.setdefault(_siblings(cpu), []).append(cpu)
    held = list(cores.values())
    if len(held) < 4:
        return [], [], []
    waiting = len(held) // 4
    first, rest, last = held[0], held[1:-waiting], held[-waiting:]
    return first, [*itertools.chain(*rest)], [*itertools.chain(*last)]


def _siblings(processor: int) -> str:
    """The threads of a processor's core, as the kernel spells them; itself where it does not."""
    path = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
    return path.read_text().strip() if path.exists() else str(processor)


def _spelled(text: str) -> list[int]:
    """The numbers of a list such as 0-3,8."""
    spans = [part.partition("-") for part in text.split(",")]
    return [n for low, _, high in spans for n in range(int(low), int(high or low) + 1)]


def start(wanted: list[Cell], deadline: float, warm_s: float) -> tuple[list[Bench], dict[str, str]]:
    """All engines, started together; reasons of the failed ones."""
    made = [Child(cell) for cell in wanted]
    where()
    benches: dict[int, Bench] = {}
    failed = {}
    for child in made:
        cell = child.cell
        cases = [Case(c) for c in CONCURRENCY]
        made_for = Bench(cell.w, {}, {}, cases, warm_s, shares(cell.cpus))
        bench = benches.setdefault(cell.w, made_for)
        patience = START_S if cell.tool in FOUR else TOOL_S  # others are started by now
        try:
            ready = child.answer(min(patience, deadline - time.monotonic() - 30))
            bench.children[cell.tool] = child
            bench.facts[cell.tool] = {name: ready[name] for name in ("start_s", "release")}
        except RuntimeError as error:
            failed[f"w{cell.w}-{cell.tool}"] = str(error)
            child.stop()
    return list(benches.values()), failed


def count(benches: list[Bench]) -> None:
    """What the probes counted, into the facts. Takes a second; the engines have to be idle."""
    children = [(bench, tool) for bench in benches for tool in bench.children]
    for bench, tool in children:
        bench.children[tool].ask_probe()
    time.sleep(ANSWERED_S)
    names = ("verify_steps", "steps_checked", "findings", "gpu_bytes", "gpu_allocated",
             "pinned_bytes", "threads_s")  # fmt: skip
    for bench, tool in children:
        child = bench.children[tool]
        probe, log = child.probe(), child.cell.path("log.txt").read_text(errors="replace")
        bench.facts[tool] |= {name: probe.get(name) for name in names}
        bench.facts[tool]["violations_logged"] = log.count("iolation")
        bench.facts[tool]["dumps"] = probe.get("recorder", {}).get("dumps")
    for bench in [bench for bench in benches if "guard" in bench.facts]:
        for name in ("verify_steps", "steps_checked", "findings", "violations_logged", "dumps"):
            values = [bench.facts[tool][name] for tool in ("guard", "twin") if tool in bench.facts]
            # a probe that did not answer has not counted nothing
            bench.facts["guard"][name] = None if None in values else sum(values)


def lane(benches: list[Bench], deadline: float, options: argparse.Namespace, save: Any) -> None:
    """Measure the widths of one GPU, a few rounds of each case at a time, until the deadline."""
    cases = [(bench, case) for at in range(len(CONCURRENCY))
             for bench in benches for case in (bench.cases[at],)]  # fmt: skip
    longest = 0.0
    for bench, case in itertools.cycle(cases):
        if len(case.rounds.get("guard", ())) >= options.blocks:
            return
        bench.settle(case, options.block)
        turns = dict.fromkeys(FOUR, 0) | {"guard": options.rounds}
        for tool in [name for name in bench.children for _ in range(turns.get(name, 1))]:
            begun = time.monotonic()
            if begun + longest > deadline:
                return
            bench.round(tool, case)
            longest = max(longest, time.monotonic() - begun)
        save()


def measure(options: argparse.Namespace, result: dict[str, Any], save: Any) -> list[dict[str, Any]]:
    """Start, measure each GPU's widths in a thread, count, stop. Returns the rows."""
    deadline = time.monotonic() + options.seconds - 8
    benches, result["failed"] = start(cells(options), deadline, options.warm)
    lock = threading.Lock()

    def keep() -> list[dict[str, Any]]:
        with lock:
            rows = [row for bench in benches for row in bench.rows()]
            put(result, rows)
            save(rows)
            return rows

    try:
        ready = [bench for bench in benches if {"off", "guard"} <= set(bench.children)]
        lanes: dict[str, list[Bench]] = {}
        for bench in ready:
            lanes.setdefault(bench.children["off"].cell.gpu, []).append(bench)
        work = [threading.Thread(target=_guarded, args=(result, mine, deadline, options, keep))
                for mine in lanes.values()]  # fmt: skip
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        count(benches)
        return keep()
    finally:
        for child in [child for bench in benches for child in bench.children.values()]:
            child.stop(0.3)


def _guarded(result: dict[str, Any], benches: list[Bench], *more: Any) -> None:
    """One lane; a fault ends it and is kept, the others go on."""
    try:
        lane(benches, *more)
    except Exception as error:
        result["failed"]["w" + ",".join(str(bench.w) for bench in benches)] = str(error)


def put(result: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Replace the rows of the widths that were measured; other widths stay."""
    widths = {row["w"] for row in rows}
    result["rows"] = [row for row in result["rows"] if row["w"] not in widths] + rows


def main(argv: list[str] | None = None) -> int:
    """Measure; 1 if the guard costs more than it may, or a width was not measured."""
    options = _parser().parse_args(argv)
    result: dict[str, Any] = {"environment": {}, "rows": [], "failed": {}}
    if options.out.exists():
        result |= json.loads(options.out.read_text())
    load = os.getloadavg()[0]

    def save(measured: list[dict[str, Any]]) -> None:
        if measured or not result["environment"]:  # nothing new is of this machine otherwise
            result["environment"] = environment(options, load, result["rows"])
        options.out.parent.mkdir(parents=True, exist_ok=True)
        part = options.out.with_suffix(".part")
        part.write_text(json.dumps(result, indent=1) + "\n")
        part.replace(options.out)

    measured = measure(options, result, save)
    mine = [row for row in measured if row["tool"] == "guard"]
    for row in result["rows"]:
        print(json.dumps({name: value for name, value in row.items() if name != "ratios"}))
    return 0 if {row["w"] for row in mine} == set(options.w) and all(map(met, mine)) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--w", type=_numbers, default=[64, 8], help="verify widths")
    parser.add_argument("--seconds", type=float, default=540.0, help="in all, start included")
    parser.add_argument("--blocks", type=int, default=120, help="most rounds per case")
    parser.add_argument("--block", type=float, default=0.6, help="seconds per block")
    parser.add_argument("--warm", type=float, default=0.1, help="unmeasured seconds before it")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of a case at a time")
    parser.add_argument("--shape", default="8b", choices=("8b", "small"))
    parser.add_argument("--tools", type=_tools, default=list(TOOLS))
    parser.add_argument(
        "--gpus", type=lambda text: text.split(","), default=[""], help="a width each, in turn"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results/server_overhead.json"
    )
    return parser


def _numbers(text: str) -> list[int]:
    return list(dict.fromkeys(int(word) for word in text.split(",")))  # an engine has one name


def _tools(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := set(names) - set(TOOLS):
        known = " and ".join(TOOLS)
        raise argparse.ArgumentTypeError(f"expected {known}, found {', '.join(sorted(unknown))}")
    return names


def met(row: dict[str, Any]) -> bool:
    """Whether a row of the guard is as fast as it has to be."""
    return bool(row["ratio_to_off"] >= GATE and (row["ratio_low"] or 0) >= LOW)


def environment(
    options: argparse.Namespace, load: float, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Versions, the device, how busy the machine was before, and the verdict in words."""
    mine = [row for row in rows if row["tool"] == "guard"]
    same = [row for row in rows if row["tool"] == "control" and row["ratio_low"]]
    note = (
        f"{where()['device']}, SGLang {mine[0]['release'] if mine else 'unknown'}, "
        f"{where()['processors']} processors. Required: median at least {GATE}, interval above "
        f"{LOW}; met in {sum(map(met, mine))} of {len(mine)} rows."
    )
    if same:
        low, high = min(r["ratio_low"] for r in same), max(r["ratio_high"] for r in same)
        note += (
            f" Not resolved to 1 %: two engines without a guard (control) differ by {low:.2f} to "
            f"{high:.2f} in the same blocks."
        )
    return {
        **where(), "gpus": options.gpus, "load_before": round(load, 2), "shape": options.shape,
        "block_s": options.block, "note": note,
    }  # fmt: skip


@functools.cache
def where() -> dict[str, Any]:
    """Versions and the device; loads torch, so it is asked while engines start."""
    import platform

    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"device": name, "torch": torch.__version__, "python": platform.python_version(),
            "processors": os.cpu_count()}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
