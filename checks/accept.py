"""Acceptance and commit: the walk, and what follows from it."""

from __future__ import annotations

from ddtree_guard.rule import Rule

RULES: tuple[Rule, ...] = ()
