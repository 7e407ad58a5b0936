"""Faults of the config family. Deployment rules name no request."""

from __future__ import annotations

from ddtree_guard.step import Step
from ddtree_guard.testing.faults.registry import Planted, fault


@fault("CFG1")
def stale_backend_width(step: Step, request: int) -> Planted:
    """The backend holds one row fewer than the batch."""
    holders = {**step.widths.holders, "backend": step.w - 1}
    return Planted(step.replace(widths__holders=holders), None)


@fault("CFG2")
def draft_with_bonus_row(step: Step, request: int) -> Planted:
    """The draft backend counts one row more than the proposer emits."""
    return Planted(step.replace(widths__draft_width=step.widths.draft_rows + 1), None)


@fault("CFG3")
def depth_beyond_block(step: Step, request: int) -> Planted:
    """The tree may be one level deeper than the draft block reaches."""
    return Planted(step.replace(widths__depth_max=step.widths.block), None)


@fault("CFG4")
def one_draft_token_too_many(step: Step, request: int) -> Planted:
    """A chain of w steps with w + 2 draft tokens."""
    changed = step.replace(
        widths__num_draft_tokens=step.w + 2, widths__num_steps=step.w, widths__topk=1
    )
    return Planted(changed, None)


@fault("CFG5")
def undeclared_feature(step: Step, request: int) -> Planted:
    """The backend does not declare the last needed feature."""
    return Planted(step.replace(limits__supports=step.limits.needs[:-1]), None)


@fault("CFG6")
def draft_table_ends_at_context(step: Step, request: int) -> Planted:
    """The draft model's rotary table has C rows and none for the tree."""
    return Planted(step.replace(limits__draft_rope_rows=step.limits.context), None)
