"""Processes that die, disks that fill up, folders that go: a dump is whole or it is not there."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ddtree_guard.config import Capture, Config
from ddtree_guard.dump import redact
from ddtree_guard.dump.find import find_dumps
from ddtree_guard.dump.read import Dump
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.errors import DumpError, UsageError
from ddtree_guard.step import Step
from ddtree_guard.testing.hostile import target_step
from ddtree_guard.testing.steps import sound_step


def writer(root: Path, **settings: int) -> DumpWriter:
    return DumpWriter("run", Config(dump_dir=root, redact=False, **settings))  # type: ignore[arg-type]


def large_step(megabytes: int = 4) -> Step:
    return sound_step().replace(mask__cells=np.zeros(megabytes << 20, np.uint8))


def test_a_kill_at_any_moment_leaves_whole_dumps_or_none(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ddtree_guard.testing.crash", str(tmp_path / "d"), "200", "3"]
    env = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["kills"] == 200
    assert told["refused"] == 0
    assert told["in_the_middle"] > 20  # the kills did hit writers at work
    assert told["whole"] > 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_keeps_what_was_complete_and_warns_once(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    maker = writer(small_disk, dump_max_mb=100)
    kept = maker.save([sound_step()])
    assert kept is not None
    with caplog.at_level(logging.WARNING):
        assert [maker.save([large_step()]) for _ in range(3)] == [None] * 3
    assert [record.getMessage() for record in caplog.records] == [
        f"ddtree_guard: no dump was written to {maker.folder}: [Errno 28] No space left on device; "
        "serving continues"
    ]
    assert maker.failed == 3
    assert list(maker.folder.iterdir()) == [kept]  # and no half-written rest
    assert len(Dump(kept)) == 1
    assert maker.save([sound_step()]) is not None  # it goes on when there is room


def test_a_read_only_file_system_warns_once(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = writer(small_disk).save([sound_step()])
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with caplog.at_level(logging.WARNING):
        maker = writer(small_disk)
        assert [maker.save([sound_step()]) for _ in range(2)] == [None, None]
    (record,) = caplog.records
    assert "Read-only file system" in record.getMessage()
    assert find_dumps(small_disk) == [kept]


def test_a_folder_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    maker = writer(tmp_path / "root")
    assert maker.save([sound_step()]) is not None
    shutil.rmtree(tmp_path / "root")
    again = maker.save([sound_step()])
    assert again is not None
    assert len(Dump(again)) == 1


def test_a_folder_deleted_in_the_middle_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = writer(tmp_path / "root")
    real = os.fsync

    def gone(descriptor: int) -> None:
        shutil.rmtree(tmp_path / "root", ignore_errors=True)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", gone)
    with caplog.at_level(logging.WARNING):
        assert maker.save([sound_step()]) is None
    assert len(caplog.records) == 1
    assert not find_dumps(tmp_path)


TWO = """
import os, sys
from pathlib import Path
from ddtree_guard.config import Config
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.testing.steps import sound_step
maker = DumpWriter("run", Config(dump_dir=Path(sys.argv[1]), redact=False, dump_keep=500))
made = [maker.save([sound_step(n)]) for n in range(25)]
assert None not in made and maker.failed == 0
"""


def test_two_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    env = {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", TWO, str(tmp_path)]
    both = [subprocess.Popen(command, env=env) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    found = find_dumps(tmp_path)
    assert len(found) == 50
    assert sum(len(Dump(path)) for path in found) == 50


def test_two_processes_that_rotate_at_once_leave_whole_dumps(tmp_path: Path) -> None:
    env = {"PYTHONPATH": ":".join(sys.path)}
    code = TWO.replace("dump_keep=500", "dump_keep=3")
    both = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=env) for _ in "ab"]
    assert [process.wait() for process in both] == [0, 0]
    found = find_dumps(tmp_path)
    assert 1 <= len(found) <= 4
    assert all(len(Dump(path)) == 1 for path in found)


def test_a_configuration_that_captures_qkv_and_redacts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="prompts can be rebuilt"):
        DumpWriter("run", Config(dump_dir=tmp_path, capture=Capture.QKV))


def test_a_step_with_qkv_rows_never_reaches_a_redacted_dump(tmp_path: Path) -> None:
    maker = DumpWriter("run", Config(dump_dir=tmp_path))
    with pytest.raises(DumpError, match="prompts can be rebuilt"):
        maker.write([target_step()])
    assert not find_dumps(tmp_path)


class Store:
    """The memory store of a job, as `torch.distributed` has one."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.held.get(key, expected) == expected:
            self.held[key] = desired
        return self.held[key].encode()


def test_ranks_of_a_job_share_a_key_and_other_jobs_do_not() -> None:
    job = Store()
    keys = [redact.job_key(job) for _ in range(3)]
    assert len(set(keys)) == 1
    assert len(keys[0]) == 32
    assert redact.job_key(Store()) != keys[0]
    assert redact.job_key() != redact.job_key()


def test_the_root_is_for_its_owner_only(tmp_path: Path) -> None:
    path = writer(tmp_path / "a").write([sound_step()])
    assert (path.parent.stat().st_mode & 0o777, path.parent.parent.stat().st_mode & 0o777) == (
        0o700,
        0o700,
    )
