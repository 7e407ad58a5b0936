"""Edge cases of the acceptance rules beyond the one fault that each rule owns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddtree_guard.guard import find_rule
from ddtree_guard.rule import Finding, NotEvaluable
from ddtree_guard.step import Contract, Limits, Outcome, Step, Tree, Widths
from ddtree_guard.testing.steps import sound_step


def broken(rule: str, step: Step) -> Finding | None:
    return find_rule(rule).check(step)


def step_of(**changes: Any) -> Step:
    """Two requests, w = 5. Request 1: rows 1 and 2 under the root, 3 under 1, 4 under 2; the target
    goes 0 -> 2 -> 4 and adds token 99. Request 0: the root alone and its bonus token 50.
    """
    tree = Tree(
        tokens=np.array([[10, 0, 0, 0, 0], [20, 21, 22, 23, 24]]),
        parents=np.array([[-1, -1, -1, -1, -1], [-1, 0, 0, 1, 2]]),
        sizes=np.array([1, 5]),
    )
    outcome = Outcome(
        predict=np.array([[50, 7, 7, 7, 7], [22, 7, 24, 7, 99]]),
        accept_index=np.array([[0, -1, -1, -1], [0, 2, 4, -1]]),
        accept_lens=np.array([1, 3]),
        committed=np.array([[50, -1, -1, -1], [22, 24, 99, -1]]),
        hidden_rows=np.array([[0, -1, -1, -1], [0, 2, 4, -1]]),
        greedy=np.array([True, True]),
    )
    widths = Widths(w=5, block=4, depth_max=3)
    step = Step(2, 2, widths, tree=tree, outcome=outcome, limits=Limits(vocab=100))
    return step.replace(**changes)


def edit(path: str, at: Any, value: Any) -> Step:
    changed = step_of().get(path).copy()
    changed[at] = value
    return step_of(**{path.replace(".", "__"): changed})


@pytest.mark.parametrize("rule", ["A1", "A2", "A3", "A5"])
def test_walked_branch_is_sound(rule: str) -> None:
    assert broken(rule, step_of()) is None


@pytest.mark.parametrize(
    ("path", "row"),
    [
        ([2, 4, -1, -1], 2),  # the root left out
        ([0, 4, -1, -1], 4),  # a node skipped
        ([0, 2, -1, 4], 4),  # a gap
        ([0, 2, 4, 9], 4),  # out of range: the row above is named
        ([0, 1, 3, -1], 1),  # the other branch
        ([-1, -1, -1, -1], 0),  # nothing
    ],
)
def test_path_off_the_tree(path: list[int], row: int) -> None:
    found = broken("A1", edit("outcome.accept_index", 1, path))
    assert found is not None
    assert (found.request, found.row) == (1, row)


def test_siblings_read_as_successors() -> None:
    step = edit("outcome.predict", 1, [21, 22, 7, 7, 7])
    found = broken("A1", step.replace(outcome__accept_index=np.array([[0, -1, -1], [0, 1, 2]])))
    assert found is not None
    assert (found.request, found.row) == (1, 2)
    assert "took the tree for a chain" in found.cause


def test_accepted_row_behind_the_size() -> None:
    step = step_of(tree__sizes=np.array([1, 4]))
    found = broken("A1", step)
    assert found is not None
    assert (found.request, found.row) == (1, 4)


def test_chain_contract_needs_no_tree() -> None:
    chain = step_of(
        tree__parents=None,
        tree__sizes=None,
        contract=Contract(chain=True),
        outcome__predict=np.array([[50, 7, 7, 7, 7], [21, 22, 99, 7, 7]]),
        outcome__accept_index=np.array([[0, -1, -1, -1], [0, 1, 2, -1]]),
    )
    assert broken("A1", chain) is None
    assert broken("A2", chain) is None
    with pytest.raises(NotEvaluable, match=r"tree\.parents"):
        broken("A1", chain.replace(contract=Contract()))


def test_walk_that_stops_early_names_the_missed_row() -> None:
    found = broken("A2", edit("outcome.accept_index", 1, [0, 2, -1, -1]))
    assert found is not None
    assert (found.request, found.row, found.actual) == (1, 4, "last accepted row 2")


def test_children_behind_the_size_are_not_missed() -> None:
    step = edit("outcome.accept_index", 1, [0, 2, -1, -1])
    assert broken("A2", step.replace(tree__sizes=np.array([1, 4]))) is None


def test_only_greedy_walks_are_maximal() -> None:
    step = edit("outcome.accept_index", 1, [0, -1, -1, -1])
    assert broken("A2", step.replace(outcome__greedy=np.array([True, False]))) is None
    unknown = step.replace(outcome__greedy=None)
    assert broken("A2", unknown.replace(outcome__greedy_kernel=True)) is not None
    with pytest.raises(NotEvaluable, match="sampled walk"):
        broken("A2", unknown)


def test_dropped_tree_is_not_walked() -> None:
    step = edit("outcome.accept_index", 1, [0, -1, -1, -1])
    assert broken("A2", step.replace(outcome__masked_walk=np.array([1, 0]))) is None
    assert broken("A2", step.replace(outcome__masked_walk=np.array([1, 1]))) is not None


@pytest.mark.parametrize("length", [0, -1, 2, 4, 5, 2**63 - 1, -(2**63)])
def test_length_off_the_path(length: int) -> None:
    found = broken("A3", edit("outcome.accept_lens", 1, length))
    assert found is not None
    assert (found.request, found.row, found.expected) == (1, None, "3")


def test_commit_cut_at_a_stop() -> None:
    cut = step_of(
        outcome__accept_lens=np.array([1, 2]),
        outcome__truncated=np.array([0, 1]),
        outcome__committed=np.array([[50, -1, -1, -1], [22, 24, -1, -1]]),
    )
    assert broken("A3", cut) is None
    uncut = broken("A3", cut.replace(outcome__accept_lens=np.array([1, 3])))
    assert uncut is not None
    assert (uncut.expected, uncut.actual) == ("2", "3")
    longer = cut.replace(outcome__committed=np.array([[50, -1, -1, -1], [22, 24, 99, -1]]))
    found = broken("A3", longer)
    assert found is not None
    assert (found.request, found.row, found.expected) == (1, 4, "nothing")


def test_nothing_is_cut_from_beyond_the_path() -> None:
    step = step_of(outcome__truncated=np.array([0, -1]), outcome__accept_lens=np.array([1, 4]))
    assert broken("A3", step) is not None


@pytest.mark.parametrize(("column", "row"), [(0, 0), (1, 2), (2, 4)])
def test_committed_token_names_the_row_that_predicted_it(column: int, row: int) -> None:
    found = broken("A3", edit("outcome.committed", (1, column), 77))
    assert found is not None
    assert (found.request, found.row, found.actual) == (1, row, "77")


def test_length_is_judged_without_tokens() -> None:
    step = step_of(outcome__committed=None, outcome__predict=None)
    assert broken("A3", step) is None
    assert broken("A3", step.replace(outcome__accept_lens=np.array([1, 2]))) is not None


def test_narrow_committed_buffer() -> None:
    found = broken("A3", step_of(outcome__committed=np.array([[50, -1], [22, 24]])))
    assert found is not None
    assert (found.request, found.row, found.expected) == (1, 4, "99")


def test_each_drifting_holder_is_named() -> None:
    step = step_of(
        outcome__delta_seq_lens=np.array([1, 5]),
        outcome__delta_output=np.array([1, 3]),
        outcome__delta_kv=np.array([1, 5]),
    )
    found = broken("A4", step)
    assert found is not None
    assert (found.request, found.actual) == (1, "delta_seq_lens = 5, delta_kv = 5")
    assert "verify width" in found.cause


def test_drift_without_any_holder_is_not_evaluable() -> None:
    with pytest.raises(NotEvaluable, match="no length change"):
        broken("A4", step_of())


def test_hidden_rows_of_a_prefix() -> None:
    found = broken("A5", edit("outcome.hidden_rows", 1, [0, 1, 2, -1]))
    assert found is not None
    assert (found.request, found.row) == (1, 2)
    assert "as if the accepted path were a chain" in found.cause


def test_hidden_rows_too_many() -> None:
    found = broken("A5", edit("outcome.hidden_rows", 1, [0, 2, 4, 3]))
    assert found is not None
    assert (found.request, found.row, found.actual) == (1, None, "3")


def test_hidden_rows_need_not_be_padded_alike() -> None:
    assert broken("A5", step_of(outcome__hidden_rows=np.array([[0, -2, -2], [0, 2, 4]]))) is None


def test_hidden_rows_behind_a_stop_are_not_compared() -> None:
    step = step_of(outcome__truncated=np.array([0, 1]))
    for rest in (-1, 4, 3):
        hidden = np.array([[0, -1, -1, -1], [0, 2, rest, -1]])
        assert broken("A5", step.replace(outcome__hidden_rows=hidden)) is None


def test_draft_of_another_length() -> None:
    step = sound_step(0)
    draft = step.outcome.draft_lens - [0, 0, 1]
    found = broken("A7", step.replace(outcome__draft_lens=draft))
    assert found is not None
    assert (found.request, found.row, found.expected) == (2, None, "50")


def test_root_that_is_not_the_last_token() -> None:
    step = sound_step(0)
    tokens = step.tree.tokens.copy()
    tokens[2, 0] += 1
    found = broken("A7", step.replace(tree__tokens=tokens))
    assert found is not None
    assert (found.request, found.row) == (2, 0)


@pytest.mark.parametrize("rule", ["A1", "A2", "A3", "A4", "A5", "A7"])
@pytest.mark.parametrize("w", [1, 2])
def test_narrow_steps_are_sound(rule: str, w: int) -> None:
    assert broken(rule, sound_step(3, lens=(5, 9), w=w)) is None


HOLDERS = ("delta_seq_lens", "delta_seq_lens_cpu", "delta_output", "delta_kv")


@pytest.mark.parametrize("holder", HOLDERS)
def test_each_holder_of_a_length_is_compared(holder: str) -> None:
    lens = np.array([1, 3])
    step = step_of().replace(**{f"outcome__{name}": lens for name in HOLDERS})
    assert broken("A4", step) is None
    found = broken("A4", step.replace(**{f"outcome__{holder}": np.array([1, 4])}))
    assert found is not None
    assert (found.request, found.actual) == (1, f"{holder} = 4")


def test_a_request_that_commits_nothing_is_a_fault() -> None:
    step = step_of(outcome__accept_lens=np.array([1, 0]), outcome__truncated=np.array([0, 3]))
    step = step.replace(outcome__committed=np.array([[50, -1, -1, -1], [-1, -1, -1, -1]]))
    found = broken("A3", step)
    assert found is not None
    assert (found.request, found.expected, found.actual) == (1, "1..4", "0")
