"""Faults of the logits family."""

from __future__ import annotations

from ddtree_guard.step import Step
from ddtree_guard.testing.faults.registry import Planted, fault
from ddtree_guard.testing.faults.tree import last_node


@fault("L1")
def nan_row(step: Step, request: int) -> Planted:
    """The logits of the last node of `request` are not finite."""
    finite, row = step.outcome.finite.copy(), last_node(step, request)
    finite[request, row] = False
    return Planted(step.replace(outcome__finite=finite), request, row)


@fault("L2")
def id_behind_vocab(step: Step, request: int) -> Planted:
    """The prediction of the last node of `request` is the vocabulary size."""
    predict, row = step.outcome.predict.copy(), last_node(step, request)
    predict[request, row] = step.limits.vocab
    return Planted(step.replace(outcome__predict=predict), request, row)


@fault("L3")
def sampled_as_greedy(step: Step, request: int) -> Planted:
    """`request` samples while the greedy verifier runs."""
    greedy = step.outcome.greedy.copy()
    greedy[request] = False
    return Planted(step.replace(outcome__greedy_kernel=True, outcome__greedy=greedy), request)


@fault("L4")
def forbidden_token(step: Step, request: int) -> Planted:
    """The grammar forbids the first committed token of `request`."""
    allowed = step.outcome.allowed.copy()
    allowed[request, 0] = 0
    return Planted(step.replace(outcome__allowed=allowed), request, 0)
