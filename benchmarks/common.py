"""What the benchmarks share: the environment they ran in, results on disk, spread of a sample."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from files import put


def environment() -> dict[str, Any]:
    """Versions and the device, for the head of a result file."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write(path: Path, result: Any) -> None:
    """Write JSON by way of a temporary name: a killed run leaves the last whole file."""
    put(path, json.dumps(result, indent=1) + "\n")


def spread(sample: list[float]) -> dict[str, float]:
    """Min, median and max, rounded to nanoseconds of microseconds."""
    return {
        "min": round(min(sample), 3),
        "median": round(statistics.median(sample), 3),
        "max": round(max(sample), 3),
    }


def gpu_us(
    launch: Callable[[], None], repeats: int, samples: int = 7, ahead: int = 30_000
) -> list[float]:
    """Microseconds of GPU time per call, by events; the host is let run ahead of the device, by
    `ahead` cycles a call.
    """
    times = []
    for _ in range(samples):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(ahead * repeats)
        begin.record()
        for _ in range(repeats):
            launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / repeats)
    return times


def host_us(launch: Callable[[], None], repeats: int = 200, samples: int = 7) -> list[float]:
    """Microseconds of host time per call, with the queue never full."""
    times = []
    for _ in range(samples):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            launch()
        times.append((time.perf_counter() - begin) * 1e6 / repeats)
    torch.cuda.synchronize()
    return times


def captured(*launches: Callable[[], None]) -> Any:
    """A CUDA graph of these launches in order."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    torch.cuda.synchronize()
    return graph
