"""The tree search, its mask and positions, against enumeration of every prefix."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from ddtree_guard.ddtree.tree import Trees, default_top_k, paint, positions, search

SEEDS = 10
CASES_PER_SEED = 500


def random_case(rng: np.random.Generator, ties: bool) -> tuple[Any, Any, Any, int]:
    """tokens, logp, roots, budget. Whole-numbered log-probabilities make most scores equal."""
    bs, depth, top_k = 2, int(rng.integers(1, 5)), int(rng.integers(1, 5))
    shape = (bs, depth, top_k)
    logp = -rng.integers(0, 3, shape) if ties else -rng.random(shape)
    logp = -np.sort(-logp.astype(np.float32), axis=-1)
    tokens = np.stack(
        [
            np.stack([rng.permutation(50)[:top_k] for _ in range(depth)])
            for _ in range(bs)
        ]
    )  # fmt: skip
    return tokens, logp, rng.integers(0, 50, bs), int(rng.integers(1, 30))


def prefix_scores(logp: Any) -> dict[tuple[int, ...], np.float32]:
    """Score of every prefix (tuple of ranks) of one request, summed left to right."""
    depth, top_k = logp.shape
    scores: dict[tuple[int, ...], np.float32] = {(): np.float32(0)}
    for level in range(depth):
        for prefix in itertools.product(range(top_k), repeat=level + 1):
            scores[prefix] = scores[prefix[:-1]] + logp[level, prefix[-1]]
    return scores


def paths(trees: Trees, tokens: Any, i: int) -> list[tuple[int, ...]]:
    """The rank prefix of every real node of request i, found through tokens and parents."""
    found: list[tuple[int, ...]] = [()]
    for row in range(1, int(trees.sizes[i])):
        up = found[int(trees.parents[i, row])]
        level = tokens[i, len(up)].tolist()
        found.append((*up, level.index(int(trees.tokens[i, row]))))
    return found


@pytest.mark.parametrize("ties", [False, True], ids=["random", "ties"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_tree_holds_the_best_prefixes_after_the_spine(seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(CASES_PER_SEED // 2):
        tokens, logp, roots, budget = random_case(rng, ties)
        trees = search(tokens, logp, roots, budget)
        depth = logp.shape[1]
        for i in range(len(roots)):
            scores = prefix_scores(logp[i])
            nodes = paths(trees, tokens, i)
            spine = [(0,) * d for d in range(min(depth, budget) + 1)]
            assert nodes[: len(spine)] == spine
            assert len(set(nodes)) == len(nodes) == min(budget + 1, len(scores))
            chosen = [scores[n] for n in nodes[len(spine) :]]
            rest = sorted((scores[p] for p in set(scores) - set(spine)), reverse=True)
            assert chosen == rest[: len(chosen)]


def test_equal_offers_go_to_the_lowest_parent_row() -> None:
    tokens = np.arange(6).reshape(1, 2, 3)
    trees = search(tokens, np.zeros((1, 2, 3), np.float32), np.array([9]), 6)
    assert trees.parents[0].tolist() == [-1, 0, 1, 0, 0, 1, 1]
    assert trees.tokens[0].tolist() == [9, 0, 3, 1, 2, 4, 5]


def test_children_are_linked_first_child_next_sibling() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        trees = search(*random_case(rng, ties=True))
        for i in range(2):
            linked = {}
            for parent in range(int(trees.sizes[i])):
                row = int(trees.next_token[i, parent])
                while row >= 0:
                    linked[row] = parent
                    row = int(trees.next_sibling[i, row])
            size = int(trees.sizes[i])
            assert linked == dict(enumerate(trees.parents[i, 1:size].tolist(), 1))


@pytest.mark.parametrize("depth", [1, 7, 15, 31])
def test_degenerate_tree_is_the_chain(depth: int) -> None:
    rng = np.random.default_rng(depth)
    logp = -rng.random((3, depth, 1)).astype(np.float32)
    tokens, roots, lens = rng.integers(0, 99, (3, depth, 1)), rng.integers(0, 99, 3), [5, 0, 17]
    trees = search(tokens, logp, roots, depth)
    chain = np.arange(depth + 1)
    assert (trees.tokens == np.concatenate([roots[:, None], tokens[:, :, 0]], axis=1)).all()
    assert (trees.parents == chain - 1).all()
    cells, offsets = paint(trees, lens)
    for i, s in enumerate(lens):
        rows = cells[offsets[i] : offsets[i + 1]].reshape(depth + 1, s + depth + 1)
        assert (rows == np.tril(np.ones_like(rows), s)).all()
        assert (positions(trees, lens).reshape(3, -1)[i] == s + chain).all()


def test_mask_shows_the_prefixes_of_each_node_and_a_pad_row_itself() -> None:
    rng = np.random.default_rng(8)
    for _ in range(60):
        tokens, logp, roots, budget = random_case(rng, ties=False)
        budget += 10  # most trees are smaller than the budget
        trees = search(tokens, logp, roots, budget)
        lens, w = rng.integers(0, 9, 2), budget + 1
        cells, offsets = paint(trees, lens)
        for i in range(2):
            rows = cells[offsets[i] : offsets[i + 1]].reshape(w, lens[i] + w)
            assert (rows[:, : lens[i]] == 1).all()
            nodes = paths(trees, tokens, i)
            for r in range(w):
                sees = set(np.flatnonzero(rows[r, lens[i] :]).tolist())
                if r >= len(nodes):
                    assert sees == {r}
                else:
                    assert sees == {c for c, n in enumerate(nodes) if n == nodes[r][: len(n)]}


@pytest.mark.parametrize("bad", [-np.inf, np.nan])
def test_impossible_prefixes_leave_the_tree_small(bad: float) -> None:
    logp = np.array([[[-0.1, bad], [-0.2, bad]]], np.float32)
    trees = search(np.arange(4).reshape(1, 2, 2), logp, np.array([7]), 9)
    assert trees.sizes.tolist() == [3]
    assert trees.tokens[0].tolist() == [7, 0, 2] + [0] * 7
    assert trees.parents[0].tolist() == [-1, 0, 1] + [-1] * 7


@pytest.mark.parametrize(
    ("budget", "shape", "name"),
    [(0, (1, 2, 2), "budget"), (1025, (1, 2, 2), "budget"), (4, (1, 32, 2), "depth")],
)
def test_sizes_out_of_range_are_named(budget: int, shape: tuple[int, ...], name: str) -> None:
    with pytest.raises(ValueError, match=f"tree {name} must be 1 to"):
        search(np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(1), budget)


def test_default_top_k_never_exceeds_what_the_budget_can_use() -> None:
    assert [default_top_k(b) for b in (1, 7, 32, 256)] == [1, 7, 32, 32]
