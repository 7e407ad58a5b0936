"""SIGUSR2: a handled process dumps and lives on; one without a handler is left alone."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_guard import cli
from ddtree_guard.dump.find import find_dumps
from ddtree_guard.dump.read import Dump
from ddtree_guard.errors import IncompatibleError, UsageError
from ddtree_guard.recorder import signals

SERVER = """
import os, signal, sys, time
from pathlib import Path
from ddtree_guard.config import Config
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.recorder import Recorder
from ddtree_guard.testing.steps import sound_step
signal.signal(signal.SIGUSR2, lambda *_: os.write(1, b"theirs\\n"))
config = Config(dump_dir=Path(sys.argv[1]), redact=False)
recorder = Recorder(config, DumpWriter("run", config))
recorder.step(sound_step(1).replace(who__step_id=41))
recorder.start(on_signal=True)
print("ready", flush=True)
n = 42
while True:
    recorder.step(sound_step(2).replace(who__step_id=n))
    n += 1
    time.sleep(0.002)
"""
HUNG = """
import signal, sys
from pathlib import Path
from ddtree_guard.config import Config
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.recorder import Recorder
from ddtree_guard.testing.steps import sound_step
config = Config(dump_dir=Path(sys.argv[1]), redact=False)
recorder = Recorder(config, DumpWriter("run", config))
recorder.step(sound_step(1))
recorder.start(on_signal=True)
print("ready", flush=True)
sys.stdin.buffer.read()  # the main thread runs no Python any more
"""
BARE = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.01)"


def start(code: str, *args: str) -> "subprocess.Popen[str]":
    env = {"PYTHONPATH": ":".join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def bare() -> Iterator["subprocess.Popen[str]"]:
    process = start(BARE)
    yield process
    process.kill()
    process.communicate()


def test_a_running_process_dumps_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = start(SERVER, str(tmp_path))
    try:
        assert cli.main(["dump", "--pid", str(process.pid)]) == 0
        assert f"asked process {process.pid}" in capsys.readouterr().out
        for _ in range(600):
            if find_dumps(tmp_path):
                break
            time.sleep(0.025)
        if not find_dumps(tmp_path):
            process.kill()
            pytest.fail(f"no dump; the process said: {process.communicate()}")
        (path,) = find_dumps(tmp_path)
        assert Dump(path).trigger["kind"] == "signal"
        assert 41 in Dump(path).step_ids()
        assert process.poll() is None
        assert process.stdout is not None
        assert process.stdout.readline() == "theirs\n"  # the handler that was there ran as well
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_hangs_in_c_code_dumps(tmp_path: Path) -> None:
    process = start(HUNG, str(tmp_path))
    try:
        time.sleep(0.2)
        assert cli.main(["dump", "--pid", str(process.pid)]) == 0
        for _ in range(600):
            if find_dumps(tmp_path):
                break
            time.sleep(0.025)
        assert [Dump(path).trigger["kind"] for path in find_dumps(tmp_path)] == ["signal"]
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_a_wake_up_that_somebody_has_is_left_alone() -> None:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    before, held = signal.getsignal(signal.SIGUSR2), signal.set_wakeup_fd(writes)
    calls: list[str] = []
    try:
        undo = signals.install(lambda: calls.append("ours"))
        signal.raise_signal(signal.SIGUSR2)
        assert os.read(reads, 8) == bytes([signal.SIGUSR2])
        assert calls == ["ours"]
        assert undo()
        assert signal.set_wakeup_fd(held) == writes
    finally:
        signal.signal(signal.SIGUSR2, before)
        os.close(reads)
        os.close(writes)


def test_a_process_without_a_handler_is_refused_and_lives(
    bare: "subprocess.Popen[str]", capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["dump", "--pid", str(bare.pid)]) == 3
    assert "might end it, so it was left alone. " in capsys.readouterr().err
    time.sleep(0.1)
    assert bare.poll() is None


@pytest.mark.parametrize(
    "command",
    [["bash", "-c", "trap : EXIT; echo ready; read line"],  # catches it, and dies of it tidily
     [sys.executable, "-c", f"import signal; signal.signal(signal.SIGUSR2, exit)\n{BARE}"]],
    ids=["shell", "python"],
)  # fmt: skip
def test_a_process_with_a_handler_of_its_own_is_refused_and_lives(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]} here")
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    server = start(HUNG, str(tmp_path))
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        assert signals.catches(other.pid)
        assert cli.main(["dump", "--pid", str(other.pid)]) == 3
        said = capsys.readouterr().err
        assert str(server.pid) in said.partition("Guarded processes here: ")[2]
        time.sleep(0.1)
        assert other.poll() is None
    finally:
        for process in (other, server):
            process.kill()
            process.communicate()


def test_that_process_would_have_died(bare: "subprocess.Popen[str]") -> None:
    os.kill(bare.pid, signal.SIGUSR2)
    assert bare.wait() == -signal.SIGUSR2


def test_what_to_do_is_said_where_no_process_is_guarded(tmp_path: Path) -> None:
    for pid, thread in (("5", "5"), ("7", "7"), ("7", "9")):  # 5 is the command that asks
        task = tmp_path / pid / "task" / thread
        task.mkdir(parents=True)
        (task / "comm").write_text("ddtree-guard\n")
        assert signals.guarded(tmp_path) == ([] if thread == pid else [7])


@pytest.mark.parametrize("pid", ["0", "-1", "4194305"])
def test_no_such_process_is_a_sentence(pid: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dump", f"--pid={pid}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_status_without_the_mask_is_refused(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text("Name:\tx\n")
    with pytest.raises(IncompatibleError, match="SigCgt was expected"):
        signals.catches(7, tmp_path)
    with pytest.raises(UsageError, match="no process with id 8"):
        signals.catches(8, tmp_path)


def test_installing_chains_and_can_be_undone() -> None:
    calls: list[str] = []
    before = signal.signal(signal.SIGUSR2, lambda *_: calls.append("before"))
    try:
        undo = signals.install(lambda: calls.append("ours"))
        assert signals.catches(os.getpid())
        signal.raise_signal(signal.SIGUSR2)
        assert calls == ["ours", "before"]
        assert undo()
        signal.raise_signal(signal.SIGUSR2)
        assert calls == ["ours", "before", "before"]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_handler_that_came_after_ours_is_left_in_place() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    try:
        undo = signals.install(lambda: None)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        assert not undo()
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)
