"""The start-up self-test: a guard that cannot raise an alarm is not armed.

The catalogue's own counter-examples (one fault per rule) must alarm, and a sound step must not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree_guard.hooks.runtime import ServerGuard


def self_test(guard: ServerGuard) -> str:
    """What failed, as a sentence without a capital and full stop; empty if nothing did."""
    return host_test(guard.guard) or guard.checker.self_test()


def host_test(guard: Any) -> str:
    """Every selected rule against its own fault, and all of them against sound steps."""
    # by name: at run time only, since `testing` is built on top of this package
    faults = importlib.import_module("ddtree_guard.testing.faults").FAULTS
    sound = importlib.import_module("ddtree_guard.testing.steps").sound_step
    steps = [sound(seed, padded_bs=lanes) for seed, lanes in ((0, None), (1, 4))]
    for step in steps:
        found = guard.check(step).rules
        if found:
            return f"self-test: {found[0]} alarmed on a sound step"
    for rule in guard.rules:
        if rule.id in faults and not any(
            _alarms(guard, rule, faults[rule.id], step) for step in steps
        ):
            return f"self-test: {rule.id} did not alarm on its own fault"
    return ""


def _alarms(guard: Any, rule: Any, fault: Any, step: Any) -> bool:
    try:
        planted = fault(step, step.bs - 1).step
    except Exception:  # a fault of the graph family needs a step of the graph path
        return False
    return rule.id in guard.check(planted, (rule.site,)).rules
