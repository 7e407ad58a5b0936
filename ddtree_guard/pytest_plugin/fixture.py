"""The fixture `ddtree_guard`: what a test may ask the guard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ddtree_guard.errors import Violation
from ddtree_guard.guard import find_rule
from ddtree_guard.pytest_plugin.case import unexpected
from ddtree_guard.pytest_plugin.collect import Charge

if TYPE_CHECKING:
    from ddtree_guard.pytest_plugin.session import Session
    from ddtree_guard.step import Step


class GuardFixture:
    """The guard of one test. Every question first waits for steps in flight (a fence)."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def mode(self) -> str:
        """`log` or `raise`; `off` where the test's marker says so."""
        return self._session.case().wish.mode.value

    @property
    def findings(self) -> list[Charge]:
        """Findings of this test so far: `.hit.rule`, `.hit.headline`, `.hit.text`, `.hit.dump`."""
        self._session.look()
        return self._session.case().findings()

    @property
    def rules(self) -> tuple[str, ...]:
        """Ids of the rules that were broken in this test so far."""
        return tuple(dict.fromkeys(charge.hit.rule for charge in self.findings))

    @property
    def steps_checked(self) -> int:
        """Verify steps of this test that were checked so far."""
        self._session.look()
        return self._session.case().news.steps_checked

    @property
    def verify_steps(self) -> int:
        """Verify steps that ran in this test so far."""
        self._session.look()
        return self._session.case().news.verify_steps

    def expect(self, *rules: str) -> Expectation:
        """Around a block in which exactly these rules must fire; the test may go on afterwards.

        `with ddtree_guard.expect("W3"): ...`. A finding of another rule, or none of one of these,
        fails the test. Raises UsageError for a rule that does not exist.
        """
        return Expectation(self._session, frozenset(find_rule(rule).id for rule in rules))

    def watch(self, backend: Any, runner: Any) -> None:
        """See the launches of a backend of your own, built for this runner, from now on.

        SGLang's Triton backend and its subclasses are seen without this. How the guard reads a
        class that is none of these is told it by `register_adapter`.
        """
        self._session.local.made().watch(backend, runner)

    def check(self, step: Step) -> None:
        """Judge a Step that the test has filled itself, as one verify step."""
        self._session.local.made().check(step)


class Expectation:
    """A block in which exactly the given rules must fire. Without `with` it fails its test."""

    def __init__(self, session: Session, rules: frozenset[str]) -> None:
        self._session, self._rules = session, rules
        self._forgotten = f"expect({', '.join(sorted(rules))}) was called without `with`"
        session.case().open_expectations.append(self._forgotten)

    def __enter__(self) -> None:
        self._session.look()
        case = self._session.case()
        case.open_expectations.remove(self._forgotten)
        self._before, self._steps = len(case.news.charges), case.news.steps_checked

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._session.look()
        case = self._session.case()
        new = case.news.charges[self._before :]
        found = [c for c in new if not c.hit.latent or c.hit.rule in self._rules]
        case.news.charges[self._before :] = [c for c in new if c not in found]
        case.taken += found
        if kind is not None and not issubclass(kind, Violation):
            return False  # the test's own error
        seen = f"{case.news.steps_checked - self._steps} verify steps checked in this block"
        complaints = unexpected(found, self._rules, seen)
        if complaints:
            pytest.fail("ddtree_guard: " + "\n\n".join(complaints), pytrace=False)
        return True  # mode raise stopped the launch with what was expected
