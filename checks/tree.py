"""Tree topology: parents first, explicit sizes, consistent links."""

from __future__ import annotations

from ddtree_guard.rule import Rule

RULES: tuple[Rule, ...] = ()
