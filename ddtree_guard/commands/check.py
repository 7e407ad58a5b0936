"""`ddtree-guard check DUMP`: run the rules again on recorded steps."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddtree_guard import render
from ddtree_guard.checks import ALL
from ddtree_guard.config import Config, RuleSelection
from ddtree_guard.dump.read import Dump
from ddtree_guard.errors import DumpError
from ddtree_guard.fold import say
from ddtree_guard.guard import Guard, Report
from ddtree_guard.rule import Finding
from ddtree_guard.step import Step


@dataclass
class Recheck:
    """What re-checking a dump gave. `lost` are recorded rules that the re-check did not find."""

    dump: Dump
    reports: list[Report] = field(default_factory=list)
    found: list[tuple[Step, Finding]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    selected_out: int = 0

    @property
    def exit_code(self) -> int:
        """1 for a finding or a recorded finding that could not be confirmed, else 0."""
        return 1 if self.found or self.lost else 0

    @property
    def summary(self) -> str:
        """The closing line."""
        return render.summary(*self.reports, selected_out=self.selected_out)


def recheck(path: str, selection: str = "") -> Recheck:
    """Check every step of a dump with the selected rules.

    Raises DumpError for a dump that cannot be read or on which no selected rule can be evaluated,
    UsageError for a selection that names an unknown rule.
    """
    guard = Guard(Config(rules=RuleSelection.parse(selection)))
    dump = Dump(path)
    result = Recheck(dump, selected_out=len(ALL) - len(guard.rules))
    broken: set[tuple[int, str]] = set()
    for at, step in enumerate(dump.steps()):
        with np.errstate(all="ignore"):  # absurd lengths are findings, not warnings
            report = guard.check(step)
        result.reports.append(report)
        result.found += [(step, finding) for finding in report.findings]
        broken |= {(at, rule) for rule in report.rules}
    if not any(report.checked for report in result.reports):
        why = result.reports[0].not_checked[:1]
        reason = f" ({why[0].rule}: {why[0].why})" if why else ""
        raise DumpError(
            f"no selected rule can be evaluated on this dump{reason}; nothing is known."
        )
    chosen = {rule.id for rule in guard.rules} | {f.rule for _, f in dump.findings()} - _KNOWN
    recorded = [(at, f.rule) for at, f in dump.findings() if f.rule in chosen]
    result.lost = list(dict.fromkeys(rule for at, rule in recorded if (at, rule) not in broken))
    return result


_KNOWN = {rule.id for rule in ALL}


def run(args: argparse.Namespace) -> int:
    """Print what the re-check gave."""
    result = recheck(args.dump, args.rules)
    if args.json:
        print(json.dumps(as_json(result), indent=1))
    else:
        say("\n".join(text(result, args.all)))
    return result.exit_code


def text(result: Recheck, list_all: bool = False) -> list[str]:
    """Blocks of the first finding of each rule, then what was not confirmed, then the summary."""
    lines: list[str] = []
    counts = Counter(finding.rule for _, finding in result.found)
    firsts = {finding.rule: (step, finding) for step, finding in reversed(result.found)}
    # what is latent reached no answer
    for block in render.blocks(
        sorted((firsts[rule] for rule in counts), key=lambda pair: pair[1].latent)
    ):
        lines += [block, ""]
    lines += [render.LEGEND, ""] if result.found else []
    more = [f"{rule} in {n - 1} more" for rule, n in counts.items() if n > 1]
    if more:
        lines.append(f"only the first finding of each rule is shown: {', '.join(more)}")
    lines += [_lost(result, rule) for rule in result.lost]
    lines += _unchecked_steps(result)
    lines += render.not_checked(*result.reports, by_data=True)
    quiet = render.not_checked(*result.reports, by_data=False)
    lines += quiet if list_all else []
    if result.dump.redacted and result.dump.cannot_recheck:
        names = render.plain(", ".join(sorted(result.dump.cannot_recheck)))
        lines.append(f"redacted dump, ids are hashes: {names} cannot be re-checked")
    return [*lines, result.summary + (" (--all says why)" if quiet and not list_all else "")]


def _unchecked_steps(result: Recheck) -> list[str]:
    """A line for the steps on which no rule could be evaluated."""
    silent = [at for at, report in enumerate(result.reports) if not report.checked]
    if not silent:
        return []
    named = ", ".join(map(str, silent[:8])) + (", ..." if len(silent) > 8 else "")
    return [
        f"NOT CHECKED: no rule could be evaluated on {len(silent)} of {len(result.reports)} steps "
        f"(index {named}); nothing is known of them"
    ]


def _lost(result: Recheck, rule: str) -> str:
    skipped = [n.why for r in result.reports for n in r.not_checked if n.rule == rule]
    why = f"not checked now: {skipped[0]}" if skipped else "this check finds it sound"
    return render.plain(f"{rule} was recorded when the dump was written; {why}")


def as_json(result: Recheck) -> dict[str, Any]:
    """The re-check as JSON values."""
    checked, partly = render.coverage(*result.reports)
    return {
        "dump": str(result.dump.path),
        "redacted": result.dump.redacted,
        "steps": len(result.reports),
        "rules_checked": [rule.id for rule in ALL if rule.id in checked],
        "rules_on_some_steps": [rule.id for rule in ALL if rule.id in partly],
        "steps_without_rules": [at for at, r in enumerate(result.reports) if not r.checked],
        "findings": [render.as_json(finding, step) for step, finding in result.found],
        "not_confirmed": result.lost,
        "not_checked": render.not_checked(*result.reports),
        "summary": result.summary,
        "exit": result.exit_code,
    }
