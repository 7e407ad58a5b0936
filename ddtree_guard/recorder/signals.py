"""SIGUSR2: ask a running scheduler for a dump, without harm to a process that has no handler.

A process without a handler dies of SIGUSR2. The handler is installed in scheduler processes only
and calls whatever was there before; the sender reads the receiver's mask first.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from ddtree_guard.errors import IncompatibleError, UsageError

SIGNAL = signal.SIGUSR2


def install(asked: Callable[[], None]) -> Callable[[], bool]:
    """Call `asked` on SIGUSR2, then the handler that was there. Returns what undoes it.

    `asked` runs between two instructions of the main thread, so it must only leave a note. Raises
    ValueError outside the main thread, as `signal.signal` does.
    """
    before: Any = signal.getsignal(SIGNAL)

    def handler(number: int, frame: FrameType | None) -> None:
        asked()
        if callable(before):
            before(number, frame)

    signal.signal(SIGNAL, handler)
    # Without this a blocking read of the server would fail with EINTR in C code.
    signal.siginterrupt(SIGNAL, False)

    def undo() -> bool:
        if signal.getsignal(SIGNAL) is not handler:
            return False  # somebody chained after us; leave theirs in place
        signal.signal(SIGNAL, before if before is not None else signal.SIG_DFL)
        return True

    return undo


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


def ask(pid: int) -> None:
    """Send SIGUSR2 to a process that has a handler for it.

    Raises IncompatibleError for one that has none and would die, UsageError for one that is not
    there or belongs to somebody else.
    """
    if pid <= 0:
        raise UsageError(f"a process id is a positive number, found {pid}.")
    if not catches(pid):
        raise IncompatibleError(
            f"process {pid} was expected to have a handler for SIGUSR2, found none; the signal "
            "would end it, so it was left alone. Give a scheduler process of a server that runs "
            "with SGLANG_DDTREE_GUARD=log."
        )
    try:
        os.kill(pid, SIGNAL)
    except ProcessLookupError:
        raise UsageError(f"process {pid} has ended meanwhile; give another one.") from None
    except PermissionError:
        raise UsageError(
            f"process {pid} belongs to another user; run the command as that user."
        ) from None
