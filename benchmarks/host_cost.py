"""Host time that the guard adds to a verify step of a captured graph, site by site. Needs no GPU.

    TRITON_INTERPRET=1 python benchmarks/host_cost.py [--steps 2000] [--label after] [--cold]

The hooks, the device checker and the recorder are those of a server, armed as in one on SGLang's
real Triton backend; the objects of a step are SGLang's. What SGLang does itself is left out (its
functions are replaced by empty ones under our wrappers, once a graph is captured), and so is
what a CUDA driver does: kernels are launched into nothing, events have always happened. A step is
resolved when the next one is queued, as the overlapping scheduler does. `us` is the median of each
site in the tenth of the run that was disturbed least; `dispatches` counts calls of torch's
dispatcher, each of which costs some microseconds more where it launches something on a GPU;
`launches` are those of our own kernels. With --cold, other Python code and other memory are used
before each site, as a scheduler does between them: the caches of the processor hold little of ours
then, and a site takes several times as long. With --profile, the functions in which the time goes
are printed.
"""

from __future__ import annotations

import argparse
import cProfile
import inspect
import json
import os
import platform
import pstats
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from ddtree_guard.config import Config
from ddtree_guard.hooks import arm
from ddtree_guard.hooks.device_checker import DeviceChecker
from ddtree_guard.testing.cases import VerifyCase
from ddtree_guard.testing.cost import Dispatches, Launches, launching_nothing, on_stream, sign
from ddtree_guard.testing.server import DECODE, MiniServer, _resolver

ROOT = Path(__file__).resolve().parents[1]
SIZES = tuple((bs, w) for w in (8, 64) for bs in (1, 8, 32))
SITES = ("begin", "build", "walk", "end", "resolve")
WARM = 60


def emptied(function: Any, stub: Callable[..., Any]) -> Any:
    """Our wrapper, with `stub` in the place of SGLang's function below it."""
    inspect.getclosurevars(function).nonlocals["original"].value = stub
    return function


def hooked(owner: type, name: str) -> Any:
    """The method with our wrapper: the corrected backend overrides it and calls its base."""
    return next(vars(c)[name] for c in owner.__mro__ if "original" in _free(vars(c).get(name)))


def _free(function: Any) -> tuple[str, ...]:
    code = getattr(function, "__code__", None)
    return () if code is None else code.co_freevars


class Others:
    """What a scheduler does between our sites: many objects, and more memory than a cache holds."""

    def __init__(self, objects: int = 60_000, at_once: int = 3000, mebibytes: int = 3) -> None:
        rng = random.Random(0)
        self.held = [{"at": n, "row": [n], "name": str(n)} for n in range(objects)]
        rng.shuffle(self.held)
        self.at, self.at_once = 0, at_once
        self.block = torch.zeros(mebibytes << 17, dtype=torch.int64)

    def __call__(self) -> int:
        self.at = (self.at + self.at_once) % (len(self.held) - self.at_once)
        self.block += 1
        part: Any = self.held[self.at : self.at + self.at_once]
        return sum(one["at"] + len(one["row"]) + len(one["name"]) for one in part)


class Bench:
    """One size: a guarded server whose steps are queued from here. `others` runs before a site."""

    def __init__(
        self, bs: int, w: int, folder: Path, launches: Launches, others: Callable[[], Any]
    ) -> None:
        self.launches, self.others = launches, others
        lens = tuple(200 + 37 * i % 101 for i in range(bs))
        case = VerifyCase(
            lens=lens, algorithm="NGRAM", budget=w - 1, draft_tokens=w, padded_bs=bs, head_dim=16,
            heads=2, kv_heads=1, context=1024,
        )  # fmt: skip
        self.server = server = MiniServer(case, "auto")
        server.server_args.device = "cuda"
        server.redress = self.keep
        guard = server.arm(Config(dump_dir=folder))
        assert guard is not None
        self.guard = guard
        server.runner.war_fastpath_read_done_event = None  # NGRAM on 0.5.16 and 0.5.17
        for req in server.reqs:
            req.kv_allocated_len = 400  # type: ignore[attr-defined]
        for _ in range(3):  # the first ones are read to the host as well
            server.step()
        assert not guard.fuses.faults, guard.fuses.faults
        self.check = guard.checker.graphs.check  # type: ignore[attr-defined]
        on_stream(self.check)
        self.slots = self.check.slots.numpy()
        guard.checker.ready()
        self.walk = server.model_worker.server._walk(
            server.prepare(server.batch(DECODE, server.reqs))
        )
        backend = type(server.backend)
        self.replay = emptied(
            hooked(backend, "init_forward_metadata_out_graph"), lambda *args, **kw: None
        )
        module = sys.modules["ddtree_guard.testing.server"]
        self.sample = emptied(module.eagle_sample, lambda *args, **kw: self.walk)
        self.resolver = emptied(_resolver(), self.commit)
        kept = [[7 + i, 9 + i, 11 + i, 13 + i][: 1 + i % 4] for i in range(bs)]
        self.turns = kept, [[token + 50 for token in row] for row in kept]
        self.result_of = server.result
        self.pending: tuple[Any, Any] | None = None
        self.steps = 0
        self.times: dict[str, list[float]] = {name: [] for name in (*SITES, "stub")}

    def keep(self, spec: Any) -> None:
        """NGRAM's links lie in the same place in each step."""
        names = "retrieve_next_token", "retrieve_next_sibling"
        links = [getattr(spec, name).to(torch.int64) for name in names]
        self.links = getattr(self, "links", None) or links
        for name, mine, part in zip(names, self.links, links, strict=True):
            mine.copy_(part)
            setattr(spec, name, mine)

    def commit(self, scheduler: Any, result: Any, batch: Any) -> Any:
        """What SGLang's resolution leaves on the requests."""
        tokens = self.turns[self.steps % 2]
        for req, row in zip(batch.reqs, tokens, strict=True):
            req.kv_committed_len += len(row)
        return tokens

    def view(self) -> Any:
        """What the graph runner hands to the backend: new views of its buffers in each step."""
        static, bs, w = self.server.static, self.server.case.bs, self.server.case.w
        mode = static.forward_mode
        return SimpleNamespace(
            batch_size=bs, forward_mode=mode, actual_forward_mode=mode,
            input_ids=static.input_ids[: bs * w], positions=static.positions[: bs * w],
            req_pool_indices=static.req_pool_indices[:bs], seq_lens=static.seq_lens[:bs],
            seq_lens_sum=None, seq_lens_cpu=static.seq_lens_cpu[:bs], num_padding=0,
            encoder_lens=None, out_cache_loc=static.out_cache_loc.clone(), out_cache_loc_dsv4=None,
            mamba_track_indices=None, spec_info=self.server.spec,
        )  # fmt: skip

    def timed(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Run a site's call and keep its microseconds."""
        self.others()
        begun = time.perf_counter_ns()
        result = call(*args)
        self.times[name].append((time.perf_counter_ns() - begun) / 1000)
        return result

    def step(self) -> None:
        """Queue a step, then resolve the one before it."""
        server = self.server
        batch, view = server.batch(DECODE, server.reqs), self.view()
        predict, lens, index = self.walk
        result = server.result(predict, lens, index)
        self.timed("begin", self.guard.begin, batch)
        self.timed("build", self.replay, server.backend, view)
        self.timed("walk", self.sample, server.spec, batch, None)
        self.steps += 1
        sign(self.slots, self.steps, server.case.bs)
        self.timed("end", self.guard.end, result)
        if self.pending is not None:
            self.timed("resolve", self.resolver, None, *self.pending)
        self.timed("stub", self.commit, None, result, batch)
        for req, row in zip(server.reqs, self.turns[0], strict=True):
            req.kv_committed_len -= len(row)
        self.pending = (result, batch)

    def run(self, steps: int) -> None:
        """So many steps, counted from now on."""
        for sample in self.times.values():
            sample.clear()
        for _ in range(steps):
            self.step()

    def row(self) -> dict[str, Any]:
        """The best tenth of what was run: its median, by site."""
        times = {name: best(sample) for name, sample in self.times.items()}
        times["resolve"] -= times.pop("stub")
        counts = self.counted()
        return {
            "bs": self.server.case.bs, "w": self.server.case.w, "steps": len(self.times["begin"]),
            "us": {name: round(value, 2) for name, value in times.items()},
            "total_us": round(sum(times.values()), 1), **counts,
        }  # fmt: skip

    def counted(self) -> dict[str, Any]:
        """Dispatcher calls and launches of one step, by site."""
        found: dict[str, int] = {}
        timed, before = self.timed, self.launches.count

        def counting(name: str, call: Callable[..., Any], *args: Any) -> Any:
            with Dispatches() as mode:
                result = call(*args)
            found[name] = len(mode.names)
            return result

        self.timed = counting  # type: ignore[method-assign]
        self.step()
        self.timed = timed  # type: ignore[method-assign]
        found.pop("stub")
        return {"dispatches": found, "launches": self.launches.count - before}

    def stop(self) -> None:
        """Every step was checked, and the hooks go."""
        coverage = self.guard.coverage
        assert not self.guard.fuses.faults, self.guard.fuses.faults
        assert self.guard.flight.recorder.faults == 0
        assert coverage.steps_checked >= self.steps - 2, coverage
        while arm.GUARDS:
            arm.GUARDS.pop().remove()


def best(sample: list[float], parts: int = 10) -> float:
    """The smallest median of so many runs in a row: other processes share the processor."""
    size = max(1, len(sample) // parts)
    chunks = [sample[at : at + size] for at in range(0, len(sample) - size + 1, size)]
    return min(statistics.median(chunk) for chunk in chunks)


def main(argv: list[str] | None = None) -> int:
    """Measure every size and write the result under its label."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--label", default="after")
    parser.add_argument("--cold", action="store_true", help="other work before each site")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/host_cost.json")
    options = parser.parse_args(argv)
    DeviceChecker.self_test = lambda self: ""  # type: ignore[method-assign]
    rows, others = [], Others() if options.cold else lambda: None
    for bs, w in SIZES:
        with tempfile.TemporaryDirectory() as folder, launching_nothing() as launches:
            bench = Bench(bs, w, Path(folder), launches, others)
            bench.run(WARM)
            if options.profile:
                profile = cProfile.Profile()
                profile.runcall(bench.run, options.steps)
                pstats.Stats(profile).sort_stats("tottime").print_stats(45)
            bench.run(options.steps)
            rows.append(bench.row())
            bench.stop()
        print(json.dumps(rows[-1]), flush=True)
        if options.profile:
            return 0
    keep(options.out, options.label, rows)
    return 0


def keep(path: Path, label: str, rows: list[dict[str, Any]]) -> None:
    """Write the rows under their label; other labels stay."""
    result = json.loads(path.read_text()) if path.exists() else {}
    cpu = next(
        (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")), platform.processor(),
    )  # fmt: skip
    where = {
        "cpu": cpu, "processors": os.cpu_count(), "python": platform.python_version(),
        "torch": torch.__version__, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip
    result[label] = {"environment": where, "rows": rows}
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
