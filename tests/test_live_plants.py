"""Faults planted in a running server, at the site where their rule first looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree_guard import render
from ddtree_guard.config import Config, Mode
from ddtree_guard.hooks import arm
from ddtree_guard.hooks.facts import release
from ddtree_guard.testing.cases import small_case

pytestmark = pytest.mark.sglang
LATENT = {"M5"}  # of stock's own buffers, said once


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    from ddtree_guard.testing.server import MiniServer

    def make(algorithm: str) -> Any:
        server = MiniServer(small_case(algorithm, graph=True), "auto")
        return server, server.arm(Config(mode=Mode.LOG, dump_dir=tmp_path))

    yield make
    while arm.GUARDS:
        assert arm.GUARDS.pop().remove() == ()


@pytest.mark.parametrize(
    ("algorithm", "rule"),
    [("NGRAM", "W3"), ("NGRAM", "A1"), ("NGRAM", "A4"), ("EAGLE", "P1"), ("EAGLE", "M2"),
     ("EAGLE", "W3"), ("EAGLE", "A1"), ("EAGLE", "A4"), ("EAGLE", "G4"), ("NGRAM", "G4"),
     ("DFLASH", "K2"), ("DFLASH", "P1"), ("DFLASH", "G4"), ("DFLASH", "A4"), ("DDTREE", "G4"),
     ("DDTREE", "A1"), ("DDTREE", "A3"), ("DDTREE", "A4")],
)  # fmt: skip
def test_the_fault_is_found_on_its_step_with_its_request(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture, algorithm: str, rule: str
) -> None:
    from ddtree_guard.testing.live import plant_at

    if rule == "A4" and release() == "0.5.12":
        pytest.skip("0.5.12 claims the bonus token one step earlier; lengths are not compared")
    if rule == "G4" and release() == "0.5.12":
        pytest.skip("0.5.12 leaves padded positions as the last replay left them")
    server, guard = start(algorithm)
    plan: dict[str, Any] = {"rule": rule, "from": 3, "at": None}
    plant_at(guard, plan)
    for _ in range(4):
        server.step()
    assert plan["at"] == 3, plan
    found = [line for text in caplog.messages if (line := render.parse_line(text))]
    line = next(line for line in found if line["rule"] == rule)
    assert (line["step"], line["tokens_left"]) == ("3", "no")
    assert line["rid"] in ("r2", "-")
    assert {line["step"] for line in found if line["rule"] not in LATENT} == {"3"}


def test_a_fault_waits_for_a_step_that_begins_after_it_was_asked_for(
    start: Callable[..., Any],
) -> None:
    """Else it might change a walk that was checked already, and nobody could find it."""
    from ddtree_guard.testing.live import plant_at

    server, guard = start("EAGLE")
    verify, plan = guard.checker.verify, {"rule": "A1", "from": 1, "at": None}

    def asked(record: Any) -> None:  # behind the check of the walk, before the step's end
        guard.checker.verify = verify
        plant_at(guard, plan)
        guard.checker.walked(record)

    server.step()
    guard.checker.verify = asked
    server.step()
    assert plan["at"] is None
    server.step()
    assert (plan["at"], guard.coverage.findings > 0) == (3, True)


def test_a_fault_may_be_planted_in_every_step(start: Callable[..., Any]) -> None:
    from ddtree_guard.testing.live import plant_at

    server, guard = start("DDTREE")
    plan: dict[str, Any] = {"rule": "M2", "from": 3, "at": None, "always": True}
    plant_at(guard, plan)
    found = []
    for _ in range(5):
        server.step()
        found.append(guard.coverage.findings)
    assert (plan["at"], plan["rid"]) == (3, "r2")
    assert found == [0, 0, 2, 4, 6]  # M2, and M3 of the same row


def test_lengths_are_compared_in_steps_that_were_not_read(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if release() == "0.5.12":
        pytest.skip("0.5.12 claims the bonus token one step earlier; lengths are not compared")
    from ddtree_guard.testing.live import plant_at

    server, guard = start("DDTREE")
    build = guard.checker.build
    monkeypatch.setattr(
        guard.checker,
        "build",
        lambda record, view: (build(record, view), setattr(record, "step", None)),
    )
    plan: dict[str, Any] = {"rule": "A4", "from": 2, "at": None}
    plant_at(guard, plan)
    for _ in range(3):
        server.step()
    found = [line for text in caplog.messages if (line := render.parse_line(text))]
    assert [(line["rule"], line["step"], line["rid"]) for line in found] == [("A4", "2", "r2")]
    assert Path(found[0]["dump"]).is_dir()
