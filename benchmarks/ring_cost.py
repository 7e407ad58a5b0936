"""What the flight recorder's ring costs a step, on top of the device check. Needs a CUDA device.

    python benchmarks/ring_cost.py --out DIR

One check is bound twice to the same buffers, without a ring and with one, and both run in turns;
the cost is the median of the paired differences. GPU time: replays of two captured graphs of many
steps. Host time: replays of two graphs of one step, the second with the note that the host leaves
about it; and eager steps, whose arrays lie elsewhere each time, and `launch`, the same where they
stay. Steps run under `set_sync_debug_mode("error")`. What the device packed is compared
with what the host would keep. `recorder_host_us` is the host time of the whole recorder, with the
request trails and the signs of garbage, by requests; `read_ms` what a dump takes to copy the ring.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ddtree_guard.config import Config
from ddtree_guard.device.from_step import buffers_of, shape_of
from ddtree_guard.device.launch import DeviceCheck
from ddtree_guard.device.operands import MOVING, moved_verify
from ddtree_guard.device.pack import Packer
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.recorder import Recorder
from ddtree_guard.recorder.ring import AHEAD, Ring, bare
from ddtree_guard.step import Outcome, Step
from ddtree_guard.testing.compare import differences
from ddtree_guard.testing.steps import sound_step

SHAPES = ((1, 17), (8, 17), (8, 65), (32, 65), (32, 257))
LIMIT_HOST_US, LIMIT_GPU_US = 5.0, 2.0
PAIRS, BATCH = 60, 50
Work = Callable[[], None]


class Case:
    """One shape: its step, and the check bound to its device buffers with and without a ring."""

    def __init__(self, bs: int, w: int, device: str) -> None:
        lens = tuple(200 + 37 * i % 301 for i in range(bs))
        self.step = sound_step(3, lens=lens, w=w, padded_bs=bs).replace(outcome=Outcome())
        self.buffers, self.shape = buffers_of(self.step, device), shape_of(self.step)
        self.arrays = tuple(getattr(self.buffers, name) for name in MOVING)
        self.checker = DeviceCheck(device)
        self.ring = Ring(64, bs, w, on_device=True)
        self.packer = Packer(self.ring, device)
        self.ring.fetch = self.packer.reader()
        self.mark = 0
        self.alone = self.checker.bind(self.buffers, self.shape)
        pack = self.packer.pack(self.buffers, self.shape.lanes, self.shape.w)
        self.packing = self.checker.bind(self.buffers, self.shape, pack=pack)
        self.base, self.kinds = bare(self.step), pack.kinds(self.buffers, bs)
        self.who = self.step.who.step_id, self.step.who.rids

    def check(self) -> None:
        """The step as it is without a ring."""
        self.checker.check(self.alone)
        self.checker.close()

    def packed(self) -> None:
        """The step with a ring, as the device runs it."""
        self.checker.check(self.packing)
        self.checker.close()

    def note(self) -> None:
        """What the ring adds to the host's part of a replay."""
        self.mark += 1
        self.ring.place(self.mark, self.base, self.kinds, self.who)

    def launch(self) -> None:
        """A step with a ring."""
        self.packed()
        self.note()

    def eager(self) -> None:
        """An eager step of a server without a ring."""
        moved_verify(self.alone, self.arrays, self.shape, self.checker.state)
        self.check()

    def eager_packed(self) -> None:
        """An eager step of a server with a ring."""
        moved_verify(self.packing, self.arrays, self.shape, self.checker.state)
        self.launch()


def paired(first: Callable[[], float], second: Callable[[], float], pairs: int) -> dict[str, float]:
    """Median and quartiles of `second` minus `first`, measured in turns; microseconds."""
    gaps, alone = [], []
    for n in range(pairs + 5):
        order = (first, second) if n % 2 else (second, first)
        found = {run: run() for run in order}
        if n >= 5:  # the first ones warm up
            gaps.append(found[second] - found[first])
            alone.append(found[first])
    low, middle, high = statistics.quantiles(gaps, n=4)
    return {"median_us": round(middle, 3), "q1_us": round(low, 3), "q3_us": round(high, 3),
            "without_us": round(statistics.median(alone), 3)}  # fmt: skip


def host_us(work: Work) -> float:
    """Host time of one call, in a batch that the device's queue can take."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(BATCH):
        work()
    return (time.perf_counter() - began) / BATCH * 1e6


def gpu_us(graph: Any) -> float:
    """Device time of one replay, between two events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(BATCH):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / BATCH * 1e3


def captured(work: Work, copies: int) -> Any:
    """A graph of `copies` steps, so that the time between replays does not count."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            work()
    return graph


def measure(bs: int, w: int, pairs: int) -> dict[str, Any]:
    """Every number of one shape."""
    case, copies = Case(bs, w, "cuda"), 20
    for _ in range(3):  # compile everything before capture
        case.check()
        case.launch()
    torch.cuda.synchronize()
    graphs = [captured(work, copies) for work in (case.check, case.packed)]
    gpu = paired(*(lambda g=g: gpu_us(g) / copies for g in graphs), pairs)
    single, packed = (captured(work, 1).replay for work in (case.check, case.packed))

    def replay() -> None:
        packed()
        case.note()

    def host(first: Work, second: Work) -> dict[str, float]:
        return paired(lambda: host_us(first), lambda: host_us(second), 3 * pairs)

    return {
        "bs": bs, "w": w, "slot_bytes": case.ring.words * 8, "ring_steps": case.ring.steps,
        "ring_mib": round(case.ring.nbytes / 2**20, 3), "gpu": gpu,
        "host_graph": host(single, replay), "host_eager": host(case.eager, case.eager_packed),
        "host_launch": host(case.check, case.launch), **unharmed(case.eager_packed, replay),
        "same_as_host": same_as_host(case), "read_ms": read_ms(case),
    }  # fmt: skip


def unharmed(*works: Work) -> dict[str, int]:
    """Syncs, at which torch raises, and allocations of these steps."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for work in works:
            for _ in range(200):
                work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()["allocation.all.allocated"]
    return {"syncs": 0, "allocations": after - before}


def same_as_host(case: Case) -> bool:
    """Whether the device packs what the host keeps, bit for bit."""
    torch.cuda.synchronize()
    case.checker.reset()
    case.packer.restart()
    case.mark = 0
    for _ in range(90):
        case.launch()
    torch.cuda.synchronize()
    host = Ring(64, case.ring.lanes, case.ring.w)
    host.put(case.step)
    (expected,) = host.snapshot()
    found: list[Step] = case.ring.snapshot()
    whole = len(found) == case.ring.steps - AHEAD
    return whole and all(differences(expected, s) == [] for s in found)


def read_ms(case: Case) -> float:
    """Time of one copy of the ring to the host."""
    times = []
    for _ in range(10):
        began = time.perf_counter()
        assert case.ring.fetch is not None
        case.ring.fetch(None)
        times.append((time.perf_counter() - began) * 1e3)
    return round(statistics.median(times), 3)


def recorder_us(bs: int) -> float:
    """Host time a step of all that the recorder does: the ring's note, the trails, the signs."""
    config, rids = Config(), tuple(f"r{i}" for i in range(bs))
    recorder = Recorder(config, DumpWriter("run", config), "TP0")
    recorder.open_ring(bs, 17, on_device=True)
    base = bare(sound_step(3, lens=(9, 4), w=17))
    tokens = [[[7 * n + k for k in range(1 + (n + at) % 5)] for n in range(bs)] for at in range(16)]
    times, at = [], 0
    for _ in range(60):
        began = time.perf_counter()
        for _ in range(32):
            at += 1
            recorder.packed(at, base, {}, (at, rids))
            recorder.ran(rids, 17, True)
            recorder.accepted(at, rids, tokens[at % 16])
        times.append((time.perf_counter() - began) / 32 * 1e6)
    return round(statistics.median(times), 3)


def main() -> int:
    """Measure all shapes and write `ring_cost.json`. 1 when a limit is broken, 3 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("ring_cost: a CUDA device was expected, found none; run it on one", file=sys.stderr)
        return 3
    began = time.monotonic()
    shapes = [measure(bs, w, args.pairs) for bs, w in SHAPES]
    within = all(
        shape["gpu"]["median_us"] <= LIMIT_GPU_US
        and max(shape[f"host_{way}"]["median_us"] for way in ("graph", "eager", "launch"))
        <= LIMIT_HOST_US
        and shape["allocations"] == 0
        and shape["same_as_host"]
        for shape in shapes
    )
    result = {
        "limits": {"host_us": LIMIT_HOST_US, "gpu_us": LIMIT_GPU_US},
        "within": within,
        "shapes": shapes,
        "recorder_host_us": {str(bs): recorder_us(bs) for bs in (1, 8, 32)},
        "pairs": args.pairs,
        "batch": BATCH,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seconds": round(time.monotonic() - began, 1),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "ring_cost.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0 if within else 1


if __name__ == "__main__":
    raise SystemExit(main())
