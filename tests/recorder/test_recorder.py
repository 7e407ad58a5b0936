"""Triggers, storms, heuristics, the crash path, and that nothing of it reaches the server."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ddtree_guard import recorder as module
from ddtree_guard.config import Config
from ddtree_guard.dump.find import find_dumps, find_trails
from ddtree_guard.dump.read import Dump
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.guard import Guard
from ddtree_guard.recorder import Recorder
from ddtree_guard.recorder.heuristics import MIN_REQUEST_STEPS, RUN, SETTLED, STUCK, Heuristics
from ddtree_guard.step import Step
from ddtree_guard.testing.compare import differences
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step

LENS = (37, 21, 50)
RIDS = ("r0", "r1", "r2")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def step(number: int) -> Step:
    return sound_step(number, lens=LENS, padded_bs=4).replace(who__step_id=number)


def broken(number: int) -> Step:
    return FAULTS["W3"](step(number), 2).step


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(tmp_path: Path, clock: Clock) -> Iterator[Recorder]:
    config = Config(dump_dir=tmp_path, redact=False, ring_steps=8)
    made = Recorder(config, DumpWriter("run", config), clock=clock)
    yield made
    made.stop()
    assert made.faults == 0


def wait_for(condition: Callable[[], object]) -> None:
    for _ in range(2400):
        if condition():
            return
        time.sleep(0.025)
    raise AssertionError("it did not happen")


def test_a_finding_dumps_the_ring_and_the_whole_step(recorder: Recorder) -> None:
    for number in range(1, 12):
        recorder.step(step(number) if number < 11 else broken(11))
    found = Guard().check(broken(11)).findings
    path = recorder.finding(broken(11), found)
    assert path is not None
    dump = Dump(path)
    assert dump.step_ids() == list(range(4, 12))
    assert dump.trigger["kind"] == "finding"
    assert dump.findings() == [(7, finding) for finding in found]
    assert differences(broken(11), dump.step(7)) == []  # the step itself, bit for bit
    assert Guard().check(dump.step(7)).findings == found
    trail = {t.rid: t for t in dump.requests()}["r1"]
    assert trail.verdict == "11/11 steps checked, W3 in 1 of them"


def test_a_ring_step_gives_no_finding_that_the_step_did_not(recorder: Recorder) -> None:
    recorder.step(step(1))
    recorder.step(broken(2))
    path = recorder.trigger("signal", "SIGUSR2")
    assert path is not None
    sound, bad = Dump(path).steps()
    assert Guard().check(sound).findings == ()
    assert Guard().check(bad).rules == ("W3",)


def test_a_storm_yields_one_dump_and_a_count(recorder: Recorder, clock: Clock) -> None:
    found = Guard().check(broken(1)).findings
    paths = [recorder.finding(broken(1), found) for _ in range(50)]
    assert [path is not None for path in paths] == [True] + [False] * 49
    clock.now += 31
    later = recorder.finding(broken(2), found)
    assert later is not None
    assert Dump(later).trigger["suppressed"] == 49
    assert recorder.dumps == 2


def test_a_fault_that_stays_is_dumped_ever_more_rarely(recorder: Recorder, clock: Clock) -> None:
    found, at = Guard().check(broken(1)).findings, []
    recorder.step(step(1))
    for _ in range(4 * 3600 // 10):
        clock.now += 10
        if recorder.finding(broken(1), found) is not None:
            at.append(clock.now)
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert gaps[:5] == [30, 60, 120, 240, 480]
    assert max(gaps) <= 3600
    recorder.trigger("signal", "SIGUSR2")
    clock.now += 31
    assert recorder.trigger("signal", "SIGUSR2") is not None  # a person does not wait longer


def test_a_rule_that_joins_a_storm_is_dumped(recorder: Recorder) -> None:
    known = Guard().check(broken(1)).findings
    new = Guard().check(FAULTS["T4"](step(2), 2).step).findings
    assert recorder.finding(broken(1), known)
    assert recorder.finding(broken(1), (*known, *new))
    assert recorder.finding(broken(1), new) is None


def test_another_rule_in_a_storm_gets_its_own_dump(recorder: Recorder) -> None:
    other = FAULTS["T4"](step(2), 2).step
    assert recorder.finding(broken(1), Guard().check(broken(1)).findings)
    assert recorder.finding(other, Guard().check(other).findings)


def test_a_larger_step_makes_a_larger_ring(recorder: Recorder) -> None:
    recorder.step(step(1))
    recorder.step(sound_step(2, lens=LENS * 2, w=33).replace(who__step_id=2))
    assert recorder.ring is not None
    small, large = recorder.ring.snapshot()
    assert (small.who.step_id, small.w, large.who.step_id, large.w) == (1, 17, 2, 33)
    assert np.array_equal(small.tree.tokens, step(1).tree.tokens)
    assert recorder.ring.dropped == 0


def test_the_outcome_reaches_the_ring_and_the_trail(recorder: Recorder) -> None:
    original = step(1)
    recorder.step(original.replace(outcome=type(original.outcome)()))
    lens = np.array([2, 1, 3])
    recorder.accepted(1, RIDS, [[4, 4], [5], [6, 6, 6]], {"outcome.accept_lens": lens})
    assert recorder.ring is not None
    assert np.array_equal(recorder.ring.snapshot()[0].outcome.accept_lens, lens)
    trail = recorder.trails.get("r2")
    assert trail is not None
    assert (trail.run, trail.accept) == (3, {3: 1})


def test_a_run_of_one_token_triggers_a_dump_and_nothing_else(recorder: Recorder) -> None:
    recorder.step(step(1))
    for _ in range(RUN // 4 + 3):
        recorder.accepted(1, RIDS, [[0, 0, 0, 0], [1, 2, 1, 2], [3, 4, 5, 6]])
    wait_for(lambda: recorder.dumps == 1)
    (path,) = find_dumps(recorder.config.dump_dir)
    assert Dump(path).trigger["kind"] == "heuristic"
    assert "one token 32 times in a row" in Dump(path).trigger["why"]
    assert Dump(path).findings() == []


def test_a_stuck_accept_length_is_told_once() -> None:
    watch = Heuristics()
    told = [watch.lengths(8, 8) for _ in range(STUCK + 200)]
    assert [why for why in told if why] == ["accept length 1.00 for 64 steps, 512 request steps"]
    watch.lengths(9, 8)
    assert any(watch.lengths(8, 8) for _ in range(STUCK + 200))  # a new episode


def test_a_single_request_must_be_stuck_longer() -> None:
    watch = Heuristics()
    told = [watch.lengths(1, 1) for _ in range(MIN_REQUEST_STEPS)]
    assert [bool(why) for why in told] == [False] * (MIN_REQUEST_STEPS - 1) + [True]


@pytest.mark.parametrize(("before", "after"), [(2, 6), (6, 2)])
def test_a_jump_either_way_is_told_once(before: int, after: int) -> None:
    watch = Heuristics()
    assert not any(watch.lengths(before * 8, 8) for _ in range(2 * SETTLED))
    told = [why for why in (watch.lengths(after * 8, 8) for _ in range(200)) if why]
    assert len(told) == 1
    assert told[0].startswith("accept length went from ")


def test_a_steady_server_triggers_nothing() -> None:
    rng, watch = np.random.default_rng(0), Heuristics()
    steps = rng.integers(1, 9, (3000, 8)).sum(axis=1)
    assert not any(watch.lengths(int(total), 8) for total in steps)


def test_the_crash_path_dumps_and_lets_the_error_go(recorder: Recorder) -> None:
    recorder.step(step(1))
    with pytest.raises(RuntimeError, match="boom"), recorder.crash_path():
        raise RuntimeError("boom")
    (path,) = find_dumps(recorder.config.dump_dir)
    assert Dump(path).trigger == {
        "kind": "crash", "why": "RuntimeError", "suppressed": 0, "ring_dropped": 0,
    }  # fmt: skip


def test_an_orderly_exit_is_no_crash(recorder: Recorder) -> None:
    recorder.step(step(1))
    with pytest.raises(SystemExit), recorder.crash_path():
        raise SystemExit(0)
    assert find_dumps(recorder.config.dump_dir) == []


def test_stopping_writes_the_trails(tmp_path: Path) -> None:
    config = Config(dump_dir=tmp_path)
    made = Recorder(config, DumpWriter("run", config))
    made.step(step(1))
    made.start()
    made.stop()
    assert len(find_trails(tmp_path)) == 1
    assert not [t for t in threading.enumerate() if t.name == "ddtree-guard-recorder"]


def test_the_device_is_drained_also_where_somebody_asks_all_the_time(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained: list[bool] = []
    monkeypatch.setattr(module, "DRAIN_S", 0.1)
    recorder.step(step(1))
    assert recorder.trigger("heuristic", "first") is not None  # the next ones are counted only
    monkeypatch.setattr(recorder, "_drain", lambda: drained.append(True))
    for _ in range(100):
        recorder.ask("heuristic", "a request produced one token 32 times in a row")
        time.sleep(0.005)
    assert drained


def test_faults_of_the_recorder_are_counted_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(dump_dir=tmp_path)
    made = Recorder(config, DumpWriter("run", config))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            made.step(None)  # type: ignore[arg-type]
        assert made.finding(None, (None,)) is None  # type: ignore[arg-type]
    assert made.faults == 4
    assert len(caplog.records) == 1


def test_a_trigger_before_any_step_is_a_word_in_the_log(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert recorder.trigger("signal", "SIGUSR2") is None
    assert "nothing to dump yet" in caplog.text
    recorder.step(step(1))
    assert recorder.trigger("signal", "SIGUSR2") is not None  # that was no dump to be quiet after


def test_a_redacted_dump_hides_what_the_recorder_knows(tmp_path: Path) -> None:
    config = Config(dump_dir=tmp_path)
    made = Recorder(config, DumpWriter("run", config))
    made.step(step(1).replace(who__rids=("alice-secret", "b-secret", "c-secret")))
    path = made.trigger("signal", "SIGUSR2")
    made.stop()
    assert path is not None
    raw = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"secret" not in raw
