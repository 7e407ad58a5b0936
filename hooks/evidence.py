"""Writes a process's evidence (`ddtree_guard.evidence`) from a thread of its own.

The serving thread only appends to a queue. The thread wakes once a second, looks at one file for a
fence, and writes what is new: findings at once, counts once a second and when steps have come to
rest. Where somebody sets fences it wakes ten times a second. A fence is answered when no step is in
flight, or after two seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import logging
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddtree_guard import render
from ddtree_guard.config import Config, Mode
from ddtree_guard.evidence import FENCE, FILE, MAX_BYTES, NOT_ARMED, SCHEMA
from ddtree_guard.rule import Finding
from ddtree_guard.step import Step

log = logging.getLogger("ddtree_guard")
TICK_S, PERIOD_S = 0.1, 1.0  # a thread that wakes takes the interpreter from the serving one
WAIT_S = 2.0  # for steps in flight, before a fence is answered all the same
QUIET = 2  # ticks without a change before a process counts as quiet
TEXTS = 8  # findings of a rule that are kept in words, between two fences
KEPT = 256  # findings that survive a new beginning of the file
OLD_S, SPARED = 7 * 86_400, 64  # files older than a week go, but for the newest ones

Counters = Callable[[], Mapping[str, Any]]


class Evidence:
    """The evidence of one process. `counters` gives steps, verify_steps, steps_checked, open,
    skipped and faults; it is called from another thread than the serving one.
    """

    def __init__(
        self, config: Config, run: str, rank: str, release: str, counters: Counters | None = None
    ) -> None:
        safe = re.sub(r"[^A-Za-z0-9.-]+", "-", rank).strip("-") or "rank"
        self.path = _free(config.dump_dir / run, safe)
        self.fence = config.dump_dir / FENCE
        self.counters = counters or _nothing
        self._stops = config.mode is Mode.RAISE
        self.found: Counter[str] = Counter()
        self.latent: Counter[str] = Counter()
        self._head = {
            "kind": "process", "schema": SCHEMA, "pid": os.getpid(), "ppid": os.getppid(),
            "rank": rank, "mode": config.mode.value, "release": release, "at": _now(),
        }  # fmt: skip
        self._state: dict[str, Any] | None = None
        self._kept: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._new: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._texts: Counter[str] = Counter()
        self._number = 0
        self._size = 0
        self._written: dict[str, Any] = {}
        self._due = 0.0
        self._token = ""  # the fence that was answered last
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._ended = False
        self._thread: threading.Thread | None = None
        self._failed = False

    def begin(self) -> Evidence:
        """Write the first line and start the thread."""
        self._token = self._asked()  # what was asked of others before
        _forget_old(self.path.parent.parent)
        with self._lock:
            self._append([self._head])
        self._thread = threading.Thread(
            target=self._work, name="ddtree-guard-evidence", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)
        return self

    def state(self, state: str, why: str = "", **values: Any) -> None:
        """Write whether the process is armed, at once."""
        self._state = {"kind": "state", "state": state, "why": why, "at": _now(), **values}
        with self._lock:
            self._append([self._state])

    def finding(self, finding: Finding, step: Step, dump: Path | None, text: str) -> None:
        """Count a finding; keep its words if they are few of its rule. Waits in mode raise only."""
        (self.latent if finding.latent else self.found)[finding.rule] += 1
        self._texts[finding.rule] += 1
        if self._texts[finding.rule] > TEXTS:
            return
        self._number += 1
        self._new.append({
            "kind": "finding", "rule": finding.rule, "step": step.who.step_id,
            "latent": finding.latent, "headline": render.headline(finding), "text": text,
            "line": render.line(finding, step, dump=dump),
            "dump": None if dump is None else str(dump.absolute()),
            "at": _now(), "number": self._number,
        })  # fmt: skip
        self._wake.set()
        if self._stops and not finding.latent:
            self.flush()  # mode raise ends this process now

    def close(self) -> None:
        """End the thread and write the rest."""
        if self._ended or os.getpid() != self._head["pid"]:  # a fork that ends is another process
            return
        self._ended = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2)
        self.flush(last=True)
        atexit.unregister(self.close)

    # --- the thread -----------------------------------------------------------------------------
    def _work(self) -> None:
        before: dict[str, Any] = {}
        quiet, since = 0, 0.0
        while not self._ended:
            self._wake.wait(TICK_S if self._token or since else PERIOD_S)
            self._wake.clear()
            try:
                token = self._asked()  # before the counts: they hold every step of before the fence
                now = self._counts()
                still = now == before and not self._new
                quiet, before = (quiet + 1 if still and not now["open"] else 0), now
                if token != self._token:
                    since = since or time.monotonic()
                if since and (quiet >= QUIET or time.monotonic() - since > WAIT_S):
                    self.flush(token=token)
                    self._token, since = token, 0.0
                elif self._new or self._is_due(now, still):
                    self.flush()
            except Exception:
                if not self._failed:
                    self._failed = True
                    log.warning("ddtree_guard: the evidence thread failed", exc_info=True)

    def _is_due(self, counts: Mapping[str, Any], still: bool) -> bool:
        """Whether counts are to be written: now and then, and when steps have come to rest."""
        return counts != self._written and (still or time.monotonic() >= self._due)

    def _asked(self) -> str:
        """The token of the newest fence; empty where nobody sets any."""
        try:
            with open(self.fence, encoding="ascii", errors="replace") as file:
                return file.read(80).strip()
        except OSError:
            return ""

    def flush(self, token: str = "", last: bool = False) -> None:
        """Write new findings and counts; with a token, answer its fence."""
        with self._lock:
            lines = [self._new.popleft() for _ in range(len(self._new))]
            counts = self._counts()
            if token:
                lines.append({"kind": "fence", "token": token, "at": _now(), **counts})
                self._texts.clear()
            elif counts != self._written or lines:
                lines.append({"kind": "steps", "at": _now(), **counts})
            if last:
                lines.append({"kind": "end", "at": _now()})
            self._kept.extend(line for line in lines if line["kind"] == "finding")
            self._append(lines)
            self._written = counts
            self._due = time.monotonic() + PERIOD_S

    def _counts(self) -> dict[str, Any]:
        return {**self.counters(), "found": dict(self.found), "latent": dict(self.latent)}

    def _append(self, lines: list[dict[str, Any]]) -> None:
        """Append lines in one write. A folder that cannot be written is said once."""
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        if not data or self._failed:
            return
        try:
            if self._size + len(data) > MAX_BYTES:
                data = self._anew(lines)
            for folder in (self.path.parent.parent, self.path.parent):
                os.makedirs(folder, mode=0o700, exist_ok=True)
            _write(self.path, data, os.O_APPEND)
            self._size += len(data)
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning(
                    "ddtree_guard: no evidence is written to %s: %s; serving continues, and a test "
                    "that waits for this process will call it not armed",
                    self.path, error.strerror,
                )  # fmt: skip

    def _anew(self, lines: list[dict[str, Any]]) -> bytes:
        """Begin the file again with what still matters; returns nothing more to append."""
        rest = [line for line in lines if line["kind"] not in ("finding", "state")]
        whole = [self._head, *([self._state] if self._state else []), *self._kept, *rest]
        data = b"".join(json.dumps(line).encode() + b"\n" for line in whole)
        part = self.path.with_suffix(".part")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        _write(part, data, os.O_EXCL)
        os.replace(part, self.path)
        self._size = len(data)
        return b""


def counters_of(guard: Any) -> Counters:
    """The counters of a `runtime.ServerGuard`. A step is open until everything is said about it."""

    def read() -> Mapping[str, Any]:
        coverage = guard.coverage
        pending = coverage.verify_steps - coverage.settled + guard.running.busy
        return {
            "steps": guard.begun,
            "verify_steps": coverage.verify_steps,
            "steps_checked": coverage.steps_checked,
            "open": max(0, pending),
            "skipped": dict(coverage.skipped),
            "faults": dict(guard.fuses.faults),
        }

    return read


def note(config: Config, rank: str, release: str, state: str, why: str) -> None:
    """Evidence of a process that has no guard: one file, written once."""
    evidence = Evidence(config, f"run-{os.getppid()}", rank, release)
    evidence._append([evidence._head])
    evidence.state(state, why)


def note_not_active(config: Config, why: str, release: str) -> None:
    """The plugin could not be loaded in this process."""
    note(config, "load", release, NOT_ARMED, why)


def _forget_old(root: Path) -> None:
    """Remove the evidence of long ago, so that restarts do not fill the disk."""
    with contextlib.suppress(OSError):
        found = [(path.lstat().st_mtime, path) for path in root.glob("*/evidence_*.jsonl")]
        for when, path in sorted(found, reverse=True)[SPARED:]:
            if FILE.fullmatch(path.name) and time.time() - when > OLD_S:
                path.unlink()


def _free(folder: Path, rank: str) -> Path:
    """A name that no earlier process has: containers that restart begin with the same pids."""
    name, again = f"evidence_{rank}_pid{os.getpid()}.jsonl", 1
    while os.path.lexists(folder / name) and again < 1000:
        again += 1
        name = f"evidence_{rank}.{again}_pid{os.getpid()}.jsonl"
    return folder / name


def _write(path: Path, data: bytes, how: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | how, 0o600)
    try:
        if os.write(descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, "the disk is full")
    finally:
        os.close(descriptor)


def _now() -> float:
    return round(time.time(), 3)


def _nothing() -> Mapping[str, Any]:
    return {
        "steps": 0, "verify_steps": 0, "steps_checked": 0, "open": 0, "skipped": {}, "faults": {}
    }  # fmt: skip
