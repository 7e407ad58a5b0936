"""SIGUSR2: ask a running scheduler for a dump, without harm to a process that has no handler.

A process without a handler dies of SIGUSR2, and so do some with one: a shell catches it to tidy
up. The handler is installed in scheduler processes only and calls whatever was there before; the
sender first looks for it, and for the name of a thread that only a guarded process has.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from ddtree_guard.errors import IncompatibleError, UsageError

SIGNAL = signal.SIGUSR2
SAME_S = 0.5  # a signal that arrives twice within this is one
MARK = "ddtree-guard"  # name of a thread; the kernel keeps 15 bytes
_PR_SET_NAME = 15


def install(asked: Callable[[], None]) -> Callable[[], bool]:
    """Call `asked` on SIGUSR2, and the handler that was there. Returns what undoes it.

    Python runs handlers between two instructions of the main thread, so never while that waits for
    a device that hangs, when a dump is wanted most. Where nobody else has asked for wake-ups, a
    thread of ours is therefore woken by the signal itself. `asked` must only leave a note. Raises
    ValueError outside the main thread, as `signal.signal` does.
    """
    before: Any = signal.getsignal(SIGNAL)
    once = _Once(asked)

    def handler(number: int, frame: FrameType | None) -> None:
        once()
        if callable(before):
            before(number, frame)

    signal.signal(SIGNAL, handler)
    # Without this a blocking read of the server would fail with EINTR in C code.
    signal.siginterrupt(SIGNAL, False)
    wake = _Wake.start(once)

    def undo() -> bool:
        if wake is not None:
            wake.stop()
        if signal.getsignal(SIGNAL) is not handler:
            return False  # somebody chained after us; leave theirs in place
        signal.signal(SIGNAL, before if before is not None else signal.SIG_DFL)
        return True

    return undo


def mark() -> None:
    """Name the calling thread, by which a sender knows this process."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, MARK.encode(), 0, 0, 0)


class _Once:
    """One call for the two ways on which a signal arrives."""

    def __init__(self, asked: Callable[[], None]) -> None:
        self.asked, self.last = asked, -SAME_S

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self.last >= SAME_S:
            self.last = now
            self.asked()


class _Wake:
    """A thread that reads the numbers of signals from the pipe that Python's C handler writes."""

    def __init__(self, asked: Callable[[], None], reads: int, writes: int) -> None:
        self.asked, self.reads, self.writes = asked, reads, writes
        self.thread = threading.Thread(target=self._read, name="ddtree-guard-signal", daemon=True)

    @classmethod
    def start(cls, asked: Callable[[], None]) -> _Wake | None:
        """None where the process's one wake-up is taken, by an event loop for example."""
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        theirs = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        if theirs != -1:
            signal.set_wakeup_fd(theirs)
            os.close(reads)
            os.close(writes)
            return None
        wake = cls(asked, reads, writes)
        wake.thread.start()
        return wake

    def _read(self) -> None:
        while numbers := os.read(self.reads, 64):
            if SIGNAL in numbers:
                self.asked()
        os.close(self.reads)

    def stop(self) -> None:
        """Give the wake-up back, unless somebody has taken it since, and end the thread."""
        now = signal.set_wakeup_fd(-1)
        if now != self.writes:
            signal.set_wakeup_fd(now)
        os.close(self.writes)
        self.thread.join(timeout=5)


def catches(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether the process has a handler for SIGUSR2, by SigCgt of its status.

    Raises UsageError for a process that is not there.
    """
    try:
        text = (proc / str(pid) / "status").read_text(errors="replace")
    except (OSError, ValueError):
        raise UsageError(
            f"no process with id {pid} was found; give the id of a scheduler process, for "
            "example from `pgrep -f sglang::scheduler`."
        ) from None
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    try:
        caught = int(fields["SigCgt"].strip(), 16)
    except (KeyError, ValueError):
        raise IncompatibleError(
            f"SigCgt was expected in /proc/{pid}/status, found none; the process was left alone."
        ) from None
    return bool(caught >> (SIGNAL - 1) & 1)


def marked(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a guard records in this process. Its main thread says nothing: that of each
    `ddtree-guard` command has this name as well.
    """
    for name in proc.glob(f"{pid}/task/*/comm"):
        with contextlib.suppress(OSError, ValueError):
            if name.read_text().strip() == MARK and name.parent.name != str(pid):
                return True
    return False


def guarded(proc: Path = Path("/proc")) -> list[int]:
    """The processes of this machine in which a guard records."""
    return sorted(int(p.name) for p in proc.glob("[0-9]*") if marked(int(p.name), proc))


def ask(pid: int) -> None:
    """Send SIGUSR2 to a process in which a guard has a handler for it.

    Raises IncompatibleError for one that has none and might die, UsageError for one that is not
    there or belongs to somebody else.
    """
    if pid <= 0:
        raise UsageError(f"a process id is a positive number, found {pid}.")
    if not (catches(pid) and marked(pid)):
        there = ", ".join(map(str, guarded()))
        raise IncompatibleError(
            f"process {pid} was expected to have the guard's handler for SIGUSR2, found none; the "
            "signal might end it, so it was left alone. "
            + (f"Guarded processes here: {there}." if there else "No process here is guarded: give "
               "a scheduler process of a server that runs with SGLANG_DDTREE_GUARD=log.")
        )  # fmt: skip
    try:
        os.kill(pid, SIGNAL)
    except ProcessLookupError:
        raise UsageError(f"process {pid} has ended meanwhile; give another one.") from None
    except PermissionError:
        raise UsageError(
            f"process {pid} belongs to another user; run the command as that user."
        ) from None
