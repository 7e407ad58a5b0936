"""Walking and committing a verified tree, in plain NumPy: what `verify_kernel` does on the device.

`predict` is the target's token for every row: its argmax, or a token sampled from its distribution
in that row. The walk starts at the root and moves to the child that carries the row's predicted
token, as long as there is one. Sampling every row first and walking afterwards is lossless: each
visited row's token was drawn from the target's own distribution after exactly that row's prefix,
and whether the draft tree happens to contain it only decides how far one step reaches.

The path has n rows, the root included. Committed are n tokens: those of the path behind the root,
and the bonus token predicted in its last row. Their keys and values, n rows' worth, move to the
first n of the request's slots.

A stop token inside the path changes nothing here: SGLang's scheduler looks for one among all
committed tokens, ends the request there, and frees its slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Accepted:
    """What verification decided; b columns, b = most tokens that one step can commit.

    accept_index: (bs, b) rows of the path from the root, -1 behind it; lens: (bs,) int32, tokens
    committed; committed: (bs, b) tokens, 0 behind; bonus: (bs,) last committed token, the next
    root; new_lens: (bs,) committed length after the step; rows: (bs*b,) indices of the path's rows
    in the flattened batch (padding repeats the root); positions: (bs*b,) where they end up.
    """

    accept_index: Any
    lens: Any
    committed: Any
    bonus: Any
    new_lens: Any
    rows: Any
    positions: Any


def walk(tokens: Any, parents: Any, predict: Any, prefix_lens: Any, block: int) -> Accepted:
    """Walk every request's tree. tokens, parents, predict: (bs, w); prefix_lens: (bs,)."""
    bs, w = tokens.shape
    index = np.full((bs, block), -1, np.int64)
    committed = np.zeros((bs, block), np.int64)
    lens = np.zeros(bs, np.int32)
    for i in range(bs):
        path = [0]
        while len(path) < block:
            wanted = predict[i, path[-1]]
            hits = np.flatnonzero((parents[i] == path[-1]) & (tokens[i] == wanted))
            if hits.size == 0:
                break
            path.append(int(hits[0]))
        index[i, : len(path)] = path
        committed[i, : len(path)] = predict[i, path]
        lens[i] = len(path)
    prefix = np.asarray(prefix_lens, np.int64)
    return Accepted(
        accept_index=index,
        lens=lens,
        committed=committed,
        bonus=committed[np.arange(bs), lens - 1],
        new_lens=prefix + lens,
        rows=(np.arange(bs)[:, None] * w + np.maximum(index, 0)).reshape(-1),
        positions=(prefix[:, None] + np.arange(block)).reshape(-1),
    )


def moves(accept_index: Any, lens: Any, slots: Any) -> list[list[tuple[int, int]]]:
    """KV copies per request as (from, to) slots. slots: (bs, >= w), the rows' slots in row order.

    Row j of the path ends in slot j. A path row never lies before its place (parents come first),
    and no slot is written before it has been read if all reads come first.
    """
    return [
        [
            (int(slots[i, row]), int(slots[i, j]))
            for j, row in enumerate(accept_index[i, : lens[i]])
            if row != j
        ]
        for i in range(len(lens))
    ]
