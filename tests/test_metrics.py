"""Metrics exist only where SGLang serves them, and carry the rank."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_guard.metrics import Metrics, exported, metrics_for, metrics_of_process


class Made:
    """A metric of a client that records what is done to it."""

    def __init__(self, log: list[Any], name: str, labels: list[str]) -> None:
        self.log, self.name, self.names = log, name, labels

    def labels(self, **labels: str) -> Any:
        assert sorted(labels) == sorted(self.names)
        return SimpleNamespace(
            set=lambda value: self.log.append((self.name, labels, value)),
            inc=lambda amount: self.log.append((self.name, labels, amount)),
        )


def _client(log: list[Any]) -> Any:
    def make(name: str, text: str, labels: list[str], **extra: Any) -> Made:
        assert text
        return Made(log, name, labels)

    return SimpleNamespace(Gauge=make, Counter=make)


def test_names_labels_and_values() -> None:
    log: list[Any] = []
    metrics = Metrics("TP3", _client(log))
    metrics.set("armed", 1)
    metrics.add("violations_total", rule="W3", scope="batch", latent="no")
    metrics.add("dumps_total", 0)
    assert log == [
        ("sglang:ddtree_guard_armed", {"rank": "TP3"}, 1),
        (
            "sglang:ddtree_guard_violations_total",
            {"rank": "TP3", "rule": "W3", "scope": "batch", "latent": "no"},
            1,
        ),
    ]


def test_nothing_is_imported_where_sglang_serves_no_metrics() -> None:
    before = "prometheus_client" in sys.modules
    metrics = metrics_for("TP0", served=False)
    metrics.set("armed", 1)
    assert not metrics.active
    assert ("prometheus_client" in sys.modules) is before
    assert not metrics_of_process().active


def test_without_the_client_there_are_no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    metrics = metrics_for("TP0", served=True)
    metrics.add("steps_checked_total")
    assert not metrics.active


def test_a_client_that_fails_ends_the_metrics_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log: list[Any] = []
    metrics = Metrics("TP0", _client(log))
    metrics.add("violations_total", rule="W3")  # the client refuses missing labels
    metrics.add("steps_checked_total")
    assert (log, metrics.active) == ([], False)
    assert [record.message[:48] for record in caplog.records] == [
        "ddtree_guard: metrics of rank TP0 end here: asse"
    ]


def test_a_name_that_the_client_refuses_ends_the_metrics(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*args: Any, **extra: Any) -> Any:
        raise ValueError("duplicated timeseries")

    assert not Metrics("TP0", SimpleNamespace(Gauge=refuse, Counter=refuse)).active
    assert "duplicated timeseries" in caplog.text


def test_a_rank_with_a_disarmed_site_is_not_armed() -> None:
    log: list[Any] = []
    metrics = Metrics("TP0", _client(log))
    metrics.fault("build", disarmed=False)
    assert log == [
        ("sglang:ddtree_guard_internal_faults_total", {"rank": "TP0", "site": "build"}, 1)
    ]
    metrics.fault("build", disarmed=True)
    assert log[-1] == ("sglang:ddtree_guard_armed", {"rank": "TP0"}, 0)


def test_every_metric_has_a_rank() -> None:
    assert {labels[0] for labels in exported().values()} == {"rank"}
    assert "site" in exported()["sglang:ddtree_guard_internal_faults_total"]
