"""One finding per rule, made from its planted fault: for golden texts and the generated pages."""

from __future__ import annotations

from ddtree_guard.guard import Guard
from ddtree_guard.rule import Finding, Rule
from ddtree_guard.step import Step
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step

_SEED, _LENS = 7, (37, 21, 50)


def example(rule: Rule) -> tuple[Finding, Step] | None:
    """The rule's finding on its fault in the last request, and the step it is about.

    An eager step is tried first, then a step of a captured graph. None without a fault that fires.
    """
    for lanes in (None, len(_LENS) + 1):
        step = sound_step(_SEED, lens=_LENS, padded_bs=lanes)
        if rule.id in FAULTS:
            planted = FAULTS[rule.id](step, step.bs - 1).step
            findings = Guard(rules=(rule,)).check(planted).findings
            if findings:
                return findings[0], planted
    return None
