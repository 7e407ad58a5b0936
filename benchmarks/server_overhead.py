"""What the guard costs a server: engines side by side on one GPU, measured in turns.

    python benchmarks/server_overhead.py --w 64,8 --seconds 520 [--gpus 0,1] [--generations 2]

Two processes that run the same code differ by up to a percent, for as long as they live: how many
engines there are decides what can be told, not how long they are measured. So all engines are
started, measured and stopped `--generations` times, each with an equal share of the time left. A
generation has three engines without a guard and three with it for each width, on one GPU; the last
has two of each beside SGLang's own `--tools`, which need memory and are measured at the last width
only, in fewer rounds, against one engine. Widths that share a GPU have one engine of each.

A block is the same requests on one engine; a round is one block on each engine of both sides, and
rounds alternate which side goes first, and which engine of it. One ratio comes from a pair, two
neighbouring rounds of one visit to a case, so that drift and order fall out; a round without its
other is in no pair. Rows are of all generations: `engines` counts those of a side over all,
`blocks` the rounds. `ratio_to_off` is the median over all pairs, of tokens per second of decoding,
over whole blocks; `step_to_off` of the median time between two steps, which a pause of the host
does not move. Their interval is a bootstrap over pairs: it knows nothing of how engines differ.
`by_generation` does: the median of each one's pairs. `control` is what the method says of nothing:
the second engine without a guard to the first, in the same blocks. `p99_ms` is the median over
blocks of each block's p99 of seconds a token.

Runs add up: the file keeps every round, and a later call with the same sources of the guard, shape,
release and device goes on from them (pool.py), with the same requests; what does not fit is said
and dropped, with `--fresh` all of it. Generations are numbered on over runs. The case with the
fewest pairs is always visited next. Counts of steps (`ahead`: with nothing launched before their
replay), findings and dumps are sums over a side's engines, but for `uncounted` ones; start-up,
memory and `threads_s` are of the newest run's first.

The engine that runs has the same processors as the others when those run, one core of them for its
scheduler's main thread alone; the engines that wait sleep on others. With two GPUs the widths are
measured at the same time, each on its own GPU with half of the processors. The result file is
rewritten after every visit; other widths stay. `failed` names generation, width and engine.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from files import sources
from pool import Pool, Width, met
from rounds import COUPLES, ENGINES, TOOLS, Case, Round, compact, coverage
from serving import ANSWERED_S, ROOT, Cell, Child

CONCURRENCY = (8, 32, 1)  # the ones that matter most first
POOL = 24_000  # KV slots: 32 requests with their lookahead, and their prompts in the radix cache
SIZES = (1, 2, 4, 8, 16, 24, 32)  # captured batch sizes: the less of them, the sooner it starts
LENGTHS = (64, 1536)  # new tokens of a request
START_S, TOOL_S = 150.0, 30.0  # most seconds until the engines that matter are up; then the others
STOP_S = 8.0  # to count and to stop, at the end of a generation


# --- one width ---
@dataclass(slots=True)
class Bench(Width):
    """One width: its engines, by tool, and what all generations of them have shown."""

    children: dict[str, Child] = field(default_factory=dict)
    warm_s: float = 0.1  # of each block, before what is measured
    cores: tuple[Any, Any, Any] = ((), (), ())  # of a scheduler, of its engine, of those that wait
    running: str = ""
    run: int = 1
    generation: int = 1  # numbered on over runs
    visit: int = 0  # counted on over generations
    joined: bool = False  # by what earlier runs have shown
    settled: set[int] = field(default_factory=set)  # concurrencies

    def begin(self, generation: int) -> None:
        """Forget the engines of before, not what they have shown."""
        self.children, self.running, self.settled = {}, "", set()
        self.generation = generation

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
        """One block on each engine of both sides: ABBA, then BAAB; three a side go ABBAAB."""
        held = case.rounds.setdefault(tool, [])
        at = sum(one.generation == self.generation for one in held)
        couples = [two for two in COUPLES if self.children.keys() >= {*two}]
        couples = couples if tool == "guard" else [("off", tool)]
        way = -1 if at % 4 in (1, 2) else 1  # the last engines come first as often
        order = [two[:: -1 if (at + k) % 2 else 1] for k, two in enumerate(couples[::way])]
        found = {name: compact(self.block(name, case)) for name in itertools.chain(*order)}
        off, mine = ([found[name] for name in side] for side in zip(*couples, strict=True))
        held.append(Round(off, mine, self.generation, self.visit, self.run))

    def settle(self, case: Case, block_s: float) -> None:
        """Begin a visit with blocks that are not measured: lengths, radix cache, n-grams, clocks;
        and each engine told once, as SGLang offers it, that what it holds is no garbage. A length
        stays as it was found: the requests of all generations and runs are the same.
        """
        self.visit += 1
        if not case.length:
            case.length = LENGTHS[0]
            self.block("off", case)
            speed = self.block("off", case)["tokens_per_s"] / case.concurrency
            case.length = min(max(LENGTHS[0], round(block_s * speed)), LENGTHS[1])
        if case.concurrency not in self.settled:
            for tool, child in self.children.items():
                self.block(tool, case)
                child.ask(60, do="settled")
            self.settled.add(case.concurrency)
        for tool in self.children:
            self.block(tool, case)


# --- all widths ---
def tools_of(last: bool, options: argparse.Namespace) -> tuple[str, ...]:
    """The engines of a width, the ones that are needed most first. SGLang's own tools come last, in
    a run's last generation, and take the place of the third engines. A GPU holds about six.
    """
    tools = [tool for tool in TOOLS if tool in options.tools and last]
    if len(options.gpus) < len(options.w):
        return (*ENGINES[:2], *tools)
    return (*ENGINES[:4], *tools) if tools else ENGINES


def cells(options: argparse.Namespace, generation: int, last: bool) -> list[Cell]:
    """All engines of a generation, in a folder of its own. SGLang's tools run at the last width."""
    gpus, groups, final = options.gpus, processors(len(options.gpus)), len(options.w) - 1
    wanted = [
        Cell(
            "NGRAM", tool=tool, shape=options.shape, w=options.w[at], max_running=32, pool=POOL,
            sizes=SIZES, asked=True, gpu=gpus[at % len(gpus)], cpus=tuple(groups[at % len(gpus)]),
        )
        for tool in tools_of(last, options)
        for at in range(final if tool in TOOLS else 0, final + 1)
    ]  # fmt: skip
    return [replace(cell, folder=f"{cell.folder}/generation-{generation}") for cell in wanted]


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


def start(benches: list[Bench], made: list[Child], deadline: float, failed: dict[str, str]) -> None:
    """Wait for engines that were started together; those that fail are stopped, and said why."""
    where()
    by_w = {bench.w: bench for bench in benches}
    for child in made:
        cell, bench = child.cell, by_w[child.cell.w]
        bench.cores = shares(cell.cpus)
        patience = START_S if cell.tool in ENGINES else TOOL_S  # others are started by now
        try:
            ready = child.answer(min(patience, deadline - time.monotonic() - 30))
            bench.children[cell.tool] = child
            fact = {"run": bench.run, "generation": bench.generation,
                    **{name: ready[name] for name in ("start_s", "release")}}  # fmt: skip
            bench.facts.setdefault(cell.tool, []).append(fact)
        except RuntimeError as error:
            failed[f"g{bench.generation}-w{cell.w}-{cell.tool}"] = str(error)
            child.stop(0.3)


def asked(children: Iterable[Child]) -> list[dict[str, Any]]:
    """What each engine's probe says, once it rests; takes a second."""
    held = list(children)
    for child in held:
        child.ask_probe()
    time.sleep(ANSWERED_S)
    return [child.probe() for child in held]


def stop(children: list[Child]) -> None:
    """End all engines at once."""
    with ThreadPoolExecutor(len(children) or 1) as threads:
        list(threads.map(lambda child: child.stop(0.3), children))


def count(benches: list[Bench]) -> None:
    """What the probes counted, into the facts. Takes a second; the engines have to be idle."""
    children = [(bench.facts[tool][-1], child)
                for bench in benches for tool, child in bench.children.items()]  # fmt: skip
    names = ("verify_steps", "steps_checked", "findings", "gpu_bytes", "gpu_allocated",
             "pinned_bytes", "threads_s", "beside", "ahead")  # fmt: skip
    told = asked([child for _, child in children])
    for (fact, child), probe in zip(children, told, strict=True):
        log = child.cell.path("log.txt").read_text(errors="replace")
        fact |= {name: probe.get(name) for name in names}
        fact["violations_logged"] = log.count("iolation")
        fact["dumps"] = probe.get("recorder", {}).get("dumps")


def lane(benches: list[Bench], deadline: float, options: argparse.Namespace, save: Any) -> None:
    """Measure the widths of one GPU until the deadline, a few rounds at a time of the case that has
    the fewest pairs.
    """
    cases = [(bench, case) for at in range(len(CONCURRENCY))
             for bench in benches for case in (bench.cases[at],)]  # fmt: skip
    longest = 0.0
    while left := [two for two in cases if lived(*two) < options.blocks]:
        if time.monotonic() + longest > deadline:
            return
        bench, case = min(left, key=lambda two: coverage(two[1]))
        bench.settle(case, options.block)
        turns = dict.fromkeys(ENGINES, 0) | {"guard": options.rounds}
        for tool in [name for name in bench.children for _ in range(turns.get(name, 2))]:
            begun = time.monotonic()
            if begun + longest > deadline:
                return
            bench.round(tool, case)
            longest = max(longest, time.monotonic() - begun)
        save()


def lived(bench: Bench, case: Case) -> int:
    """The rounds of a case in this generation."""
    return sum(one.generation == bench.generation for one in case.rounds.get("guard", ()))


def measure(options: argparse.Namespace, pool: Pool) -> list[dict[str, Any]]:
    """Each generation in its share of the time left. Returns the rows of what was measured."""
    end, lock, failed = time.monotonic() + options.seconds, threading.Lock(), dict[str, str]()
    benches = [Bench(w, {}, [Case(c) for c in CONCURRENCY], warm_s=options.warm,
                     run=pool.run["run"]) for w in options.w]  # fmt: skip

    def keep() -> dict[str, Any]:
        with lock:
            return pool.save(benches, failed)

    first = pool.generations + 1
    for generation in range(first, first + options.generations):
        now = time.monotonic()
        share = (end - now) / (first + options.generations - generation)
        for bench in benches:
            bench.begin(generation)
        last = generation == first + options.generations - 1
        try:
            live(benches, now + share - STOP_S, options, failed, keep, pool, last)
        except Exception as error:  # the other generations count
            failed[f"g{generation}"] = str(error)
        result = keep()
    widths = pool.measured(benches)
    return [row for row in result["rows"] if row["w"] in widths]


def live(
    benches: list[Bench], deadline: float, options: argparse.Namespace, failed: dict[str, str],
    keep: Callable[[], Any], pool: Pool, last: bool,
) -> None:  # fmt: skip
    """One generation: start, measure each GPU's widths in a thread, count, stop."""
    made: list[Child] = []
    try:
        for cell in cells(options, benches[0].generation, last):
            made.append(Child(cell))
        start(benches, made, deadline, failed)
        ready = [bench for bench in benches if bench.children.keys() >= {"off", "guard"}]
        lanes: dict[str, list[Bench]] = {}
        for bench in ready:
            lanes.setdefault(bench.children["off"].cell.gpu, []).append(bench)
        join(ready, pool)
        work = [threading.Thread(target=_guarded, args=(failed, mine, deadline, options, keep))
                for mine in lanes.values()]  # fmt: skip
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        count(benches)
    finally:
        stop(made)


def join(ready: list[Bench], pool: Pool) -> None:
    """Let widths go on from earlier runs, now that the device and the release are known."""
    for bench in ready:
        if not bench.joined:
            pool.run |= {**where(), "release": bench.facts["off"][-1]["release"]}
            pool.join(bench)
            bench.joined = True


def _guarded(failed: dict[str, str], benches: list[Bench], *more: Any) -> None:
    """One lane; a fault ends it and is kept, the others go on."""
    try:
        lane(benches, *more)
    except Exception as error:
        widths = ",".join(str(bench.w) for bench in benches)
        failed[f"g{benches[0].generation}-w{widths}"] = str(error)


def main(argv: list[str] | None = None) -> int:
    """Measure; 1 if the guard costs more than it may, or a width was not measured."""
    options = _parser().parse_args(argv)
    measured = measure(options, Pool.open(options.out, options.fresh, begun(options)))
    mine = [row for row in measured if row["tool"] == "guard"]
    for row in measured:
        print(json.dumps({name: value for name, value in row.items() if name != "ratios"}))
    return 0 if {row["w"] for row in mine} == set(options.w) and all(map(met, mine)) else 1


def begun(options: argparse.Namespace) -> dict[str, Any]:
    """What a run is from its beginning."""
    return {
        "run": 1, "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "guard": sources(), "shape": options.shape, "gpus": options.gpus,
        "block_s": options.block, "load_before": round(os.getloadavg()[0], 2),
    }  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--w", type=numbers, default=[64, 8], help="verify widths")
    parser.add_argument("--seconds", type=float, default=540.0, help="in all, start included")
    parser.add_argument("--generations", type=int, default=2, choices=range(1, 10))
    parser.add_argument("--blocks", type=int, default=120, help="of a case and generation, at most")
    parser.add_argument(
        "--block", type=float, default=0.6, help="seconds per block, where no run was before"
    )
    parser.add_argument("--warm", type=float, default=0.1, help="unmeasured seconds before it")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of a case at a time; even")
    parser.add_argument("--shape", default="8b", choices=("8b", "small"))
    parser.add_argument("--tools", type=_tools, default=list(TOOLS))
    parser.add_argument(
        "--gpus", type=lambda text: text.split(","), default=[""], help="a width each, in turn"
    )
    parser.add_argument("--fresh", action="store_true", help="go on from no earlier run")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results/server_overhead.json"
    )
    return parser


def numbers(text: str) -> list[int]:
    return list(dict.fromkeys(int(word) for word in text.split(",")))  # an engine has one name


def _tools(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := set(names) - set(TOOLS):
        known = " and ".join(TOOLS)
        raise argparse.ArgumentTypeError(f"expected {known}, found {', '.join(sorted(unknown))}")
    return names


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
