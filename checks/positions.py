"""Rotary positions: prefix length plus depth."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_guard.checks.common import first_cell, hint, ints, optional_ints
from ddtree_guard.checks.rows import live_lens, node_rows
from ddtree_guard.rule import Cost, Finding, NotApplicable, NotEvaluable, Rule, Scope, Site, rule
from ddtree_guard.step import Step

_MOVED = "a new tensor was assigned where the captured buffer had to be written in place"


@rule(
    "P1", "position-not-depth", site=Site.BUILD, cost=Cost.ROWS, scope=Scope.REQUEST, bit=14,
    needs=("positions.values", "layout.prefix_lens"),
)  # fmt: skip
def position_not_depth(step: Step) -> Finding | None:
    """A node's position is the committed length on the device plus its depth.

    Holds when: `pos[i,r] = s_i + depth[r]` for every node. mRoPE sections may be shifted per
    request, so they are compared with the position of their root row.
    Breaks as: chains are right and every branch drifts; or all of a request is off by the same
    amount and the text stays plausible. Acceptance may even rise.
    Usual cause: row index used instead of depth, or the length taken from the scheduler's
    optimistic mirror instead of the device.
    Seen in: I24, I25.
    """
    lens, values = live_lens(step), _runs(step)
    live = node_rows(step)
    depths = _depths(step)
    got = values[:, : step.bs]
    base = lens[:, None] if step.positions.sections == 1 else got[:, :, :1] - depths[:, :1]
    want = np.broadcast_to(base + depths, got.shape)
    wrong = (got != want) & live
    at = first_cell(wrong.any(axis=0))
    if at is None:
        return None
    i, r = at
    section = int(np.argmax(wrong[:, i, r]))
    cause, confidence = _position_cause(step, got[section, i], depths[i], live[i], i)
    sectioned = f" in section {section}" if step.positions.sections > 1 else ""
    right = int(want[section, i, r])
    return Finding(
        headline=f"request {i}: row {r} is not at prefix length + depth",
        equation=f"pos[{i},{r}] = {int(got[section, i, r])}{sectioned}, expected s+depth = "
        f"{right - int(depths[at])}+{int(depths[at])} = {right}",
        expected=str(right),
        actual=str(int(got[section, i, r])),
        request=i,
        row=r,
        cause=cause,
        confidence=confidence,
    )


def _runs(step: Step) -> Any:
    """Positions as int64 (sections, BS, w)."""
    values, sections = ints(step, "positions.values"), step.positions.sections
    rows = sections * step.padded_bs * step.w
    if min(sections, step.w) < 1 or step.padded_bs < step.bs or values.size != rows:
        raise NotEvaluable(
            f"positions.values holds {values.size} positions, expected sections*BS*w = "
            f"{sections}*{step.padded_bs}*{step.w} (see P2)"
        )
    return values.reshape(sections, step.padded_bs, step.w)


def _depths(step: Step) -> Any:
    depths = optional_ints(step, "tree.depths")
    if depths is None and step.contract.chain:
        depths = np.broadcast_to(np.arange(step.w), (step.bs, step.w))
    if depths is None:
        raise NotApplicable("tree.depths is not in this step")
    return depths


def _position_cause(step: Step, got: Any, depths: Any, live: Any, request: int) -> tuple[str, str]:
    """What reproduces every position of the request, and how sure that is."""
    s = int(step.layout.prefix_lens[request])
    mirror = hint(step, "layout.prefix_lens_cpu")
    rows = np.flatnonzero(live)
    if mirror is not None and np.array_equal(got[rows], mirror[request] + depths[rows]):
        return (
            f"the base is the scheduler's mirror, prefix_lens_cpu[{request}] = "
            f"{int(mirror[request])}, not the length on the device, {s}",
            "certain",
        )
    if np.array_equal(got[rows], got[0] + rows):
        return "the row index was used instead of the depth", "certain"
    if len(set((got[rows] - depths[rows]).tolist())) == 1:
        return "the base is another prefix length: of an earlier step or another request", "likely"
    return "positions were not rebuilt for this tree", "likely"


@rule(
    "P2", "position-outside-rope", site=Site.LAUNCH, cost=Cost.ROWS, scope=Scope.BATCH,
    needs=("positions.values", "limits.rope_rows"),
)  # fmt: skip
def position_outside_rope(step: Step) -> Finding | None:
    """There is one position per row and section, each inside the rotary table.

    Holds when: `positions` holds `sections*BS*w` values (3 sections for mRoPE), and
    `0 <= pos < rope rows` for every row of every lane, padding included.
    Breaks as: an illegal memory access minutes or hours later, or rotation by whatever lies
    behind the table.
    Usual cause: padded lanes keep positions of finished requests, or the context plus w exceeds
    the table.
    Seen in: I26.
    """
    values, sections = ints(step, "positions.values"), step.positions.sections
    rows, limit = sections * step.padded_bs * step.w, int(step.limits.rope_rows)
    if values.size != rows:
        return Finding(
            headline="the number of positions is not the number of rows",
            equation=f"positions holds {values.size} values, expected sections*BS*w = "
            f"{sections}*{step.padded_bs}*{step.w} = {rows}",
            expected=str(rows),
            actual=str(values.size),
            cause="positions were built for another width, batch or number of mRoPE sections",
        )
    if rows <= 0:
        return None
    runs = values.reshape(sections, step.padded_bs, step.w)
    wrong = (runs < 0) | (runs >= limit)
    at = first_cell(wrong.any(axis=0))
    if at is None:
        return None
    i, r = at
    value = int(runs[int(np.argmax(wrong[:, i, r])), i, r])
    padded = i >= step.bs
    return Finding(
        headline=f"{'padded lane' if padded else 'request'} {i}: row {r} is off the rotary table",
        equation=f"pos[{i},{r}] = {value}, expected 0..{limit - 1}",
        expected=f"0..{limit - 1}",
        actual=str(value),
        request=i,
        row=r,
        cause="padded lanes keep positions of finished requests"
        if padded
        else "the prefix length is stale, or the context plus w exceeds the rotary table",
    )


@rule(
    "P3", "position-buffer-moved", site=Site.REPLAY, cost=Cost.HOST, scope=Scope.BATCH,
    needs=("graph.born", "graph.live"),
)  # fmt: skip
def position_buffer_moved(step: Step) -> Finding | None:
    """A replayed graph reads positions from the buffer that this step wrote.

    Holds when: the address of the positions at replay is the address at capture.
    Breaks as: right without CUDA graphs, wrong with them: the kernel reads positions of the
    captured batch or of an earlier step.
    Usual cause: a new tensor was assigned where the captured buffer had to be written in place.
    Seen in: I25.
    """
    born, live = step.graph.born.get("positions"), step.graph.live.get("positions")
    if born is None or live is None:
        raise NotApplicable("positions is not among the captured buffers of this step")
    if born.pointer == live.pointer:
        return None
    return Finding(
        headline="the graph reads positions from another buffer",
        equation=f"positions at {live.pointer:#x}, expected the captured {born.pointer:#x}",
        expected=f"{born.pointer:#x}",
        actual=f"{live.pointer:#x}",
        cause=_MOVED,
    )


RULES: tuple[Rule, ...] = (position_not_depth, position_outside_rope, position_buffer_moved)
