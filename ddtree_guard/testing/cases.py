"""Verify cases: sizes and trees of one step, and everything random about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from ddtree_guard.step import Tree


@dataclass(frozen=True, slots=True)
class VerifyCase:
    """One verify step. Row 0 of a tree is its root; the width is budget + 1.

    `lens` are the committed lengths. `parents` gives each request's tree (-1 for the root and for
    padding rows); without it trees grow from `seed` in the style of `kind`. `padded_bs` is the
    captured batch size of the graph path. `context` 0 means "just enough". `draft_tokens` is D,
    the server argument; None wires it as the incident does, to the block size. Another
    `algorithm` than DDTREE has no budget: set `draft_tokens` to its width, budget + 1.
    """

    lens: tuple[int, ...] = (37, 21)
    budget: int = 16
    block: int = 8
    parents: tuple[tuple[int, ...], ...] | None = None
    seed: int = 0
    kind: Literal["random", "chain", "star"] = "random"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    padded_bs: int | None = None
    context: int = 0
    draft_tokens: int | None = None
    algorithm: str = "DDTREE"
    topk: int = 1

    @property
    def w(self) -> int:
        """Rows per request."""
        return self.budget + 1

    @property
    def bs(self) -> int:
        """Live requests."""
        return len(self.lens)


SMALL: Mapping[str, Mapping[str, Any]] = {  # an interpreted kernel takes milliseconds per program
    "DDTREE": {"budget": 8},
    "EAGLE": {"budget": 5, "draft_tokens": 6, "topk": 4},
    "NGRAM": {"budget": 6, "draft_tokens": 7},
    "DFLASH": {"budget": 7, "draft_tokens": 8, "kind": "chain"},
}


def small_case(algorithm: str = "DDTREE", graph: bool = False) -> VerifyCase:
    """Three requests of an algorithm, eager or in a graph of four lanes."""
    lanes = 4 if graph else None
    return VerifyCase(
        algorithm=algorithm, padded_bs=lanes, lens=(9, 4, 12), head_dim=16, heads=2, kv_heads=1,
        **SMALL[algorithm],
    )  # fmt: skip


def grow_trees(case: VerifyCase) -> Tree:
    """The trees of a case: its `parents`, or trees grown from its seed; tokens, depths, links."""
    rng = np.random.default_rng(case.seed)
    parents = [
        case.parents[i] if case.parents is not None else _parents(rng, case) for i in range(case.bs)
    ]
    shape = (case.bs, case.w)
    depths = np.zeros(shape, np.int64)
    child, sibling = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
    sizes = np.ones(case.bs, np.int64)
    for i, tree in enumerate(parents):
        for row, parent in enumerate(tree):
            if parent < 0:
                continue
            sizes[i] = row + 1
            depths[i, row] = depths[i, parent] + 1
            if child[i, parent] < 0:
                child[i, parent] = row
            else:
                last = child[i, parent]
                while sibling[i, last] >= 0:
                    last = sibling[i, last]
                sibling[i, last] = row
    return Tree(
        tokens=rng.permuted(np.tile(np.arange(1, case.w + 1), (case.bs, 1)), axis=1) * 7,
        parents=np.array(parents, np.int64).reshape(shape),
        depths=depths,
        sizes=sizes,
        retrieve_index=np.arange(case.bs * case.w, dtype=np.int64).reshape(shape),
        retrieve_next_token=child,
        retrieve_next_sibling=sibling,
    )


def _parents(rng: np.random.Generator, case: VerifyCase) -> list[int]:
    """A chain down to the block's depth first (star: the root only), then random attachments."""
    w, deepest = case.w, case.block - 1
    spine = {"star": 1, "chain": w, "random": int(rng.integers(1, deepest + 1))}[case.kind]
    parents, depths = [-1], [0]
    for row in range(1, w):
        room = [p for p in range(row) if depths[p] < deepest]
        if case.kind == "star":
            parent = 0
        elif row <= spine and depths[row - 1] < deepest:
            parent = row - 1
        elif case.kind == "chain":
            return parents + [-1] * (w - row)  # the rest of the rows is padding
        else:
            parent = int(rng.choice(room))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything random about one step, on the CPU: trees, slots, and q, k, v rows."""

    case: VerifyCase
    tree: Tree
    slots: list[Any]  # per request: s + w slot ids
    rows: Any  # request pool row per request
    q: Any
    k: Any
    v: Any
    prefix: list[tuple[Any, Any]]


def make_inputs(case: VerifyCase) -> Inputs:
    """The inputs of a case. The same case gives the same inputs."""
    rng = np.random.default_rng(case.seed + 1)
    torch_rng = torch.Generator().manual_seed(case.seed)
    ids = torch.from_numpy(rng.permutation(sum(case.lens) + case.bs * case.w) + 1)
    slots = list(ids.split([s + case.w for s in case.lens]))

    def rows(count: int, heads: int) -> Any:
        return torch.randn((count, heads, case.head_dim), generator=torch_rng)

    total = case.bs * case.w
    return Inputs(
        case=case,
        tree=grow_trees(case),
        slots=slots,
        rows=torch.from_numpy(rng.permutation(case.bs) + 1),
        q=rows(total, case.heads),
        k=rows(total, case.kv_heads),
        v=rows(total, case.kv_heads),
        prefix=[(rows(s, case.kv_heads), rows(s, case.kv_heads)) for s in case.lens],
    )
