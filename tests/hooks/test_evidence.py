"""What a guarded process leaves on disk, under storms, kills and full disks."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree_guard.config import Config, Mode
from ddtree_guard.evidence import ARMED, FENCE, NOT_ARMED, Process, read_process
from ddtree_guard.guard import find_rule
from ddtree_guard.hooks import evidence as module
from ddtree_guard.hooks.evidence import Evidence, note
from ddtree_guard.rule import Finding
from ddtree_guard.step import Step
from ddtree_guard.testing.examples import example

COUNTS: dict[str, Any] = {
    "steps": 0, "verify_steps": 0, "steps_checked": 0, "open": 0, "skipped": {}, "faults": {}
}  # fmt: skip
Make = Callable[..., tuple[Evidence, dict[str, Any]]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Evidence] = []

    def start(begin: bool = True, mode: Mode = Mode.LOG) -> tuple[Evidence, dict[str, Any]]:
        counts = dict(COUNTS)
        config = Config(mode=mode, dump_dir=tmp_path / "dumps")
        config.dump_dir.mkdir(exist_ok=True)
        if not (config.dump_dir / FENCE).exists():
            (config.dump_dir / FENCE).write_text("session")
        made.append(Evidence(config, "run-7", "TP0_DP1", "0.5.16", lambda: dict(counts)))
        return (made[-1].begin() if begin else made[-1]), counts

    yield start
    for one in made:
        one.close()


@functools.cache
def _example(rule: str) -> tuple[Finding, Step]:
    made = example(find_rule(rule))
    assert made is not None
    return made


def find(evidence: Evidence, rule: str = "W3", step_id: int = 1) -> str:
    finding, step = _example(rule)
    evidence.finding(finding, step.replace(who__step_id=step_id), None, f"{rule} in words")
    return finding.headline


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not what() and time.monotonic() < end:
        time.sleep(0.02)
    assert what()


def fenced(evidence: Evidence, token: str = "token") -> Process:
    evidence.fence.write_text(token)
    until(lambda: token in read_process(evidence.path).fences)
    return read_process(evidence.path)


def test_a_process_is_read_as_it_was_written(make: Make) -> None:
    evidence, counts = make()
    evidence.state(ARMED, boot="boot line", rules=36, world=2, armed=1, missing=["rank 1: gone"])
    counts |= {"steps": 5, "verify_steps": 5, "steps_checked": 4, "skipped": {"why": 1}}
    headline = find(evidence)
    read = fenced(evidence)
    assert evidence.path.name == f"evidence_TP0-DP1_pid{os.getpid()}.jsonl"
    assert (read.pid, read.ppid, read.rank) == (os.getpid(), os.getppid(), "TP0_DP1")
    assert (read.state, read.rules, read.boot, read.mode) == (ARMED, 36, "boot line", "log")
    assert read.problem == "1 of 2 ranks are armed: rank 1: gone"
    assert (read.verify_steps, read.steps_checked, read.skipped) == (5, 4, {"why": 1})
    assert read.fences == {"token": 5}
    (hit,) = read.hits
    assert (hit.rule, hit.text) == ("W3", "W3 in words")
    assert headline in hit.headline
    assert read.found == {"W3": 1}
    assert evidence.path.stat().st_mode & 0o777 == 0o600
    evidence.close()
    assert read_process(evidence.path).ended


def test_a_fence_waits_for_the_step_in_flight_and_for_its_finding(make: Make) -> None:
    evidence, counts = make()
    counts |= {"steps": 1, "open": 1}

    def settle() -> None:
        time.sleep(0.5)
        find(evidence)
        counts.update(verify_steps=1, steps_checked=1, open=0)

    thread = threading.Thread(target=settle)
    thread.start()
    read = fenced(evidence)
    thread.join()
    assert (read.found, read.steps_checked, read.open) == ({"W3": 1}, 1, 0)


def test_a_step_that_begins_right_before_the_fence_is_waited_for(make: Make) -> None:
    evidence, counts = make(begin=False)
    told: list[str] = []

    def asked() -> dict[str, Any]:
        found = dict(counts)
        told.append("")
        if len(told) == 6:  # the process has been quiet for long
            counts.update(steps=1, verify_steps=1, open=1)
            evidence.fence.write_text("token")
        return found

    evidence.counters = asked
    evidence.begin()
    until(lambda: len(told) > 8)
    assert read_process(evidence.path).fences == {}
    find(evidence)
    counts.update(steps_checked=1, open=0)
    until(lambda: "token" in read_process(evidence.path).fences)
    read = read_process(evidence.path)
    assert (read.open, read.found) == (0, {"W3": 1})


def test_a_fence_is_answered_although_a_step_stays_open(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.3)
    evidence, counts = make()
    counts |= {"steps": 1, "open": 1}
    assert fenced(evidence).open == 1


def test_a_fence_of_before_is_not_answered(make: Make, tmp_path: Path) -> None:
    (tmp_path / "dumps").mkdir(exist_ok=True)
    (tmp_path / "dumps" / FENCE).write_text("old")
    evidence, _ = make()
    assert list(fenced(evidence, "new").fences) == ["new"]


def test_counts_are_written_when_steps_come_to_rest(make: Make) -> None:
    evidence, counts = make()
    counts |= {"steps": 1, "verify_steps": 1, "steps_checked": 1}
    until(lambda: read_process(evidence.path).verify_steps == 1)
    begin = time.monotonic()
    counts |= {"steps": 2, "verify_steps": 2, "steps_checked": 2}
    until(lambda: read_process(evidence.path).verify_steps == 2)
    assert time.monotonic() - begin < 10 * module.PERIOD_S


def test_the_first_fence_of_a_server_without_any_is_seen(make: Make) -> None:
    evidence, _ = make(begin=False)
    evidence.fence.unlink()
    evidence.begin()
    assert "token" in fenced(evidence).fences


def test_mode_raise_writes_before_the_server_stops(make: Make) -> None:
    evidence, _ = make(begin=False, mode=Mode.RAISE)
    find(evidence)
    assert [hit.rule for hit in read_process(evidence.path).hits] == ["W3"]


def test_a_storm_keeps_the_first_words_and_every_count(make: Make) -> None:
    evidence, _ = make()
    for step in range(1, 5001):
        find(evidence, step_id=step)
    read = fenced(evidence)
    assert read.found == {"W3": 5000}
    assert [hit.step for hit in read.hits] == list(range(1, module.TEXTS + 1))
    find(evidence, step_id=6000)  # after a fence, words again
    assert [hit.step for hit in fenced(evidence, "second").hits][-1] == 6000


def test_the_file_stays_small_and_keeps_what_matters(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 20_000)
    evidence, counts = make(begin=False)
    evidence.begin()
    evidence.state(ARMED, rules=3)
    for number in range(300):
        counts["verify_steps"] = counts["steps_checked"] = number
        if number % 10 == 0:
            evidence._texts.clear()
            find(evidence, "K2", number)
        evidence.flush()
    read = read_process(evidence.path)
    assert evidence.path.stat().st_size <= 60_000
    assert (read.state, read.verify_steps, read.found) == (ARMED, 299, {"K2": 30})
    assert len({hit.number for hit in read.hits}) == len(read.hits)
    assert read.hits[-1].step == 290


def test_a_torn_last_line_is_left_out(make: Make) -> None:
    evidence, counts = make()
    counts["verify_steps"] = 3
    evidence.close()
    with evidence.path.open("a") as file:
        file.write('{"kind": "steps", "verify_st')
    assert read_process(evidence.path).verify_steps == 3


def test_a_fork_that_ends_is_not_the_end_of_its_parent(tmp_path: Path) -> None:
    script = """
import os, sys, time
from pathlib import Path
from ddtree_guard.config import Config, Mode
from ddtree_guard.hooks.evidence import Evidence
evidence = Evidence(Config(mode=Mode.LOG, dump_dir=Path(sys.argv[1])), "run", "TP0", "-").begin()
evidence._lock.acquire()  # as its thread does when it writes
child = os.fork()
if not child:
    sys.exit(0)
for _ in range(500):
    if os.waitpid(child, os.WNOHANG)[0]:
        break
    time.sleep(0.01)
else:
    os.kill(child, 9)
    os._exit(1)
evidence._lock.release()
print(evidence.path.read_text().count('"end"'))
"""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "dumps").write_text("a file")
    config = Config(mode=Mode.LOG, dump_dir=tmp_path / "dumps")
    evidence = Evidence(config, "run", "TP0", "0.5.16").begin()
    evidence.state(ARMED)
    find(evidence)
    evidence.close()
    assert caplog.text.count("no evidence is written to") == 1


def test_a_process_without_a_guard_leaves_one_note(tmp_path: Path) -> None:
    before = threading.active_count()
    note(Config(mode=Mode.LOG, dump_dir=tmp_path), "TP3", "0.5.16", NOT_ARMED, "no hooks")
    (path,) = tmp_path.glob("*/*")
    assert (read_process(path).problem, read_process(path).rank) == ("no hooks", "TP3")
    assert threading.active_count() == before


def test_evidence_of_long_ago_goes_and_the_newest_stays(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SPARED", 2)
    folder = tmp_path / "dumps" / "run-1"
    folder.mkdir(parents=True)
    old, foreign = time.time() - 30 * 86_400, folder / "evidence_mine.jsonl"
    for age, name in enumerate(["evidence_TP0_pid1.jsonl", "evidence_TP0_pid2.jsonl",
                                "evidence_TP0_pid3.jsonl", foreign.name]):  # fmt: skip
        (folder / name).write_text("")
        os.utime(folder / name, (old - age, old - age))
    recent = folder / "evidence_TP1_pid1.jsonl"
    recent.write_text("")
    make()
    left = {path.name for path in folder.iterdir()}
    assert left == {recent.name, foreign.name, "evidence_TP0_pid1.jsonl"}
