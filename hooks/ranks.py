"""Do all ranks see the same step? Each rank writes a short digest; now and then they are compared.

The digests travel through the key-value store of SGLang's own process group, never through a
collective: a rank without the guard, or one that lags, can therefore not hang the others.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Any, Protocol

import numpy as np

from ddtree_guard.step import Peers, Step

EVERY = 64  # verify steps between two comparisons
KEPT = 4  # comparisons that wait for slower ranks
PARTS = ("width", "offsets", "tree", "accepted")


class Store(Protocol):
    """The part of torch.distributed's Store that is used."""

    def set(self, key: str, value: str) -> None:
        """Write a key."""

    def get(self, key: str) -> bytes:
        """Read a key; waits until it is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there. Never waits."""


def digest_of(step: Step) -> tuple[str, ...]:
    """What must be equal on all ranks: the graph key, then one value per name in PARTS."""
    layout, lens = step.layout, step.layout.prefix_lens
    live = None if lens is None else lens[: step.bs]
    return (
        f"{step.who.path}/{step.padded_bs}",
        str(step.w),
        _hash(layout.qo_indptr, layout.kv_indptr, layout.mask_indptr, live),
        _hash(step.tree.tokens),
        _hash(step.outcome.accept_lens),
    )


class Digests:
    """Writes this rank's digest every `every` steps, and gathers those that all ranks wrote."""

    def __init__(self, store: Store, rank: int, world: int, every: int = EVERY) -> None:
        self.store, self.rank, self.world, self.every = store, rank, world, every
        self._open: deque[Step] = deque(maxlen=KEPT)

    def exchange(self, step: Step) -> list[Step]:
        """Take part if this is a step to compare. Returns earlier or this step with their peers,
        as far as every rank has written its digest; never waits for a rank that has not.
        """
        if step.who.step_id % self.every:
            return []
        self.store.set(self._key(step, self.rank), " ".join(digest_of(step)))
        self._open.append(step)
        known, waiting = [], []
        for held in self._open:
            keys = [self._key(held, rank) for rank in range(self.world)]
            if self.store.check(keys):
                rows = [self.store.get(key).decode().split(" ") for key in keys]
                known.append(held.replace(peers=_peers(rows)))
            else:
                waiting.append(held)
        self._open = deque(waiting, maxlen=KEPT)
        return known

    def _key(self, step: Step, rank: int) -> str:
        return f"ddtree_guard/digest/{step.who.step_id}/{rank}"


def _peers(rows: list[list[str]]) -> Peers:
    columns = list(zip(*rows, strict=True))
    return Peers(digests=dict(zip(PARTS, columns[1:], strict=True)), keys=columns[0])


def _hash(*arrays: Any) -> str:
    total = hashlib.blake2b(digest_size=6)
    for array in arrays:
        if array is not None:
            total.update(np.ascontiguousarray(array).astype(np.int64).tobytes())
        total.update(b"|")
    return total.hexdigest()
