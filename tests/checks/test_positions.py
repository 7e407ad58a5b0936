"""Edge cases of the position rules beyond the one fault that each rule owns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddtree_guard.guard import Guard, find_rule
from ddtree_guard.rule import Finding, NotEvaluable
from ddtree_guard.step import Contract, Static, Step
from ddtree_guard.testing.steps import sound_step


def broken(rule: str, step: Step) -> Finding | None:
    return find_rule(rule).check(step)


def with_positions(step: Step, change: Any, at: slice) -> Step:
    values = step.positions.values.copy()
    values[at] = change(values[at])
    return step.replace(positions__values=values)


def sections(step: Step, shift: tuple[int, ...]) -> Step:
    """Three mRoPE sections, shifted per request."""
    one = step.positions.values.reshape(step.bs, step.w)
    shifted = [one + np.array(shift)[:, None] * k for k in (1, 0, -1)]
    return step.replace(positions__values=np.stack(shifted).reshape(-1), positions__sections=3)


def test_padding_rows_may_be_anywhere() -> None:
    step = sound_step(2, lens=(9, 30), w=5)
    size = int(step.tree.sizes[1])
    assert size < 5
    step = with_positions(step, lambda p: p + 3, slice(5 + size, 10))
    assert broken("P1", step) is None


def test_padded_lanes_are_not_compared() -> None:
    step = sound_step(1, padded_bs=5)
    assert broken("P1", with_positions(step, lambda p: p + 3, slice(3 * 17, None))) is None


@pytest.mark.parametrize("w", [1, 2])
def test_narrow_step(w: int) -> None:
    step = sound_step(1, lens=(4, 9), w=w)
    assert broken("P1", step) is None
    found = broken("P1", with_positions(step, lambda p: p + 1, slice(w, None)))
    assert found is not None
    assert (found.request, found.row, found.expected) == (1, 0, "9")


def test_stale_base_is_told_from_a_stale_tree() -> None:
    step = sound_step(0, full_trees=True)
    base = broken("P1", with_positions(step, lambda p: p + 4, slice(34, 51)))
    tree = broken("P1", with_positions(step, lambda p: p[::-1], slice(34, 51)))
    assert base is not None
    assert tree is not None
    assert "another prefix length" in base.cause
    assert "not rebuilt" in tree.cause


def test_chain_contract_needs_no_tree() -> None:
    step = sound_step(0, lens=(4, 9), w=3, kind="chain", full_trees=True)
    chain = step.replace(
        tree__depths=None, tree__parents=None, tree__sizes=None, contract=Contract(chain=True)
    )
    assert broken("P1", chain) is None
    found = broken("P1", with_positions(chain, lambda p: p + 1, slice(5, 6)))
    assert found is not None
    assert (found.request, found.row) == (1, 2)


def test_a_tree_without_depths_is_not_checked() -> None:
    step = sound_step(0).replace(tree__depths=None)
    with pytest.raises(NotEvaluable, match=r"tree\.depths is not in this step"):
        broken("P1", step)
    whys = {skipped.rule: skipped.why for skipped in Guard().check(step).not_checked}
    assert whys["P1"] == "tree.depths is not in this step"


def test_sections_may_be_shifted_but_not_bent() -> None:
    step = sections(sound_step(0, lens=(9, 30), w=5, full_trees=True), (2, -3))
    assert broken("P1", step) is None
    # Row 4 of request 1 in section 2: the section's run starts at 2*BS*w.
    found = broken("P1", with_positions(step, lambda p: p + 1, slice(29, 30)))
    assert found is not None
    assert (found.request, found.row) == (1, 4)
    assert "section 2" in found.equation


def test_sections_count_in_the_number_of_positions() -> None:
    step = sound_step(0, lens=(9, 30), w=5)
    assert broken("P2", sections(step, (0, 0))) is None
    found = broken("P2", step.replace(positions__sections=3))
    assert found is not None
    assert (found.expected, found.actual) == ("30", "10")


@pytest.mark.parametrize("value", [-1, 2**62])
def test_padding_rows_and_lanes_index_the_table_too(value: int) -> None:
    step = sound_step(1, padded_bs=5)
    found = broken("P2", with_positions(step, lambda p: value, slice(4 * 17 + 6, 4 * 17 + 7)))
    assert found is not None
    assert (found.request, found.row) == (4, 6)
    assert "finished requests" in found.cause


def test_last_position_of_the_table_is_inside() -> None:
    step = sound_step(1)
    highest = int(step.positions.values.max())
    assert broken("P2", step.replace(limits__rope_rows=highest + 1)) is None
    assert broken("P2", step.replace(limits__rope_rows=highest)) is not None


def test_graph_without_positions_is_not_checked() -> None:
    other = {"out_cache_loc": Static(1)}
    with pytest.raises(NotEvaluable, match="captured buffers"):
        broken("P3", sound_step(1, padded_bs=4).replace(graph__born=other))
