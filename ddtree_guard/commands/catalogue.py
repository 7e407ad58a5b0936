"""The rule catalogue without NumPy: reading about rules should not wait for what evaluates them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from ddtree_guard.rule import HEADINGS, Rule
from ddtree_guard.runbook import advice_on


class _NumPyLater(ModuleType):
    """Stands in for NumPy while the checks are imported, and becomes it on first use.

    `explain` needs the checks for their text only; importing NumPy would take most of its time.
    """

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get("numpy") is self:
            del sys.modules["numpy"]
        return getattr(importlib.import_module("numpy"), name)


def catalogue() -> tuple[Rule, ...]:
    """Every rule, in catalogue order."""
    sys.modules.setdefault("numpy", _NumPyLater("numpy"))
    from ddtree_guard.checks import ALL

    return ALL


def find(name: str) -> Rule:
    """The rule with this id or defect name. Raises UsageError with the nearest names."""
    rules = catalogue()
    from ddtree_guard.guard import find_rule

    return find_rule(name, rules)


def sections(rule: Rule) -> dict[str, str]:
    """The manual page by heading; the text before the first heading is under "Statement"."""
    found: dict[str, list[str]] = {"Statement": []}
    current = found["Statement"]
    for line in rule.page.splitlines():
        heading = next((h for h in HEADINGS if line.startswith(f"{h}:")), None)
        if heading:
            current = found[heading] = []
            line = line[len(heading) + 1 :]
        current.append(line.strip())
    return {heading: " ".join(filter(None, lines)) for heading, lines in found.items()}


def reads(rule: Rule) -> list[str]:
    """The Step fields that the rule cannot do without, or words where it takes what there is."""
    return list(rule.needs) or ["whatever the step holds"]


def advice(rule: Rule) -> tuple[str, list[str]]:
    """What a break of the rule does to users, and what to do, the best first."""
    row = advice_on(rule.id)
    return row.harm.value, [cure.value for cure in row.cures]


def facts(rule: Rule) -> dict[str, Any]:
    """The rule as JSON values."""
    return {
        "id": rule.id,
        "name": rule.name,
        "family": rule.family,
        "scope": rule.scope.value,
        "site": rule.site.value,
        "cost": rule.cost.value,
        "needs": list(rule.needs),
        "device_bit": rule.bit,
        "harm": advice(rule)[0],
        "what_to_do": advice(rule)[1],
        "page": sections(rule),
    }
