"""The device checker against one seeded bad step per rule: each must alarm, a sound one must not.

On a GPU every step is also checked by a captured and replayed CUDA graph. On a CPU the same kernels
run in Triton's interpreter (TRITON_INTERPRET=1 must be set before Triton is imported).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton

from ddtree_guard.config import Depth
from ddtree_guard.device.from_step import StepOperands, operands_from_step, run_step
from ddtree_guard.device.launch import DeviceCheck
from ddtree_guard.device.protocol import BITS
from ddtree_guard.device.verdict import Verdict
from ddtree_guard.errors import IncompatibleError

SOUND = "sound"


@dataclass(frozen=True, slots=True)
class Result:
    """One seeded step. `rule` is the planted rule, or "sound"; `found` what the device reported."""

    rule: str
    path: str
    passed: bool
    found: tuple[str, ...]
    planted: tuple[int | None, int | None] = (None, None)
    named: tuple[int, int] | None = None

    @property
    def text(self) -> str:
        """One line: what was planted, and whether it was named."""
        verdict = "ok" if self.passed else "FAILED"
        what = ", ".join(self.found) or "clean"
        where = "" if self.named is None else f" at request {self.named[0]}, row {self.named[1]}"
        return f"{verdict:6} {self.path:5} {self.rule:5} -> {what}{where}"


def run(device: str | None = None, seed: int = 0) -> list[Result]:
    """Run the self-test on a device, a GPU where there is one.

    Raises IncompatibleError where neither a GPU nor Triton's interpreter is there to run on.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu" and not triton.knobs.runtime.interpret:
        raise IncompatibleError(
            "the device self-test needs a GPU or Triton's interpreter, and there is no GPU; set "
            "TRITON_INTERPRET=1 to run the same kernels on the CPU."
        )
    check = DeviceCheck(device)
    paths: tuple[Callable[[DeviceCheck, StepOperands], Verdict], ...] = (_eager,)
    if check.device.type == "cuda":
        paths = (_eager, _graph)
    results = []
    for rule, step, request, row in _steps(seed):
        operands = operands_from_step(check, step, Depth.FULL)
        for path in paths:
            verdict = path(check, operands)
            results.append(_judge(rule, path.__name__.lstrip("_"), verdict, request, row))
    return results


def selftest_main(args: Any) -> int:
    """`ddtree-guard selftest`: print one line a step; exit code 0 if all passed, else 1.

    Reads `args.device` (None: choose) and `args.json` where they are there.
    """
    results = run(getattr(args, "device", None))
    failed = [result for result in results if not result.passed]
    if getattr(args, "json", False):
        import json

        print(json.dumps([dataclasses.asdict(result) for result in results], indent=1))
    else:
        for result in results:
            print(result.text)
        rules = len({result.rule for result in results} - {SOUND})
        print(f"self-test: {len(results)} steps, {rules} rules, {len(failed)} failed")
    return 1 if failed else 0


def _steps(seed: int) -> Iterator[tuple[str, Any, int | None, int | None]]:
    """Name, Step, and planted request and row: the sound step first, then one per device rule."""
    from ddtree_guard.step import Contract
    from ddtree_guard.testing.faults import FAULTS
    from ddtree_guard.testing.steps import sound_step

    step = sound_step(seed, padded_bs=4, full_trees=True)
    yield SOUND, step, None, None
    for rule in BITS:
        base = step
        if rule == "M6":
            base = step.replace(contract=Contract(name="causal", causal_with_mask=True))
        # K2 across requests is the NumPy rule's alone; within request 0 it is the device's too.
        request = 0 if rule == "K2" else step.bs - 1
        planted = FAULTS[rule](base, request)
        yield rule, planted.step, planted.request, planted.row


def _eager(check: DeviceCheck, operands: StepOperands) -> Verdict:
    run_step(check, operands)
    return _read(check)


def _graph(check: DeviceCheck, operands: StepOperands) -> Verdict:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if operands.table is not None:
            operands.table.launch()
        check.check(operands.verify)
        check.close(operands.outcome)
    graph.replay()
    check.collect()
    return _read(check)


def _read(check: DeviceCheck) -> Verdict:
    if check.device.type == "cuda":
        torch.cuda.synchronize()
    (verdict,) = check.poll()
    return verdict


def _judge(rule: str, path: str, verdict: Verdict, request: int | None, row: int | None) -> Result:
    if rule == SOUND:
        return Result(rule, path, not verdict.bits, verdict.rules)
    named = verdict.first.get(rule)
    right = named is not None and request in (None, named[0]) and row in (None, named[1])
    return Result(rule, path, right, verdict.rules, (request, row), named)
