"""The trails of the requests of one process: bounded in memory, an hour of them on disk.

A request that has been idle for a while is appended to `trail_<rank>_pid<p>.jsonl` in the run
folder and forgotten. A file that is an hour old becomes `...jsonl.old`, in place of the last one,
so one to two hours are kept. What cannot be written is counted and kept out of memory all the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_guard.dump.trail import TRAIL_SCHEMA, Trail

KEEP = 8192  # requests in memory
IDLE_S = 60.0
SPAN_S = 3600.0
MAX_FILE = 64 << 20
IN_DUMP = 512  # trails of a dump, the most recent ones


@dataclass(slots=True)
class _Steady:
    """Steps of one width in a row for the same requests, not yet in their trails."""

    rids: tuple[str, ...] = ()
    w: int = 0
    trails: Sequence[Trail] = ()
    steps: int = 0
    checked: int = 0
    last: float = 0.0


@dataclass(slots=True)
class _Live:
    """A request in memory: its trail, and the run of one token that it is in."""

    trail: Trail
    token: int = -1
    length: int = 0


class Trails:
    """Trails by request id, in the order in which they came. `lost` counts those not written."""

    def __init__(
        self,
        folder: Path | None = None,
        name: str = "TP0",
        hide: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
        keep: int = KEEP,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`hide` redacts the JSON form of a trail before it is written."""
        self.name = name
        safe = re.sub(r"[^A-Za-z0-9.-]+", "-", name)
        self.path = None if folder is None else folder / f"trail_{safe}_pid{os.getpid()}.jsonl"
        self.hide = hide
        self.keep = keep
        self.clock = clock
        self.lost = 0
        self._live: dict[str, _Live] = {}
        self._steady = _Steady()
        self._waiting: list[Trail] = []  # pushed out, to be written by the next sweep
        self._lock = threading.Lock()
        self._began: float | None = None

    def __len__(self) -> int:
        return len(self._live)

    def get(self, rid: str) -> Trail | None:
        """The trail of a request that is in memory."""
        with self._lock:
            self._settle()
            live = self._live.get(rid)
        return None if live is None else live.trail

    def _entry(self, rid: str) -> _Live:
        live = self._live.get(rid)
        return self._new(rid) if live is None else live

    def _new(self, rid: str) -> _Live:
        if len(self._live) >= self.keep:  # one that goes on begins anew; its parts add up
            self._settle()
            self._waiting.append(self._live.pop(next(iter(self._live))).trail)
            self.lost += len(self._waiting) > self.keep
            del self._waiting[: -self.keep]
        live = self._live[rid] = _Live(Trail(rid, first=self.clock()))
        return live

    def ran(self, rids: Sequence[str], w: int, checked: bool) -> None:
        """A verify step of width w ran for these requests."""
        with self._lock:
            steady = self._steady
            if w != steady.w or rids != steady.rids:
                self._settle()
                trails = [self._entry(rid).trail for rid in rids]
                steady = self._steady = _Steady(tuple(rids), w, trails)
            steady.steps += 1
            steady.checked += checked
            steady.last = self.clock()

    def _settle(self) -> None:
        """Add the steps of the batch that runs to its trails; the next one looks them up again."""
        steady, self._steady = self._steady, _Steady()
        for trail in steady.trails if steady.steps else ():
            trail.steps += steady.steps
            trail.checked += steady.checked
            trail.widths[steady.w] = trail.widths.get(steady.w, 0) + steady.steps
            trail.last = steady.last

    def hit(self, rids: Sequence[str], rule: str) -> None:
        """A rule was broken in a step of these requests."""
        with self._lock:
            for rid in rids:
                rules = self._entry(rid).trail.rules
                rules[rule] = rules.get(rule, 0) + 1

    def accepted(self, rids: Sequence[str], tokens: Sequence[Sequence[int]]) -> list[int]:
        """A step committed these tokens, per request. Returns the length of the run of one token
        that each request is in.
        """
        known, runs = self._live.get, []
        with self._lock:
            for rid, mine in zip(rids, tokens, strict=False):
                live = known(rid) or self._new(rid)
                trail, last, length = live.trail, live.token, live.length
                count = len(mine)
                trail.accept[count] = trail.accept.get(count, 0) + 1
                for token in mine:
                    length = length + 1 if token == last else 1
                    last = token
                    if length > trail.run:
                        trail.run = length
                live.token, live.length = last, length
                runs.append(length)
        return runs

    def taint(self, rid: str) -> None:
        """The request's prefix holds KV of a step with a finding."""
        with self._lock:
            self._entry(rid).trail.tainted = True

    def recent(self, count: int = IN_DUMP) -> list[dict[str, Any]]:
        """The JSON forms of the requests that were active last, newest first."""
        with self._lock:
            self._settle()
            kept = sorted((live.trail for live in self._live.values()), key=lambda t: -t.last)
            return [trail.as_json() for trail in kept[:count]]

    def sweep(self, idle_s: float = IDLE_S) -> list[Trail]:
        """Write and forget the requests that have been idle for `idle_s` seconds. Returns them."""
        limit = self.clock() - idle_s
        with self._lock:
            self._settle()
            idle = [rid for rid, live in self._live.items() if live.trail.last <= limit]
            gone = self._waiting + [self._live.pop(rid).trail for rid in idle]
            self._waiting = []
        self._write(gone)
        return gone

    def _write(self, trails: Sequence[Trail]) -> None:
        """Append to the file; what fails is counted in `lost` and never raised."""
        if not trails or self.path is None:
            return
        values = [trail.as_json() for trail in trails]
        if self.hide is not None:
            values = [self.hide(value) for value in values]
        redacted = self.hide is not None
        lines = [{"schema": TRAIL_SCHEMA, "redacted": redacted, "request": v} for v in values]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        try:
            self._append(self.path, text.encode())
        except OSError:
            self.lost += len(trails)

    def _append(self, path: Path, data: bytes) -> None:
        for folder in (path.parent.parent, path.parent):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        now = self.clock()
        if self._began is not None and now - self._began >= SPAN_S:
            with contextlib.suppress(FileNotFoundError):
                os.replace(path, path.with_name(f"{path.name}.old"))
            self._began = None
        if self._began is None:
            self._began = now
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            if os.fstat(descriptor).st_size + len(data) > MAX_FILE:
                raise OSError("the trail file is full")
            os.write(descriptor, data)
        finally:
            os.close(descriptor)
