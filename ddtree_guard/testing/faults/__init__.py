"""One fault per rule; see `registry`. Importing the package registers all of them."""

from ddtree_guard.testing.faults import (  # noqa: F401  (imported for their registrations)
    accept,
    config,
    device,
    graph,
    kv,
    logits,
    mask,
    positions,
    ranks,
    shadow,
    tree,
    width,
)
from ddtree_guard.testing.faults.registry import FAULTS, Planted

__all__ = ["FAULTS", "Planted"]
