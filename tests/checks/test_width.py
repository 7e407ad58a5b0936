"""W rules, clause by clause, where the faults and incidents do not reach."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddtree_guard.checks.common import width_from_cells
from ddtree_guard.guard import Guard
from ddtree_guard.rule import Finding
from ddtree_guard.step import Step
from ddtree_guard.testing.steps import sound_step


def judge(rule_id: str, step: Step) -> Finding | None:
    """The finding of one rule, or None; fails if the rule was not evaluated."""
    report = Guard().check(step)
    assert rule_id in report.checked, report.not_checked
    return next((f for f in report.findings if f.rule == rule_id), None)


def found(rule_id: str, step: Step) -> Finding:
    """The finding of one rule, which must be there."""
    finding = judge(rule_id, step)
    assert finding is not None
    return finding


@pytest.mark.parametrize(
    ("rows", "request_", "row"), [(50, 2, 16), (51, None, None), (52, 2, None), (17, 1, 0)]
)
def test_w1_operand_rows(rows: int, request_: int | None, row: int | None) -> None:
    step = sound_step()
    step = step.replace(layout__rows={**step.layout.rows, "positions": rows})
    finding = judge("W1", step)
    if rows == 51:
        assert finding is None
    else:
        assert finding is not None
        assert (finding.request, finding.row) == (request_, row)
        assert finding.equation == f"positions.shape[0] = {rows}, expected BS*w = 3*17 = 51"


def test_w1_names_the_holder_whose_width_the_offsets_follow() -> None:
    step = sound_step(padded_bs=4).replace(
        layout__qo_indptr=np.arange(5) * 11, widths__holders={"graph_runner": 11}
    )
    finding = found("W1", step)
    assert finding.cause == "the offset follows the width 11 that graph_runner holds"
    assert finding.confidence == "very likely"


def with_draft(step: Step) -> Step:
    """The step as a backend states it whose KV range counts the draft rows."""
    lens = step.layout.prefix_lens + step.w
    return step.replace(
        layout__kv_indptr=np.concatenate([[0], np.cumsum(lens)]), contract__kv_includes_draft=True
    )


@pytest.mark.parametrize("lanes", [None, 5])
def test_w2_and_w4_follow_the_kv_convention(lanes: int | None) -> None:
    step = with_draft(sound_step(padded_bs=lanes))
    assert (judge("W2", step), judge("W4", step)) == (None, None)
    mixed = step.replace(contract__kv_includes_draft=False)
    assert found("W2", mixed).actual == str(37 + 17)
    assert found("W4", mixed).actual == str(37 + 17 + 17)


def test_w2_wrong_convention_the_other_way() -> None:
    finding = found("W2", sound_step().replace(contract__kv_includes_draft=True))
    assert finding.equation == "kv_indptr[1] - kv_indptr[0] = 37, expected s+w = 54"


@pytest.mark.parametrize("rule_id", ["W2", "W3"])
def test_an_offset_of_a_padded_lane_is_named_by_its_lane(rule_id: str) -> None:
    step = sound_step(padded_bs=5)
    path = {"W2": "layout.kv_indptr", "W3": "layout.mask_indptr"}[rule_id]
    offsets = step.get(path).copy()
    offsets[5] += 3
    finding = found(rule_id, step.replace(**{path.replace(".", "__"): offsets}))
    assert (finding.request, finding.rid, finding.victims) == (4, None, ())


@pytest.mark.parametrize(
    ("changes", "equation"),
    [
        ({"layout__grids": {"b": (4, 4), "a": (3, 4)}}, "grid of a = 3, expected 4"),
        ({"layout__grids": {"a": (5, 4)}}, "grid of a = 5, expected 4"),
        (
            {"outcome__accept_index": np.zeros((3, 7), int)},
            "outcome.accept_index.shape[1] = 7, expected >= depth_max+1 = 8",
        ),
    ],
)
def test_w5(changes: dict[str, Any], equation: str) -> None:
    assert found("W5", sound_step().replace(**changes)).equation == equation


def test_w5_a_wider_accept_index_is_fine() -> None:
    step = sound_step().replace(outcome__accept_index=np.zeros((3, 17), int))
    assert judge("W5", step) is None


def test_w5_counts_the_other_misshapen_arrays() -> None:
    flat = np.zeros(3)
    step = sound_step().replace(tree__parents=flat, tree__tokens=flat, tree__depths=flat)
    assert found("W5", step).equation.endswith("(and 2 more arrays)")


@pytest.mark.parametrize(("buckets", "fires"), [((), False), ((1, 4), False), ((1, 2, 8), True)])
def test_w7_batch_size_is_a_captured_one(buckets: tuple[int, ...], fires: bool) -> None:
    step = sound_step(padded_bs=4).replace(graph__batch_sizes=buckets)
    assert (judge("W7", step) is not None) is fires


@pytest.mark.parametrize(("actual", "row"), [(0, 0), (-4, 0), (8, 8), (64, 16)])
def test_w8_names_the_first_row_that_is_not_covered(actual: int, row: int) -> None:
    finding = found("W8", sound_step().replace(layout__max_extend_len=actual))
    assert (finding.request, finding.row) == (0, row)


@pytest.mark.parametrize(
    ("cells", "s", "width"),
    [
        (864, 100, 8),
        (1989, 100, 17),
        (1990, 100, None),
        (0, 5, None),
        (-3, 5, None),
        (2**80, 1, None),
    ],
)
def test_width_from_cells(cells: int, s: int, width: int | None) -> None:
    assert width_from_cells(cells, s) == width


def windowed(window: int = 20) -> Step:
    """A sound step whose kernel gets keys clipped to a sliding window, and whole mask rows."""
    step = sound_step(lens=(37, 12, 50))
    kept = np.minimum(step.layout.prefix_lens, window)
    return step.replace(
        mask__window=window,
        mask__window_start=step.layout.prefix_lens - kept,
        layout__kv_indptr=np.concatenate([[0], np.cumsum(kept)]),
    )


def test_w2_keys_are_clipped_to_the_window() -> None:
    step = windowed()
    assert judge("W2", step) is None
    whole = np.concatenate([[0], np.cumsum(step.layout.prefix_lens)])
    finding = found("W2", step.replace(layout__kv_indptr=whole))
    assert (finding.request, finding.expected, finding.actual) == (0, "20", "37")


def test_w2_a_length_beyond_what_a_step_ahead_can_reach_is_impossible() -> None:
    """The longest request has 50 tokens. A step that runs ahead may start up to w rows beyond C."""
    step = sound_step()
    assert judge("W2", step.replace(limits__context=50 - step.w)) is None
    assert found("W2", step.replace(limits__context=49 - step.w)).request == 2


def test_w4_skipped_columns_belong_to_the_row() -> None:
    step = windowed()
    assert judge("W4", step) is None
    finding = found("W4", step.replace(mask__window_start=np.zeros(3, np.int64)))
    assert (finding.request, finding.expected, finding.actual) == (0, "54", "37")
