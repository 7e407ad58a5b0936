"""Faults of the cross-rank family. They name no request: the whole group is affected."""

from __future__ import annotations

from ddtree_guard.step import Step
from ddtree_guard.testing.faults.registry import Planted, fault


@fault("X1")
def other_tree_on_last_rank(step: Step, request: int) -> Planted:
    """The last rank verified other draft tokens."""
    digests = dict(step.peers.digests)
    digests["tree"] = (*digests["tree"][:-1], "another")
    return Planted(step.replace(peers__digests=digests), None)


@fault("X4")
def other_bucket_on_last_rank(step: Step, request: int) -> Planted:
    """The last rank padded the batch to a larger bucket."""
    keys = (*(step.peers.keys or ())[:-1], "graph/64")
    return Planted(step.replace(peers__keys=keys), None)
