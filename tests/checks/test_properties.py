"""Properties over random steps: 10,000 sound ones fire nothing; one wrong mask cell is named.

`sound_step` paints masks by walking ancestors one by one, so it shares no code with the rules.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_guard.guard import Guard
from ddtree_guard.step import Step
from ddtree_guard.testing.steps import Plan, sound_step

GUARD = Guard()
MASK_RULES = {"M1", "M2", "M3", "M4"}
seeds = st.integers(0, 2**32 - 1)


def plans(requests: int, longest: int, widths: tuple[int, int], pads: int = 0) -> Any:
    """Plans of at most this many requests and this long prefixes; `pads` lanes beyond them."""

    def plan(lens: list[int], extra: int | None, **sizes: Any) -> Plan:
        return Plan(tuple(lens), padded_bs=None if extra is None else len(lens) + extra, **sizes)

    return st.builds(
        plan,
        lens=st.lists(st.integers(1, longest), min_size=1, max_size=requests),
        extra=st.integers(0, pads) if pads else st.none(),
        w=st.integers(*widths),
        block=st.integers(2, 16),
        page_size=st.sampled_from([1, 4, 16]),
        kind=st.sampled_from(["random", "random", "chain", "star"]),
        full_trees=st.booleans(),
    )


def silent(seed: int, plan: Plan) -> None:
    """Fail if a rule fires on the sound step of this plan, or if the mask was not read."""
    report = GUARD.check(sound_step(seed, plan))
    assert report.findings == ()
    assert set(report.checked) >= MASK_RULES


@settings(max_examples=4000, deadline=None, database=None)
@given(seeds, plans(3, 12, (2, 9)))
def test_tiny_sound_steps_are_clean(seed: int, plan: Plan) -> None:
    silent(seed, plan)


@settings(max_examples=3600, deadline=None, database=None)
@given(seeds, plans(5, 80, (2, 24)))
def test_small_sound_steps_are_clean(seed: int, plan: Plan) -> None:
    silent(seed, plan)


@settings(max_examples=2000, deadline=None, database=None)
@given(seeds, plans(4, 40, (2, 20), pads=5))
def test_padded_sound_steps_are_clean(seed: int, plan: Plan) -> None:
    silent(seed, plan)


@settings(max_examples=400, deadline=None, database=None)
@given(seeds, plans(8, 500, (25, 65), pads=2))
def test_wide_sound_steps_are_clean(seed: int, plan: Plan) -> None:
    silent(seed, plan)


@pytest.mark.parametrize("w", [129, 257])
def test_widest_sound_steps_are_clean(w: int) -> None:
    silent(w, Plan((300, 41, 7), w=w, block=16, full_trees=True))


def flipped(step: Step, request: int, row: int, column: int) -> Step:
    """The step with one mask cell inverted, found without the rules' arithmetic."""
    at = sum(step.w * (int(s) + step.w) for s in step.layout.prefix_lens[:request])
    at += row * (int(step.layout.prefix_lens[request]) + step.w) + column
    cells = step.mask.cells.copy()
    cells[at] = not cells[at]
    return step.replace(mask__cells=cells)


@settings(max_examples=600, deadline=None, database=None)
@given(seeds, plans(4, 30, (2, 20), pads=2), st.data())
def test_any_wrong_cell_of_a_live_row_is_named(seed: int, plan: Plan, data: st.DataObject) -> None:
    step = sound_step(seed, plan)
    request = data.draw(st.integers(0, step.bs - 1))
    row = data.draw(st.integers(0, int(step.tree.sizes[request]) - 1))
    s = int(step.layout.prefix_lens[request])
    column = data.draw(st.integers(0, s + step.w - 1))
    findings = {f.rule: f for f in GUARD.check(flipped(step, request, row, column)).findings}
    wanted = {"M3", "M1"} if column < s else {"M3", "M2"} | ({"M4"} if column == s + row else set())
    assert set(findings) == wanted
    assert {(f.request, f.row) for f in findings.values()} == {(request, row)}


@settings(max_examples=300, deadline=None, database=None)
@given(seeds, plans(4, 30, (2, 20), pads=2), st.data())
def test_a_cut_mask_is_never_a_silent_pass(seed: int, plan: Plan, data: st.DataObject) -> None:
    step = sound_step(seed, plan)
    live = sum(step.w * (s + step.w) for s in plan.lens)
    kept = data.draw(st.integers(0, live - 1))
    report = GUARD.check(step.replace(mask__cells=step.mask.cells[:kept]))
    assert "M9" in report.rules
    assert MASK_RULES.isdisjoint(report.checked)
