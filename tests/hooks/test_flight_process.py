"""The flight recorder and its process: signal, crash, ranks of a job, and no harm to the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_guard import cli
from ddtree_guard.config import Config, Mode
from ddtree_guard.dump.find import find_dumps
from ddtree_guard.dump.read import Dump
from ddtree_guard.hooks import arm, flight
from ddtree_guard.metrics import Metrics
from ddtree_guard.testing.cases import small_case
from ddtree_guard.testing.dumps import awaited, dumps_of
from ddtree_guard.testing.on_demand import plant_next

pytestmark = pytest.mark.sglang


@pytest.fixture
def start(serve: Callable[..., Any]) -> Callable[..., Any]:
    """Starts guarded servers, with the host's checker."""
    return lambda **config: serve(small_case(), **config)


class Shared:
    """A store of a job, as far as a key takes one."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.held.setdefault(key, desired).encode()


def test_ranks_of_a_job_give_a_request_one_name(tmp_path: Path) -> None:
    store, names = Shared(), set()
    for rank in ("TP0", "TP1"):
        made = flight.Flight(Config(dump_dir=tmp_path), "run", rank, Metrics(rank))
        made.start(store)
        names.add(made.name("r0"))
        made.stop()
    assert len(names) == 1
    alone = flight.Flight(Config(dump_dir=tmp_path), "run", "TP0", Metrics("TP0"))
    assert alone.name("r0") not in names


def test_a_store_that_fails_costs_the_common_key_only(tmp_path: Path) -> None:
    made = flight.Flight(Config(dump_dir=tmp_path), "run", "TP0", Metrics("TP0"))
    made.start(object())  # type: ignore[arg-type]
    assert made.size == "8MiB"
    made.stop()
    assert made.size == "off"


# --- the process ----------------------------------------------------------------------------------
CHILD = """
import sys, time
from pathlib import Path
from ddtree_guard.config import Config, Mode
from ddtree_guard.testing.cases import small_case
from ddtree_guard.testing.server import MiniServer
server = MiniServer(small_case(), "auto")
server.arm(Config(mode=Mode(sys.argv[2]), dump_dir=Path(sys.argv[1])))
for _ in range(5):
    server.step()
print("serving", flush=True)
for line in sys.stdin:
    server.step()
    print("stepped", flush=True)
"""


def test_sigusr2_of_a_running_server_writes_a_dump(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CHILD, str(tmp_path), "log"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "serving\n"
        assert cli.main(["dump", "--pid", str(child.pid)]) == 0
        dump = awaited(tmp_path, "signal")
        child.stdin.write("go on\n")
        child.stdin.flush()
        assert child.stdout.readline() == "stepped\n"  # and the server lives
    finally:
        child.kill()
        child.communicate()
    assert dump.step_ids() == [1, 2, 3, 4, 5]
    assert cli.main(["check", str(dump.path)]) == 0
    assert any("ring=8MiB" in line for line in dump.doctor)


def test_a_crash_of_the_event_loop_is_on_disk_before_it_is_handled(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddtree_guard.testing.fakes import sglang

    try:
        scheduler = sglang("managers.scheduler").Scheduler
    except ImportError as error:  # 0.5.12 wants its compiled kernels there
        pytest.skip(str(error))
    steps: list[Callable[[], Any]] = []

    def run_event_loop(self: Any) -> None:
        steps[0]()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(scheduler, "run_event_loop", run_event_loop)
    server, guard = start()
    steps.append(server.step)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        scheduler.run_event_loop(SimpleNamespace())
    (dump,) = dumps_of(tmp_path, "crash")
    assert (dump.trigger["why"], dump.step_ids()) == ("RuntimeError", [1])
    guard.remove()
    assert scheduler.run_event_loop is run_event_loop


def test_raise_writes_one_dump_of_its_finding(start: Callable[..., Any], tmp_path: Path) -> None:
    from ddtree_guard.errors import Violation

    server, guard = start(mode=Mode.RAISE)
    plant_next(guard, "W3")
    with pytest.raises(Violation), guard.flight.crash_path():
        server.step()
    assert [dump.trigger["kind"] for dump in map(Dump, find_dumps(tmp_path))] == ["finding"]


def test_the_handler_comes_when_armed_and_goes_with_the_guard(start: Callable[..., Any]) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    _, guard = start()
    assert signal.getsignal(signal.SIGUSR2) is not before
    assert _threads() == 1
    guard.remove()
    assert signal.getsignal(signal.SIGUSR2) is before
    assert _threads() == 0


def _threads() -> int:
    return sum(thread.name == "ddtree-guard-recorder" for thread in threading.enumerate())


def test_a_server_that_is_not_armed_gets_no_handler(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    monkeypatch.setattr(arm, "self_test", lambda guard: "it failed")
    start()
    assert signal.getsignal(signal.SIGUSR2) is before
    assert _threads() == 0
    assert any("ring=off" in text for text in caplog.messages)


def test_off_means_no_handler_and_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtree_guard.hooks import plugin

    before = signal.getsignal(signal.SIGUSR2)
    plugin.activate({"SGLANG_DDTREE_GUARD": "off"})
    assert signal.getsignal(signal.SIGUSR2) is before
    assert _threads() == 0
    plugin.unload()


def test_outside_the_main_thread_only_the_signal_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = flight.Flight(Config(dump_dir=tmp_path), "run", "TP0", Metrics("TP0"))
    thread = threading.Thread(target=made.start)
    thread.start()
    thread.join()
    assert made.size == "8MiB"
    assert any("SIGUSR2 asks for no dump here" in text for text in caplog.messages)
    made.stop()


# --- no harm --------------------------------------------------------------------------------------
@pytest.mark.parametrize("broken", ["put", "ran", "accepted", "finding"])
def test_faults_of_the_recorder_cost_no_step_and_no_check(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    server, guard = start()
    monkeypatch.setattr(guard.flight.recorder, broken, lambda *args: 1 / 0)
    plant_next(guard, "W3", stays=True)
    for _ in range(10):
        server.step()
    assert len(server.sent) == 10
    assert guard.coverage.ratio == 1.0
    assert guard.coverage.findings > 0
    assert not guard.fuses.faults
    assert guard.flight.recorder.faults == flight.LIMIT
