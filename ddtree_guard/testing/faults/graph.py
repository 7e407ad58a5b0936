"""Faults of the graph family. On a step without padded lanes those about lanes change nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

from ddtree_guard.step import Static, Step
from ddtree_guard.testing.faults.registry import Planted, fault


@fault("G1")
def chain_in_a_tree_graph(step: Step, request: int) -> Planted:
    """The batch is a chain, the graph was captured for trees. Concerns the batch."""
    live = {**(step.graph.live_key or {}), "regime": "chain"}
    return Planted(step.replace(graph__live_key=live), None)


@fault("G2")
def skipped_positions(step: Step, request: int) -> Planted:
    """Positions were not written in this step. Concerns the batch."""
    return Planted(
        _with_static(step, "positions", generation=(step.graph.generation or 0) - 1), None
    )


@fault("G3")
def replaced_positions(step: Step, request: int) -> Planted:
    """Positions were written to a new tensor. Concerns the server."""
    return Planted(_with_static(step, "positions", pointer=0xDEAD00), None)


@fault("G4")
def stale_position(step: Step, request: int) -> Planted:
    """The first padded lane keeps the position of a finished request in its last row."""
    if step.padded_bs == step.bs:
        return Planted(step, None)
    positions, row = step.positions.values.copy(), step.w - 1
    positions[step.bs * step.w + row] = 5000
    return Planted(step.replace(positions__values=positions), step.bs, row)


@fault("G5")
def lane_with_a_live_slot(step: Step, request: int) -> Planted:
    """The last padded lane writes the slot of the last row of `request`."""
    if step.padded_bs == step.bs:
        return Planted(step, None)
    out, lane, row = step.slots.out_cache_loc.copy(), step.padded_bs - 1, step.w - 1
    out[lane * step.w + row] = out[request * step.w + row]
    return Planted(step.replace(slots__out_cache_loc=out), lane, row)


@fault("G6")
def prompt_not_done(step: Step, request: int) -> Planted:
    """`request` has prompt tokens left."""
    if step.graph.prompt_left is None:
        return Planted(step, None)
    left = step.graph.prompt_left.copy()
    left[request] = 3
    return Planted(step.replace(graph__prompt_left=left), request)


@fault("G7")
def output_overwritten(step: Step, request: int) -> Planted:
    """The logits changed between replay and use. Concerns the server."""
    return Planted(step.replace(graph__output_marks={"logits": (0x1234, 0x1235)}), None)


def _with_static(step: Step, name: str, **changes: Any) -> Step:
    static = step.graph.live.get(name, Static(4096))
    return step.replace(
        graph__live={**step.graph.live, name: dataclasses.replace(static, **changes)}
    )
