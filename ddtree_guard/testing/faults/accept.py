"""Faults of the accept family."""

from __future__ import annotations

from ddtree_guard.step import Step
from ddtree_guard.testing.faults.registry import Planted, fault
from ddtree_guard.testing.faults.tree import with_child


def path_length(step: Step, request: int) -> int:
    """Accepted rows of a request, the root included."""
    return sum(1 for row in step.outcome.accept_index[request] if row >= 0)


@fault("A1")
def walk_back(step: Step, request: int) -> Planted:
    """The path of `request` returns to the root."""
    accept = step.outcome.accept_index.copy()
    accept[request, min(path_length(step, request), accept.shape[1] - 1)] = 0
    return Planted(step.replace(outcome__accept_index=accept), request, 0)


@fault("A2")
def missed_child(step: Step, request: int) -> Planted:
    """The walk of `request` stays at the root although a child matches."""
    step, row = with_child(step, request)
    predict, accept = step.outcome.predict.copy(), step.outcome.accept_index.copy()
    predict[request, 0] = step.tree.tokens[request, row]
    accept[request, 1:] = -1
    return Planted(
        step.replace(outcome__predict=predict, outcome__accept_index=accept), request, row
    )


@fault("A3")
def extra_token(step: Step, request: int) -> Planted:
    """One token more is committed for `request` than its path gives."""
    lens = step.outcome.accept_lens.copy()
    lens[request] += 1
    return Planted(step.replace(outcome__accept_lens=lens), request)


@fault("A4")
def drifting_length(step: Step, request: int) -> Planted:
    """The committed KV of `request` grows by one more than its output."""
    delta = step.outcome.delta_kv.copy()
    delta[request] += 1
    return Planted(step.replace(outcome__delta_kv=delta), request)


@fault("A5")
def missing_hidden_row(step: Step, request: int) -> Planted:
    """The hidden state of the last accepted row of `request` is not handed on."""
    hidden, last = step.outcome.hidden_rows.copy(), path_length(step, request) - 1
    row = int(hidden[request, last])
    hidden[request, last] = -1
    return Planted(step.replace(outcome__hidden_rows=hidden), request, row)


@fault("A7")
def masked_anchor(step: Step, request: int) -> Planted:
    """The draft block of `request` starts with another token than the last committed one."""
    anchor = step.outcome.draft_anchor.copy()
    anchor[request] = (anchor[request] + 1) % step.limits.vocab
    return Planted(step.replace(outcome__draft_anchor=anchor), request, 0)
