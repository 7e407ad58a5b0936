"""Slots, ring, counters, decoding, and what happens when the two checkers disagree."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ddtree_guard.device.from_step import StepOperands, operands_from_step, run_step
from ddtree_guard.device.launch import RING, DeviceCheck
from ddtree_guard.device.operands import bind
from ddtree_guard.device.protocol import BITS, MAGIC, NO_OFFENDER, ROW_RADIX, SLOTS, WORDS
from ddtree_guard.device.verdict import Verdict, decode, explain
from ddtree_guard.guard import Guard
from ddtree_guard.step import Step
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step

SIZES = {"w": 3, "lens": (4, 2)}


@pytest.fixture
def check() -> DeviceCheck:
    return DeviceCheck("cpu")


@pytest.fixture
def sound(check: DeviceCheck) -> StepOperands:
    return operands_from_step(check, sound_step(1, **SIZES))


@pytest.fixture
def bad(check: DeviceCheck) -> StepOperands:
    return operands_from_step(check, FAULTS["P1"](sound_step(1, **SIZES), 1).step)


class StandIn(SimpleNamespace):
    """Hashable, as compiled kernels are remembered by it."""

    __hash__ = object.__hash__


def test_a_launch_keeps_alive_the_tensors_whose_addresses_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for a compiled kernel: only a GPU has real ones."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    launched: list[tuple[Any, ...]] = []
    compiled = SimpleNamespace(
        run=lambda *args: launched.append(args), function=1, packed_metadata=2
    )
    kernel = StandIn()
    kernel.device_caches, kernel.arg_names = {}, ["a", "n", "HAS"]
    kernel.warmup = lambda *args, **meta: compiled
    tensor = torch.zeros(5)
    address, alive = tensor.data_ptr(), weakref.ref(tensor)
    launch = bind(kernel, (3, 2), (tensor, 9), 4, HAS=8)
    del tensor
    gc.collect()
    assert alive() is not None
    launch()
    assert launched == [(3, 2, 1, 7, 1, 2, None, None, None, address, 9, 8)]


def test_slots_rotate_and_are_cleared(
    check: DeviceCheck, sound: StepOperands, bad: StepOperands
) -> None:
    rules = []
    for operands in (bad, sound, bad, sound, sound, sound):
        run_step(check, operands)
        rules += [verdict.rules for verdict in check.poll()]
    assert rules == [("P1",), (), ("P1",), (), (), ()]


def test_counter_and_coverage(check: DeviceCheck, sound: StepOperands) -> None:
    for _ in range(3):
        run_step(check, sound)
    assert [verdict.step for verdict in check.poll()] == [1, 2, 3]
    assert (check.launched, check.collected, check.checked, check.coverage) == (3, 3, 3, 1.0)


def test_step_without_a_check_lowers_the_coverage(check: DeviceCheck, sound: StepOperands) -> None:
    run_step(check, sound)
    check.close()
    check.collect()
    assert [verdict.step for verdict in check.poll()] == [1]
    assert (check.checked, check.coverage) == (1, 0.5)


def test_a_check_that_does_not_run_costs_one_step_its_verdict(
    check: DeviceCheck, sound: StepOperands, bad: StepOperands
) -> None:
    """The steps after it are still known by the number of their close."""
    run_step(check, sound)
    check.close()
    check.collect()
    run_step(check, bad)
    run_step(check, sound)
    assert [(v.close, v.rules) for v in check.poll()] == [(1, ()), (3, ("P1",)), (4, ())]


def test_bits_of_one_step_gather_over_its_launches(check: DeviceCheck) -> None:
    step = sound_step(1, **SIZES)
    for rule in ("K3", "P1", "A3"):
        step = FAULTS[rule](step, 1).step
    run_step(check, operands_from_step(check, step))
    (verdict,) = check.poll()
    assert set(verdict.rules) == {"K3", "P1", "A3"}


def test_late_poll_returns_what_the_ring_still_holds(
    check: DeviceCheck, sound: StepOperands
) -> None:
    steps = 2 * RING + SLOTS + 2
    for _ in range(steps):
        run_step(check, sound)
    seen = [verdict.step for verdict in check.poll()]
    assert seen == sorted(seen)
    assert seen[-1] == steps
    assert check.lost == steps - len(seen)
    assert check.poll() == []


def test_reset_forgets_warm_up(check: DeviceCheck, sound: StepOperands, bad: StepOperands) -> None:
    check.check(bad.verify)
    check.reset()
    run_step(check, sound)
    assert [(v.step, v.rules) for v in check.poll()] == [(1, ())]


def words(**values: int) -> Any:
    row = np.zeros(WORDS, np.int64)
    row[8 : 8 + len(BITS)] = NO_OFFENDER
    for name, value in values.items():
        row[int(name[1:])] = value
    return row


def test_decode() -> None:
    row = words(w0=MAGIC, w1=7, w2=1 << BITS["M2"], w3=6, w4=3, w5=9)
    row[8 + BITS["M2"]] = 2 * ROW_RADIX + 5
    assert decode(row) == Verdict(7, 1 << BITS["M2"], 6, 3, {"M2": (2, 5)}, 9)
    assert decode(words(w1=7)) is None


def report_of(step: Step, *rules: str, full: bool = True) -> Any:
    bits = sum(1 << BITS[rule] for rule in rules)
    verdict = Verdict(1, bits, first=dict.fromkeys(rules, (1, 0)))
    return explain(verdict, step, Guard().check, full=full)


def test_agreement_is_the_numpy_finding() -> None:
    planted = FAULTS["P1"](sound_step(1, **SIZES), 1)
    report = report_of(planted.step, "P1")
    assert report.rules == ("P1",)
    assert (report.findings[0].request, report.findings[0].row) == (planted.request, planted.row)


def test_device_alone_is_a_disagreement() -> None:
    report = report_of(sound_step(1, **SIZES), "W3")
    assert report.rules == ("DG1",)
    assert (report.findings[0].request, report.findings[0].row) == (1, 0)
    assert "W3 is broken for the device checker only" in report.findings[0].headline


def test_host_alone_is_a_disagreement_unless_the_device_samples() -> None:
    assert report_of(FAULTS["P1"](sound_step(1, **SIZES), 1).step).rules == ("P1", "DG1")
    shared = FAULTS["K2"](sound_step(1, **SIZES), 1).step
    assert "DG1" not in report_of(shared, "K3").rules
