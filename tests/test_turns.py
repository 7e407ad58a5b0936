"""The probe's turns: what the guard adds to a step, where steps get longer with the text."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from ddtree_guard.testing import probe

US = 1000
COSTS = {"begin": 3, "built": 20, "accepted": 5, "end": 2}


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    yield importlib.import_module("host_turns").row
    for name in ("host_turns", "server_overhead", "serving"):
        sys.modules.pop(name, None)


class Engine:
    """Steps whose own time grows within a block; each site of the guard takes its COSTS."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self.calls: list[str] = []
        monkeypatch.setattr(probe.time, "perf_counter_ns", lambda: self.now)
        sites = {name: self.site(name, us) for name, us in COSTS.items()}
        self.guard = SimpleNamespace(
            **sites,
            running=SimpleNamespace(set=lambda record: None),
            checker=SimpleNamespace(_changed=lambda: None),
        )
        self.turns = probe.Turns(self.guard)

    def site(self, name: str, us: int) -> Any:
        def call(*args: Any) -> None:
            self.calls.append(name)
            self.now += us * US

        return call

    def step(self, decode: bool, own_us: float, bs: int = 2) -> None:
        mode = SimpleNamespace(is_decode=lambda: decode)
        self.guard.begin(SimpleNamespace(reqs=[0] * bs, forward_mode=mode))
        if decode:
            self.guard.built()
            self.guard.accepted()
            self.guard.end()
        self.now += int(own_us * US)

    def block(self, steps: int, bs: int = 2, noise: random.Random | None = None) -> None:
        self.step(False, 900, bs)
        for at in range(steps):
            self.step(True, 8000 + 80 * at + (noise.gauss(0, 30) if noise else 0), bs)


# one turn's steps grow by far more than the guard adds; with 3 turns a block every place would
# always have the same state, were the states not moved on
@pytest.mark.parametrize("steps", [40, 50, 63, 88])
def test_what_a_site_takes_is_found_where_steps_get_longer(
    row: Any, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    engine, noise = Engine(monkeypatch), random.Random(3)
    for _ in range(36):
        engine.block(steps, noise=noise)
    found = row(2, engine.turns.table()["2"])
    assert found["compared"] >= 3 * 8
    assert found["all"]["added_us"] == pytest.approx(30, abs=6)
    assert found["front"]["added_us"] == pytest.approx(23, abs=6)
    assert found["all"]["low"] - 3 < 30 < found["all"]["high"] + 3


def test_muted_sites_do_nothing_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    seen = []
    for _ in range(6):
        engine.block(12 * 3 + 1)
    for _, _, state, _ in engine.turns.table()["2"]:
        seen.append(state)
    assert seen[:9] == ["all", "none", "front", "none", "front", "all", "front", "all", "none"]
    engine.calls.clear()
    engine.block(12 * 3 + 1)  # all, none, front again
    steps = [name for name in engine.calls if name != "begin"]
    assert engine.calls.count("built") == 12 * 2 + 1
    assert steps.count("accepted") == steps.count("end") == 12 + 1


def test_batches_of_other_sizes_and_short_ones_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(monkeypatch)
    for bs in (2, 3, 2):
        engine.block(30, bs=bs)
        engine.block(5, bs=bs)  # too short for a turn
    table = engine.turns.table()
    assert {bs: len(turns) for bs, turns in table.items()} == {"2": 4, "3": 2}
    blocks = {(bs, block) for bs, turns in table.items() for block, *_ in turns}
    assert len(blocks) == 3


def test_too_little_is_compared_with_nothing(row: Any) -> None:
    assert row(8, [[0, 0, "all", 9.0], [1, 0, "none", 8.0]]) == {
        "bs": 8, "turns": 2, "compared": 0,
    }  # fmt: skip
