"""The oracle against a plain loop over rows and keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddtree_guard.attention.reference import verify_attention, visible


def _loop(q: Any, k: Any, v: Any, allowed: Any, group: int) -> Any:
    out = np.zeros_like(q)
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            keys = [c for c in range(len(k)) if allowed(row, c)]
            scores = [float(q[row, head] @ k[c, head // group]) / q.shape[2] ** 0.5 for c in keys]
            weights = np.exp(np.array(scores) - max(scores))
            rows = [w * v[c, head // group] for w, c in zip(weights, keys, strict=True)]
            out[row, head] = np.sum(rows, axis=0) / weights.sum()
    return out


def test_visible_walks_ancestors_only() -> None:
    seen = visible([-1, 0, 0, 1, -1])
    assert [np.flatnonzero(row).tolist() for row in seen] == [[0], [0, 1], [0, 2], [0, 1, 3], [4]]


def test_visible_refuses_a_parent_that_comes_later() -> None:
    with pytest.raises(ValueError, match="node 1 has parent 2"):
        visible([-1, 2, 0])


@pytest.mark.parametrize("group", [1, 2, 4])
def test_attention_matches_a_loop(group: int) -> None:
    rng = np.random.default_rng(group)
    parents, s, kv_heads = [-1, 0, 0, 1, 3], 6, 2
    q = rng.normal(size=(5, kv_heads * group, 8))
    k, v = rng.normal(size=(2, s + 5, kv_heads, 8))
    seen = visible(parents)
    expected = _loop(q, k, v, lambda row, c: c < s or seen[row, c - s], group)
    actual = verify_attention(q, k[:s], v[:s], k[s:], v[s:], parents)
    np.testing.assert_allclose(actual, expected, atol=1e-12)


def test_without_a_prefix_the_root_sees_itself() -> None:
    v = np.ones((2, 1, 4)) * [[[1.0]], [[2.0]]]
    none = np.zeros((0, 1, 4))
    rows = verify_attention(np.ones((2, 1, 4)), none, none, np.ones((2, 1, 4)), v, [-1, -1])
    np.testing.assert_allclose(rows[:, 0, 0], [1.0, 2.0])
