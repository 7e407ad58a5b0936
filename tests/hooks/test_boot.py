"""Arming is proven over all ranks: who is missing, why, and when mode raise refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_guard.config import Config, Mode
from ddtree_guard.hooks import arm, boot
from ddtree_guard.metrics import Metrics


@pytest.mark.parametrize(
    ("value", "excluded"),
    [("", None), (" , ", None), ("ddtree_guard", None), ("a, ddtree_guard", None), ("a,b", "a,b")],
)
def test_exclusion_by_sglang_plugins(value: str, excluded: str | None) -> None:
    assert boot.excluded_by({"SGLANG_PLUGINS": value}) == excluded


def test_no_list_excludes_nobody() -> None:
    assert boot.excluded_by({}) is None


def test_every_rank_reports_and_the_silent_one_is_named(store: Any) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds

    for rank in (0, 2):
        boot.publish(store, boot.RankReport(rank, "" if rank == 0 else "site build is not hooked"))
    reports = boot.gather(store, 3, wait_s=1.0, clock=lambda: clock.now, sleep=sleep)
    assert [report.armed for report in reports] == [True, False, False]
    assert "no report" in reports[1].why
    assert reports[2].why == "site build is not hooked"
    assert sum(slept) == pytest.approx(1.0, abs=0.1)


def test_nobody_waits_when_all_have_reported(store: Any) -> None:
    for rank in range(2):
        boot.publish(store, boot.RankReport(rank))

    def sleep(seconds: float) -> None:
        raise AssertionError("slept")

    assert all(report.armed for report in boot.gather(store, 2, sleep=sleep))


def test_the_line_about_an_unguarded_rank() -> None:
    why = boot.excluded_line("a,b")
    assert boot.not_guarded(boot.RankReport(5, why), 8) == (
        "NOT GUARDED: rank 5 of 8, plugin excluded by SGLANG_PLUGINS=a,b; add ddtree_guard; "
        "serving continues unchecked"
    )


def test_only_mode_raise_refuses() -> None:
    reports = [boot.RankReport(0), boot.RankReport(1, "site build is not hooked")]
    assert boot.refuses(Config(mode=Mode.LOG), reports) is None
    assert boot.refuses(Config(mode=Mode.RAISE), reports[:1]) is None
    text = boot.refuses(Config(mode=Mode.RAISE), reports)
    assert text is not None
    assert "rank 1 without: site build is not hooked" in text


def test_the_boot_line() -> None:
    line = boot.Boot(
        config=Config(mode=Mode.LOG, dump_dir=Path("/var/dg")),
        release="0.5.16",
        armed=8,
        world=8,
        active=31,
        rules=44,
        skipped={"fa3": ["M1", "M2"]},
        backend="stock",
        ring="8MiB",
    ).line()
    assert line == (
        "ddtree_guard armed=8/8 mode=log rules=31/44 not_checked=M1,M2(fa3) backend=stock "
        f"ring=8MiB dumps=/var/dg release=0.5.16({boot.tested('0.5.16')})"
    )


def test_a_release_outside_the_matrix_is_untested() -> None:
    assert boot.tested("0.5.17+corp.42") == "untested"
    assert boot.tested("0.5.12") != "untested"


def test_one_process_has_no_store() -> None:
    assert boot.world_of(SimpleNamespace(is_available=lambda: False)) == (0, 1, None)


def test_a_guard_that_could_not_start_is_exported_as_not_armed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: dict[str, float] = {}
    metrics = Metrics("TP0")
    monkeypatch.setattr(metrics, "set", told.__setitem__)
    monkeypatch.setattr(arm, "metrics_of_process", lambda: metrics)
    args = SimpleNamespace(speculative_algorithm="DDTREE")
    arm.finish(Config(mode=Mode.LOG), None, SimpleNamespace(server_args=args))
    assert told == {"armed": 0.0, "ranks": 1, "ranks_armed": 0}
    assert "NOT GUARDED: rank 0 of 1, the guard could not start" in caplog.text
