"""What is new since the last look: findings, steps, and processes that are not armed.

A fence asks every live process to finish the steps in flight and to write; what it then holds was
caused by what ran before. A finding that comes later still names its step, by which it is charged.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ddtree_guard.errors import DumpError
from ddtree_guard.evidence import (
    ARMED,
    FENCE,
    FILE,
    STARTING,
    Hit,
    Process,
    alive,
    read_process,
    runs,
)
from ddtree_guard.pytest_plugin.local import Local
from ddtree_guard.pytest_plugin.servers import Servers, sentence, unguarded

ANSWER_S = 10.0  # how long a fence waits for a process; each answers within 2 s unless it hangs
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Charge:
    """A finding and where it came from. `cause` is the test whose step it was, if an earlier one.

    `count` is above 1 for repeats of which only the number is known.
    """

    hit: Hit
    process: str
    cause: str | None = None
    count: int = 1


@dataclass(slots=True)
class News:
    """What happened between two looks."""

    charges: list[Charge] = field(default_factory=list)
    verify_steps: int = 0
    steps_checked: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def add(self, other: News) -> None:
        """Take in what another look saw."""
        self.charges += other.charges
        self.verify_steps += other.verify_steps
        self.steps_checked += other.steps_checked
        self.skipped += other.skipped
        self.problems += other.problems


@dataclass(slots=True)
class _Seen:
    """How far a process was read, and up to which step whose test is to blame."""

    hits: int = 0
    verify_steps: int = 0
    steps_checked: int = 0
    found: Counter[str] = field(default_factory=Counter)
    latent: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    mark: int = 0
    told: str = ""


class Collector:
    """Reads this process and the evidence files of its children."""

    def __init__(self, folder: Path, local: Local, servers: Servers) -> None:
        self.folder, self.local, self.servers = folder, local, servers
        self._files: dict[Path, tuple[tuple[int, int], Process]] = {}
        self._seen: dict[Path, _Seen] = {}
        self._known: set[Path] = set()  # processes of servers of earlier tests
        self._named: set[Path] = set()  # processes whose problem was told
        self._faults: set[str] = set()

    def processes(self) -> list[Process]:
        """Every process, this one first."""
        found = [self.local.current()]
        for path in sorted(self.folder.glob("*/evidence_*.jsonl")):
            if FILE.fullmatch(path.name):
                found += self._read(path)
        return found

    def _read(self, path: Path) -> list[Process]:
        try:
            kind = path.lstat()
            key = (kind.st_size, kind.st_mtime_ns)
            if self._files.get(path, ((0, 0), None))[0] != key:
                self._files[path] = (key, read_process(path))
            return [self._files[path][1]]
        except FileNotFoundError:
            return []
        except DumpError as error:
            self._faults.add(str(error))
            return []

    def fence(self) -> list[str]:
        """Wait until every live process has accounted for its steps. Who did not answer, if any."""
        waiting = [p for p in self.processes()[1:] if p.state == ARMED and alive(p)]
        if not waiting:
            return []
        token = uuid.uuid4().hex
        part = self.folder / f".{FENCE}-{token}"
        part.write_text(token)
        os.replace(part, self.folder / FENCE)
        end = time.monotonic() + ANSWER_S
        paths = {p.path for p in waiting}
        while time.monotonic() < end:
            now = [p for p in self.processes()[1:] if p.path in paths and token not in p.fences]
            waiting = [p for p in now if alive(p)]
            if not waiting:
                return []
            time.sleep(POLL_S)
        return [
            f"{p.name} did not account for its steps within {ANSWER_S:.0f} s: it hangs, or cannot "
            f"write to {self.folder}; {p.steps_checked} of {p.verify_steps} steps are known"
            for p in waiting
        ]

    def mark(self, test: str) -> None:
        """Steps that servers have begun so far are this test's. Nothing is late in this process."""
        for process in self.processes()[1:]:
            seen = self._seen.setdefault(process.path, _Seen())
            if process.steps > seen.mark:
                seen.mark, seen.told = process.steps, test

    def news(self, ended: bool = False) -> News:
        """What is new. With `ended`, also who should have been guarded and was not."""
        processes, news = self.processes(), News()
        for process in processes:
            self._compare(process, news)
        if ended:
            news.problems += self._not_guarded(processes)
        news.problems += sorted(self._faults)
        self._faults.clear()
        return news

    def _not_guarded(self, processes: list[Process]) -> list[str]:
        """Processes that cannot vouch for their steps: once, or as long as they run."""
        new = [p for p in processes[1:] if p.path not in self._known]
        self._known |= {p.path for p in new}
        starts = unguarded(self.servers.take(), new)
        self.servers.keep(starts)
        told = [sentence(start) for start in starts]
        for process in processes[1:]:
            first = process.path not in self._named
            if process.problem and (first or runs(process.pid)):
                if process.state == STARTING and runs(process.pid):
                    continue  # it is still loading
                self._named.add(process.path)
                told.append(f"NOT GUARDED: {process.name}: {process.problem}")
        return told

    def _compare(self, process: Process, news: News) -> None:
        seen = self._seen.setdefault(process.path, _Seen())
        new = [hit for hit in process.hits if hit.number > seen.hits]
        for latent in (False, True):
            mine = [hit for hit in new if hit.latent == latent]
            counts = (process.latent - seen.latent) if latent else (process.found - seen.found)
            news.charges += _charges(mine, counts, process, seen, latent)
        news.verify_steps += process.verify_steps - seen.verify_steps
        news.steps_checked += process.steps_checked - seen.steps_checked
        news.skipped += process.skipped - seen.skipped
        faults = process.faults - seen.faults
        if faults and process.path in self._files:  # this process tells its own as unchecked steps
            news.problems.append(f"{process.name}: {process.distrust}")
        seen.faults = process.faults.copy()
        seen.hits = max([seen.hits, *(hit.number for hit in new)])
        seen.verify_steps, seen.steps_checked = process.verify_steps, process.steps_checked
        seen.found, seen.latent = process.found.copy(), process.latent.copy()
        seen.skipped = process.skipped.copy()


def _charges(
    hits: list[Hit], counts: Counter[str], process: Process, seen: _Seen, latent: bool
) -> list[Charge]:
    """The findings in words, and those of which only the number is known."""
    found = []
    for hit in hits:
        cause = seen.told if 0 < hit.step <= seen.mark else None
        found.append(Charge(hit, process.name, cause))
    for rule, count in counts.items():
        more = count - sum(hit.rule == rule for hit in hits)
        if more > 0:
            like = next((h for h in reversed([*process.hits, *hits]) if h.rule == rule), None)
            text = f"{rule}: {more} more, counted only"
            if like is None:  # a storm of another rule has taken its words away
                like = Hit(rule, 0, latent, text, text, text, None, process.last, 0)
            found.append(Charge(_again(like, text), process.name, None, more))
    return found


def _again(hit: Hit, text: str) -> Hit:
    return Hit(hit.rule, hit.step, hit.latent, hit.headline, text, text, hit.dump, hit.at, 0)
