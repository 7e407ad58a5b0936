"""Verify steps are counted whatever else fails, so that a step at which a disarmed site does not
look any more lowers the coverage.
"""

from __future__ import annotations

from typing import Any


def count(guard: Any, began: bool, result: Any) -> None:
    """A worker has returned its result. `began` says whether the guard saw the step begin. Never
    raises.
    """
    failed = guard.fuses.faults and _failed(guard.fuses, began, result)
    if not began and not failed:  # no verify step
        return
    guard.coverage.verify_steps += 1
    guard.metrics.add("verify_steps_total")
    if failed:
        guard.coverage.skipped[f"site {failed} failed"] += 1
        guard.coverage.settled += 1  # nothing else will be said about it


def _failed(fuses: Any, began: bool, result: Any) -> str:
    """The site that did not look at this step, which nobody else will judge; or nothing."""
    if began:
        return "" if fuses.intact("verify") else "verify"
    return "begin" if fuses.faults["begin"] and _accepted(result) else ""


def _accepted(result: Any) -> bool:
    """Whether the result has accepted lengths, as only that of a verify step has."""
    try:
        return getattr(result, "accept_lens", None) is not None
    except Exception:  # a fork's own property
        return False
