"""Parents and depths from SGLang's left-child right-sibling arrays, on the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ddtree_guard.errors import IncompatibleError
from ddtree_guard.step import Tree


def links_of(spec: Any) -> tuple[Any, Any]:
    """First children and next siblings of a batch's trees. Raises IncompatibleError for none."""
    child, sibling = spec.retrieve_next_token, spec.retrieve_next_sibling
    if child is None or sibling is None:
        raise IncompatibleError(
            f"expected {type(spec).__name__} to hold parents or links, found neither; "
            "register an adapter for it."
        )
    return child, sibling


def with_parents(tree: Tree) -> Tree:
    """The tree with parents, depths and sizes where only the links are there.

    Every row is a node then: EAGLE and NGRAM verify full trees. A row that no link reaches keeps
    parent -1, so T1 reports it; links that lead backwards or out of the tree are not followed.
    """
    child, sibling = tree.retrieve_next_token, tree.retrieve_next_sibling
    if tree.parents is not None or child is None or sibling is None:
        return tree
    parents, depths = np.full(child.shape, -1, np.int64), np.zeros(child.shape, np.int64)
    each, width = np.arange(child.shape[0]), child.shape[1]
    for row in range(width):
        for links, is_child in ((child, True), (sibling, False)):
            to = links[:, row]
            known = (to > row) & (to < width)
            lanes, rows = each[known], to[known]
            parents[lanes, rows] = row if is_child else parents[known, row]
            depths[lanes, rows] = depths[known, row] + is_child
    sizes = np.full(child.shape[0], width, np.int64)
    return dataclasses.replace(tree, parents=parents, depths=depths, sizes=sizes)


def local_rows(index: Any, w: int) -> Any:
    """Row numbers within the request from row numbers over the batch; negative ones become -1."""
    offset = np.arange(index.shape[0], dtype=np.int64)[:, None] * w
    return np.where(index >= 0, index.astype(np.int64) - offset, -1)
