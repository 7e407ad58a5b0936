"""The guard's own faults never reach SGLang, are said once, and end in disarming."""

from __future__ import annotations

import logging

import pytest

from ddtree_guard.errors import Violation
from ddtree_guard.hooks.fuses import Fuses


def _fail(fuses: Fuses, site: str = "build", may_raise: bool = True) -> None:
    with fuses.internal(site, may_raise):
        raise RuntimeError("broken guard")


def test_faults_are_counted_said_once_and_disarm(caplog: pytest.LogCaptureFixture) -> None:
    fuses = Fuses(limit=3)
    with caplog.at_level(logging.ERROR, "ddtree_guard"):
        for left in (True, True, False):
            _fail(fuses)
            assert fuses.intact("build") is left
    assert fuses.disarmed() == ("build",)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "ddtree_guard internal site=build",
        "NOT GUARDED",
    ]


def test_sites_do_not_share_a_fuse() -> None:
    fuses = Fuses(limit=1)
    _fail(fuses, "build")
    assert not fuses.intact("build")
    assert fuses.intact("verify")


def test_a_violation_is_no_fault_and_passes() -> None:
    fuses = Fuses(limit=1)
    with pytest.raises(Violation), fuses.internal("resolve"):
        raise Violation("W3")
    assert fuses.intact("resolve")


def test_strict_lets_faults_through_but_never_out_of_a_capture() -> None:
    fuses = Fuses(strict=True)
    with pytest.raises(RuntimeError, match="broken guard"):
        _fail(fuses)
    _fail(fuses, may_raise=False)
    with fuses.internal("capture", may_raise=False):
        raise Violation("G1")


def test_every_fault_is_told_with_whether_it_disarms() -> None:
    heard: list[tuple[str, bool]] = []
    fuses = Fuses(limit=2, told=lambda site, disarmed: heard.append((site, disarmed)))
    _fail(fuses)
    _fail(fuses, "verify")
    _fail(fuses)
    assert heard == [("build", False), ("verify", False), ("build", True)]
