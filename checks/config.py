"""Configuration: one canonical width, and limits that it must respect."""

from __future__ import annotations

from ddtree_guard.rule import Rule

RULES: tuple[Rule, ...] = ()
