"""Acceptance and commit: the walk, and what follows from it.

Recomputed on the host from tokens, parents and the target's prediction per row; nothing here uses
the retrieve arrays that the walk itself used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_guard.checks.common import first, first_cell, hint, ints, optional_ints
from ddtree_guard.checks.rows import accepted, gather, inside, lowest, node_rows, parent_rows
from ddtree_guard.rule import Cost, Finding, NotApplicable, Rule, Scope, Site, rule
from ddtree_guard.step import Step


@rule(
    "A1", "walk-off-tree", site=Site.VERIFY, cost=Cost.ROWS, scope=Scope.REQUEST, bit=18,
    needs=("tree.tokens", "outcome.predict", "outcome.accept_index"),
)  # fmt: skip
def walk_off_tree(step: Step) -> Finding | None:
    """The accepted rows are a path from the root, each token being what the target predicted.

    Holds when: `accept[0] = 0`, `parent[accept[j]] = accept[j-1]` and
    `token[accept[j]] = predict[accept[j-1]]`, with no gap before the end.
    Breaks as: tokens are committed that the target never chose in that context.
    Usual cause: a chain walk over a tree (siblings read as successors), or links of another tree.
    Seen in: I19, I47.
    """
    w, parents, live = step.w, parent_rows(step), node_rows(step)
    tokens, predict = ints(step, "tree.tokens"), ints(step, "outcome.predict")
    index, lengths = accepted(step)
    columns = np.arange(index.shape[1])
    # A path without any entry is wrong at its first column.
    on_path = columns < np.maximum(lengths, 1)[:, None]
    stray = ~on_path & (index >= 0)
    before = np.roll(index, 1, axis=1)
    node = inside(index, w) & gather(live, index)
    linked = gather(parents, index) == before
    chosen = gather(tokens, index) == gather(predict, before)
    good = node & np.where(columns == 0, index == 0, linked & chosen)
    at = first_cell((on_path & ~good) | stray)
    if at is None:
        return None
    i, j = at
    row, above = int(index[at]), int(before[at]) if j else -1
    expected, actual, cause = _walk_fault(step, i, j, row, above, bool(node[at] and linked[at]))
    return Finding(
        headline=f"request {i}: the accepted path breaks at step {j}",
        equation=f"accept[{i},{j}] = {row}: {actual}, expected {expected}",
        expected=expected,
        actual=actual,
        request=i,
        row=row if 0 <= row < w else max(min(above, w - 1), 0),
        cause=cause,
    )


def _walk_fault(
    step: Step, i: int, j: int, row: int, above: int, on_edge: bool
) -> tuple[str, str, str]:
    """What the path should do at column j of request i, what it does, and why."""
    size = int(node_rows(step)[i].sum())
    if j == 0:
        return "row 0", f"the path starts at row {row}", "the root was left out of the path"
    if not 0 <= row < size or above < 0:
        where = f"follows row {above}, in a tree of {size} nodes"
        return f"a node 0..{size - 1}", where, "row indices of another request or width, or stale"
    if not on_edge:
        parent = int(parent_rows(step)[i, row])
        return (
            f"a child of row {above}",
            f"its parent is row {parent}",
            _edge_cause(row, above),
        )
    token, predict = ints(step, "tree.tokens")[i, row], ints(step, "outcome.predict")[i, above]
    return (
        f"predict[{i},{above}] = {int(predict)}",
        f"its token is {int(token)}",
        "the draft token was accepted without being compared with the target's prediction",
    )


def _edge_cause(row: int, above: int) -> str:
    if row == 0:
        return "the links lead back to the root"
    if row == above + 1:
        return "rows in order were read as successors: the walk took the tree for a chain"
    return "the walk followed links of another tree"


@rule(
    "A2", "walk-stops-early", site=Site.VERIFY, cost=Cost.ROWS, scope=Scope.REQUEST, bit=19,
    needs=("tree.tokens", "outcome.predict", "outcome.accept_index"),
)  # fmt: skip
def walk_stops_early(step: Step) -> Finding | None:
    """A greedy walk ends only where no child holds the predicted token.

    Holds when: no child of the last accepted row has `token = predict[last]`. Applies to greedy
    requests whose tree was walked.
    Breaks as: right text, fewer accepted tokens: the tree costs its rows and gives a chain's
    speed, or less.
    Usual cause: a sibling link is missing, or the walk compares only first children.
    Seen in: I20, I44.
    """
    w, live, parents = step.w, node_rows(step), parent_rows(step)
    tokens, predict = ints(step, "tree.tokens"), ints(step, "outcome.predict")
    index, lengths = accepted(step)
    last = gather(index, lengths[:, None] - 1)
    judged = _greedy(step) & (lengths > 0) & inside(last[:, 0], w)
    walked = optional_ints(step, "outcome.masked_walk")
    if walked is not None:
        judged &= walked != 0
    missed = live & (np.arange(w) > 0) & (parents == last) & (tokens == gather(predict, last))
    at = first_cell(missed & judged[:, None])
    if at is None:
        return None
    i, r = at
    end = int(last[i, 0])
    return Finding(
        headline=f"request {i}: the walk stops above a matching row {r}",
        equation=f"tokens[{i},{r}] = {int(tokens[at])} = predict[{i},{end}], expected the walk to "
        f"go on from row {end} to row {r}",
        expected=f"row {r} accepted",
        actual=f"last accepted row {end}",
        request=i,
        row=r,
        cause="the sibling link to this row is missing, or only first children are compared",
    )


def _greedy(step: Step) -> Any:
    """Which requests are verified greedily. Raises NotEvaluable where that is not known."""
    greedy = optional_ints(step, "outcome.greedy")
    if greedy is not None:
        return greedy != 0
    if step.outcome.greedy_kernel:
        return np.ones(step.bs, np.bool_)
    raise NotApplicable("outcome.greedy is not in this step, and a sampled walk may end anywhere")


@rule(
    "A3", "commit-off-path", site=Site.VERIFY, cost=Cost.REQUESTS, scope=Scope.REQUEST, bit=20,
    needs=("outcome.accept_index", "outcome.accept_lens"),
)  # fmt: skip
def commit_off_path(step: Step) -> Finding | None:
    """What is committed is the accepted path's tokens and the bonus token, cut at a stop.

    Holds when: `1 <= L <= depth_max+1`, `L + truncated = accepted rows`, and the committed tokens
    are the first L of `token[accept[1]], .., token[accept[n-1]], predict[accept[n-1]]`.
    Breaks as: a token is repeated or lost at every step boundary, or text goes on behind the end
    of the answer.
    Usual cause: the bonus token counted twice or not at all, or lengths of the full path used
    after the output was cut.
    Seen in: I21, I47.
    """
    index, lengths = accepted(step)
    lens, cut = ints(step, "outcome.accept_lens"), optional_ints(step, "outcome.truncated")
    cut = np.zeros_like(lens) if cut is None else cut
    return lowest(_wrong_length(step, lens, cut, lengths), _wrong_token(step, lens, index, lengths))


def _wrong_length(step: Step, lens: Any, cut: Any, lengths: Any) -> Finding | None:
    widths = step.widths
    most = widths.block if widths.depth_max is None else widths.depth_max + 1
    # Differences of hostile lengths may wrap; the range test stands beside them.
    outside = (lens < 1) | (lens > (step.w if most is None else most))
    i = first(outside | (cut < 0) | (cut > lengths) | (lens != lengths - cut))
    if i is None:
        return None
    count, behind, nodes = int(lens[i]), int(cut[i]), int(lengths[i])
    ranged = f"1..{step.w if most is None else most}"
    return Finding(
        headline=f"request {i}: the committed length is not the path's",
        equation=f"L = {count}, expected {ranged} and accepted rows - truncated = "
        f"{nodes}-{behind} = {nodes - behind}",
        expected=ranged if count == nodes - behind else str(nodes - behind),
        actual=str(count),
        request=i,
        cause="the bonus token was counted twice or not at all"
        if abs(count - nodes + behind) == 1
        else "the length belongs to another step, or was not cut where the output was",
    )


def _wrong_token(step: Step, lens: Any, index: Any, lengths: Any) -> Finding | None:
    committed, tokens, predict = (
        optional_ints(step, path)
        for path in ("outcome.committed", "tree.tokens", "outcome.predict")
    )
    width = index.shape[1]
    if committed is None or tokens is None or predict is None or step.w < 1:
        return None
    columns = np.arange(width)
    after = gather(index, np.broadcast_to(columns + 1, index.shape))
    bonus = columns == lengths[:, None] - 1
    want = np.where(bonus, gather(predict, index), gather(tokens, after))
    # A path that leaves the tree belongs to A1.
    known = (columns < lengths[:, None]) & inside(index, step.w) & (bonus | inside(after, step.w))
    got = np.full(index.shape, -1)
    shared = min(width, committed.shape[1])
    got[:, :shared] = committed[:, :shared]
    due = columns < lens[:, None]
    at = first_cell((due & known & (got != want)) | (~due & (got >= 0)))
    if at is None:
        return None
    i, j = at
    row = int(index[at]) if 0 <= int(index[at]) < step.w else None
    expected = str(int(want[at])) if due[at] else "nothing"
    return Finding(
        headline=f"request {i}: committed token {j} is not the path's",
        equation=f"committed[{i},{j}] = {int(got[at])}, expected {expected} (L = {int(lens[i])})",
        expected=expected,
        actual=str(int(got[at])),
        request=i,
        row=row,
        cause="tokens were taken from the first rows of the block instead of the accepted rows"
        if due[at]
        else "tokens behind the stop were committed too",
    )


@rule(
    "A4", "length-drift", site=Site.COMMIT, cost=Cost.REQUESTS, scope=Scope.REQUEST,
    needs=("outcome.accept_lens",),
)  # fmt: skip
def length_drift(step: Step) -> Finding | None:
    """Every holder of a request's length advances by the number of committed tokens.

    Holds when: sequence lengths on the device and on the host, output tokens and committed KV all
    grow by L in this step.
    Breaks as: from the next step on positions, masks and slots are off by the difference, and the
    prefix cache keeps keys of tokens that nobody returned.
    Usual cause: one holder counts the full path while the output was cut at a stop token.
    Seen in: I21, I32, I47.
    """
    lens = ints(step, "outcome.accept_lens")
    holders = ("delta_seq_lens", "delta_seq_lens_cpu", "delta_output", "delta_kv")
    deltas = {name: optional_ints(step, f"outcome.{name}") for name in holders}
    present = {name: delta for name, delta in deltas.items() if delta is not None}
    if not present:
        raise NotApplicable("no length change (outcome.delta_*) is in this step")
    i = first(np.logical_or.reduce([delta != lens for delta in present.values()]))
    if i is None:
        return None
    want = int(lens[i])
    off = {name: int(delta[i]) for name, delta in present.items() if delta[i] != want}
    text = ", ".join(f"{name} = {value}" for name, value in off.items())
    return Finding(
        headline=f"request {i}: a length advances by another number than L",
        equation=f"{text}, expected L = {want}",
        expected=str(want),
        actual=text,
        request=i,
        cause=_drift_cause(step, i, want, set(off.values())),
    )


def _drift_cause(step: Step, request: int, length: int, values: set[int]) -> str:
    cut = hint(step, "outcome.truncated")
    if cut is not None and values == {length + int(cut[request])} and cut[request]:
        return "the full accepted path was counted although the output stops earlier"
    if values == {step.w}:
        return "the verify width was added instead of the accepted length"
    if len(values) == 1 and abs(values.pop() - length) == 1:
        return "the bonus token is counted in one place and not in another"
    return "the lengths are advanced in several places that do not agree"


@rule(
    "A5", "hidden-rows-off-path", site=Site.COMMIT, cost=Cost.REQUESTS, scope=Scope.REQUEST,
    needs=("outcome.hidden_rows", "outcome.accept_index"),
)  # fmt: skip
def hidden_rows_off_path(step: Step) -> Finding | None:
    """The drafter gets the hidden states of the accepted rows, in path order.

    Holds when: `hidden_rows[i] = accept[i]`, entry by entry and as many. Entries behind a stop are
    not compared.
    Breaks as: right text; drafts get worse after every branch, so acceptance sinks below that of
    a chain.
    Usual cause: the first L rows of the block were taken; they are the accepted rows only in a
    chain.
    Seen in: I21, I44.
    """
    index, lengths = accepted(step)
    hidden, cut = ints(step, "outcome.hidden_rows"), optional_ints(step, "outcome.truncated")
    width = max(index.shape[1], hidden.shape[1])
    want, got = np.full((step.bs, width), -1), np.full((step.bs, width), -1)
    columns = np.arange(width)
    want[:, : index.shape[1]] = index
    want[columns >= lengths[:, None]] = -1
    got[:, : hidden.shape[1]] = np.maximum(hidden, -1)
    judged = np.ones_like(want, np.bool_)
    if cut is not None:
        judged = (cut <= 0)[:, None] | (columns < (lengths - cut)[:, None])
    at = first_cell(judged & (want != got))
    if at is None:
        return None
    i, j = at
    right, wrong = int(want[at]), int(got[at])
    n = int(lengths[i])
    prefix = np.array_equal(got[i, :n], columns[:n])
    return Finding(
        headline=f"request {i}: hidden state {j} is not of the accepted row",
        equation=f"hidden_rows[{i},{j}] = {wrong}, expected accept[{i},{j}] = {right}",
        expected=str(right),
        actual=str(wrong),
        request=i,
        row=right if 0 <= right < step.w else None,
        cause="the first rows of the block were taken, as if the accepted path were a chain"
        if prefix
        else "hidden states were gathered with indices of another step or order",
        confidence="certain" if prefix else "likely",
    )


@rule(
    "A7", "stale-draft-start", site=Site.BUILD, cost=Cost.REQUESTS, scope=Scope.REQUEST,
    needs=("outcome.draft_anchor", "outcome.last_committed"),
)  # fmt: skip
def stale_draft_start(step: Step) -> Finding | None:
    """Drafting starts from the last committed token, at the target's length.

    Holds when: row 0 of the draft block and the root of the tree hold the last committed token,
    and the drafter's committed length is the target's.
    Breaks as: the drafter continues another text than the target; acceptance falls to about 1.
    Usual cause: row 0 holds the mask token like the other slots, or the drafter's cache was rolled
    back by another number of tokens.
    Seen in: I45, I50.
    """
    last, roots = ints(step, "outcome.last_committed"), optional_ints(step, "tree.tokens")
    starts = {"draft_anchor": ints(step, "outcome.draft_anchor")}
    if roots is not None and roots.shape[1]:
        starts["tree.tokens[:,0]"] = roots[:, 0]
    found = [_wrong_start(name, values, last) for name, values in starts.items()]
    return lowest(*found, _wrong_draft_length(step))


def _wrong_start(name: str, values: Any, last: Any) -> Finding | None:
    i = first(values != last)
    if i is None:
        return None
    same = len(values) > 1 and len(set(values.tolist())) == 1
    return Finding(
        headline=f"request {i}: the draft does not start at the last token",
        equation=f"{name} of request {i} = {int(values[i])}, expected the last committed token "
        f"{int(last[i])}",
        expected=str(int(last[i])),
        actual=str(int(values[i])),
        request=i,
        row=0,
        cause="row 0 holds the same token in every request: the mask token"
        if same
        else "the block was built before the last step's tokens were committed",
    )


def _wrong_draft_length(step: Step) -> Finding | None:
    draft, target = (
        optional_ints(step, "outcome.draft_lens"),
        optional_ints(step, "outcome.target_lens"),
    )
    if draft is None or target is None:
        return None
    i = first(draft != target)
    if i is None:
        return None
    return Finding(
        headline=f"request {i}: drafter and target hold different lengths",
        equation=f"draft_lens[{i}] = {int(draft[i])}, expected target_lens[{i}] = {int(target[i])}",
        expected=str(int(target[i])),
        actual=str(int(draft[i])),
        request=i,
        cause="the drafter's cache was advanced or rolled back by another number of tokens",
    )


RULES: tuple[Rule, ...] = (
    walk_off_tree,
    walk_stops_early,
    commit_off_path,
    length_drift,
    hidden_rows_off_path,
    stale_draft_start,
)
