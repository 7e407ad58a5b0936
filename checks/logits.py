"""Logits and sampling: finite rows, valid ids, the right acceptance rule."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_guard.checks.common import first, first_cell, ints, numbers, optional_ints
from ddtree_guard.checks.rows import accepted, inside, lowest, node_rows, path_row
from ddtree_guard.rule import Cost, Finding, Rule, Scope, Site, rule
from ddtree_guard.step import Step

_CERTAIN = 1.001  # probabilities are softmax sums in 32 or 16 bits


@rule(
    "L1", "dead-logits-row", site=Site.VERIFY, cost=Cost.ROWS, scope=Scope.REQUEST,
    needs=("outcome.finite",),
)  # fmt: skip
def dead_logits_row(step: Step) -> Finding | None:
    """The target's logits of every node are finite and not all the same.

    Holds when: each node's row holds no NaN or infinity before any grammar mask, and
    `min < max`. Padding rows may hold anything: attention over no key gives NaN there.
    Breaks as: argmax of a dead row is token 0, or V itself: a run of `!`.
    Usual cause: the row was never written by attention, or it attended to no key.
    Seen in: I01, I03, I48.
    """
    finite, live = ints(step, "outcome.finite") != 0, node_rows(step)
    dead = live & ~finite
    flat = np.zeros_like(live)
    low, high = numbers(step, "outcome.row_min"), numbers(step, "outcome.row_max")
    if low is not None and high is not None:
        flat = live & finite & ~(low < high)  # NaN is smaller than nothing
    at = first_cell(dead | flat)
    if at is None:
        return None
    i, r = at
    value = _row_text(bool(dead[at]), low, high, at)
    zero = bool(flat[at]) and low[at] == 0
    return Finding(
        headline=f"request {i}: the logits of row {r} mean nothing",
        equation=f"logits[{i},{r}] hold {value}, expected finite and different values",
        expected="finite, min < max",
        actual=value,
        request=i,
        row=r,
        cause="the row was never written: attention or the gather stopped before it"
        if zero
        else "the row attended to no key, or read keys that were never written",
    )


def _row_text(dead: bool, low: Any, high: Any, at: tuple[int, int]) -> str:
    if dead:
        return "NaN or infinity"
    least, most = float(low[at]), float(high[at])
    return f"only {least:g}" if least == most else f"a range from {least:g} to {most:g}"


@rule(
    "L2", "target-id-outside-vocab", site=Site.VERIFY, cost=Cost.ROWS, scope=Scope.REQUEST,
    needs=("outcome.predict", "limits.vocab"),
)  # fmt: skip
def target_id_outside_vocab(step: Step) -> Finding | None:
    """Predicted and committed ids are tokens that the tokenizer knows.

    Holds when: `0 <= id < V` for the prediction of every node and for each committed token. A
    sampled verifier predicts along the accepted path only.
    Breaks as: an embedding gather out of range in the next step, or an untrained token of the
    language model head's padding, printed as nothing or as garbage.
    Usual cause: argmax over a row without a largest value, or over padding columns.
    Seen in: I48.
    """
    vocab = int(step.limits.vocab)
    predict, live = ints(step, "outcome.predict"), node_rows(step)
    if step.outcome.greedy_kernel is False:
        live = live & _on_path(step)
    predicted = first_cell(live & ~inside(predict, vocab))
    return lowest(_foreign(step, "predict", predict, predicted), _foreign_commit(step, vocab))


def _on_path(step: Step) -> Any:
    """True for accepted rows; everywhere if the path is not known."""
    if optional_ints(step, "outcome.accept_index") is None:
        return np.ones((step.bs, step.w), np.bool_)
    index, lengths = accepted(step)
    used = (np.arange(index.shape[1]) < lengths[:, None]) & inside(index, step.w)
    found = np.zeros((step.bs, step.w), np.bool_)
    request, column = np.nonzero(used)
    found[request, index[request, column]] = True
    return found


def _foreign_commit(step: Step, vocab: int) -> Finding | None:
    committed = optional_ints(step, "outcome.committed")
    lens = optional_ints(step, "outcome.accept_lens")
    if committed is None or lens is None:
        return None
    due = np.arange(committed.shape[1]) < lens[:, None]
    at = first_cell(due & ~inside(committed, vocab))
    return _foreign(step, "committed", committed, at)


def _foreign(step: Step, name: str, ids: Any, at: tuple[int, int] | None) -> Finding | None:
    if at is None:
        return None
    i, column = at
    value, vocab, padded = int(ids[at]), int(step.limits.vocab), step.limits.vocab_padded
    cause = "the id was read from memory that this step did not write"
    if value == vocab or (padded is not None and value == padded):
        cause = "argmax over a row without a largest value (all -inf or NaN) ran off its end"
    elif padded is not None and vocab <= value < padded:
        cause = "argmax over the padding columns of the language model head"
    return Finding(
        headline=f"request {i}: {name}[{column}] is no token id",
        equation=f"{name}[{i},{column}] = {value}, expected 0..{vocab - 1}",
        expected=f"0..{vocab - 1}",
        actual=str(value),
        request=i,
        row=column if name == "predict" else path_row(step, i, column),
        cause=cause,
    )


@rule(
    "L3", "wrong-acceptance-rule", site=Site.VERIFY, cost=Cost.REQUESTS, scope=Scope.REQUEST,
    needs=("outcome.greedy_kernel", "outcome.greedy"),
)  # fmt: skip
def wrong_acceptance_rule(step: Step) -> Finding | None:
    """Each request is verified by the rule that its sampling parameters ask for.

    Holds when: the greedy verifier runs only if every request is greedy; each accepted draft token
    has a target probability `0 < p <= 1`; random coins of a request are numbers and not repeated.
    Breaks as: valid text from the wrong distribution: quality sinks at temperature above 0 and
    nothing else shows it.
    Usual cause: one kernel chosen for the whole batch, or a coin of exactly 0 accepted a token of
    probability 0.
    Seen in: I49.
    """
    greedy = ints(step, "outcome.greedy")
    i = first(greedy == 0) if step.outcome.greedy_kernel else None
    by_kernel = None if i is None else _sampled_as_greedy(i)
    return lowest(by_kernel, _impossible_token(step), _repeated_coin(step))


def _sampled_as_greedy(request: int) -> Finding:
    return Finding(
        headline=f"request {request} samples, but is verified greedily",
        equation=f"greedy_kernel = True, greedy[{request}] = False, expected the sampling verifier",
        expected="sampling verifier",
        actual="greedy verifier",
        request=request,
        cause="the verifier was chosen for the batch without looking at every request",
    )


def _impossible_token(step: Step) -> Finding | None:
    """The first accepted draft token that the target gives no probability."""
    probs = numbers(step, "outcome.target_probs")
    if probs is None or optional_ints(step, "outcome.accept_index") is None:
        return None
    index, lengths = accepted(step)
    width = min(index.shape[1] - 1, probs.shape[1])
    columns = np.arange(max(width, 0))
    p = probs[:, : len(columns)]
    # `not p > 0` rather than `p <= 0`: NaN is no probability either.
    at = first_cell((columns < lengths[:, None] - 1) & ~((p > 0) & (p <= _CERTAIN)))
    if at is None:
        return None
    i, j = at
    row, value = path_row(step, i, j + 1), float(probs[at])
    return Finding(
        headline=f"request {i}: a token of no probability was accepted",
        equation=f"p(target) of accepted token {j} = {value:g}, expected 0 < p <= 1",
        expected="0 < p <= 1",
        actual=f"{value:g}",
        request=i,
        row=row,
        cause="a coin of exactly 0 passes `coin <= p` although p is 0"
        if value == 0
        else "the probability was read from memory that this step did not write",
    )


def _repeated_coin(step: Step) -> Finding | None:
    """Coins are float32 in [0, 1), so a pair may collide by chance; a reused coin collides more."""
    coins = numbers(step, "outcome.coins")
    if coins is None:
        return None
    i = first(~np.isfinite(coins).all(axis=1))
    if i is not None:
        return Finding(
            headline=f"request {i}: a random coin is not a number",
            equation=f"coins[{i}] hold NaN or infinity, expected 0 <= coin < 1",
            expected="0 <= coin < 1",
            actual="NaN or infinity",
            request=i,
            cause="the coins were not drawn for this step",
        )
    for i, row in enumerate(coins):
        drawn = row[row >= 0]
        values, counts = np.unique(drawn, return_counts=True)
        repeats = len(drawn) - len(values)
        if repeats >= 2 and 4 * repeats > len(drawn):
            most = int(np.argmax(counts))
            return Finding(
                headline=f"request {i}: one random coin decides several tokens",
                equation=f"coin {float(values[most]):g} occurs {int(counts[most])} times among "
                f"{len(drawn)}, expected different coins",
                expected=f"{len(drawn)} different coins",
                actual=f"{len(values)} different coins",
                request=i,
                cause="one coin was drawn per request and used for each of its nodes",
            )
    return None


@rule(
    "L4", "token-against-grammar", site=Site.VERIFY, cost=Cost.REQUESTS, scope=Scope.REQUEST,
    needs=("outcome.allowed", "outcome.accept_lens"),
)  # fmt: skip
def token_against_grammar(step: Step) -> Finding | None:
    """Every committed token is allowed by the grammar after its own ancestors.

    Holds when: `allowed[i,j]` is 1 for each of the L committed tokens, looked up in the bitmask
    row of the node whose prediction it is, or -1 where the request has no grammar.
    Breaks as: output that the schema forbids, or the matcher refuses a token that is committed.
    Usual cause: bitmask rows filled along a chain and applied to the rows of a tree.
    Seen in: I23.
    """
    allowed, lens = ints(step, "outcome.allowed"), ints(step, "outcome.accept_lens")
    due = np.arange(allowed.shape[1]) < lens[:, None]
    at = first_cell(due & (allowed != 1) & (allowed != -1))
    if at is None:
        return None
    i, j = at
    row, value = path_row(step, i, j), int(allowed[at])
    node = "?" if row is None else row
    return Finding(
        headline=f"request {i}: committed token {j} breaks the grammar",
        equation=f"allowed[{i},{j}] = {value} in the bitmask row of node {node}, expected 1",
        expected="1",
        actual=str(value),
        request=i,
        row=row,
        cause="bitmask rows were filled along a chain, not along each node's ancestors",
    )


RULES: tuple[Rule, ...] = (
    dead_logits_row,
    target_id_outside_vocab,
    wrong_acceptance_rule,
    token_against_grammar,
)
