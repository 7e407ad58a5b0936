"""Walk, commit and losslessness of the tree, on the host reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddtree_guard.ddtree.tree import search
from ddtree_guard.ddtree.verify import moves, walk

VOCAB = 4


def random_tree(rng: np.random.Generator, bs: int = 3) -> tuple[Any, int]:
    """Trees over a vocabulary of four tokens, distinct among siblings, and the block size."""
    depth, top_k = int(rng.integers(1, 6)), int(rng.integers(1, VOCAB + 1))
    logp = -np.sort(rng.random((bs, depth, top_k)).astype(np.float32), axis=-1)
    tokens = np.array(
        [[rng.permutation(VOCAB)[:top_k] for _ in range(depth)] for _ in range(bs)]
    )  # fmt: skip
    trees = search(tokens, logp, rng.integers(0, VOCAB, bs), int(rng.integers(1, 24)))
    return trees, depth + 1


def strings(trees: Any, i: int) -> dict[tuple[int, ...], int]:
    """Token string below the root -> row, for the real nodes of request i."""
    found: dict[int, tuple[int, ...]] = {0: ()}
    for row in range(1, int(trees.sizes[i])):
        found[row] = (*found[int(trees.parents[i, row])], int(trees.tokens[i, row]))
    return {text: row for row, text in found.items()}


@pytest.mark.parametrize("seed", range(10))
def test_walk_commits_the_longest_predicted_string_of_the_tree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(500):
        trees, block = random_tree(rng)
        predict = rng.integers(0, VOCAB, trees.tokens.shape)
        lens = rng.integers(0, 99, 3)
        result = walk(trees.tokens, trees.parents, predict, lens, block)
        for i in range(3):
            known = strings(trees, i)
            text: tuple[int, ...] = ()
            while (*text, int(predict[i, known[text]])) in known:
                text = (*text, int(predict[i, known[text]]))
            n = len(text) + 1
            bonus = int(predict[i, known[text]])
            assert result.lens[i] == n
            assert result.new_lens[i] == lens[i] + n
            assert result.committed[i].tolist() == [*text, bonus] + [0] * (block - n)
            assert result.bonus[i] == bonus
            path = [known[text[:j]] for j in range(n)]
            assert result.accept_index[i].tolist() == path + [-1] * (block - n)
            rows = result.rows.reshape(3, block)[i] - i * trees.width
            assert rows.tolist() == path + [0] * (block - n)


@pytest.mark.parametrize("seed", range(5))
def test_moves_bring_each_accepted_row_to_its_place(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(200):
        trees, block = random_tree(rng)
        predict = rng.integers(0, VOCAB, trees.tokens.shape)
        result = walk(trees.tokens, trees.parents, predict, np.zeros(3), block)
        slots = rng.permutation(3 * trees.width).reshape(3, trees.width)
        pool = np.empty(3 * trees.width, np.int64)
        pool[slots.reshape(-1)] = np.arange(3 * trees.width)  # which row wrote each slot
        before = pool.copy()
        for copies in moves(result.accept_index, result.lens, slots):
            read = [before[source] for source, _ in copies]
            for value, (_, target) in zip(read, copies, strict=True):
                pool[target] = value
        for i, n in enumerate(result.lens):
            wanted = result.accept_index[i, :n] + i * trees.width
            assert (pool[slots[i, :n]] == wanted).all()


def test_a_pad_row_with_the_predicted_token_is_never_accepted() -> None:
    tokens, parents = np.array([[3, 1, 0, 0]]), np.array([[-1, 0, -1, -1]])
    result = walk(tokens, parents, np.zeros((1, 4), np.int64), np.array([9]), 4)
    assert result.lens.tolist() == [1]


def test_sampled_walk_has_the_distribution_of_plain_sampling() -> None:
    """Three tokens ahead, 60,000 draws: chi-square of the first two tokens against the target."""
    rng = np.random.default_rng(20)
    draws, depth = 60_000, 2
    first = np.array([0.5, 0.3, 0.15, 0.05])
    second = np.array([[0.7, 0.1, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25] * 4, [0, 0, 0.5, 0.5]])
    logp = np.log(np.array([[[0.4, 0.35], [0.6, 0.3]]], np.float32))
    trees = search(np.array([[[1, 0], [3, 2]]]), logp, np.array([0]), 4)
    rows = strings(trees, 0)
    predict = np.zeros((draws, trees.width), np.int64)
    for text, row in rows.items():
        p = first if not text else second[text[0]] if len(text) == 1 else np.full(4, 0.25)
        predict[:, row] = rng.choice(4, draws, p=p)
    many = [np.repeat(part, draws, axis=0) for part in (trees.tokens, trees.parents)]
    result = walk(*many, predict, np.zeros(draws), depth + 1)
    # A step that stops after one token leaves the next to plain decoding.
    one = result.committed[:, 0]
    rest = np.array([rng.choice(4, p=second[t]) for t in one])
    two = np.where(result.lens > 1, result.committed[:, 1], rest)
    expected = (first[:, None] * second).reshape(-1) * draws
    seen = np.bincount(one * 4 + two, minlength=16)
    assert (seen[expected == 0] == 0).all()
    live = expected > 0
    chi2 = ((seen - expected)[live] ** 2 / expected[live]).sum()
    assert chi2 < 34.5  # 13 degrees of freedom, p = 0.001
    assert 0 < (result.lens > 1).mean() < 1
