"""Time, bytes, syncs and allocations of the device check, against its floor.

    python benchmarks/device_check.py --out benchmarks/results

Writes `device_check.json`: `environment`, `rows`, `targets`. The floor of a launch is the time to
read its bytes once at the copy bandwidth measured here, plus one empty launch. GPU time in graphs
is the difference between replays of a graph with 6k launches and with k, divided by 5k, of the
empty launch, too. `gpu_us` takes turns with batches that together do not fit the L2 cache, as far
as there is room; `hot_us` checks one batch again and again, as if just written by the kernels that
build it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from batches import batch, shape
from common import captured, environment, gpu_us, host_us, spread, write
from probes import chain_kernel

from ddtree_guard.config import Depth
from ddtree_guard.device import operands as device_operands
from ddtree_guard.device.kernel import VERIFY_ARGS, verify_kernel
from ddtree_guard.device.launch import DeviceCheck
from ddtree_guard.device.operands import Operands, Tile, bind, pack_of, tile_for

BATCHES, WIDTHS, CONTEXTS = (1, 8, 32, 128), (8, 17, 65, 257), (1024, 32768)
L2_BYTES = 64 << 20
MANY = 6
TUNE = ((8, 17, 32768), (8, 65, 32768), (32, 257, 1024), (32, 257, 32768))
TILES = [
    Tile(*tile)
    for tile in (
        (64, 16), (64, 16, 4, 4, 4, 80), (64, 16, 4, 4, 4, 96), (64, 4), (64, 4, 4, 4, 4, 80),
    )
]  # fmt: skip


def empty_kernel() -> Any:
    """A Triton kernel with the parameters of the real one and nothing in it."""
    names = [*VERIFY_ARGS, *(n for n in verify_kernel.arg_names if n not in VERIFY_ARGS)]
    typed = [n if n in VERIFY_ARGS else f"{n}: tl.constexpr" for n in names]
    path = Path(__file__).with_name("_empty_kernel.py")
    path.write_text(
        "import triton\nimport triton.language as tl\n\n\n@triton.jit(do_not_specialize="
        f"{VERIFY_ARGS!r})\ndef empty({', '.join(typed)}):\n    pass\n"
    )
    import importlib.util

    spec = importlib.util.spec_from_file_location("_empty_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.empty


class Floors:
    """Copy bandwidth, and the GPU and host time of an empty launch of equal arity."""

    def __init__(self, check: DeviceCheck) -> None:
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        us = min(gpu_us(lambda: target.copy_(source), 10))
        self.bytes_per_us = 2 * source.numel() / us
        args: tuple[Any, ...] = (check.state,) * 19 + (1,) * (len(VERIFY_ARGS) - 19)
        meta = dict.fromkeys(verify_kernel.arg_names[len(VERIFY_ARGS) :], 1)
        kernel = empty_kernel()

        def bare() -> None:
            kernel[(1, 2)](*args, num_warps=4, **meta)

        bare()  # Triton's own launch path: slower, for comparison only
        bound = bind(kernel, (1, 2), args, 4, **meta)
        self.empty = {"eager": gpu_us(bound, 100), "graph": graph_us([bound])}
        self.host = host_us(bound)
        self.host_triton = host_us(bare)
        self.chain = [_chain(loads, programs) for programs in (64, 320, 960) for loads in range(4)]

    def us(self, count: int, mode: str) -> list[float]:
        """Floor of a launch that reads `count` bytes."""
        return [count / self.bytes_per_us + empty for empty in self.empty[mode]]


def _chain(loads: int, programs: int) -> dict[str, Any]:
    """GPU time in graphs of `loads` dependent loads in each of so many programs."""
    zeros = torch.zeros(4, 1 << 20, dtype=torch.int64, device="cuda")
    launch = bind(chain_kernel, (programs, 1), (zeros, zeros, 1 << 20), 4, LOADS=loads)
    return {"loads": loads, "programs": programs, "gpu_us": spread(graph_us([launch]))}


def graph_us(
    launches: list[Callable[[], None]], copies: int = 20, repeats: int = 10
) -> list[float]:
    """GPU time of one launch in a graph: replays with `MANY` times as many launches as `copies`
    minus replays with `copies`. What a replay costs besides is not the same for all graphs, nor in
    the first graphs of a process.
    """
    turn = itertools.cycle(launches)
    anchor = torch.zeros(32, device="cuda")

    def step() -> None:
        anchor.add_(1)

    step()  # loaded before the capture
    few, many = (
        captured(step, *(next(turn) for _ in range(count)), step)
        for count in (copies, MANY * copies)
    )
    times = []
    for _ in range(7):
        (base,) = gpu_us(few.replay, repeats, 1)
        (full,) = gpu_us(many.replay, repeats, 1)
        times.append((full - base) / ((MANY - 1) * copies))
    return times


def counted(launch: Callable[[], None]) -> tuple[int, int]:
    """Synchronisations and allocations in a hundred launches; torch raises at a sync."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats().get("allocation.all.allocated", 0)
    syncs = 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            launch()
    except RuntimeError:
        syncs = 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return syncs, torch.cuda.memory_stats().get("allocation.all.allocated", 0) - before


def rows_of(bs: int, w: int, context: int, depth: Depth, floors: Floors, check: DeviceCheck) -> Any:
    """The two result rows, eager and graph, of one size."""
    operands = _operand_sets(bs, w, context, depth, check)
    launches = [operand.launch for operand in operands]
    turn = itertools.cycle(launches)
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    bits = _bits(check, operands[0])
    if bits:
        raise RuntimeError(f"a sound batch is not clean: {bits}")
    size = operands[0].bytes_read
    copies = max(2, min(20, int(4000 / (1 + size / floors.bytes_per_us))))
    replay = captured(launches[0])
    host = {
        "eager": (host_us(lambda: next(turn)(), 100), floors.host),
        "graph": ([0.0], [0.0]),  # the replay is launched with or without the check
    }
    gpu = {
        "eager": gpu_us(lambda: next(turn)(), 10 * copies),
        "graph": graph_us(launches, copies, 10 if size < 1 << 26 else 1),
    }
    hot = graph_us(launches[:1], copies) if len(launches) > 1 else gpu["graph"]
    for mode, action in (("eager", launches[0]), ("graph", replay.replay)):
        syncs, allocations = counted(action)
        yield {
            "bs": bs, "w": w, "context": context, "depth": depth.value, "mode": mode,
            "gpu_us": spread(gpu[mode]), "hot_us": spread(hot if mode == "graph" else gpu[mode]),
            "floor_us": spread(floors.us(size, mode)),
            "host_us": spread(host[mode][0]), "host_floor_us": spread(host[mode][1]),
            "syncs": syncs, "allocations": allocations, "bytes": size, "sets": len(operands),
            "launches": 1 if mode == "eager" else 0,
        }  # fmt: skip


def _operand_sets(
    bs: int, w: int, context: int, depth: Depth, check: DeviceCheck, tile: Tile | None = None
) -> list[Operands]:
    """Operands of one batch, or of several that together do not fit the L2 cache."""
    first = check.bind(batch(bs, w, context), shape(bs, w, context, depth), tile)
    big = 1 << 20 < first.bytes_read < L2_BYTES
    extra = min(7, L2_BYTES // first.bytes_read) if big else 0
    return [first] + [
        check.bind(batch(bs, w, context, seed), shape(bs, w, context, depth), tile)
        for seed in range(1, extra + 1)
    ]


def _bits(check: DeviceCheck, operands: Operands) -> tuple[str, ...]:
    check.reset()
    check.check(operands)
    check.close()
    check.collect()
    torch.cuda.synchronize()
    return check.poll()[0].rules


def variants() -> list[tuple[str, int, int]]:
    """One size for each compiled kernel of the sweep: depth, width and requests."""
    found: dict[Any, tuple[str, int, int]] = {}
    for depth, w, bs in itertools.product(Depth, WIDTHS, BATCHES):
        key = depth, tile_for(w), pack_of(w, tile_for(w)), bs <= 32
        found.setdefault(key, (depth.value, w, bs))
    return list(found.values())


def precompile(depth: str, w: int, bs: int) -> float:
    """Compile one variant of the kernel into Triton's disk cache; in a process of its own."""
    begin = time.perf_counter()
    check = DeviceCheck("cuda")
    check.bind(batch(bs, w, 64), shape(bs, w, 64, Depth(depth)))
    return time.perf_counter() - begin


def precompile_tile(tile: Tile) -> None:
    """The same for a tile."""
    check = DeviceCheck("cuda")
    for w in (65, 257):
        check.bind(batch(8, w, 64), shape(8, w, 64, Depth.FAST), tile)


def tune(check: DeviceCheck) -> dict[str, Any]:
    """GPU time in graphs per tile at the sizes that have a target; of the first programs of each
    lane alone, kind after kind; and with launches that start only when the one before has ended.
    """
    found: dict[str, Any] = {"tiles": [], "first_programs": [], "without_wait": []}
    for bs, w, context in TUNE:
        size = {"bs": bs, "w": w, "context": context}
        for tile in TILES:
            launches = [o.launch for o in _operand_sets(bs, w, context, Depth.FAST, check, tile)]
            times = {"gpu_us": spread(graph_us(launches)), "hot_us": spread(graph_us(launches[:1]))}
            found["tiles"].append({**size, "tile": dataclasses.asdict(tile), **times})
            print(found["tiles"][-1], flush=True)
        with mock.patch.object(device_operands, "waits", return_value=False):
            launches = [o.launch for o in _operand_sets(bs, w, context, Depth.FAST, check)]
        found["without_wait"].append({**size, "gpu_us": spread(graph_us(launches))})
        torch.cuda.empty_cache()
    for bs, w, context in TUNE[1:3]:
        for kind, programs in _first_programs(w):
            whole = device_operands.programs_per_lane
            with mock.patch.object(
                device_operands, "programs_per_lane", lambda *a, n=programs, f=whole: min(n, f(*a))
            ):
                launches = [o.launch for o in _operand_sets(bs, w, context, Depth.FAST, check)]
            size = {"bs": bs, "w": w, "context": context, "up_to": kind}
            found["first_programs"].append({**size, "gpu_us": spread(graph_us(launches))})
            print(found["first_programs"][-1], flush=True)
    return found


def _first_programs(w: int) -> list[tuple[str, int]]:
    """The kinds of program in their order, and how many there are of a lane up to each."""
    tile = tile_for(w)
    block = 32 * tile.warps
    paths, blocks = triton.cdiv(w - 1, block), triton.cdiv(w, block)
    counts = (("paths", paths), ("cells", triton.cdiv(w - 1, tile.rows)), ("pairs", 1))
    counts += (("links", 1), ("nodes", blocks), ("places", blocks), ("lane", 1))
    return list(
        zip((n for n, _ in counts), itertools.accumulate(n for _, n in counts), strict=True)
    )


def targets(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The issue's requirements, as far as the rows decide them."""
    fast = {(r["bs"], r["w"], r["context"], r["mode"]): r for r in rows if r["depth"] == "fast"}
    result: dict[str, Any] = {}
    for w in (17, 65):
        row = fast.get((8, w, 32768, "graph"))
        if row:
            result[f"bs8_w{w}_graph_us"] = [row["gpu_us"]["median"], "<= 3"]
    row = fast.get((32, 257, 32768, "graph"))
    if row:
        for name in ("gpu_us", "hot_us"):
            ratio = row[name]["median"] / row["floor_us"]["median"]
            result[f"bs32_w257_{name}_over_floor"] = [round(ratio, 2), "<= 2"]
    eager = [r for r in rows if r["mode"] == "eager"]
    if eager:
        extra = max(r["host_us"]["median"] - r["host_floor_us"]["median"] for r in eager)
        result["host_beyond_bare_us"] = [round(extra, 2), "<= 5"]
    result["syncs"] = [sum(r["syncs"] for r in rows), 0]
    result["allocations"] = [sum(r["allocations"] for r in rows), 0]
    return result


def main() -> None:
    """Measure every size that the result file does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--tune", action="store_true", help="sweep tiles instead")
    parser.add_argument("--seconds", type=float, default=230, help="stop starting rows after this")
    options = parser.parse_args()
    begin = time.perf_counter()
    check = DeviceCheck("cuda")
    if options.tune:
        with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
            list(pool.map(precompile_tile, TILES))
        write(options.out / "device_tune.json", {"environment": environment(), **tune(check)})
        return
    with ProcessPoolExecutor(10, mp_context=get_context("spawn")) as pool:
        times = list(pool.map(precompile, *zip(*variants(), strict=True)))
        print("compiled in", [round(seconds) for seconds in times])
    path = options.out / "device_check.json"
    result = json.loads(path.read_text()) if path.exists() else {"rows": [], "errors": []}
    floors = Floors(check)
    result["environment"] = environment() | {
        "copy_gb_per_s": round(floors.bytes_per_us / 1000),
        "empty_launch_us": {mode: spread(us) for mode, us in floors.empty.items()},
        "triton_launch_host_us": spread(floors.host_triton),
        "triton_launch_args": len(verify_kernel.arg_names),
        "chain": floors.chain,
    }
    done = {(r["bs"], r["w"], r["context"], r["depth"]) for r in result["rows"]}
    order = sorted(
        itertools.product(BATCHES, WIDTHS, CONTEXTS, Depth),
        key=lambda size: (size[3] is Depth.FULL, size[:3] not in [(b, w, c) for b, w, c in TUNE]),
    )
    for bs, w, context, depth in order:
        if (bs, w, context, depth.value) in done or time.perf_counter() - begin > options.seconds:
            continue
        try:
            result["rows"] += rows_of(bs, w, context, depth, floors, check)
        except Exception as error:
            result["errors"].append(f"{bs} {w} {context} {depth.value}: {error!r}")
        result["targets"] = targets(result["rows"])
        write(path, result)
        torch.cuda.empty_cache()
    print(json.dumps(result.get("targets"), indent=1), result["errors"], triton.__version__)


if __name__ == "__main__":
    main()
