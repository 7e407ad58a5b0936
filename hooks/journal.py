"""Findings into the log: the first of a rule at once, repeats counted and written now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ddtree_guard import render
from ddtree_guard.config import LogStyle
from ddtree_guard.rule import Finding
from ddtree_guard.step import Step

log = logging.getLogger("ddtree_guard")
EVERY_S = 30.0  # seconds between two lines about repeats of one rule
NAMED = 4  # request ids named in such a line


@dataclass(slots=True)
class _Repeats:
    count: int = 0
    total: int = 0
    since: float = 0.0
    first_step: int = 0
    last_step: int = 0
    rids: dict[str, None] = field(default_factory=dict)  # an ordered set


class Journal:
    """Writes findings of one process. `clock` gives seconds that never go back."""

    def __init__(
        self,
        style: LogStyle = LogStyle.LINE,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.style = style
        self.every_s = every_s
        self.clock = clock
        self._rules: dict[str, _Repeats] = {}

    def is_new(self, rule: str) -> bool:
        """Whether no finding of this rule was written before."""
        return rule not in self._rules

    def write(
        self, finding: Finding, step: Step, dump: object | None = None, name: str | None = None
    ) -> None:
        """Log a finding, or count it towards the next line about repeats of its rule. `name` is
        its rid as dumps hold it.
        """
        now = self.clock()
        repeats = self._rules.get(finding.rule)
        if repeats is None:
            self._rules[finding.rule] = _Repeats(since=now)
            log.error("%s", render.line(finding, step, dump=dump, name=name))
            if self.style is LogStyle.BLOCK:
                log.error("%s", render.block(finding, step, dump=dump))
            return
        self._count(repeats, finding, step)
        if now - repeats.since >= self.every_s:
            self._flush(finding.rule, repeats, now)

    def flush(self) -> None:
        """Write the lines about repeats that are still held back."""
        now = self.clock()
        for rule, repeats in self._rules.items():
            if repeats.count:
                self._flush(rule, repeats, now)

    def _count(self, repeats: _Repeats, finding: Finding, step: Step) -> None:
        if not repeats.count:
            repeats.first_step = step.who.step_id
        repeats.count += 1
        repeats.last_step = step.who.step_id
        if finding.rid is not None and len(repeats.rids) <= NAMED:
            repeats.rids[finding.rid] = None

    def _flush(self, rule: str, repeats: _Repeats, now: float) -> None:
        repeats.total += repeats.count
        names = list(repeats.rids)
        rids = ",".join(names[:NAMED]) + ("+" if len(names) > NAMED else "")
        log.error(
            "ddtree_guard repeated rule=%s count=%d total=%d steps=%d-%d rids=%s",
            rule,
            repeats.count,
            repeats.total,
            repeats.first_step,
            repeats.last_step,
            render.quote(rids or "-"),
        )
        repeats.count, repeats.since = 0, now
        repeats.rids.clear()
