"""Logits and sampling: finite rows, valid ids, the right acceptance rule."""

from __future__ import annotations

from ddtree_guard.rule import Rule

RULES: tuple[Rule, ...] = ()
