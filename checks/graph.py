"""CUDA graphs: what was captured is what is replayed."""

from __future__ import annotations

from ddtree_guard.rule import Rule

RULES: tuple[Rule, ...] = ()
