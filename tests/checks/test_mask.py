"""M rules, clause by clause, where the faults and incidents do not reach."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddtree_guard.checks import cells as cells_module
from ddtree_guard.guard import Guard
from ddtree_guard.rule import Finding
from ddtree_guard.step import Step
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step


def findings(step: Step) -> dict[str, Finding]:
    """Rule id to finding, M rules only."""
    return {f.rule: f for f in Guard().check(step).findings if f.rule[0] == "M"}


def why(step: Step, rule_id: str) -> str:
    """Why a rule was not checked."""
    skipped = {n.rule: n.why for n in Guard().check(step).not_checked}
    assert rule_id in skipped
    return skipped[rule_id]


@pytest.mark.parametrize(("reads", "latent"), [(True, False), (False, True)])
def test_a_hidden_prefix_is_latent_where_the_kernel_skips_it(reads: bool, latent: bool) -> None:
    step = FAULTS["M1"](sound_step(), 2).step.replace(contract__reads_prefix_mask=reads)
    assert {rule: f.latent for rule, f in findings(step).items()} == {"M1": latent, "M3": latent}


def test_a_wrong_tree_cell_is_never_latent() -> None:
    found = findings(FAULTS["M2"](sound_step(), 2).step)
    assert {rule: f.latent for rule, f in found.items()} == {"M2": False, "M3": False}


@pytest.mark.parametrize("value", [2, 255])
def test_a_cell_that_is_neither_0_nor_1_is_wrong(value: int) -> None:
    step = sound_step(full_trees=True)
    cells = step.mask.cells.copy()
    cells[cells == 1] = value
    assert set(findings(step.replace(mask__cells=cells))) == {"M1", "M2", "M3", "M4"}


def filled(step: Step, paint: Any) -> Step:
    """The step with the tree block of its last request replaced by paint(w)."""
    cells = step.mask.cells.copy()
    s = int(step.layout.prefix_lens[step.bs - 1])
    rows = cells[len(cells) - step.w * (s + step.w) :].reshape(step.w, s + step.w)
    rows[:, s:] = paint(step.w)
    return step.replace(mask__cells=cells)


@pytest.mark.parametrize(
    ("paint", "cause"),
    [
        (lambda w: np.ones((w, w)), "the buffer was filled with ones and never painted"),
        (lambda w: np.tri(w), "the builder wrote a causal (chain) mask for a tree"),
        (lambda w: np.eye(w), "the mask was built from another tree or with another row length"),
    ],
)
def test_m2_says_what_the_block_looks_like(paint: Any, cause: str) -> None:
    step = filled(sound_step(5, w=9, block=4, full_trees=True), paint)
    m2 = findings(step)["M2"]
    assert (m2.request, m2.cause) == (2, cause)


def test_m2_says_which_way_a_cell_is_wrong() -> None:
    step = sound_step(5, w=9, block=4, full_trees=True)
    hidden = findings(filled(step, np.eye))["M2"]
    assert hidden.headline == "node 1 does not see its ancestor 0"
    ones = findings(filled(step, lambda w: np.ones((w, w))))["M2"]
    assert ones.headline == "node 0 sees node 1, not an ancestor"
    blind = findings(FAULTS["M4"](step, 2).step)["M2"]
    assert blind.headline == "node 8 does not see itself"


def test_requests_are_found_by_their_lengths_and_not_by_the_backends_offsets() -> None:
    step = sound_step()
    wrong = step.replace(layout__mask_indptr=step.layout.mask_indptr * 0)
    assert findings(wrong) == {}
    report = Guard().check(wrong)
    assert "W3" in report.rules
    assert "M2" in report.checked


def test_a_fault_before_the_cut_is_reported_although_the_mask_is_short() -> None:
    step = FAULTS["M2"](sound_step(), 1).step
    report = Guard().check(step.replace(mask__cells=step.mask.cells[:-1]))
    assert {"M2", "M3", "M9"} <= set(report.rules)
    short = sound_step()
    short = short.replace(mask__cells=short.mask.cells[:-1])
    assert why(short, "M2") == "the mask ends before row 16 of request 2 (see M9)"


def test_a_chain_contract_needs_neither_parents_nor_sizes() -> None:
    step = sound_step(kind="chain", w=8, full_trees=True).replace(
        contract__chain=True, tree__parents=None, tree__sizes=None
    )
    report = Guard().check(step)
    assert {"M1", "M2", "M3", "M4", "M7"} <= set(report.checked)
    assert findings(step) == {}
    assert findings(filled(step, np.eye))["M2"].row == 1


def test_a_tree_without_parents_is_not_checked() -> None:
    assert why(sound_step().replace(tree__parents=None), "M2") == "tree.parents is not in this step"
    assert why(sound_step().replace(tree__sizes=None), "M1") == "tree.sizes is not in this step"


@pytest.mark.parametrize("size", [0, 18, -1])
def test_an_impossible_size_blocks_the_cell_rules(size: int) -> None:
    sizes = np.array([3, 17, size])
    text = why(sound_step().replace(tree__sizes=sizes), "M4")
    assert text == f"the tree of request 2 has {size} nodes (see T4)"


def test_no_padding_rows_is_its_own_message() -> None:
    step = sound_step(3, lens=(30, 20), w=9, block=4).replace(contract__pad_rows="none")
    assert "has padding rows" in findings(step)["M4"].headline


@pytest.mark.parametrize("offset", [-1, -(2**62)])
def test_m5_negative_offset(offset: int) -> None:
    step = sound_step()
    offsets = step.layout.mask_indptr.copy()
    offsets[2] = offset
    m5 = findings(step.replace(layout__mask_indptr=offsets))["M5"]
    assert (m5.request, m5.actual, m5.latent) == (1, str(offset), False)


@pytest.mark.parametrize(
    ("path", "length", "fires"),
    [
        ("graph", "exact", True),
        ("eager", "capacity", False),
        ("graph", "capacity", True),
        ("eager", "exact", False),
    ],
)
def test_m5_full_context_matters_for_captured_buffers(path: str, length: str, fires: bool) -> None:
    step = sound_step().replace(who__path=path, contract__mask_length=length)
    assert ("M5" in findings(step)) is fires


def packed(step: Step, elements: int) -> Step:
    """The step with cells packed eight to an element."""
    return step.replace(
        mask__cells=np.zeros(elements, np.uint8),
        mask__capacity=10**9,
        contract__mask_unit=8,
    )


def test_m9_packed_masks_round_each_request_up() -> None:
    step = sound_step(lens=(36, 20, 49), w=17, block=8)  # 901, 629 and 1122 cells
    elements = 113 + 79 + 141
    assert findings(packed(step, elements)) == {}
    assert findings(packed(step, elements - 1))["M9"].expected == str(elements)
    assert "packed" in why(packed(step, elements), "M2")


def test_m9_capacity_may_be_longer_and_needs_only_the_live_requests() -> None:
    step = sound_step(padded_bs=5)
    live = int(step.layout.mask_indptr[3])
    longer = np.concatenate([step.mask.cells, np.ones(99, np.uint8)])
    assert findings(step.replace(mask__cells=longer)) == {}
    assert findings(step.replace(mask__cells=step.mask.cells[:live])) == {}
    assert set(findings(step.replace(mask__cells=step.mask.cells[: live - 1]))) == {"M9"}


def test_m9_exact_may_not_be_longer() -> None:
    step = sound_step()
    longer = np.concatenate([step.mask.cells, np.ones(1, np.uint8)])
    m9 = findings(step.replace(mask__cells=longer))["M9"]
    assert (m9.request, m9.actual) == (None, str(len(longer)))


@pytest.mark.parametrize(
    ("rids", "request_", "victims"),
    [
        (("r0", "r2", "r1"), 1, (2,)),
        (("r0", "r1"), 2, ()),
        (("r0", "r1", "r2", "r3"), None, ()),
        ((), 0, ()),
    ],
)
def test_m8(rids: tuple[str, ...], request_: int | None, victims: tuple[int, ...]) -> None:
    m8 = findings(sound_step().replace(mask__rids=rids))["M8"]
    assert (m8.request, m8.victims) == (request_, victims)


def test_m8_without_request_ids_is_not_checked() -> None:
    assert "request ids" in why(sound_step().replace(who__rids=()), "M8")


@pytest.mark.parametrize("window", [1, 3])
def test_a_window_that_cuts_the_tree_is_not_judged(window: int) -> None:
    step = sound_step(full_trees=True, block=8).replace(mask__window=window)
    assert why(step, "M2") == f"the sliding window of {window} tokens cuts through the tree"


def test_wide_trees_are_judged_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_module, "_CLOSURE_CELLS", 2 * 17 * 17)
    step = sound_step(1, lens=(9, 8, 7, 6, 5), full_trees=True)
    assert findings(step) == {}
    planted = FAULTS["M2"](step, 4)
    m2 = findings(planted.step)["M2"]
    assert (m2.request, m2.row) == (4, planted.row)


@pytest.mark.parametrize(("missing", "fires"), [(0, False), (1, True)])
def test_m5_a_captured_buffer_holds_the_tree_columns_at_full_context(
    missing: int, fires: bool
) -> None:
    step = sound_step(padded_bs=4)
    need = 4 * 17 * (step.limits.context + 17)
    found = findings(step.replace(mask__capacity=need - missing))
    assert ("M5" in found) is fires
    assert "M5" not in found or found["M5"].expected == f">= {need}"


def test_m5_knows_the_buffer_without_the_tree_columns() -> None:
    step = sound_step(padded_bs=4)
    found = findings(step.replace(mask__capacity=4 * 17 * step.limits.context))["M5"]
    assert found.latent
    assert "without the w tree columns" in found.cause


@pytest.mark.parametrize(("beyond", "rules"), [(0, set()), (1, {"M1", "M3"})])
def test_a_window_ends_before_the_key_that_is_its_length_away(beyond: int, rules: set[str]) -> None:
    """Row 3 of the last request, at depth 3, sees positions s+3-W+1 .. s+3, so not s+3-W."""
    window, s = 20, 50
    step = sound_step(lens=(37, 12, s), kind="chain", full_trees=True).replace(mask__window=window)
    cells = step.mask.cells.copy()
    cells[len(cells) - 17 * (s + 17) + 3 * (s + 17) + s + 3 - window + beyond] = 0
    assert set(findings(step.replace(mask__cells=cells))) == rules
