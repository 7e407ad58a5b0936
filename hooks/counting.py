"""Verify steps are counted whatever else fails, so that a step at which a disarmed site does not
look any more lowers the coverage.
"""

from __future__ import annotations

from typing import Any

from ddtree_guard.hooks.record import Record


def count(guard: Any, record: Record | None, result: Any) -> None:
    """A worker of the `ServerGuard` has returned its result. Never raises."""
    failed = guard.fuses.faults and _failed(guard.fuses, record, result)
    if record is None and not failed:  # no verify step
        return
    guard.coverage.verify_steps += 1
    guard.metrics.add("verify_steps_total")
    if failed:
        guard.coverage.skipped[f"site {failed} failed"] += 1
        guard.coverage.settled += 1  # nothing else will be said about it


def _failed(fuses: Any, record: Record | None, result: Any) -> str:
    """The site that did not look at this step, which nobody else will judge; or nothing."""
    if record is None:  # only verify steps have accepted lengths
        return "begin" if fuses.faults["begin"] and _accepted(result) else ""
    return "" if fuses.intact("verify") else "verify"


def _accepted(result: Any) -> bool:
    try:
        return getattr(result, "accept_lens", None) is not None
    except Exception:  # a fork's own property
        return False
