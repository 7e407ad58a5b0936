"""The probe's stopwatch: which of the guard's time lengthens a step, and which is hidden."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ddtree_guard.testing import probe  # noqa: E402

US = 1000


class Engine:
    """Steps of a worker whose sites and waits take so many microseconds each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        monkeypatch.setattr(probe.time, "perf_counter_ns", lambda: self.now)
        for owner in (torch.cuda.Stream, torch.cuda.Event):
            monkeypatch.setattr(owner, "synchronize", lambda waited: self.passes(waited.us))
        monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.cpu)  # put back behind the test
        self.runner = SimpleNamespace(is_draft_worker=False, forward=lambda batch: self.passes(500))
        sites = {name: lambda *args, us=us: self.passes(us) for name, us in
                 (("begin", 3), ("built", 7), ("accepted", 20), ("end", 10), ("resolve", 30),
                  ("commit", 5))}  # fmt: skip
        self.guard = SimpleNamespace(
            **sites,
            flight=SimpleNamespace(accepted=lambda *args: self.passes(2)),
            backends=lambda: [(self.runner, None)],
        )
        self.watch = probe.Stopwatch(self.guard)

    def passes(self, us: float) -> None:
        self.now += int(us * US)

    def step(self, wait: float) -> None:
        """As with overlap: the host waits, prepares a replay, and resolves the step before."""
        batch = SimpleNamespace(
            reqs=[1, 2], forward_mode=SimpleNamespace(is_target_verify=lambda: True)
        )
        stream: Any = SimpleNamespace(us=wait)
        torch.cuda.Stream.synchronize(stream)
        torch.cuda.Event.synchronize(SimpleNamespace(us=1))
        self.guard.begin(batch)
        self.guard.built(None, batch, "graph")
        self.runner.forward(batch)
        self.guard.accepted(batch)
        self.guard.end(None)
        self.guard.resolve(None)
        self.guard.flight.accepted(None, ())
        self.guard.commit(None, ())


def test_what_the_wait_hides_is_not_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    for _ in range(5):
        engine.step(wait=900)
    found = {name: times["median"] for name, times in engine.watch.table()["2"].items()}
    assert (found["paid"], found["hidden"], found["wait"]) == (10, 67, 900)
    assert found["step"] == 900 + 1 + 10 + 500 + 67


def test_a_step_that_does_not_wait_pays_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    for _ in range(5):
        engine.step(wait=probe.Stopwatch.SLACK_US / 2)
    found = {name: times["median"] for name, times in engine.watch.table()["2"].items()}
    assert (found["paid"], found["hidden"]) == (77, 0)
