"""Faults of the shadow family: errors beyond rounding."""

from __future__ import annotations

from ddtree_guard.step import Step
from ddtree_guard.testing.faults.registry import Planted, fault
from ddtree_guard.testing.faults.tree import last_node


@fault("D1")
def sibling_in_the_chain(step: Step, request: int) -> Planted:
    """The last node of `request` is not the end of its chain."""
    chain, row = step.shadow.chain.copy(), last_node(step, request)
    chain[:] = 0.001
    chain[row] = 0.25
    return Planted(
        step.replace(shadow__chain=chain, shadow__request=request, shadow__decode=0.0), request, row
    )


@fault("D3")
def foreign_prefix(step: Step, request: int) -> Planted:
    """The root of `request` is far from plain decoding."""
    return Planted(step.replace(shadow__decode=0.75, shadow__request=request), request, 0)


@fault("D4")
def unwritten_row(step: Step, request: int) -> Planted:
    """The last node's row of `request` holds NaN."""
    dense, row = step.shadow.dense.copy(), last_node(step, request)
    dense[:] = 0.001
    dense[row] = float("inf")
    return Planted(
        step.replace(shadow__dense=dense, shadow__request=request, shadow__decode=0.0), request, row
    )
