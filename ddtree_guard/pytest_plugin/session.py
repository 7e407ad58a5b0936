"""A session under the guard: switches it on around each test, and fails those with findings.

A test owns what happens from its setup to the end of its call. What is found later is charged by
its step number: to the class (or module) whose test it was, at that class's end.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from ddtree_guard import config as environment
from ddtree_guard.errors import Violation
from ddtree_guard.evidence import FENCE
from ddtree_guard.pytest_plugin.case import Case, as_json, distrust, late
from ddtree_guard.pytest_plugin.collect import Charge, Collector
from ddtree_guard.pytest_plugin.local import Local
from ddtree_guard.pytest_plugin.servers import Servers
from ddtree_guard.pytest_plugin.settings import Wish, settings_of, wish_of
from ddtree_guard.pytest_plugin.summary import Summary

SECTION = "ddtree_guard"
_OWN = "ddtree_guard_"


class Session:
    """Hooks of a guarded session, in each process that runs tests, and in xdist's controller."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.settings = settings_of(config)
        self.worker = hasattr(config, "workerinput")
        self.controller = not self.worker and config.getoption("dist", "no") != "no"
        self.local = Local()
        self.servers = Servers(self.settings.folder)
        self.collector = Collector(self.settings.folder, self.local, self.servers)
        self.summary = Summary(config, self.settings)
        self._before = environment.guards_variables()
        self._case: Case | None = None
        self._class: list[Charge] = []  # late findings of the class (or module) that runs
        self._loose: list[str] = []  # what was wrong between two tests
        self._told: list[str] = []  # complaints about the test that runs
        self._late: list[dict[str, Any]] = []  # those told at the end of the last test
        self._started = False
        if not self.controller:
            self._begin()

    def _begin(self) -> None:
        """Before anything is collected: a suite may import backends, or start servers, then."""
        self.settings.folder.mkdir(parents=True, exist_ok=True)
        (self.settings.folder / FENCE).write_text("session")  # processes look for more of them
        self._use(Wish(self.settings.mode, self.settings.rules))
        self.servers.watch()
        self.local.start()
        self._started = True

    def _use(self, wish: Wish) -> None:
        environment.export(**self.settings.environment(wish))
        self.local.use(self.settings.config(wish), wish.on)

    def pytest_unconfigure(self) -> None:
        """Put everything back."""
        if self._started:
            self._started = False
            self.local.stop()
            self.servers.stop()
            environment.unset()
            environment.export(**self._before)

    # --- one test -------------------------------------------------------------------------------
    def case(self) -> Case:
        """The test that runs."""
        assert self._case is not None
        return self._case

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """A test begins: also with what its class and module fixtures do."""
        wish, wrong = self._wish(item)
        between = self.collector.news()
        if self._case is not None:
            between.problems = self._case.untold(between.problems)
        self._class += between.charges
        self._loose += distrust(between)
        self._told = []
        self._case = Case(item.nodeid, wish)
        item.user_properties[:] = [p for p in item.user_properties if not p[0].startswith(_OWN)]
        self._use(wish)
        try:
            result = yield
            if wrong:
                pytest.fail(wrong, pytrace=False)
            return result
        except pytest.skip.Exception:
            raise
        except Exception as error:
            self._close(item, error, "setup")  # why no server came up, perhaps
            raise

    def _wish(self, item: pytest.Item) -> tuple[Wish, str]:
        """What the test asks for, and what is wrong with its marker."""
        try:
            return wish_of(item, self.settings), ""
        except pytest.UsageError as error:
            return Wish(self.settings.mode, self.settings.rules), str(error)

    def look(self) -> None:
        """Wait for the steps in flight and take in what is new."""
        case = self.case()
        case.news.problems += self.collector.fence()
        self._take(case)

    def _take(self, case: Case, ended: bool = False) -> None:
        news = self.collector.news(ended)
        self._class += [c for c in news.charges if c.cause is not None]
        news.charges = [c for c in news.charges if c.cause is None]
        case.news.add(news)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Run the test, wait for its steps, judge."""
        failure: BaseException | None = None
        result = None
        try:
            result = yield
        except (KeyboardInterrupt, pytest.exit.Exception):
            raise
        except BaseException as error:
            failure = error
        complaints = self._close(item, failure)
        ours = isinstance(failure, (Violation, pytest.skip.Exception)) and complaints
        if failure is not None and not ours and not self._expected(failure):
            raise failure
        if complaints:
            raise pytest.fail.Exception(_text(complaints), pytrace=False)
        return result

    def _close(
        self, item: pytest.Item, failure: BaseException | None, when: str = "call"
    ) -> list[str]:
        """End the test's window. Returns why the test fails."""
        case = self.case()
        case.news.problems += self.collector.fence()
        self._take(case, ended=True)
        self.collector.mark(item.nodeid)
        case.judge()
        complaints = case.complaints()
        item.user_properties += self._properties(case)
        hidden = getattr(item, "_excinfo", None) or []  # unittest keeps failures and skips there
        skipped = bool(hidden) and isinstance(hidden[0].value, pytest.skip.Exception)
        if skipped or isinstance(failure, pytest.skip.Exception):
            complaints = complaints if case.findings() or case.news.skipped else []
        if skipped and complaints:
            hidden.clear()
        elif complaints and (hidden or failure is not None):
            item.add_report_section(when, SECTION, _text(complaints))
        self._told = complaints
        return complaints

    def _expected(self, failure: BaseException) -> bool:
        """Mode raise stops a launch with a Violation: that is what the test has asked for."""
        return isinstance(failure, Violation) and bool(self.case().wish.expect)

    def _properties(self, case: Case) -> list[tuple[str, object]]:
        """What goes into JUnit XML."""
        found = case.findings()
        values: list[tuple[str, object]] = [
            (f"{_OWN}mode", case.wish.mode.value),
            (f"{_OWN}steps_checked", case.news.steps_checked),
            (f"{_OWN}verify_steps", case.news.verify_steps),
        ]
        rules = ",".join(dict.fromkeys(c.hit.rule for c in [*found, *case.taken]))
        values += [(f"{_OWN}rules", rules)] if rules else []
        return values + [(f"{_OWN}dump", c.hit.dump) for c in found if c.hit.dump]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, Any, Any]:
        """What is found after the test: told at once if it is its own, else at class end."""
        failure: Exception | None = None
        result = None
        try:
            result = yield
        except Exception as error:
            failure = error
        told = self._after(item, nextitem) if self._case is not None else []
        if failure is not None:
            if told:
                item.add_report_section("teardown", SECTION, _text(told))
            raise failure
        if told:
            raise pytest.fail.Exception(_text(told), pytrace=False)
        return result

    def _after(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[str]:
        """What was found since the test's own window, and, where its class ends, for the class."""
        ends = nextitem is None or _scope(nextitem) is not _scope(item)
        late_ones = self.collector.fence() if ends else []
        news, case = self.collector.news(), self.case()
        news.problems = case.untold([*late_ones, *news.problems])
        news.add(case.rest())
        found = [c for c in news.charges if not c.hit.latent and self._owned(c)]
        mine = [c for c in found if c.cause == item.nodeid]
        self._class += [c for c in found if c not in mine]
        told = [late(mine, "this test")] if mine else []
        told += distrust(news) if case.wish.on else []
        self._late = [as_json(c) for c in mine]
        if ends:
            ended = [c for c in self._class if not c.hit.latent]
            told += [late(ended, _scope(item).nodeid)] if ended else []
            self._late += [as_json(c) for c in ended]
            told += self._loose
            self._class, self._loose = [], []
        return told

    def _owned(self, charge: Charge) -> bool:
        """Whether a finding between two tests counts: not if it is of a test that is off."""
        case = self.case()
        return case.wish.on or charge.cause not in (None, case.test)

    def _rest(self) -> list[str]:
        """What was found after the last test had ended."""
        if self._case is None:
            return []
        problems = self.collector.fence()
        news = self.collector.news()
        news.problems = self._case.untold([*problems, *news.problems])
        found = [c for c in [*self._class, *news.charges] if not c.hit.latent and self._owned(c)]
        told = [late(found, "the session")] if found else []
        return told + self._loose + (distrust(news) if self._case.wish.on else [])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Send what is known along with the report; xdist carries it to the controller."""
        report = yield
        if self._told and call.when != "teardown" and hasattr(report, "wasxfail"):
            # a broken invariant is no failure that `xfail` has foreseen: that is said by `expect`
            del report.wasxfail
            report.outcome, report.longrepr = "failed", _text(self._told)
        if (
            self._case is not None
            and (call.when == "call" or report.failed)
            and (call.when != "teardown")
        ):
            vars(report)["ddtree_guard"] = self._case.as_json()
        elif self._case is not None and call.when == "teardown":
            vars(report)["ddtree_guard_late"] = self._late
            self._late = []
        return report

    # --- the session ----------------------------------------------------------------------------
    def pytest_report_header(self) -> str | None:
        """One line: what is checked, and what was found to check."""
        return None if self.worker else self.summary.header()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Every report of every worker comes here."""
        self.summary.take(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """A worker of xdist is about to start: all write below one folder."""
        node.workerinput["ddtree_guard_folder"] = str(self.settings.folder)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker of xdist has ended."""
        output = getattr(node, "workeroutput", {})
        self.summary.processes += output.get("ddtree_guard", [])
        self.summary.rest += output.get("ddtree_guard_rest", [])

    @pytest.hookimpl(tryfirst=True)  # before JUnit XML is written
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a session that saw no step, or whose report is lost; write the report."""
        if not self.controller:
            self.summary.rest += self._rest()
            self.summary.processes += [self.summary.process(p) for p in self.collector.processes()]
        if self.worker:
            self.config.workeroutput["ddtree_guard"] = self.summary.processes  # type: ignore[attr-defined]
            self.config.workeroutput["ddtree_guard_rest"] = self.summary.rest  # type: ignore[attr-defined]
            return
        if self.summary.failure() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        written = self.summary.write(int(session.exitstatus))
        if not written and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Steps checked, rules, findings, dumps; and why, where nothing was seen."""
        if not self.worker:
            self.summary.show(terminalreporter)


def _scope(item: pytest.Item) -> pytest.Collector:
    """The class of a test, else its module."""
    found = item.getparent(pytest.Class) or item.getparent(pytest.Module) or item.parent
    assert isinstance(found, pytest.Collector)
    return found


def _text(complaints: list[str]) -> str:
    return "ddtree_guard: " + "\n\nddtree_guard: ".join(complaints)
