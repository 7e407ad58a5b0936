"""Hostile inputs for every kernel of the device check, to be run under compute-sanitizer.

    python benchmarks/memcheck_device.py --sanitize --out benchmarks/results

With `--sanitize` it runs itself under `compute-sanitizer --tool memcheck` and writes
`memcheck_device.json`; without, it only launches. Every tensor is an allocation of its own
(PYTORCH_NO_CUDA_MEMORY_CACHING=1), so that one byte too far is seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import environment, write

from ddtree_guard.config import Depth
from ddtree_guard.device.from_step import StepOperands, operands_from_step
from ddtree_guard.device.launch import DeviceCheck
from ddtree_guard.device.pack import Packer
from ddtree_guard.device.ring_program import PACKED
from ddtree_guard.recorder.ring import Ring
from ddtree_guard.step import Positions, Step
from ddtree_guard.testing.steps import sound_step

VALUES = (-1, -(2**31), 2**31 - 1, 2**40, -(2**62), 2**62)
SIZES: tuple[dict[str, Any], ...] = (
    {"w": 17, "lens": (37, 21, 50), "padded_bs": 4},
    {"w": 65, "lens": (5, 0), "padded_bs": 3},
    {"w": 3, "lens": (130, 9)},
    {"w": 300, "lens": (5, 2)},
)


def main() -> int:
    """Launch everything, or run that under the sanitizer and read its summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args()
    if options.sanitize:
        return _sanitized(options.out)
    print(f"launches={launch_all('cuda')}")
    return 0


def launch_all(device: str) -> int:
    """Each array in turn, then all of them, overwritten with each hostile value."""
    launches = 0
    for sizes in SIZES:
        step = _varied(sound_step(3, **sizes))
        for depth in Depth:
            check = DeviceCheck(device)
            operands = operands_from_step(check, step, depth)
            if depth is Depth.FAST:
                operands = _packing(check, operands)
            arrays = _integers(operands)
            for value in VALUES:
                for array in [*([name] for name in arrays), list(arrays)]:
                    launches += _launch(check, operands, [arrays[name] for name in array], value)
    return launches


def _packing(check: DeviceCheck, operands: StepOperands) -> StepOperands:
    """With a check that fills a slot to its last word; `Ring` adds the slots in flight."""
    buffers, shape = operands.buffers, operands.shape
    packer = Packer(Ring(1, shape.lanes, shape.w, on_device=True), check.device)
    without = 0 if shape.sections == 1 else PACKED["positions"]
    pack = packer.pack(buffers, shape.lanes, shape.w, without)
    return dataclasses.replace(operands, verify=check.bind(buffers, shape, pack=pack))


def _varied(step: Step) -> Step:
    """Two of the sizes with sorted trees, masked pad rows and three position sections."""
    if step.w == 17:
        return step
    contract = dataclasses.replace(step.contract, depth_major=True, pad_rows="masked")
    values = np.tile(step.positions.values, 3)
    return step.replace(contract=contract, positions=Positions(values=values, sections=3))


def _integers(operands: StepOperands) -> dict[str, Any]:
    """Every integer array that some kernel of the step reads, by address."""
    parts = (operands.verify, operands.table, operands.outcome)
    tensors = [t for part in parts if part for t in part.keep if isinstance(t, torch.Tensor)]
    owned = dataclasses.asdict(operands.buffers)
    masks = {owned["mask"].data_ptr()}
    state = {t.data_ptr() for t in operands.verify.keep[:2]}
    return {str(t.data_ptr()): t for t in tensors if t.data_ptr() not in masks | state}


def _launch(check: DeviceCheck, operands: StepOperands, arrays: list[Any], value: int) -> int:
    saved = [array.clone() for array in arrays]
    for array in arrays:
        limits = torch.iinfo(array.dtype)
        array.view(-1)[::2] = min(max(value, limits.min), limits.max)
    for part in (operands.table, operands.verify):
        if part is not None:
            check.check(part)
    check.close(operands.outcome)
    for array, old in zip(arrays, saved, strict=True):
        array.copy_(old)
    if check.device.type == "cuda":
        torch.cuda.synchronize()
    return 3


def _sanitized(out: Path) -> int:
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    begin = time.perf_counter()
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    subprocess.run([sys.executable, __file__], env=env, check=True)  # compiles, without the tool
    done = subprocess.run(
        [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__],
        env=env,
        capture_output=True,
        text=True,
    )
    text = done.stdout + done.stderr
    found = re.search(r"ERROR SUMMARY: (\d+) error", text)
    launches = re.search(r"launches=(\d+)", text)
    result = {
        "environment": environment(),
        "tool": tool,
        "exit_code": done.returncode,
        "errors": int(found[1]) if found else None,
        "launches": int(launches[1]) if launches else None,
        "seconds": round(time.perf_counter() - begin, 1),
        "tail": text[-2000:],
    }
    write(out / "memcheck_device.json", result)
    print({name: result[name] for name in ("errors", "launches", "seconds", "exit_code")})
    return 0 if result["errors"] == 0 and launches else 1


if __name__ == "__main__":
    sys.exit(main())
