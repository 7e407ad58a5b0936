"""One fault per rule: plants it in a sound Step at a chosen request, and says where to expect it.

The property tests plant every fault and require that its rule names the planted place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddtree_guard.step import Step


@dataclass(frozen=True, slots=True)
class Planted:
    """A corrupted step and the offender that the rule must name (None: it names none)."""

    step: Step
    request: int | None
    row: int | None = None


Plant = Callable[[Step, int], Planted]
FAULTS: dict[str, Plant] = {}


def fault(rule_id: str) -> Callable[[Plant], Plant]:
    """Register the fault of a rule. The function takes a sound Step and a live request index."""

    def register(plant: Plant) -> Plant:
        if rule_id in FAULTS:
            raise ValueError(f"{rule_id} has a fault already")
        FAULTS[rule_id] = plant
        return plant

    return register
