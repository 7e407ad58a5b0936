"""The draft tree of DDTree in plain NumPy, which `tree_kernel` must reproduce bit for bit.

A block drafter gives one distribution per position, independent of the tokens before it. A node is
therefore a parent node and a rank in the distribution of the next position, and its score is

    score(node) = score(parent) + logp[depth(node) - 1, rank(node)]        float32, one rounding

Row 0 is the root (the last committed token, score 0). Rows 1 .. min(B, L) are the spine: rank 0 at
every depth. After that, always the best prefix that is not in the tree yet. Because a rank is worth
no more than the rank before it and a child no more than its parent, the best one is either the
first child or the next sibling of a node already chosen: each row offers one candidate, its lowest
rank not yet taken, and the best offer wins. Equal offers: the lower parent row wins.

Offers of -inf or NaN are never taken, so a tree can be smaller than its budget; `sizes` says so.
Rows from `sizes` on are padding: token 0, parent -1, depth 0, and they see themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

BUDGET_MAX = 1024
DEPTH_MAX = 31
TOP_K_MAX = 1024
TOP_K_DEFAULT = 32


def default_top_k(budget: int) -> int:
    """Candidates per position. Rank r needs its r better siblings in the tree, so B are enough."""
    return max(1, min(budget, TOP_K_DEFAULT))


@dataclass(frozen=True, slots=True)
class Trees:
    """The trees of a batch, arrays of (bs, w) with w = B + 1, or (bs,) for `sizes`.

    `next_token` and `next_sibling` are SGLang's first-child next-sibling arrays (-1 for none).
    NumPy arrays from `search`, device tensors from `tree_kernel.build`; int64 throughout.
    """

    tokens: Any
    parents: Any
    depths: Any
    sizes: Any
    next_token: Any
    next_sibling: Any

    @property
    def width(self) -> int:
        """Rows per request."""
        return int(self.tokens.shape[1])


def check_sizes(depth: int, top_k: int, budget: int) -> None:
    """Raise ValueError for sizes that the search does not support."""
    for name, value, most in (
        ("budget", budget, BUDGET_MAX),
        ("depth", depth, DEPTH_MAX),
        ("top-k", top_k, TOP_K_MAX),
    ):
        if not 1 <= value <= most:
            raise ValueError(f"the tree {name} must be 1 to {most}, found {value}.")


def search(tokens: Any, logp: Any, roots: Any, budget: int) -> Trees:
    """Build the trees of a batch.

    tokens: (bs, L, K) global token ids by position and rank; logp: same shape, float32, descending
    along ranks; roots: (bs,) last committed tokens.
    """
    bs, depth, top_k = logp.shape
    check_sizes(depth, top_k, budget)
    shape = (bs, budget + 1)
    trees = Trees(
        tokens=np.zeros(shape, np.int64),
        parents=np.full(shape, -1, np.int64),
        depths=np.zeros(shape, np.int64),
        sizes=np.zeros(bs, np.int64),
        next_token=np.full(shape, -1, np.int64),
        next_sibling=np.full(shape, -1, np.int64),
    )
    for i in range(bs):
        nodes = _search_one(logp[i], budget)
        trees.sizes[i] = len(nodes)
        trees.tokens[i, 0] = roots[i]
        last: dict[int, int] = {}
        for row, (parent, rank, level) in enumerate(nodes[1:], 1):
            trees.tokens[i, row] = tokens[i, level - 1, rank]
            trees.parents[i, row] = parent
            trees.depths[i, row] = level
            if rank == 0:
                trees.next_token[i, parent] = row
            else:
                trees.next_sibling[i, last[parent]] = row
            last[parent] = row
    return trees


def _search_one(logp: Any, budget: int) -> list[tuple[int, int, int]]:
    """(parent row, rank, depth) per node of one request, in row order."""
    depth, top_k = logp.shape
    zero = np.float32(0)
    nodes, scores, taken = [(-1, 0, 0)], [zero], [0]

    def take(parent: int) -> None:
        level, rank = nodes[parent][2] + 1, taken[parent]
        nodes.append((parent, rank, level))
        scores.append(scores[parent] + logp[level - 1, rank])
        taken.append(0)
        taken[parent] += 1

    def offer(row: int) -> Any:
        if nodes[row][2] == depth or taken[row] == top_k:
            return -np.inf
        score = scores[row] + logp[nodes[row][2], taken[row]]
        return -np.inf if np.isnan(score) else score

    for row in range(min(depth, budget)):
        take(row)
    while len(nodes) <= budget:
        offers = [offer(row) for row in range(len(nodes))]
        best = int(np.argmax(offers))  # the first of equal offers
        if offers[best] == -np.inf:
            break
        take(best)
    return nodes


def paint(trees: Trees, lens: Any) -> tuple[Any, Any]:
    """The flat mask and its offsets, as `step.Mask` lays them out: uint8 cells, int64 offsets."""
    bs, w = trees.parents.shape
    offsets = np.concatenate([[0], np.cumsum(w * (np.asarray(lens, np.int64) + w))])
    cells = np.zeros(int(offsets[-1]), np.uint8)
    for i in range(bs):
        s = int(lens[i])
        rows = cells[offsets[i] : offsets[i + 1]].reshape(w, s + w)
        rows[:, :s] = 1
        for r in range(w):
            node = r
            while node >= 0:
                rows[r, s + node] = 1
                node = int(trees.parents[i, node])
    return cells, offsets


def positions(trees: Trees, lens: Any) -> Any:
    """Rotary position of every row, flattened: s + depth (padding: s)."""
    return (np.asarray(lens, np.int64)[:, None] + trees.depths).reshape(-1)
