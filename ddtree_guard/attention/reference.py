"""Dense attention for one verify step: the oracle that kernels are compared with.

Visibility is computed here from the parents, never from a mask, and nothing is shared with the
rules or the backend, so a fault in either cannot hide in the comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def visible(parents: Sequence[int]) -> Any:
    """(w, w) booleans: row r may attend to tree column c. parents[r] < 0 marks a row without one.

    A row sees itself and its ancestors. Raises ValueError if a parent does not come before its
    child, because such a walk need not end.
    """
    w = len(parents)
    seen = np.zeros((w, w), np.bool_)
    for row, parent in enumerate(parents):
        if parent >= row:
            raise ValueError(f"node {row} has parent {parent}; parents must come first")
        if parent >= 0:
            seen[row] = seen[parent]
        seen[row, row] = True
    return seen


def verify_attention(
    q: Any,
    k_prefix: Any,
    v_prefix: Any,
    k_tree: Any,
    v_tree: Any,
    parents: Sequence[int],
    scale: float | None = None,
) -> Any:
    """Attention rows of one request, in float64: every row sees the prefix and its ancestors.

    Shapes: q (w, heads, dim); k_prefix, v_prefix (s, kv_heads, dim); k_tree, v_tree
    (w, kv_heads, dim); parents (w). `heads` is a multiple of `kv_heads` (grouped query heads share
    a KV head). `scale` defaults to dim ** -0.5. Returns (w, heads, dim).
    """
    q = np.asarray(q, np.float64)
    keys = np.concatenate([k_prefix, k_tree]).astype(np.float64)
    values = np.concatenate([v_prefix, v_tree]).astype(np.float64)
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat(group, axis=1), values.repeat(group, axis=1)
    allowed = np.concatenate([np.ones((len(q), len(k_prefix)), np.bool_), visible(parents)], axis=1)
    scores = np.einsum("rhd,chd->hrc", q, keys) * (scale or q.shape[2] ** -0.5)
    scores = np.where(allowed, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return np.einsum("hrc,chd->rhd", weights, values)
