"""`Guard`: picks the rules for a step, runs them, and says what could not be checked and why."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np

from ddtree_guard import form
from ddtree_guard.checks import ALL
from ddtree_guard.config import Config
from ddtree_guard.errors import UsageError
from ddtree_guard.rule import Finding, NotApplicable, NotEvaluable, Rule, Site
from ddtree_guard.step import Step


@dataclass(frozen=True, slots=True)
class NotChecked:
    """A rule that could not be evaluated on a step, and why.

    `by_data` False: the step lacks what the rule reads, or the contract exempts the rule. True: the
    data is there and cannot be judged, which is always worth telling.
    """

    rule: str
    why: str
    by_data: bool = True


@dataclass(frozen=True, slots=True)
class Report:
    """What checking one step gave: findings in catalogue order, and which rules were checked."""

    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    not_checked: tuple[NotChecked, ...]

    @property
    def rules(self) -> tuple[str, ...]:
        """Ids of the broken rules."""
        return tuple(finding.rule for finding in self.findings)


def find_rule(name: str, rules: Iterable[Rule] = ALL) -> Rule:
    """The rule with this id or defect name. Raises UsageError with the nearest names."""
    known = {key: rule for rule in rules for key in (rule.id.lower(), rule.name)}
    if name.lower() in known:
        return known[name.lower()]
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    hint = (
        f" Nearest: {', '.join(known[n].id + ' ' + known[n].name for n in near)}." if near else ""
    )
    raise UsageError(f"no rule is called {name!r}.{hint} `ddtree-guard rules` lists all.")


class Guard:
    """Checks steps with the rules that a Config selects.

    Raises UsageError at construction when the selection names an unknown rule or family.
    """

    def __init__(
        self, config: Config | None = None, rules: tuple[Rule, ...] = ALL, today: date | None = None
    ) -> None:
        self.config = config or Config()
        families = {rule.family for rule in rules}
        for name in self.config.rules.names():
            if name not in families:
                find_rule(name, rules)
        day = today or date.today()
        self.rules = tuple(r for r in rules if self.config.rules.wants(r.id, day))

    def check(self, step: Step, sites: Iterable[Site] = tuple(Site)) -> Report:
        """Evaluate every selected rule of these sites. Never raises for bad data in arrays.

        Arrays may be NumPy arrays, tensors or lists; they are taken to the host first. A rule whose
        needs are missing or misshapen, whose contract exempts it, or that fails on the data it met
        is "not checked"; W5 reports the misshapen arrays themselves. Raises UsageError for what is
        not a Step, and for a Step whose parts and numbers are not of their declared types.
        """
        _require_step(step)
        wanted = set(sites)
        step = on_host(step)
        misfits = step.misfits()
        findings: list[Finding] = []
        checked: list[str] = []
        skipped: list[NotChecked] = []
        for rule in self.rules:
            if rule.site not in wanted:
                continue
            entry = _obstacle(rule, step, misfits)
            if entry is None:
                try:
                    finding = rule.check(step)
                except NotEvaluable as reason:
                    by_data = not isinstance(reason, NotApplicable)
                    entry = NotChecked(rule.id, str(reason), by_data)
                except Exception as error:
                    why = f"the rule failed on this data: {type(error).__name__}: {error}"
                    entry = NotChecked(rule.id, why)
                else:
                    checked.append(rule.id)
                    if finding is not None:
                        findings.append(finding)
            if entry is not None:
                skipped.append(entry)
        return Report(tuple(findings), tuple(checked), tuple(skipped))


def _require_step(step: Step) -> None:
    """Raise UsageError for what no Step can be."""
    hint = "examples/check_a_step.py fills one by hand"
    if not isinstance(step, Step):
        raise UsageError(
            f"Guard.check expects a ddtree_guard.Step, found {type(step).__name__}; {hint}."
        )
    fault = form.fault(step)
    if fault is not None:
        raise UsageError(f"Guard.check expects the step's {fault}; {hint}.")


def on_host(step: Step) -> Step:
    """The step with every array as a NumPy array: tensors are copied, lists converted."""
    foreign = {
        path.replace(".", "__"): _array(value)
        for path, value, _ in step.arrays()
        if not isinstance(value, np.ndarray)
    }
    return step.replace(**foreign) if foreign else step


def _array(value: Any) -> Any:
    """A tensor or list as a NumPy array; what cannot be one becomes objects that no rule reads."""
    try:
        return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        return np.array([value], dtype=object)


def _obstacle(rule: Rule, step: Step, misfits: dict[str, str]) -> NotChecked | None:
    """Why the rule cannot be evaluated on this step, or None."""
    if rule.id in step.contract.not_checked:
        return NotChecked(rule.id, str(step.contract.not_checked[rule.id]), by_data=False)
    for path in rule.needs:
        value = step.get(path)
        if value is None or (isinstance(value, dict) and not value):
            return NotChecked(rule.id, f"{path} is not in this step", by_data=False)
        if path in misfits:
            return NotChecked(rule.id, f"{path} {misfits[path]} (see W5)")
    return None
