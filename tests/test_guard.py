"""Guard: which rules run, what is not checked and why, and data that no launch could have."""

from __future__ import annotations

from datetime import date
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_guard.checks import ALL
from ddtree_guard.config import Config, RuleSelection
from ddtree_guard.errors import UsageError
from ddtree_guard.guard import Guard, NotChecked, Report, find_rule
from ddtree_guard.rule import Cost, Finding, NotEvaluable, Scope, Site, rule
from ddtree_guard.step import ARRAY_KINDS, ARRAY_SHAPES, BYTES, REAL, WHOLE, Step
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step

UNREAD = ("mask.tree_bits", "layout.prefix_lens_cpu")  # for words and for the ring only
NEVER_RAISE = ("CFG", "W", "M")  # families whose rules must judge or decline, and not fail


def guard(selection: str = "", today: date | None = None) -> Guard:
    """A guard with this rule selection."""
    return Guard(Config(rules=RuleSelection.parse(selection)), today=today)


def ids(selection: str, today: date | None = None) -> set[str]:
    """Rules that a selection leaves."""
    return {r.id for r in guard(selection, today).rules}


def reasons(report: Report) -> dict[str, str]:
    """Rule id to why it was not checked."""
    return {skipped.rule: skipped.why for skipped in report.not_checked}


# --- selection ---------------------------------------------------------------------------------


def test_without_a_selection_every_rule_runs() -> None:
    assert guard().rules == ALL


def test_ids_and_families_select() -> None:
    assert ids("m,W3") == {"W3"} | {f"M{n}" for n in range(1, 10)}


def test_minus_ignores_and_wins_over_selection() -> None:
    assert ids("W,-W3,-w4") == {"W1", "W2", "W5", "W6", "W7", "W8"}


def test_ignoring_a_family_leaves_the_others() -> None:
    assert {r.family for r in guard("-W").rules} == {r.family for r in ALL} - {"W"}


@pytest.mark.parametrize(
    ("today", "runs"), [("2026-12-30", False), ("2026-12-31", False), ("2027-01-01", True)]
)
def test_ignoring_ends_after_its_day(today: str, runs: bool) -> None:
    assert ("W3" in ids("-W3@2026-12-31", date.fromisoformat(today))) is runs


def test_unknown_rule_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no rule is called 'W33'.*Nearest: .*W3 mask-offset-gap"):
        guard("W33")


def test_unknown_ignored_rule_is_refused_too() -> None:
    with pytest.raises(UsageError, match="no rule is called 'ZZ9'"):
        guard("-ZZ9")


@pytest.mark.parametrize("name", ["W3", "w3", "mask-offset-gap", "MASK-OFFSET-GAP"])
def test_a_rule_is_found_by_id_or_name(name: str) -> None:
    assert find_rule(name).id == "W3"


def test_a_misspelt_name_gets_a_hint_and_the_command_that_lists_all() -> None:
    with pytest.raises(UsageError, match=r"Nearest: W3 mask-offset-gap.*`ddtree-guard rules`"):
        find_rule("mask-ofset-gap")


# --- what is not checked, and why --------------------------------------------------------------


def test_report_accounts_for_every_rule() -> None:
    report = Guard().check(sound_step())
    assert sorted([*report.checked, *reasons(report)]) == sorted(r.id for r in ALL)


def test_only_the_asked_sites_run() -> None:
    report = Guard().check(sound_step(), [Site.INIT])
    ran = set(report.checked) | set(reasons(report))
    assert ran == {r.id for r in ALL if r.site is Site.INIT}


def test_contract_exempts_a_rule_with_its_reason() -> None:
    step = FAULTS["W3"](sound_step(), 2).step
    step = step.replace(contract__not_checked={"W3": "this backend has no mask offsets"})
    report = Guard().check(step)
    assert "W3" not in report.rules
    assert reasons(report)["W3"] == "this backend has no mask offsets"


def test_an_empty_step_checks_little_and_says_so_for_each_rule() -> None:
    step = sound_step()
    report = Guard().check(Step(bs=step.bs, padded_bs=step.padded_bs, widths=step.widths))
    assert report.findings == ()
    assert "W3" in reasons(report)
    assert all(why for why in reasons(report).values())


@pytest.mark.parametrize("path", ["layout.prefix_lens", "mask.cells", "layout.mask_indptr"])
def test_a_missing_array_is_named(path: str) -> None:
    report = Guard().check(sound_step().replace(**{path.replace(".", "__"): None}))
    assert report.findings == ()
    assert f"{path} is not in this step" in reasons(report).values()


@pytest.mark.parametrize("path", sorted(ARRAY_SHAPES))
def test_a_misshapen_array_is_a_finding_of_w5(path: str) -> None:
    step = sound_step(padded_bs=4).replace(**{path.replace(".", "__"): np.zeros((1, 2, 3, 4), int)})
    report = Guard().check(step)
    w5 = next(f for f in report.findings if f.rule == "W5")
    assert path in w5.equation
    assert w5.actual == "(1, 2, 3, 4)"


def test_rules_that_need_a_misshapen_array_point_to_w5() -> None:
    step = sound_step().replace(layout__mask_indptr=np.zeros(9, np.int64))
    report = Guard().check(step)
    assert "W3" not in report.checked
    assert "(see W5)" in reasons(report)["W3"]


def test_misshapen_lengths_do_not_cost_another_finding() -> None:
    step = FAULTS["W1"](sound_step(), 2).step.replace(layout__prefix_lens=np.zeros((2, 2)))
    report = Guard().check(step)
    assert {"W1", "W5"} <= set(report.rules)


def test_a_rule_may_decline_with_a_reason() -> None:
    report = Guard(rules=(declining,)).check(sound_step())
    assert report.not_checked == (NotChecked("Z1", "the moon is not full"),)


def test_a_rule_that_fails_is_not_checked_and_names_its_error() -> None:
    report = Guard(rules=(failing,)).check(sound_step())
    assert "KeyError" in reasons(report)["Z2"]


def test_findings_come_in_catalogue_order() -> None:
    step = FAULTS["M8"](FAULTS["W1"](sound_step(), 2).step, 2).step
    order = [r.id for r in ALL]
    rules = Guard().check(step).rules
    assert {"W1", "M8"} <= set(rules)
    assert list(rules) == sorted(rules, key=order.index)


def _toy(id: str, name: str) -> Any:
    return rule(id, name, site=Site.BUILD, cost=Cost.HOST, scope=Scope.BATCH)


@_toy("Z1", "declining-rule")
def declining(step: Step) -> Finding | None:
    """Declines."""
    raise NotEvaluable("the moon is not full")


@_toy("Z2", "failing-rule")
def failing(step: Step) -> Finding | None:
    """Fails."""
    raise KeyError("x")


# --- hostile data ------------------------------------------------------------------------------

BIG = 2**62
numbers = st.sampled_from([0, 1, -1, 2, 7, 2**31 - 1, 2**31, -(2**31), BIG, -BIG, 2**63 - 1])
dtypes = st.sampled_from([np.int64, np.int32, np.uint8, np.uint64, np.float32, np.bool_])


def corrupt(value: Any, draw: Any) -> Any:
    """Another array in place of this one: same shape and other content, or another shape."""
    how = draw(st.sampled_from(["one", "all", "dtype", "empty", "scalar", "longer", "nan"]))
    number = draw(numbers)
    if how == "empty":
        return np.zeros(0, value.dtype)
    if how == "scalar":
        return np.array(number)
    if how == "longer":
        return np.concatenate([value, value])
    if how == "nan":
        return np.full(value.shape, np.nan, np.float64)
    if how == "dtype":
        return np.full(value.shape, number, np.int64).astype(draw(dtypes))
    changed = value.astype(np.int64)
    at = slice(None) if how == "all" else draw(st.integers(0, max(value.size - 1, 0)))
    changed.reshape(-1)[at] = number
    return changed


def judged(step: Step) -> Report:
    """The report; fails if a rule of the families that must not raise did."""
    report = Guard().check(step)
    assert len(report.checked) + len(report.not_checked) == len(ALL)
    failed = {
        rule: why
        for rule, why in reasons(report).items()
        if "the rule failed" in why and rule.rstrip("0123456789") in NEVER_RAISE
    }
    assert failed == {}
    assert all(len(f.headline) <= 60 for f in report.findings)
    return report


@settings(max_examples=1500, deadline=None, database=None)
@given(st.data())
def test_corrupt_arrays_never_raise(data: st.DataObject) -> None:
    step = sound_step(data.draw(st.integers(0, 50)), lens=(9, 4, 7), w=5, block=3, padded_bs=4)
    step = step.replace(contract__causal_with_mask=data.draw(st.booleans()))
    paths = sorted(path for path, _, _ in step.arrays())
    for path in sorted(data.draw(st.sets(st.sampled_from(paths), min_size=1, max_size=4))):
        value = corrupt(step.get(path), data.draw)
        step = step.replace(**{path.replace(".", "__"): value})
    judged(step)


SCALARS = (
    "bs", "padded_bs", "widths.w", "widths.block", "widths.budget", "widths.depth_max",
    "widths.num_draft_tokens", "widths.num_steps", "widths.topk", "widths.draft_width",
    "layout.max_extend_len", "mask.capacity", "mask.window", "limits.context", "limits.vocab",
    "limits.rope_rows", "graph.num_tokens", "contract.mask_unit",
)  # fmt: skip


@settings(max_examples=800, deadline=None, database=None)
@given(st.lists(st.tuples(st.sampled_from(SCALARS), numbers), min_size=1, max_size=4))
def test_corrupt_numbers_never_raise(changes: list[tuple[str, int]]) -> None:
    step = sound_step(1, lens=(9, 4, 7), w=5, block=3, padded_bs=4)
    judged(step.replace(**{path.replace(".", "__"): number for path, number in changes}))


@pytest.mark.parametrize("length", [-1, -(2**63), 2**31, 2**62])
def test_an_impossible_length_is_w2s_and_blocks_what_needs_it(length: int) -> None:
    step = sound_step()
    lens = step.layout.prefix_lens.copy()
    lens[2] = length
    report = judged(step.replace(layout__prefix_lens=lens))
    w2 = next(f for f in report.findings if f.rule == "W2")
    assert (w2.request, w2.actual) == (2, str(length))
    assert "see W2" in reasons(report)["W3"]
    assert "see W2" in reasons(report)["M2"]


def test_length_beyond_the_context_and_a_step_ahead_is_w2s() -> None:
    step = sound_step()
    report = judged(step.replace(limits__context=49 - step.w))
    w2 = next(f for f in report.findings if f.rule == "W2")
    assert (w2.request, w2.actual, w2.expected) == (2, "50", "0..49")


@pytest.mark.parametrize("w", [0, -3, 2**40])
def test_an_impossible_width_is_w5s(w: int) -> None:
    report = judged(sound_step().replace(widths__w=w))
    assert "W5" in report.rules
    assert "see W5" in reasons(report)["W1"]


def test_fewer_lanes_than_requests_is_w5s() -> None:
    report = judged(sound_step().replace(padded_bs=2))
    w5 = next(f for f in report.findings if f.rule == "W5")
    assert w5.equation == "bs = 3, expected 0..BS = 2"


def test_a_tree_whose_parents_come_later_blocks_m2_and_says_where() -> None:
    step = sound_step(full_trees=True)
    parents = step.tree.parents.copy()
    parents[2, 5] = 9
    report = judged(step.replace(tree__parents=parents))
    assert reasons(report)["M2"] == "node 5 of request 2 has parent 9 (see T1)"


def test_an_empty_batch_is_sound() -> None:
    none = np.zeros(0, np.int64)
    step = sound_step(lens=(5,), w=4, block=4)
    empty = {
        path.replace(".", "__"): np.zeros(
            [{"BS+1": 1, "w": 4}.get(n, 0) for n in shape], value.dtype
        )
        for path, value, shape in step.arrays()
    }
    step = step.replace(
        bs=0, padded_bs=0, **empty, layout__rows=dict.fromkeys(step.layout.rows, 0),
        layout__grids={}, mask__rids=(), who__rids=(), mask__capacity=0,
    )  # fmt: skip
    report = judged(step.replace(outcome__accept_index=np.zeros((0, 4), none.dtype)))
    assert [r for r in report.rules if r.rstrip("0123456789") in NEVER_RAISE] == []
    assert {"W1", "W2", "W3", "M9"} <= set(report.checked)


@pytest.mark.parametrize("kind", [np.int64, np.float32, np.uint16])
def test_mask_cells_of_another_type_are_w5s_and_not_judged(kind: Any) -> None:
    step = sound_step()
    report = judged(step.replace(mask__cells=step.mask.cells.astype(kind)))
    assert report.rules == ("W5",)
    assert reasons(report)["M2"].endswith("(bool or uint8) (see W5)")


RETYPED = {**dict.fromkeys((WHOLE, BYTES), (np.float64, np.complex128, object)), REAL: (object,)}


@pytest.mark.parametrize("path", sorted(path for path, _, _ in sound_step(3, padded_bs=4).arrays()))
def test_an_array_of_another_type_is_w5s_and_no_rule_passes_by_leaving_it_out(path: str) -> None:
    sound = sound_step(3, padded_bs=4)
    before = Guard().check(sound)
    for kind in RETYPED[ARRAY_KINDS[path]]:
        retyped = (sound.get(path) + 1).astype(kind)
        report = judged(sound.replace(**{path.replace(".", "__"): retyped}))
        w5 = next(f for f in report.findings if f.rule == "W5")
        assert w5.equation.startswith(f"{path}.dtype = {np.dtype(kind)}, expected ")
        read = [rule for rule in before.checked if rule not in report.checked]
        assert read or path in UNREAD
        assert all("(see W5)" in reasons(report)[rule] for rule in read)


def test_a_type_that_does_not_fit_costs_no_words_of_another_finding() -> None:
    step = FAULTS["A4"](sound_step(), 2).step
    report = Guard().check(step.replace(outcome__truncated=np.zeros(3)))
    assert {"A4", "W5"} <= set(report.rules)


def test_a_number_that_would_wrap_to_a_padding_value_is_w5s() -> None:
    step = sound_step()
    allowed = step.outcome.allowed.astype(np.uint64)  # -1, no grammar, becomes 2**64 - 1
    report = Guard().check(step.replace(outcome__allowed=allowed))
    assert [(f.rule, f.actual) for f in report.findings] == [("W5", str(2**64 - 1))]
    assert reasons(report)["L4"].endswith("(see W5)")


def test_a_negative_length_of_the_scheduler_is_w5s() -> None:
    step = sound_step()
    mirror = step.layout.prefix_lens_cpu.copy()
    mirror[2] = -1
    report = Guard().check(step.replace(layout__prefix_lens_cpu=mirror))
    assert [(f.rule, f.request, f.actual) for f in report.findings] == [("W5", 2, "-1")]


def test_boolean_mask_cells_are_judged_like_bytes() -> None:
    step = FAULTS["M2"](sound_step(), 2).step
    report = judged(step.replace(mask__cells=step.mask.cells.astype(np.bool_)))
    assert report.rules == ("M2", "M3")


def test_lists_and_tensors_are_judged_like_arrays() -> None:
    torch = pytest.importorskip("torch")
    step = FAULTS["W3"](sound_step(seed=4), 2).step
    for turn in (lambda a: a.tolist(), torch.from_numpy):
        foreign = step.replace(
            **{
                path.replace(".", "__"): turn(value)
                for path, value, _ in step.arrays()
                if path != "mask.cells"  # a list does not say that its cells are bytes
            }
        )
        assert Guard().check(foreign) == Guard().check(step)


@pytest.mark.parametrize("value", [[[1], [2, 3]], object(), ["a"]])
def test_values_that_are_no_array_are_never_clean(value: object) -> None:
    report = Guard().check(sound_step(seed=4).replace(layout__mask_indptr=value))
    assert "W3" not in report.checked or "W3" in report.rules


WRONG_FORMS: dict[str, Any] = {
    **dict.fromkeys(("widths", "layout", "contract", "who", "bs", "widths__w"), None),
    "contract__not_checked": None,
    "padded_bs": "2",
    "widths__budget": "x",
    "mask__capacity": 2.5,
    "who__rank": 3,
    "layout__grids": 5,
}


@pytest.mark.parametrize("path", WRONG_FORMS)
def test_a_part_of_another_type_is_one_sentence(path: str) -> None:
    step = sound_step(lens=(4, 5), padded_bs=4).replace(**{path: WRONG_FORMS[path]})
    with pytest.raises(
        UsageError, match=rf"the step's {path.replace('__', '.')} to be a?.*, found"
    ):
        Guard().check(step)


@pytest.mark.parametrize("value", ["17", 17.0, None])
def test_a_width_that_is_no_whole_number_is_never_clean(value: Any) -> None:
    with pytest.raises(UsageError, match=r"widths\.w to be a whole number, found"):
        Guard().check(sound_step().replace(widths__w=value))


def test_numbers_of_numpy_are_whole_numbers() -> None:
    step = sound_step(4)
    same = step.replace(bs=np.int64(step.bs), widths__w=np.int32(step.w))
    assert Guard().check(same).findings == ()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("contract__mask_length", "capactiy"),
        ("contract__pad_rows", "slef"),
        ("contract__mask_unit", 0),
        ("contract__pad_lanes", {"layout.prefix_len": 1}),
        ("outcome__walk", "chian"),
        ("who__path", "grpah"),
    ],
)
def test_a_mode_of_no_meaning_is_w5s(path: str, value: Any) -> None:
    report = Guard().check(sound_step(lens=(4, 5)).replace(**{path: value}))
    w5 = next(f for f in report.findings if f.rule == "W5")
    assert path.replace("__", ".") in w5.equation


def test_an_absent_part_is_told_from_data_that_cannot_be_judged() -> None:
    step = sound_step().replace(mask__cells=None, layout__mask_indptr=np.zeros(9))
    step = step.replace(contract__not_checked={"W1": "no queries"})
    by_data = {entry.rule: entry.by_data for entry in Guard().check(step).not_checked}
    assert (by_data["M2"], by_data["W1"], by_data["M6"]) == (False, False, False)
    assert by_data["W3"]


def test_what_is_not_a_step_is_refused_in_a_sentence() -> None:
    with pytest.raises(UsageError, match=r"expects a ddtree_guard\.Step, found dict"):
        Guard().check({})  # type: ignore[arg-type]


def test_a_rule_never_sees_a_needed_array_of_another_shape() -> None:
    step = sound_step()
    report = Guard().check(step.replace(mask__cells=step.mask.cells[:, None]))
    assert reasons(report)["M9"].endswith("(see W5)")  # M9 only counts the cells
    assert report.rules == ("W5",)
