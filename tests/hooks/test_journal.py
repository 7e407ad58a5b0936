"""First hit at once in the frozen form, repeats counted, the rest after a while."""

from __future__ import annotations

import logging

import pytest

from ddtree_guard import render
from ddtree_guard.config import LogStyle
from ddtree_guard.guard import Guard
from ddtree_guard.hooks.journal import Journal
from ddtree_guard.rule import Finding
from ddtree_guard.step import Step
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step


class Clock:
    """Seconds that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def _bad(rule: str, step_id: int, request: int = 2) -> tuple[Finding, Step]:
    step = FAULTS[rule](sound_step(0).replace(who__step_id=step_id), request).step
    return next(f for f in Guard().check(step).findings if f.rule == rule), step


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.ERROR, "ddtree_guard")
    return caplog


def test_the_first_line_is_the_renderers(lines: pytest.LogCaptureFixture) -> None:
    finding, step = _bad("W3", 7)
    Journal().write(finding, step, "/dumps/x")
    assert lines.messages == [render.line(finding, step, dump="/dumps/x")]
    assert render.parse_line(lines.messages[0])["rid"] == "r2"


def test_repeats_wait_and_are_summed(lines: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    journal = Journal(every_s=30, clock=clock)
    for step_id in range(1, 101):
        clock.now = step_id / 10  # a hundred steps in ten seconds
        journal.write(*_bad("W3", step_id, step_id % 3))
    assert len(lines.messages) == 1
    clock.now = 31
    journal.write(*_bad("W3", 101))
    assert lines.messages[1] == (
        "ddtree_guard repeated rule=W3 count=100 total=100 steps=2-101 rids=r2,r0,r1"
    )


def test_each_rule_has_its_own_first_line(lines: pytest.LogCaptureFixture) -> None:
    journal = Journal()
    journal.write(*_bad("W3", 1))
    assert not journal.is_new("W3")
    assert journal.is_new("K2")
    journal.write(*_bad("K2", 1))
    assert [render.parse_line(text)["rule"] for text in lines.messages] == ["W3", "K2"]


def test_flush_writes_what_is_held_back_and_then_nothing(lines: pytest.LogCaptureFixture) -> None:
    journal = Journal()
    for step_id in (1, 2, 3):
        journal.write(*_bad("W3", step_id))
    journal.flush()
    journal.flush()
    assert [text.split(" ")[1] for text in lines.messages] == ["finding", "repeated"]


def test_style_block_adds_the_readable_form(lines: pytest.LogCaptureFixture) -> None:
    finding, step = _bad("W3", 1)
    Journal(LogStyle.BLOCK).write(finding, step)
    assert lines.messages[1] == render.block(finding, step)
