"""Random Steps for holding the device checker equal to the NumPy rules, half of them corrupted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree_guard.config import Depth
from ddtree_guard.device.protocol import BITS
from ddtree_guard.device.verdict import Verdict, explain
from ddtree_guard.guard import Guard, Report
from ddtree_guard.step import Contract, Step
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import Plan, sound_step

WIDTHS = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 18, 31, 32, 33, 34, 49, 65)
# Fields whose numbers `noise` may overwrite: everything that the kernels read.
FIELDS = (
    "layout.qo_indptr", "layout.kv_indptr", "layout.mask_indptr", "layout.kv_indices",
    "layout.prefix_lens", "mask.cells", "mask.row_stride", "tree.tokens", "tree.parents",
    "tree.depths", "tree.sizes", "tree.retrieve_index", "tree.retrieve_next_token",
    "tree.retrieve_next_sibling", "positions.values", "slots.out_cache_loc", "slots.req_to_token",
    "outcome.predict", "outcome.accept_index", "outcome.accept_lens", "outcome.truncated",
)  # fmt: skip
_DEVICE_GUARD = Guard()


@dataclass(frozen=True, slots=True)
class Case:
    """A Step, the depth to check it at, and what was done to it."""

    step: Step
    depth: Depth
    done: tuple[str, ...] = ()


def random_case(seed: int, widths: tuple[int, ...] = WIDTHS) -> Case:
    """A case by seed: sound for even seeds, corrupted in one to three places for odd ones."""
    rng = np.random.default_rng(seed)
    step = _varied(rng, sound_step(seed, _plan(rng, widths)))
    done: list[str] = []
    for _ in range(int(rng.integers(1, 4)) if seed % 2 else 0):
        step, what = _corrupted(rng, step)
        done.append(what)
    return Case(step, Depth.FULL if rng.random() < 0.5 else Depth.FAST, tuple(done))


def compare(case: Case, verdict: Verdict, covered: tuple[str, ...]) -> tuple[Report, str]:
    """The NumPy report of a case, and in words where the device verdict differs from it, or ""."""
    full = case.depth is Depth.FULL
    report = explain(verdict, case.step, _DEVICE_GUARD.check, covered, full=full)
    dg1 = [finding for finding in report.findings if finding.rule == "DG1"]
    return report, f"{dg1[0].headline}; {dg1[0].equation}" if dg1 else ""


def _plan(rng: np.random.Generator, widths: tuple[int, ...]) -> Plan:
    bs = int(rng.integers(2, 6))
    w = int(rng.choice(widths))
    return Plan(
        lens=tuple(int(n) for n in rng.integers(0, 60, bs)),
        w=w,
        block=int(rng.integers(2, 17)),
        padded_bs=bs + int(rng.integers(0, 4)) if rng.random() < 0.5 else None,
        page_size=int(rng.choice((1, 4))),
        kind=str(rng.choice(("random", "random", "chain", "star"))),
        full_trees=bool(rng.random() < 0.3),
    )


def _varied(rng: np.random.Generator, step: Step) -> Step:
    """The same step with the integer types of an eager step, of a graph, or of 32-bit builders."""
    graph = step.padded_bs > step.bs
    narrow = rng.random() < 0.3
    kinds: dict[str, Any] = {
        "layout.qo_indptr": np.int64 if graph and not narrow else np.int32,
        "mask.cells": np.uint8 if graph else np.bool_,
        "slots.req_to_token": np.int32,
    }
    if narrow:
        kinds |= dict.fromkeys(
            ("layout.prefix_lens", "slots.out_cache_loc", "tree.parents", "tree.tokens"), np.int32
        )
    arrays = {path.replace(".", "__"): step.get(path).astype(kind) for path, kind in kinds.items()}
    step = step.replace(**arrays)
    if not graph and rng.random() < 0.2:
        step = step.replace(contract=Contract(name="causal", causal_with_mask=True))
    return step


def _corrupted(rng: np.random.Generator, step: Step) -> tuple[Step, str]:
    """One more fault or one overwritten number."""
    request = int(rng.integers(step.bs))
    if rng.random() < 0.5:
        name = str(rng.choice(list(BITS)))
        try:
            return FAULTS[name](step, request).step, f"{name}@{request}"
        except Exception:  # the fault does not apply to a step already corrupted
            pass
    return _noise(rng, step)


def _noise(rng: np.random.Generator, step: Step) -> tuple[Step, str]:
    path = str(rng.choice(FIELDS))
    value = step.get(path)
    if value is None or value.size == 0:
        return step, f"{path} absent"
    value = value.copy()
    at = int(rng.integers(value.size))
    old, w = int(value.reshape(-1)[at]), step.w
    new = int(rng.choice((old - 1, old + 1, 0, 1, -1, w, w - 1, old + w, 2**31, 2**40, -(2**40))))
    value.reshape(-1)[at] = _fit(new, value.dtype)
    return step.replace(**{path.replace(".", "__"): value}), f"{path}[{at}]: {old} -> {new}"


def _fit(number: int, dtype: Any) -> Any:
    """The number in this type: clipped for integers, nonzero is True."""
    if dtype == np.bool_:
        return bool(number)
    limits = np.iinfo(dtype)
    return min(max(number, int(limits.min)), int(limits.max))
