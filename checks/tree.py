"""Tree topology: parents first, explicit sizes, consistent links.

Rows at or beyond tree.sizes[i] are padding and hold no node: parent -1, depth 0, links -1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_guard.checks.common import first_cell, ints, optional_ints
from ddtree_guard.checks.rows import gather, inside, node_rows, parent_rows, previous_equal
from ddtree_guard.rule import Cost, Finding, NotEvaluable, Rule, Scope, Site, rule
from ddtree_guard.step import Step

_NO_COLUMN = -1  # the row's token did not come from a logit column
_SHARD_PADDING = -2  # its column holds no token, so no token id is right


@rule(
    "T1", "child-before-parent", site=Site.BUILD, cost=Cost.ROWS, scope=Scope.REQUEST, bit=9,
    needs=("tree.parents", "tree.sizes"),
)  # fmt: skip
def child_before_parent(step: Step) -> Finding | None:
    """Row 0 is the only root, and every other node comes after its parent.

    Holds when: `parent[0] = -1`, and `0 <= parent[r] < r` for every node r > 0.
    Breaks as: the mask of a node is painted before that of its parent exists, so it lacks
    ancestors; a scan in row order uses a state that was never written; a second root is never
    reached by the walk.
    Usual cause: nodes were stored in heap order, or NaN draft log-probabilities left a node
    without a parent.
    Seen in: I20, I48.
    """
    parents, rows = parent_rows(step), np.arange(step.w)
    wrong = node_rows(step) & np.where(rows == 0, parents != -1, (parents < 0) | (parents >= rows))
    at = first_cell(wrong)
    if at is None:
        return None
    i, r = at
    value = int(parents[at])
    want = "-1" if r == 0 else f"0..{r - 1}"
    return Finding(
        headline=f"request {i}: the parent of row {r} is not before it",
        equation=f"parents[{i},{r}] = {value}, expected {want}",
        expected=want,
        actual=str(value),
        request=i,
        row=r,
        cause=_parent_cause(r, value, step.w),
    )


def _parent_cause(row: int, value: int, w: int) -> str:
    if row == 0:
        return "the root row was overwritten, or the array is shifted by a row"
    if value == -1:
        return "the node has no parent: its draft log-probability may be NaN"
    if 0 <= value < w:
        return "nodes were stored in the order they left the heap, not parents first"
    return "the parent index counts rows of another request, or the buffer is stale"


@rule(
    "T2", "depth-off-parent", site=Site.BUILD, cost=Cost.ROWS, scope=Scope.REQUEST, bit=10,
    needs=("tree.parents", "tree.depths", "tree.sizes"),
)  # fmt: skip
def depth_off_parent(step: Step) -> Finding | None:
    """A node is one deeper than its parent and no deeper than the drafter drafts.

    Holds when: `depth[0] = 0` and `depth[r] = depth[parent[r]] + 1 <= depth_max`. Where the
    contract asks for depth-major nodes, depths never decrease by row and siblings are adjacent.
    Breaks as: the position of the node is wrong, so attention sees its ancestors at the wrong
    distance; a recurrent scan takes the state of the wrong node. Chains still come out right.
    Usual cause: nodes kept in best-first order where the kernel wants depth-major order, or
    depths left over from the previous tree.
    Seen in: I20.
    """
    w, parents, depths = step.w, parent_rows(step), ints(step, "tree.depths")
    live = node_rows(step)
    # A node whose parent is out of range belongs to T1.
    known = live & inside(parents, w)
    want = np.where(known, gather(depths, parents) + 1, depths)
    want[:, 0] = 0
    off = live & (depths != want)
    limit = _depth_limit(step)
    deep = live & (depths > limit) if limit is not None else np.zeros_like(live)
    shallower, apart = _disorder(step, live, parents, depths)
    at = first_cell(off | deep | shallower | apart)
    if at is None:
        return None
    i, r = at
    depth, parent = int(depths[at]), int(parents[at])
    if off[at]:
        above = f"depth[{parent}]+1 = " if r else ""
        text, expected = f"expected {above}{int(want[at])}", str(int(want[at]))
        cause = "depths were not rebuilt with the parents: they belong to another tree"
    elif deep[at]:
        text, expected = f"expected at most depth_max = {limit}", f"<= {limit}"
        cause = "the tree was grown beyond the depths that the draft block covers"
    elif shallower[at]:
        before = int(depths[i, r - 1])
        text, expected = f"expected at least depths[{i},{r - 1}] = {before}", f">= {before}"
        cause = "nodes were stored in best-first order where this kernel wants depth-major order"
    else:
        text, expected = f"expected beside its sibling, as child of row {parent}", "adjacent"
        cause = "siblings were not stored side by side, which this kernel's scan relies on"
    return Finding(
        headline=f"request {i}: the depth of row {r} does not fit the tree",
        equation=f"depths[{i},{r}] = {depth}, {text}",
        expected=expected,
        actual=str(depth),
        request=i,
        row=r,
        cause=cause,
    )


def _depth_limit(step: Step) -> int | None:
    widths = step.widths
    if widths.depth_max is not None:
        return int(widths.depth_max)
    return None if widths.block is None else int(widths.block) - 1


def _disorder(step: Step, live: Any, parents: Any, depths: Any) -> tuple[Any, Any]:
    """Rows shallower than the row before, and rows not beside their previous sibling."""
    shallower, apart = np.zeros_like(live), np.zeros_like(live)
    if step.contract.depth_major:
        shallower[:, 1:] = live[:, 1:] & (depths[:, 1:] < depths[:, :-1])
        before = previous_equal(live, parents)
        apart = (before >= 0) & (before != np.arange(step.w) - 1)
    return shallower, apart


@rule(
    "T3", "links-off-tree", site=Site.BUILD, cost=Cost.ROWS, scope=Scope.REQUEST, bit=11,
    needs=(
        "tree.parents", "tree.sizes", "tree.retrieve_index", "tree.retrieve_next_token",
        "tree.retrieve_next_sibling",
    ),
)  # fmt: skip
def links_off_tree(step: Step) -> Finding | None:
    """Left-child right-sibling links describe the same tree as the parent array.

    Holds when: `retrieve_index[i,r] = i*w + r`; each link is -1 or leads to a child (a sibling)
    of its row; following links from the root reaches every node once; padding rows link nowhere.
    Breaks as: verification walks another tree than attention saw: nodes are never tried, or the
    walk accepts a token in the wrong context. A cycle hangs the kernel.
    Usual cause: links built before nodes were reordered, or not rebuilt for this step.
    Seen in: I20, I40.
    """
    w, live, parents = step.w, node_rows(step), parent_rows(step)
    child = ints(step, "tree.retrieve_next_token")
    sibling = ints(step, "tree.retrieve_next_sibling")
    index = ints(step, "tree.retrieve_index")
    want_index = np.arange(step.bs)[:, None] * w + np.arange(w)
    bad_child, bad_sibling = _bad_links(live, parents, child, sibling)
    times, lost = _reached(live, np.where(bad_child, -1, child), np.where(bad_sibling, -1, sibling))
    pads = ~live & ((child != -1) | (sibling != -1)) & (step.contract.pad_rows != "none")
    bad_index = live & (index != want_index)
    at = first_cell(bad_index | bad_child | bad_sibling | (times != 1) | lost | pads)
    if at is None:
        return None
    i, r = at
    if bad_index[at]:
        value, expected = f"retrieve_index[{i},{r}] = {int(index[at])}", str(int(want_index[at]))
        cause = "the row index was computed with another width or for another batch"
    elif bad_child[at] or bad_sibling[at]:
        name, link = ("token", child) if bad_child[at] else ("sibling", sibling)
        kin = "child" if bad_child[at] else "sibling"
        value, expected = f"retrieve_next_{name}[{i},{r}] = {int(link[at])}", f"-1 or a {kin}"
        cause = "links were built before the nodes were reordered, or belong to another tree"
    elif pads[at]:
        value = f"links[{i},{r}] = {int(child[at])} and {int(sibling[at])} on a padding row"
        expected, cause = "-1 and -1", "links of a larger tree were not cleared"
    else:
        value = f"{int(times[at])} links lead to row {r}"
        expected = "1 link, and a way to it from the root"
        cause = "a link was dropped or written twice, or the sibling list runs in a circle"
    return Finding(
        headline=f"request {i}: the links at row {r} are not those of the tree",
        equation=f"{value}, expected {expected} (parents[{i},{r}] = {int(parents[at])})",
        expected=expected,
        actual=value,
        request=i,
        row=r,
        cause=cause,
        latent=bool(pads[at]),
    )


def _bad_links(live: Any, parents: Any, child: Any, sibling: Any) -> tuple[Any, Any]:
    """Rows whose link leads neither nowhere (-1) nor to a child, respectively a sibling."""
    w = live.shape[1]
    rows = np.arange(w)

    def node(link: Any) -> Any:
        return inside(link, w) & (link > 0) & gather(live, link)

    good_child = node(child) & (gather(parents, child) == rows)
    good_sibling = node(sibling) & (sibling != rows) & (rows > 0)
    good_sibling &= gather(parents, sibling) == parents
    return live & (child != -1) & ~good_child, live & (sibling != -1) & ~good_sibling


def _reached(live: Any, child: Any, sibling: Any) -> tuple[Any, Any]:
    """How many links lead to each row (1 for the root and for padding), and which rows the root
    does not reach. Pointer doubling: a cycle costs no more steps than a tree.
    """
    bs, w = live.shape
    times = np.where(live & (np.arange(w) > 0), 0, 1)
    before = np.tile(np.arange(w), (bs, 1))
    for links in (child, sibling):
        request, row = np.nonzero(live & (links > 0))
        np.add.at(times, (request, links[request, row]), 1)
        before[request, links[request, row]] = row
    for _ in range(w.bit_length()):
        before = gather(before, before)
    return times, live & (before != 0)


@rule(
    "T4", "ambiguous-tree", site=Site.BUILD, cost=Cost.ROWS, scope=Scope.REQUEST, bit=12,
    needs=("tree.tokens", "tree.parents", "tree.sizes"),
)  # fmt: skip
def ambiguous_tree(step: Step) -> Finding | None:
    """Siblings hold different tokens, and the stated size says which rows are nodes.

    Holds when: `1 <= size <= w`, no row at or beyond size has a parent, and no two children of a
    node hold the same token.
    Breaks as: a node beyond the size is drafted and attended but never accepted; of two equal
    siblings the walk can only try the first, so the tree is smaller than it looks.
    Usual cause: the size was counted from token ids other than 0, and token 0 is a real token; or
    top-k ran over shards whose ids were not made global.
    Seen in: I21.
    """
    tokens, parents, sizes = (ints(step, f"tree.{n}") for n in ("tokens", "parents", "sizes"))
    live, rows = node_rows(step), np.arange(step.w)
    bad_size = ((sizes < 1) | (sizes > step.w))[:, None] & (rows == 0)
    ghost = ~live & (parents >= 0) & (step.contract.pad_rows != "none")
    twin = previous_equal(live & (rows > 0), parents, tokens)
    at = first_cell(bad_size | ghost | (twin >= 0))
    if at is None:
        return None
    i, r = at
    size = int(sizes[i])
    if twin[at] >= 0:
        return Finding(
            headline=f"request {i}: rows {int(twin[at])} and {r} are equal siblings",
            equation=f"tokens[{i},{r}] = tokens[{i},{int(twin[at])}] = {int(tokens[at])}, "
            f"both children of row {int(parents[at])}, expected different tokens",
            expected="different tokens",
            actual=str(int(tokens[at])),
            request=i,
            row=r,
            cause="top-k ran over shards without making ids global, or a node was added twice",
        )
    counted = size == 1 + int(np.count_nonzero(tokens[i, 1:]))
    return Finding(
        headline=f"request {i}: the tree size does not say which rows are nodes",
        equation=f"sizes[{i}] = {size}, expected 1..w = 1..{step.w}"
        if bad_size[at]
        else f"sizes[{i}] = {size}, but row {r} has parent {int(parents[at])}",
        expected=f"1..{step.w}" if bad_size[at] else f"> {r}",
        actual=str(size),
        request=i,
        row=r,
        cause="the size was counted from token ids other than 0, and token 0 is a real token"
        if counted and ghost[at]
        else "the size and the parent array come from different trees",
        confidence="certain" if counted and ghost[at] else "likely",
    )


@rule(
    "T5", "cut-spine", site=Site.BUILD, cost=Cost.ROWS, scope=Scope.REQUEST,
    needs=("tree.tokens", "tree.parents", "tree.sizes", "tree.top1"),
)  # fmt: skip
def cut_spine(step: Step) -> Finding | None:
    """The chain of the drafter's most probable tokens is in the tree.

    Holds when: from the root, a child with token `top1[d]` exists at each depth d up to
    `min(b-1, size-1)`, as far as the drafter gave top-1 tokens.
    Breaks as: nothing wrong in the text, but the tree accepts fewer tokens than the chain that it
    replaces, so speculation slows down.
    Usual cause: a log-probability stop ended tree growth before the spine was complete.
    Seen in: I20.
    """
    tokens, parents = ints(step, "tree.tokens"), parent_rows(step)
    top1, live = ints(step, "tree.top1"), node_rows(step)
    limit = _depth_limit(step)
    wanted = live.sum(axis=1) - 1 if limit is None else np.minimum(live.sum(axis=1) - 1, limit)
    node, going, cut = np.zeros(step.bs, np.int64), live[:, 0].copy(), np.full(step.bs, -1)
    for d in range(min(top1.shape[1], step.w - 1)):
        going &= (d < wanted) & (top1[:, d] >= 0)
        if not going.any():
            break
        heir = live & (parents == node[:, None]) & (tokens == top1[:, d : d + 1])
        found = heir.any(axis=1)
        cut[going & ~found] = d
        going &= found
        node = np.where(going, heir.argmax(axis=1), node)
    i = int(np.argmax(cut >= 0)) if step.bs else 0
    if not step.bs or cut[i] < 0:
        return None
    depth, row = int(cut[i]) + 1, int(node[i])
    return Finding(
        headline=f"request {i}: the top-1 chain ends at row {row}",
        equation=f"no child of row {row} holds top1[{i},{depth - 1}] = {int(top1[i, depth - 1])}, "
        f"expected the spine to depth min(b-1, size-1) = {int(wanted[i])}",
        expected=f"depth {int(wanted[i])}",
        actual=f"depth {depth - 1}",
        request=i,
        row=row,
        cause="a log-probability stop or the node budget was applied before the spine was complete",
    )


@rule(
    "T6", "draft-token-outside-vocab", site=Site.BUILD, cost=Cost.ROWS, scope=Scope.REQUEST,
    bit=13, needs=("tree.tokens", "tree.sizes", "limits.vocab"),
)  # fmt: skip
def draft_token_outside_vocab(step: Step) -> Finding | None:
    """Node tokens are ids of the target's vocabulary.

    Holds when: `0 <= token < V` for every node, and, where the drafter's logit column is known, the
    token is the global id of that column: `shard * V_shard + column within the shard`.
    Breaks as: an embedding gather out of range, or (silently) other tokens than the drafter meant:
    acceptance falls, only with tensor parallelism.
    Usual cause: a position in logits concatenated over padded shards was used as a token id.
    Seen in: I48, I50.
    """
    tokens, live, vocab = ints(step, "tree.tokens"), node_rows(step), int(step.limits.vocab)
    outside = live & ((tokens < 0) | (tokens >= vocab))
    ids = _global_ids(step)
    foreign = np.zeros_like(live)
    if ids is not None:
        foreign = live & (ids != _NO_COLUMN) & (ids != tokens)
    at = first_cell(outside | foreign)
    if at is None:
        return None
    i, r = at
    token = int(tokens[at])
    shard = bool(foreign[at])
    padding = shard and ids[at] == _SHARD_PADDING
    expected = str(int(ids[at])) if shard else f"0..{vocab - 1}"
    expected = "the id of a column outside shard padding" if padding else expected
    columns = optional_ints(step, "tree.columns")
    raw = shard and token == int(columns[at])
    return Finding(
        headline=f"request {i}: the token of row {r} is not the drafter's id"
        if shard
        else f"request {i}: the token of row {r} is not in the vocabulary",
        equation=f"tokens[{i},{r}] = {token}, expected {expected}"
        + (f" (column {int(columns[at])} of the gathered logits)" if shard else f" (V = {vocab})"),
        expected=expected,
        actual=str(token),
        request=i,
        row=r,
        cause="the column in logits concatenated over padded shards was used as the token id"
        if raw
        else "the token buffer is stale, or the draft vocabulary is larger than the target's",
        confidence="certain" if raw else "likely",
    )


def _global_ids(step: Step) -> Any:
    """Token id of each row's logit column, or None where columns or shard sizes are not known."""
    columns = optional_ints(step, "tree.columns")
    real, padded = step.limits.vocab_per_rank, step.limits.vocab_per_rank_padded
    if columns is None or real is None:
        return None
    padded = real if padded is None else padded
    if not 0 < real <= padded:
        raise NotEvaluable(f"a vocabulary shard of {real} ids padded to {padded} is impossible")
    shard, within = np.divmod(columns, padded)
    ids = np.where(within < real, shard * real + within, _SHARD_PADDING)
    return np.where(columns < 0, _NO_COLUMN, ids)


RULES: tuple[Rule, ...] = (
    child_before_parent,
    depth_off_parent,
    links_off_tree,
    ambiguous_tree,
    cut_spine,
    draft_token_outside_vocab,
)
