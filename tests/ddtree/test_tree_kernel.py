"""The tree kernels against the NumPy reference, bit for bit. Runs in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ddtree_guard.ddtree import tree, tree_kernel  # noqa: E402

FIELDS = ("tokens", "parents", "depths", "sizes", "next_token", "next_sibling")


def case(seed: int) -> tuple[Any, Any, Any, int]:
    """tokens, logp, roots, budget: ties, impossible and NaN entries included."""
    rng = np.random.default_rng(seed)
    bs, depth, top_k = 3, int(rng.integers(1, 10)), int(rng.integers(1, 7))
    shape = (bs, depth, top_k)
    logp = -(rng.integers(0, 3, shape) if seed % 2 else rng.random(shape)).astype(np.float32)
    logp = -np.sort(-logp, axis=-1)
    if seed % 5 == 0:
        logp[0, :, -1] = -np.inf
    if seed % 7 == 0:
        logp[-1, -1, -1] = np.nan
    return rng.integers(0, 99, shape), logp, rng.integers(0, 99, bs), int(rng.integers(1, 48))


def build(tokens: Any, logp: Any, roots: Any, budget: int) -> tree.Trees:
    return tree_kernel.build(*map(torch.from_numpy, (tokens, logp, roots)), budget)


def same(left: tree.Trees, right: tree.Trees) -> bool:
    return all((getattr(left, f) == getattr(right, f).numpy()).all() for f in FIELDS)


@pytest.mark.parametrize("seed", range(60))
def test_kernel_equals_reference(interpreter: None, seed: int) -> None:
    inputs = case(seed)
    assert same(tree.search(*inputs), build(*inputs))


def test_kernel_equals_reference_at_the_largest_sizes(interpreter: None) -> None:
    rng = np.random.default_rng(0)
    logp = -np.sort(rng.integers(0, 9, (2, 31, 40)).astype(np.float32), axis=-1)
    inputs = rng.integers(0, 151_936, logp.shape), logp, rng.integers(0, 9, 2), 1024
    assert same(tree.search(*inputs), build(*inputs))


@pytest.mark.parametrize("seed", range(12))
def test_mask_and_positions_are_painted_in_place(interpreter: None, seed: int) -> None:
    tokens, logp, roots, budget = case(seed)
    lens = np.random.default_rng(seed).integers(0, 300, len(roots))
    trees = build(tokens, logp, roots, budget)
    wanted, _ = tree.paint(tree.search(tokens, logp, roots, budget), lens)
    mask = torch.full((len(wanted) + 5,), 7, dtype=torch.uint8)
    rows = torch.empty(trees.parents.numel(), dtype=torch.int64)
    tree_kernel.paint(trees, torch.from_numpy(lens), rows, mask)
    assert (mask[:-5].numpy() == wanted).all()
    assert (mask[-5:] == 7).all()
    assert (rows.numpy() == tree.positions(trees_on_host(trees), lens)).all()


def trees_on_host(trees: tree.Trees) -> tree.Trees:
    return tree.Trees(*(getattr(trees, f).numpy() for f in FIELDS))


def test_without_a_mask_only_positions_are_written(interpreter: None) -> None:
    trees = build(*case(1))
    rows = torch.empty(trees.parents.numel(), dtype=torch.int64)
    tree_kernel.paint(trees, torch.tensor([4, 40, 9]), rows, None)
    lens = np.array([4, 40, 9])
    assert (rows.numpy() == tree.positions(trees_on_host(trees), lens)).all()
