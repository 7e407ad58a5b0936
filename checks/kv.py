"""KV slots: right pool, right owner, enough room."""

from __future__ import annotations

from ddtree_guard.rule import Rule

RULES: tuple[Rule, ...] = ()
