"""Walk and KV move on the device against the host reference. Runs in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ddtree_guard.ddtree import verify, verify_kernel  # noqa: E402
from ddtree_guard.ddtree.tree import Trees, search  # noqa: E402

FIELDS = ("accept_index", "lens", "committed", "bonus", "new_lens", "rows", "positions")


def case(seed: int) -> tuple[Trees, Any, Any, int]:
    """Trees, predictions that follow the tree most of the time, prefix lengths, block size."""
    rng = np.random.default_rng(seed)
    bs, depth, top_k = 3, int(rng.integers(1, 9)), int(rng.integers(1, 4))
    logp = -np.sort(rng.random((bs, depth, top_k)).astype(np.float32), axis=-1)
    tokens = np.stack([[rng.permutation(5)[:top_k] for _ in range(depth)] for _ in range(bs)])
    trees = search(tokens, logp, rng.integers(0, 5, bs), int(rng.integers(1, 40)))
    predict = rng.integers(0, 5, trees.tokens.shape)
    for i in range(bs):
        for row in rng.permutation(np.arange(1, int(trees.sizes[i]))):
            predict[i, trees.parents[i, row]] = trees.tokens[i, row]
    return trees, predict, rng.integers(0, 400, bs), depth + 1


def on_device(trees: Trees) -> Trees:
    parts = (trees.tokens, trees.parents, trees.depths, trees.sizes)
    links = (trees.next_token, trees.next_sibling)
    return Trees(*(torch.from_numpy(part) for part in (*parts, *links)))


@pytest.mark.parametrize("seed", range(40))
def test_walk_equals_reference(interpreter: None, seed: int) -> None:
    trees, predict, lens, block = case(seed)
    wanted = verify.walk(trees.tokens, trees.parents, predict, lens, block)
    found = verify_kernel.walk(
        on_device(trees), torch.from_numpy(predict), torch.from_numpy(lens), block
    )
    for name in FIELDS:
        assert (getattr(wanted, name) == getattr(found, name).numpy()).all(), name


@pytest.mark.parametrize("seed", range(20))
def test_kv_moves_equal_reference(interpreter: None, seed: int) -> None:
    trees, predict, lens, block = case(seed)
    rng = np.random.default_rng(seed)
    width = trees.width + 3  # a slot table wider than the tree
    slots = rng.permutation(3 * width + 5)[: 3 * width].reshape(3, width)
    pools = [torch.randn(3 * width + 5, 2, 12) for _ in range(3)]
    pools.append(torch.randn(3 * width + 5, 2, 700).to(torch.bfloat16))  # more than one tile
    wanted = [pool.clone() for pool in pools]
    result = verify.walk(trees.tokens, trees.parents, predict, lens, block)
    for copies in verify.moves(result.accept_index, result.lens, slots):
        for new, old in zip(wanted, pools, strict=True):
            for source, target in copies:
                new[target] = old[source]
    accepted = verify_kernel.walk(
        on_device(trees), torch.from_numpy(predict), torch.from_numpy(lens), block
    )
    row_bytes = torch.tensor([pool[0].numel() * pool.element_size() for pool in pools])
    addresses = torch.tensor([pool.data_ptr() for pool in pools], dtype=torch.uint64)
    verify_kernel.move_kv(
        addresses, row_bytes, int(row_bytes.max()), accepted, torch.from_numpy(slots), block
    )
    assert all(torch.equal(new, old) for new, old in zip(wanted, pools, strict=True))
