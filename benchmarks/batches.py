"""Sound verify batches of any size, built on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ddtree_guard.config import Depth
from ddtree_guard.device.operands import Buffers, Shape
from ddtree_guard.step import Contract
from ddtree_guard.testing.steps import GRAPH_PADS, Plan, sound_step

BLOCK, VOCAB = 16, 50_000
CONTRACT = Contract(name="bench", mask_length="capacity", pad_lanes=GRAPH_PADS)


def batch(bs: int, w: int, context: int, seed: int = 0, device: str = "cuda") -> Buffers:
    """Buffers of a verify step of a captured graph: bs full lanes of `context` committed tokens."""
    trees = sound_step(
        seed, Plan(lens=(1,) * min(bs, 4), w=w, block=BLOCK, full_trees=True)
    ).tree  # a few trees, repeated over the lanes
    pick = np.arange(bs) % len(trees.sizes)
    shift = np.arange(bs)[:, None] * w - (pick * w)[:, None]

    def put(value: Any, kind: torch.dtype = torch.int64) -> Any:
        return torch.from_numpy(np.ascontiguousarray(value)).to(device, kind)

    lens = np.full(bs, context, np.int64)
    steps = np.arange(bs + 1, dtype=np.int64)
    slots = np.arange(1, bs * (context + w) + 1, dtype=np.int64).reshape(bs, -1)
    return Buffers(
        live_count=put([bs], torch.int32),
        lens=put(lens),
        qo_indptr=put(steps * w),
        kv_indptr=put(steps * context, torch.int32),
        mask_indptr=put(steps * w * (context + w)),
        mask=_mask(trees.parents, pick, w, context, device),
        tokens=put(trees.tokens[pick]),
        parents=put(trees.parents[pick]),
        depths=put(trees.depths[pick]),
        sizes=put(trees.sizes[pick]),
        retrieve_index=put(trees.retrieve_index[pick] + shift),
        retrieve_next_token=put(trees.retrieve_next_token[pick]),
        retrieve_next_sibling=put(trees.retrieve_next_sibling[pick]),
        positions=put((lens[:, None] + trees.depths[pick]).reshape(-1)),
        out_cache_loc=put(slots[:, context:].reshape(-1)),
        kv_indices=put(slots[:, :context].reshape(-1)),
    )


def shape(bs: int, w: int, context: int, depth: Depth) -> Shape:
    """The Shape of such a batch."""
    return Shape(
        lanes=bs,
        w=w,
        contract=CONTRACT,
        depth_max=BLOCK - 1,
        context=context + 4096,
        vocab=VOCAB,
        pool=bs * (context + w) + 1,
        max_extend_len=w,
        rows={"q": bs * w},
        depth=depth,
    )


def _mask(parents: Any, pick: Any, w: int, context: int, device: str) -> Any:
    cells = torch.ones(len(pick), w, context + w, dtype=torch.uint8, device=device)
    for tree in range(len(parents)):
        seen = np.eye(w, dtype=np.uint8)
        for row in range(1, w):
            if parents[tree, row] >= 0:
                seen[row] |= seen[parents[tree, row]]
        lanes = torch.from_numpy(np.flatnonzero(pick == tree)).to(device)
        cells[lanes, :, context:] = torch.from_numpy(seen).to(device)
    return cells.reshape(-1)
