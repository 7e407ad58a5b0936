"""The writer: caps, rotation, names, and failures that never reach the server."""

import errno
import logging
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from ddtree_guard.config import Config
from ddtree_guard.dump import write
from ddtree_guard.dump.read import Dump
from ddtree_guard.dump.write import DumpTooLarge, DumpWriter
from ddtree_guard.errors import UsageError
from ddtree_guard.guard import Guard
from ddtree_guard.step import Step
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step


def writer(root: Path, run: str = "run", **settings: int) -> DumpWriter:
    return DumpWriter(run, Config(dump_dir=root, redact=False, **settings))  # type: ignore[arg-type]


def big_step(megabytes: float, step_id: int = 0) -> Step:
    cells = np.zeros(int(megabytes * 2**20), np.uint8)
    return sound_step().replace(mask__cells=cells, who__step_id=step_id)


def test_the_folder_is_named_after_time_rank_process_step_and_rule(tmp_path: Path) -> None:
    step = FAULTS["W3"](sound_step().replace(who__step_id=912, who__rank="TP3"), 2).step
    path = writer(tmp_path).write([step], [(0, f) for f in Guard().check(step).findings])
    assert path.parent == tmp_path / "run"
    name = rf"\d{{8}}T\d{{6}}\.\d{{3}}Z_TP3_pid{os.getpid()}_step912_W3"
    assert re.fullmatch(name, path.name)


def test_names_from_outside_cannot_leave_the_root(tmp_path: Path) -> None:
    step = sound_step().replace(who__rank="../../TP0")
    path = DumpWriter("../../run", Config(dump_dir=tmp_path / "root")).write([step])
    assert path.parent.parent == tmp_path / "root"
    assert Dump(path).step(0).bs == step.bs


def test_two_dumps_of_one_moment_do_not_collide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "_name", lambda step, rule: "20260101T000000.000Z_TP0_pid1_step0_W3")
    first, second = writer(tmp_path).write([sound_step()]), writer(tmp_path).write([sound_step()])
    assert second.name == first.name + "~1"
    assert len(Dump(second)) == 1


def test_the_oldest_dumps_go_beyond_the_count(tmp_path: Path) -> None:
    made = [writer(tmp_path, run, dump_keep=2).write([sound_step()]) for run in ("a", "b", "c")]
    assert [path.exists() for path in made] == [False, True, True]


def test_the_oldest_dumps_go_beyond_the_size(tmp_path: Path) -> None:
    made = [writer(tmp_path, dump_max_mb=2).write([big_step(0.9)]) for _ in range(4)]
    assert [path.exists() for path in made] == [False, False, True, True]


def test_the_newest_dump_stays_even_if_it_alone_is_over_the_size(tmp_path: Path) -> None:
    step = sound_step().replace(mask__cells=None)
    rest = sum(array.nbytes for _, array, _ in step.arrays())
    path = writer(tmp_path, dump_max_mb=1).write([big_step((2**20 - rest) / 2**20)])
    assert sum(file.stat().st_size for file in path.iterdir()) > 2**20
    assert path.exists()


def test_rotation_removes_nothing_but_dumps(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "root" / "run" / "notes").mkdir(parents=True)
    link = tmp_path / "root" / "run" / "20200101T000000.000Z_TP0_pid1_step0_W3"
    link.symlink_to(elsewhere)
    for _ in range(3):
        writer(tmp_path / "root", dump_keep=1).write([sound_step()])
    assert elsewhere.exists()
    assert link.is_symlink()
    assert len(list((tmp_path / "root" / "run").iterdir())) == 3


def test_abandoned_temporary_folders_are_removed_after_an_hour(tmp_path: Path) -> None:
    old, new = tmp_path / "run" / ".writing-1-old", tmp_path / "run" / ".writing-2-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (time.time() - 4000,) * 2)
    writer(tmp_path).write([sound_step()])
    assert not old.exists()
    assert new.exists()


def test_the_oldest_steps_are_left_out_of_a_large_dump(tmp_path: Path) -> None:
    steps = [big_step(0.6, step_id) for step_id in range(4)]
    finding = Guard().check(FAULTS["W3"](steps[3], 2).step).findings[0]
    dump = Dump(writer(tmp_path, dump_max_mb=2).write(steps, [(0, finding), (3, finding)]))
    assert [step.who.step_id for step in dump.steps()] == [1, 2, 3]
    assert dump.manifest["steps_left_out"] == 1
    assert [at for at, _ in dump.findings()] == [2]


def test_one_step_over_the_limit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(DumpTooLarge, match=r"one step takes 3 MB, more than .*DUMP_MAX_MB=2"):
        writer(tmp_path, dump_max_mb=2).write([big_step(3.5)])


def save_warns(writer: DumpWriter, step: Step, caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level(logging.WARNING):
        assert writer.save([step]) is None
    (record,) = caplog.records
    return record.getMessage()


def test_a_root_that_is_no_folder_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert "no dump was written" in save_warns(writer(tmp_path / "file"), sound_step(), caplog)


def test_a_read_only_root_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    # /proc refuses new folders even to root, as a read-only mount does.
    assert "no dump was written" in save_warns(writer(Path("/proc")), sound_step(), caplog)


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
def test_a_full_disk_is_a_warning_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    maker = writer(tmp_path)
    maker.folder.mkdir()
    monkeypatch.setattr(write.os, call, full)
    assert "No space left on device" in save_warns(maker, sound_step(), caplog)
    assert list(maker.folder.iterdir()) == []


def test_a_value_that_cannot_be_held_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = sound_step().replace(mask__cells=np.array(["text"]))
    assert "mask.cells has dtype <U4" in save_warns(writer(tmp_path), step, caplog)
    assert not list(tmp_path.glob("*/*"))


def test_a_fault_of_the_writer_itself_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(write, "encode", lambda *args: 1 / 0)
    assert "no dump was written" in save_warns(writer(tmp_path), sound_step(), caplog)


def test_names_from_a_step_stay_inside_the_folder(tmp_path: Path) -> None:
    step = sound_step().replace(who__rank="../" * 200 + "TP0", who__step_id="../../x")
    path = DumpWriter("r" * 300, Config(dump_dir=tmp_path)).write([step])
    assert path.parent.parent == tmp_path
    assert "step" in path.name
    assert len(os.fsencode(path.name)) < 200


def test_a_dump_of_nothing_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected to hold a step, found none"):
        DumpWriter("run", Config(dump_dir=tmp_path)).write([], [])
    assert list(tmp_path.iterdir()) == []
