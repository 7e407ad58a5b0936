"""One run of one test under the guard: what happened, and what is wrong with it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ddtree_guard.pytest_plugin.collect import Charge, News
from ddtree_guard.pytest_plugin.settings import Wish

BLOCKS = 6  # findings of a test that are written out


@dataclass(slots=True)
class Case:
    """A test's own news, and the findings that a block of `expect` has taken."""

    test: str
    wish: Wish
    news: News = field(default_factory=News)
    taken: list[Charge] = field(default_factory=list)
    open_expectations: list[str] = field(default_factory=list)
    _judged: tuple[int, Counter[str], int] = (0, Counter(), 0)

    def findings(self) -> list[Charge]:
        """Findings that count: read by the kernel, caused here, and not expected by a block."""
        if not self.wish.on:
            return []
        return [c for c in self.news.charges if self._counts(c)]

    def _counts(self, charge: Charge) -> bool:
        expected = self.wish.expect is not None and charge.hit.rule in self.wish.expect
        return charge.cause is None and (not charge.hit.latent or expected)

    def complaints(self) -> list[str]:
        """Why this test fails, in paragraphs; empty if it does not."""
        if not self.wish.on:
            return []
        found = self.findings()
        told = [*self.open_expectations, *unexpected(found, self.wish.expect, self._seen())]
        if self.wish.steps_required and not self.news.steps_checked:
            told.append("guard saw no verify step in this test, and its marker requires some")
        return told + distrust(self.news)

    def judge(self) -> None:
        """Remember what is known now; `rest` gives what fixtures still learn afterwards."""
        news = self.news
        self._judged = len(news.charges), news.skipped.copy(), len(news.problems)

    def untold(self, problems: list[str]) -> list[str]:
        """Those that this test has not told."""
        return [text for text in problems if text not in self.news.problems]

    def rest(self) -> News:
        """What a fixture has taken in after the test was judged."""
        charges, skipped, problems = self._judged
        news = self.news
        return News(
            [dataclasses.replace(c, cause=self.test) for c in news.charges[charges:]],
            skipped=news.skipped - skipped,
            problems=news.problems[problems:],
        )

    def _seen(self) -> str:
        return f"{_plural(self.news.steps_checked, 'verify step')} checked"

    def as_json(self) -> dict[str, Any]:
        """The case for reports, and for the process that xdist reports to."""
        wish, news = self.wish, self.news
        return {
            "test": self.test,
            "mode": wish.mode.value,
            "expect": None if wish.expect is None else sorted(wish.expect),
            "verify_steps": news.verify_steps,
            "steps_checked": news.steps_checked,
            "skipped": dict(news.skipped),
            "problems": list(news.problems),
            "findings": [
                *(as_json(c, c.hit.rule in (wish.expect or ())) for c in self.findings()),
                *(as_json(c, True) for c in self.taken),
            ],
            "latent": dict(Counter(c.hit.rule for c in news.charges if c.hit.latent)),
            "complaints": self.complaints(),
        }


def distrust(news: News) -> list[str]:
    """Why steps may have run unchecked, in paragraphs."""
    told = list(news.problems)
    skipped = sum(news.skipped.values())
    if skipped:
        why = "; ".join(f"{n}: {why}" for why, n in sorted(news.skipped.items()))
        told.append(f"{_plural(skipped, 'verify step')} ran unchecked ({why})")
    return told


def unexpected(found: list[Charge], expect: Iterable[str] | None, seen: str) -> list[str]:
    """What is wrong with the findings: any, or where some are expected, others than those."""
    rules = list(dict.fromkeys(charge.hit.rule for charge in found))
    if expect is None:
        return [_told(found, f"{_count(found)} ({', '.join(rules)}), {seen}")] if found else []
    missing = sorted(set(expect) - set(rules))
    extra = [charge for charge in found if charge.hit.rule not in expect]
    told = []
    if missing:
        told.append(f"expected {', '.join(missing)} to fire, which did not; {seen}")
    if extra:
        names = ", ".join(dict.fromkeys(charge.hit.rule for charge in extra))
        told.append(_told(extra, f"{names} fired and was not expected, {seen}"))
    return told


def _told(found: list[Charge], head: str) -> str:
    """A headline and the blocks of the first finding of each rule."""
    first: dict[str, Charge] = {}
    for charge in found:
        first.setdefault(charge.hit.rule, charge)
    shown = list(first.values())[:BLOCKS]
    lines = [head]
    for charge in shown:
        lines += ["", charge.hit.text]
    left = len(first) - len(shown)
    if left:
        lines += ["", f"{_plural(left, 'more rule')} of which no block is shown"]
    more = len(found) - len(first)
    if more > 0:
        lines += ["", "only the first finding of each rule is shown"]
    processes = list(dict.fromkeys(charge.process for charge in found))
    return "\n".join([*lines, "", f"found in: {', '.join(processes)}"])


def late(charges: list[Charge], scope: str) -> str:
    """The paragraph about findings that came after their test had ended, or belong to none."""
    causes = list(dict.fromkeys(c.cause for c in charges if c.cause))
    whose = f"caused by a step of {', '.join(causes)}" if causes else "of no test in particular"
    return _told(charges, f"charged to {scope}: {_count(charges)}, {whose}")


def as_json(charge: Charge, expected: bool = False) -> dict[str, Any]:
    """A finding as JSON values."""
    hit = charge.hit
    return {
        "rule": hit.rule, "step": hit.step, "process": charge.process, "count": charge.count,
        "latent": hit.latent, "headline": hit.headline, "text": hit.text, "line": hit.line,
        "dump": hit.dump, "cause": charge.cause, "expected": expected,
    }  # fmt: skip


def _count(found: list[Charge]) -> str:
    return _plural(sum(charge.count for charge in found), "finding")


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
