"""Ranks of one tensor-parallel group: all of them must verify the same step."""

from __future__ import annotations

from ddtree_guard.rule import Cost, Finding, Rule, Scope, Site, rule
from ddtree_guard.step import Step


@rule(
    "X1", "ranks-diverge", site=Site.VERIFY, cost=Cost.HOST, scope=Scope.SERVER,
    needs=("peers.digests",),
)  # fmt: skip
def ranks_diverge(step: Step) -> Finding | None:
    """Width, offsets, trees and accepted lengths are equal on all ranks of a group.

    Holds when: every part of the step's digest has one value over all ranks.
    Breaks as: each rank attends over another tree or keeps another number of tokens; the output
    of the group is a mixture, and later the ranks wait for each other forever.
    Usual cause: draft tokens or sampling decided on each rank instead of broadcast from rank 0, or
    positions of a vocabulary shard used as token ids.
    Seen in: I50.
    """
    for part, values in step.peers.digests.items():
        for rank, value in enumerate(values):
            if value != values[0]:
                return Finding(
                    headline=f"rank {rank} differs from rank 0 in {part}",
                    equation=f"{part}[rank {rank}] = {value}, expected {values[0]} as on rank 0",
                    expected=values[0],
                    actual=value,
                    cause="the ranks drafted, sampled or built this step from different inputs",
                )
    return None


@rule(
    "X4", "graph-key-differs", site=Site.VERIFY, cost=Cost.HOST, scope=Scope.SERVER,
    needs=("peers.keys",),
)  # fmt: skip
def graph_key_differs(step: Step) -> Finding | None:
    """All ranks of a group replay the graph of the same key, or all run eagerly.

    Holds when: path and padded batch size are equal on all ranks.
    Breaks as: collectives of different sizes meet: a hang, or sums over rows that do not belong
    together.
    Usual cause: one rank padded the batch to another bucket, or fell back to eager alone.
    Seen in: I50.
    """
    keys = step.peers.keys or ()
    for rank, key in enumerate(keys):
        if key != keys[0]:
            return Finding(
                headline=f"rank {rank} runs graph {key}, rank 0 {keys[0]}",
                equation=f"key[rank {rank}] = {key}, expected {keys[0]} as on rank 0",
                expected=keys[0],
                actual=key,
                cause="the ranks chose their graph bucket from different batches",
            )
    return None


RULES: tuple[Rule, ...] = (ranks_diverge, graph_key_differs)
