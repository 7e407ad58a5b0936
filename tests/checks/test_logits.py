"""Edge cases of the logits rules beyond the one fault that each rule owns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddtree_guard.guard import find_rule
from ddtree_guard.rule import Finding, NotEvaluable
from ddtree_guard.step import Contract, Step
from ddtree_guard.testing.steps import VOCAB, sound_step


def broken(rule: str, step: Step) -> Finding | None:
    return find_rule(rule).check(step)


def small(**changes: Any) -> Step:
    """Two requests; request 1 holds three nodes in five rows and accepts rows 0, 1, 2."""
    step = sound_step(0, lens=(9, 30), w=5, block=4, kind="chain", full_trees=True)
    tokens, predict = step.tree.tokens.copy(), step.outcome.predict.copy()
    predict[1, :3] = [tokens[1, 1], tokens[1, 2], 77]
    committed = np.full((2, 4), -1)
    committed[0, 0], committed[1, :3] = 5, predict[1, :3]
    return step.replace(
        tree__sizes=np.array([5, 3]),
        outcome__predict=predict,
        outcome__accept_index=np.array([[0, -1, -1, -1], [0, 1, 2, -1]]),
        outcome__accept_lens=np.array([1, 3]),
        outcome__committed=committed,
        outcome__target_probs=np.array([[-1.0, -1.0, -1.0], [0.5, 0.5, -1.0]]),
    ).replace(**changes)


def edit(path: str, at: Any, value: Any) -> Step:
    changed = small().get(path).copy()
    changed[at] = value
    return small(**{path.replace(".", "__"): changed})


@pytest.mark.parametrize("rule", ["L1", "L2", "L3", "L4"])
def test_sound(rule: str) -> None:
    assert broken(rule, small()) is None


def test_dead_padding_rows_are_no_fault() -> None:
    step = edit("outcome.finite", (1, slice(3, None)), False)
    assert broken("L1", step) is None
    assert broken("L1", step.replace(tree__sizes=np.array([5, 4]))) is not None


@pytest.mark.parametrize(("value", "cause"), [(0.0, "never written"), (-3.5, "no key")])
def test_constant_row(value: float, cause: str) -> None:
    low, high = small().outcome.row_min.copy(), small().outcome.row_max.copy()
    low[1, 2] = high[1, 2] = value
    found = broken("L1", small(outcome__row_min=low, outcome__row_max=high))
    assert found is not None
    assert (found.request, found.row) == (1, 2)
    assert cause in found.cause


@pytest.mark.parametrize(("low", "high"), [(np.nan, 1.0), (0.0, np.nan), (2.0, 1.0)])
def test_a_row_without_a_range_is_dead(low: float, high: float) -> None:
    lows, highs = small().outcome.row_min.copy(), small().outcome.row_max.copy()
    lows[1, 2], highs[1, 2] = low, high
    found = broken("L1", small(outcome__row_min=lows, outcome__row_max=highs))
    assert found is not None
    assert (found.request, found.row) == (1, 2)
    assert found.actual == f"a range from {low:g} to {high:g}"


def test_finite_must_be_a_truth_value() -> None:
    step = small(outcome__finite=np.full((2, 5), np.nan))
    with pytest.raises(NotEvaluable, match=r"holds float64, expected whole numbers \(see W5\)"):
        broken("L1", step)


def test_constant_padding_rows_are_no_fault() -> None:
    low, high = small().outcome.row_min.copy(), small().outcome.row_max.copy()
    low[1, 3:] = high[1, 3:] = 0.0
    assert broken("L1", small(outcome__row_min=low, outcome__row_max=high)) is None


def test_finite_alone_is_enough_evidence() -> None:
    step = small(outcome__row_min=None)
    assert broken("L1", step) is None
    assert broken("L1", step.replace(outcome__finite=np.zeros((2, 5), bool))) is not None


def test_chain_contract_judges_every_row_unless_sizes_are_known() -> None:
    step = edit("outcome.finite", (1, 4), False)
    assert broken("L1", step.replace(contract=Contract(chain=True))) is None
    found = broken("L1", step.replace(tree__sizes=None, contract=Contract(chain=True)))
    assert found is not None
    assert (found.request, found.row) == (1, 4)


@pytest.mark.parametrize(
    ("token", "cause"),
    [
        (VOCAB, "ran off its end"),
        (VOCAB + 64, "ran off its end"),
        (VOCAB + 1, "padding columns"),
        (-1, "did not write"),
    ],
)
def test_cause_of_a_foreign_id(token: int, cause: str) -> None:
    found = broken("L2", edit("outcome.predict", (1, 2), token))
    assert found is not None
    assert (found.request, found.row, found.actual) == (1, 2, str(token))
    assert cause in found.cause


def test_predictions_of_padding_rows_are_not_read() -> None:
    assert broken("L2", edit("outcome.predict", (1, 3), 2**40)) is None


def test_sampled_verifier_predicts_on_the_path_only() -> None:
    step = edit("outcome.predict", (0, 3), 2**40)
    assert broken("L2", step) is not None
    assert broken("L2", step.replace(outcome__greedy_kernel=False)) is None


def test_committed_id_names_its_row() -> None:
    found = broken("L2", edit("outcome.committed", (1, 1), VOCAB))
    assert found is not None
    assert (found.request, found.row) == (1, 1)
    assert broken("L2", edit("outcome.committed", (1, 3), VOCAB)) is None


def test_sampling_verifier_may_serve_greedy_requests() -> None:
    greedy = np.array([True, False])
    step = small(outcome__greedy=greedy, outcome__greedy_kernel=False)
    assert broken("L3", step) is None


@pytest.mark.parametrize("p", [0.0, -0.5, float("nan"), 1e9, float("inf")])
def test_accepted_token_without_probability(p: float) -> None:
    found = broken("L3", edit("outcome.target_probs", (1, 1), p))
    assert found is not None
    assert (found.request, found.row) == (1, 2)


def test_probability_behind_the_path_is_not_read() -> None:
    assert broken("L3", edit("outcome.target_probs", (1, 2), 0.0)) is None


@pytest.mark.parametrize(
    ("coins", "sound"),
    [
        ([0.5, 0.5, -1.0, -1.0, -1.0], True),  # two float32 coins may collide by chance
        ([0.5, 0.5, 0.5, -1.0, -1.0], False),
        ([0.1, 0.2, 0.1, 0.3, 0.4], True),
        ([0.1, 0.2, 0.1, 0.2, 0.4], False),
        ([0.1, 0.1, 0.2, 0.2, 0.4, 0.5], False),
        ([0.1, 0.1, 0.2, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8], True),
        ([0.0, -1.0, -1.0, -1.0, -1.0], True),
        ([-1.0, -1.0, -1.0, -1.0, -1.0], True),
    ],
)
def test_reused_coins(coins: list[float], sound: bool) -> None:
    spare = [0.05 + 0.1 * n for n in range(len(coins))]
    found = broken("L3", small(outcome__coins=np.array([spare, coins])))
    assert (found is None) == sound
    assert sound or (found is not None and found.request == 1)


def test_a_coin_that_is_no_number_is_a_fault() -> None:
    coins = np.array([[0.1, 0.2], [0.3, np.nan]])
    found = broken("L3", small(outcome__coins=coins))
    assert found is not None
    assert found.request == 1


@pytest.mark.parametrize("value", [-5, 2])
def test_a_grammar_word_of_no_meaning_is_a_fault(value: int) -> None:
    allowed = np.array([[1, -1, -1, -1], [1, value, 1, 0]])
    found = broken("L4", small(outcome__allowed=allowed))
    assert found is not None
    assert (found.request, found.row, found.actual) == (1, 1, str(value))


def test_grammar_counts_for_committed_tokens_only() -> None:
    allowed = np.array([[True, False, False, False], [True, True, True, False]])
    assert broken("L4", small(outcome__allowed=allowed)) is None
    allowed[1, 2] = False
    found = broken("L4", small(outcome__allowed=allowed))
    assert found is not None
    assert (found.request, found.row) == (1, 2)


@pytest.mark.parametrize("rule", ["L1", "L2", "L3", "L4"])
@pytest.mark.parametrize("w", [1, 2])
def test_narrow_steps_are_sound(rule: str, w: int) -> None:
    assert broken(rule, sound_step(3, lens=(5, 9), w=w)) is None


def test_the_bonus_token_is_an_id_too() -> None:
    """The last committed token is the target's own; nothing drafted it."""
    found = broken("L2", edit("outcome.committed", (1, 2), VOCAB))
    assert found is not None
    assert (found.request, found.row) == (1, 2)
