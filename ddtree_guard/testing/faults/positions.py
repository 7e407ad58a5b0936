"""Faults of the positions family."""

from __future__ import annotations

from ddtree_guard.step import Static, Step
from ddtree_guard.testing.faults.registry import Planted, fault
from ddtree_guard.testing.faults.tree import last_node


@fault("P1")
def shifted_position(step: Step, request: int) -> Planted:
    """The last node of `request` is one position too far."""
    values, row = step.positions.values.copy(), last_node(step, request)
    values[request * step.w + row] += 1
    return Planted(step.replace(positions__values=values), request, row)


@fault("P2")
def position_behind_table(step: Step, request: int) -> Planted:
    """The last row of `request` is at the first position behind the rotary table."""
    values = step.positions.values.copy()
    values[request * step.w + step.w - 1] = step.limits.rope_rows
    return Planted(step.replace(positions__values=values), request, step.w - 1)


@fault("P3")
def moved_positions(step: Step, request: int) -> Planted:
    """Positions lie elsewhere at replay than at capture. Concerns the batch, not `request`."""
    born = {**step.graph.born, "positions": Static(4096, "int64")}
    live = {**step.graph.live, "positions": Static(8192, "int64")}
    return Planted(step.replace(graph__born=born, graph__live=live), None)
