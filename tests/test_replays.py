"""The probe's timer of replays, with a clock, graphs and events of its own."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ddtree_guard.testing import probe, replays  # noqa: E402

US = 1000
PREFILL, DECODE, VERIFY = "prefill", "decode", "verify"
STEADY = 20  # steps behind those that are skipped


class Event:
    """Noted on the GPU's queue; nothing is asked of it while a block runs."""

    made = 0

    def __init__(self, engine: Engine, enable_timing: bool = False) -> None:
        assert enable_timing
        Event.made += 1
        self.engine, self.at = engine, 0

    def record(self) -> None:
        self.engine.now += US  # its own host time is no part of a launch
        self.at = max(self.engine.gpu, self.engine.now)
        self.engine.gpu = self.at

    def query(self) -> bool:
        self.engine.asked.append(threading.current_thread())
        return self.at <= self.engine.now

    def elapsed_time(self, end: Event) -> float:
        assert not self.engine.busy
        assert end.at <= self.engine.now
        return (end.at - self.at) / 1e6


class Mode(str):
    def is_decode(self) -> bool:
        return self == DECODE

    def is_target_verify(self) -> bool:
        return self == VERIFY


class Engine:
    """An NGRAM engine: preparation, 300 us of the host's until the replay, then the GPU's work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.gpu = 10**9
        self.asked: list[threading.Thread] = []
        self.busy = False
        self.graph_us = 6000.0
        self.slept: list[float] = []

        class NGRAMWorker:
            def _prepare_for_speculative_decoding(self, batch: Any) -> str:
                engine.now += 50 * US
                if batch.forward_mode.is_decode():
                    batch.forward_mode = Mode(VERIFY)
                return "prepared"

        class CUDAGraph:
            def replay(self) -> str:
                engine.now += 40 * US
                engine.gpu = max(engine.gpu, engine.now) + int(engine.graph_us * US)
                return "replayed"

        engine, Event.made = self, 0
        self.cuda = SimpleNamespace(
            CUDAGraph=CUDAGraph, Event=lambda **more: Event(self, **more), stream=None
        )
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=self.cuda))
        module = SimpleNamespace(NGRAMWorker=NGRAMWorker)
        monkeypatch.setitem(sys.modules, replays.WORKER, module)
        monkeypatch.setattr(replays.time, "perf_counter_ns", lambda: self.now)
        monkeypatch.setattr(replays.time, "sleep", self.sleep)
        self.worker, self.graph = NGRAMWorker(), CUDAGraph()
        timer = replays.arm()
        assert timer is not None
        self.timer = timer

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += int(seconds * 1e9)

    def prepare(self, mode: str, requests: int) -> Any:
        batch = SimpleNamespace(reqs=[0] * requests, forward_mode=Mode(mode))
        assert self.worker._prepare_for_speculative_decoding(batch) == "prepared"
        return batch

    def step(self, requests: int = 2, host_us: float = 300, wait: bool = True) -> None:
        self.busy = True
        self.prepare(DECODE, requests)
        self.now += int(host_us * US)
        assert self.graph.replay() == "replayed"
        if wait:
            self.now = max(self.now, self.gpu)
        self.busy = False

    def block(self, steps: int, requests: int = 2, rest_us: float = 10**5) -> None:
        self.prepare(PREFILL, requests)
        self.now += 2000 * US
        for _ in range(steps):
            self.step(requests)
        self.now += int(rest_us * US)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def test_the_parts_of_a_step_are_told_apart(engine: Engine) -> None:
    engine.block(8 + STEADY + 1)
    (requests, found), *others = engine.timer.table().items()
    assert (requests, others, found["n"]) == ("2", [], STEADY)
    medians = {part: found[part]["median"] for part in replays.PARTS}
    assert medians == {
        "graph_us": 6040.0,  # from the event before the launch
        "gap_us": 351.0,
        "launch_us": 40.0,
        "forward_us": 300.0,
        "step_us": 6391.0,
    }
    assert found["runs"] == [[STEADY, 6040.0]]


def test_steps_that_are_not_steady_are_left_out(engine: Engine) -> None:
    engine.prepare(PREFILL, 2)
    engine.graph_us = 9000
    for _ in range(8):
        engine.step()
    engine.graph_us = 6000
    for _ in range(STEADY):
        engine.step()
    engine.graph_us = 9000
    engine.step()  # the last one: none follows it in this run
    engine.now += 10**8
    found = engine.timer.table()["2"]
    assert (found["n"], found["graph_us"]) == (STEADY, {"median": 6040.0, "mean80": 6040.0})
    assert found["step_us"]["mean80"] == 6391.0


def test_a_few_steps_to_warm_up_are_not_counted(engine: Engine) -> None:
    engine.block(16, rest_us=3000)  # no rest behind it
    engine.block(8 + STEADY + 1)
    assert engine.asked == []
    assert engine.timer.table()["2"]["runs"] == [[STEADY, 6040.0]]


def test_what_is_left_of_a_block_and_other_blocks_are_told_apart(engine: Engine) -> None:
    for requests, us in ((3, 6000), (2, 7000)):  # a request ends: no batch of another kind between
        engine.graph_us = us
        for _ in range(8 + STEADY + 1):
            engine.step(requests)
    engine.now += 10**8
    engine.block(8 + STEADY + 1, requests=3)
    table = engine.timer.table()
    assert list(table) == ["3"]
    assert [us for _, us in table["3"]["runs"]] == [6040.0, 7040.0]
    assert table["3"]["n"] == 2 * STEADY
    assert table["3"]["gap_us"]["median"] == 351  # none of them spans two blocks


@pytest.mark.parametrize("graph_us", [6_000, 55_000])
def test_the_device_is_asked_for_nothing_while_a_block_runs(
    engine: Engine, graph_us: float
) -> None:
    """A step of 32 requests of 64 rows takes longer than a rest."""
    engine.graph_us = graph_us
    engine.prepare(PREFILL, 2)
    for _ in range(60):
        engine.step()
    assert engine.asked == []
    engine.step(wait=False)
    assert engine.timer.table() == {}  # its last replay is not done
    assert len(engine.asked) == 1
    assert engine.slept == []
    engine.now = engine.gpu + US
    assert engine.timer.table()["2"]["n"] == 60 - 8


def test_another_batch_may_come_while_the_gpu_works(engine: Engine) -> None:
    engine.graph_us = 55_000
    for _ in range(30):
        engine.step()
    engine.step(wait=False)
    engine.now += 40_000 * US
    engine.prepare(PREFILL, 2)
    assert engine.timer.table() == {}
    engine.now += 40_000 * US
    assert engine.timer.table()["2"]["n"] == 22


def test_nothing_is_read_where_another_replay_is_queued_during_the_rest(engine: Engine) -> None:
    engine.block(40)
    engine.timer.REST_S = 0.02  # type: ignore[misc]
    sleep = engine.sleep

    def serves(seconds: float) -> None:
        sleep(seconds)
        engine.step()

    replays.time.sleep = serves
    assert engine.timer.table() == {}
    replays.time.sleep = sleep
    assert engine.slept == [0.02]
    engine.now += 10**8
    assert engine.timer.table()["2"]["n"] == 40 - 8  # and the pause is in no gap's median
    assert engine.timer.table()["2"]["gap_us"]["mean80"] == 351


def test_the_serving_thread_reads_as_another_block_begins(engine: Engine) -> None:
    for _ in range(3):
        engine.block(30)
    assert len(engine.timer._held) == 30  # the newest block alone
    assert [run[0] for run in engine.timer.table()["2"]["runs"]] == [21] * 3


def test_nothing_is_made_in_a_step_and_a_full_ring_ends_what_is_timed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays.Replays, "RING", 50)
    assert Event.made == 0  # no context on the GPU before there is a replay
    engine.step()
    assert Event.made == 100
    for _ in range(99):
        engine.step()
    assert (Event.made, engine.timer.lost) == (100, 50)
    engine.now += 10**8
    assert engine.timer.table()["2"]["n"] == 50 - 8 - 1
    engine.block(40)
    assert engine.timer.table()["2"]["n"] == 41 + 40 - 8 - 1
    assert Event.made == 100


def test_replays_of_no_verify_step_are_left_alone(engine: Engine) -> None:
    engine.prepare(PREFILL, 2)
    assert engine.graph.replay() == "replayed"
    engine.step()
    assert engine.graph.replay() == "replayed"  # of a draft, behind the step's own
    assert len(engine.timer._held) == 1


def test_a_launch_that_fails_is_the_server_s_and_is_not_timed(engine: Engine) -> None:
    engine.block(30)
    held = len(engine.timer._held)
    engine.prepare(DECODE, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "graph_us", None)
        with pytest.raises(TypeError):
            engine.graph.replay()
    assert len(engine.timer._held) == held
    assert not engine.timer._lock.locked()


def test_what_was_asked_for_is_forgotten_where_that_is_wanted(engine: Engine) -> None:
    engine.block(40)
    assert engine.timer.table()["2"]["n"] == 31
    assert engine.timer.table(forget=True)["2"]["n"] == 31
    assert engine.timer.table() == {}
    engine.block(30)
    assert engine.timer.table(forget=True)["2"]["n"] == 21


def test_the_mean_is_of_the_middle() -> None:
    found = replays.summary([1.0, *range(10, 18), 1000.0])
    assert found == {"median": 13.5, "mean80": 13.5}
    assert replays.summary([3.0]) == {"median": 3.0, "mean80": 3.0}


def test_a_process_without_a_worker_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (None, SimpleNamespace()):  # not imported; being imported
        monkeypatch.setitem(sys.modules, replays.WORKER, module)  # type: ignore[arg-type]
        assert replays.arm() is None


@pytest.mark.parametrize("asked", [True, False])
def test_the_probe_writes_it_with_and_without_a_guard(engine: Engine, asked: bool) -> None:
    assert probe._replayed(None, asked) == {}
    engine.block(40)
    found = probe._replayed(engine.timer, asked)
    assert (found["replays"]["2"]["n"], found["replays_lost"]) == (31, 0)
    assert bool(engine.timer.table()) is not asked
