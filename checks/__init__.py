"""The rule catalogue. Ids are stable and never reused; order is the order of reports."""

from ddtree_guard.checks import (
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
from ddtree_guard.rule import Rule

ALL: tuple[Rule, ...] = (
    *config.RULES,
    *width.RULES,
    *mask.RULES,
    *tree.RULES,
    *positions.RULES,
    *kv.RULES,
    *graph.RULES,
    *accept.RULES,
    *logits.RULES,
    *ranks.RULES,
    *shadow.RULES,
    *device.RULES,
)
