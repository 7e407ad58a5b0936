"""CFG rules, clause by clause: numbers that must pass, and numbers that must not."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_guard.guard import Guard
from ddtree_guard.rule import Finding
from ddtree_guard.testing.steps import sound_step


def judge(rule_id: str, **changes: Any) -> Finding | None:
    """The finding of one rule on a sound step (w=17, b=8, B=16) with these changes, or None."""
    report = Guard().check(sound_step().replace(**changes))
    assert rule_id in report.checked, report.not_checked
    return next((f for f in report.findings if f.rule == rule_id), None)


def test_cfg1_first_holder_in_name_order_is_named() -> None:
    found = judge("CFG1", widths__holders={"runner": 9, "backend": 8, "sampler": 17})
    assert found is not None
    assert found.equation == "backend.w = 8, expected w = 17"


@pytest.mark.parametrize(("confidence", "held"), [("very likely", 8), ("possible", 9)])
def test_cfg1_is_surer_when_the_copy_is_the_block(confidence: str, held: int) -> None:
    found = judge("CFG1", widths__holders={"backend": held})
    assert found is not None
    assert found.confidence == confidence


def test_cfg1_width_follows_the_budget_of_a_ddtree_target() -> None:
    found = judge("CFG1", widths__budget=20)
    assert found is not None
    assert (found.actual, found.expected) == ("17", "21")


@pytest.mark.parametrize(
    "changes",
    [
        {"widths__budget": None},
        {"widths__budget": 20, "who__worker": "draft"},
        {"widths__budget": 20, "contract__algorithm": "DFLASH"},
    ],
)
def test_cfg1_other_workers_and_algorithms_have_no_budget(changes: dict[str, Any]) -> None:
    assert judge("CFG1", **changes) is None


def test_cfg2_names_the_inherited_width() -> None:
    found = judge("CFG2", widths__draft_width=17, widths__draft_rows=8)
    assert found is not None
    assert "inherited" in found.cause


@pytest.mark.parametrize(
    ("changes", "equation"),
    [
        ({"widths__budget": 0}, "B = 0, expected >= 1"),
        ({"widths__budget": -1}, "B = -1, expected >= 1"),
        ({"widths__depth_max": 8}, "depth_max = 8, expected <= b-1 = 8-1"),
        ({"limits__kernel_rows": {"a": 17, "gdn": 8}}, "w = 17, expected <= 8 (gdn)"),
        ({"widths__depth_max": 7, "limits__kernel_rows": {"a": 17}}, None),
        ({"limits__kernel_rows": {}}, None),
    ],
)
def test_cfg3(changes: dict[str, Any], equation: str | None) -> None:
    found = judge("CFG3", **changes)
    assert (found and found.equation) == equation


@pytest.mark.parametrize(
    ("count", "steps", "topk", "equation"),
    [
        (4, 3, 1, None),
        (8, 3, 1, "D = 8, expected n + 1 = 4"),
        (3, 3, 1, "D = 3, expected n + 1 = 4"),
        (8, 3, 4, None),
        (85, 3, 4, None),
        (86, 3, 4, "D = 86, expected <= 85"),
        (60, 5, 8, None),
        (4, 2, 0, "k = 0, expected >= 1 and <= V = 50000"),
        (4, 2, 50_001, "k = 50001, expected >= 1 and <= V = 50000"),
        (2**62, 2**62, 2, None),
    ],
)
def test_cfg4(count: int, steps: int, topk: int, equation: str | None) -> None:
    found = judge(
        "CFG4", widths__num_draft_tokens=count, widths__num_steps=steps, widths__topk=topk
    )
    assert (found and found.equation) == equation


def test_cfg5_names_the_first_missing_feature() -> None:
    found = judge(
        "CFG5",
        limits__needs=("custom_mask", "page_size", "non_greedy"),
        limits__supports=("custom_mask",),
    )
    assert found is not None
    assert found.headline == "triton does not support page_size"


def test_cfg5_without_a_stated_need_is_not_checked() -> None:
    report = Guard().check(sound_step().replace(limits__needs=()))
    assert [n.why for n in report.not_checked if n.rule == "CFG5"] == [
        "limits.needs is empty: no needed feature was stated"
    ]


@pytest.mark.parametrize(
    ("changes", "equation"),
    [
        ({"limits__draft_context": 999}, "draft context = 999, expected >= C = 1000"),
        ({"limits__rope_rows": 1007}, "rope rows = 1007, expected >= C + path = 1000+8 = 1008"),
        ({"limits__rope_rows": 1008}, None),
        ({"limits__rope_rows": None}, None),
        (
            {"limits__draft_rope_rows": 1007},
            "draft rope rows = 1007, expected >= C + path = 1000+8 = 1008",
        ),
        (
            {"limits__rope_rows": 1016, "widths__depth_max": None},
            "rope rows = 1016, expected >= C + path = 1000+17 = 1017",
        ),
        ({"limits__rope_rows": 1017, "widths__depth_max": 40}, None),
    ],
)
def test_cfg6(changes: dict[str, Any], equation: str | None) -> None:
    base = {
        "limits__context": 1000,
        "limits__draft_context": 1000,
        "limits__rope_rows": 2000,
        "limits__draft_rope_rows": 2000,
    }
    found = judge("CFG6", **(base | changes))
    assert (found and found.equation) == equation


@pytest.mark.parametrize(("rows", "fires"), [(17, False), (16, True)])
def test_cfg3_a_kernel_takes_as_many_rows_as_it_says(rows: int, fires: bool) -> None:
    assert (judge("CFG3", limits__kernel_rows={"mla": rows}) is not None) is fires
