"""Faults of the guard's own checkers."""

from __future__ import annotations

from ddtree_guard.step import Device, Step
from ddtree_guard.testing.faults.registry import Planted, fault


@fault("DG1")
def false_alarm(step: Step, request: int) -> Planted:
    """The device kernel names the first row of `request` for W3, the NumPy rule nothing."""
    device = Device(hot=("W3",), cold=(), first={"W3": (request, 0)})
    return Planted(step.replace(device=device), request, 0)
