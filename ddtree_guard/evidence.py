"""What a guarded process leaves on disk for machines: was it armed, how many steps, what was found.

`<dumps>/<run>/evidence_<rank>_pid<p>.jsonl`, one JSON object a line, appended in order, so that a
process that is killed still counts what it had written. `hooks.evidence` writes it; the pytest
plugin and `ddtree-guard ci-report` read it here. The text of a finding is that of the server's log.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree_guard.errors import DumpError, not_yours

SCHEMA = "ddtree-guard-evidence/1"
FENCE = "fence"  # file in the folder of dumps: a token that every process answers
FILE = re.compile(r"evidence_[A-Za-z0-9.-]+_pid\d+\.jsonl")
MAX_BYTES = 1 << 20  # of a file; the writer starts anew before
MAX_FILES = 4096
STARTING, ARMED, IDLE, NOT_ARMED = "starting", "armed", "idle", "not armed"
_COUNTS = ("skipped", "faults", "found", "latent")
_NUMBERS = ("steps", "verify_steps", "steps_checked", "open")


@dataclass(frozen=True, slots=True)
class Hit:
    """One finding in words. `step` is the process's own count of verify steps; 0 is its start."""

    rule: str
    step: int
    latent: bool
    headline: str
    text: str
    line: str
    dump: str | None
    at: float
    number: int


@dataclass(slots=True)
class Process:
    """One guarded process, as far as it has written. Counts are over its whole life.

    `found` and `latent` count findings by rule; `hits` holds the words of the first ones of each.
    `skipped` counts verify steps that were not checked, by reason; `faults` errors of the guard
    itself, by site. `fences` maps a token to the number of steps that had begun when it was
    answered. `world` and `armed_ranks` are the whole job's; `missing` says which ranks are not.
    """

    path: Path
    pid: int = 0
    ppid: int = 0
    rank: str = "-"
    mode: str = ""
    release: str = ""
    began: float = 0.0
    last: float = 0.0
    state: str = STARTING
    why: str = ""
    boot: str = ""
    rules: int = 0
    world: int = 1
    armed_ranks: int = 0
    missing: list[str] = field(default_factory=list)
    steps: int = 0
    verify_steps: int = 0
    steps_checked: int = 0
    open: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    latent: Counter[str] = field(default_factory=Counter)
    hits: list[Hit] = field(default_factory=list)
    fences: dict[str, int] = field(default_factory=dict)
    ended: bool = False

    @property
    def name(self) -> str:
        """How the process is called in a report."""
        return f"{self.path.parent.name} {self.rank} pid {self.pid}"

    @property
    def problem(self) -> str:
        """Why this process cannot vouch for its steps; empty if it was armed, or had none to do."""
        if self.state == STARTING:
            return "it began to arm the guard and never finished: it ended, or is still loading"
        if self.state == NOT_ARMED:
            return self.why or "no reason was written"
        if self.state == ARMED and self.missing:
            return f"{self.armed_ranks} of {self.world} ranks are armed: {'; '.join(self.missing)}"
        if self.state == ARMED and not self.rules:
            return "it is armed with no rule at all; see SGLANG_DDTREE_GUARD_RULES"
        return ""

    @property
    def distrust(self) -> str:
        """Why its steps may have run unchecked although it is armed; empty if nothing says so."""
        if self.faults:
            sites = ", ".join(f"{site} ({n}x)" for site, n in sorted(self.faults.items()))
            return f"the guard itself failed at {sites}; see the server's log and report it"
        lost = self.verify_steps - self.steps_checked - sum(self.skipped.values()) - self.open
        return f"{lost} of {self.verify_steps} steps unaccounted for" if lost > 0 else ""


def read_processes(root: Path | str, since: float = 0.0) -> list[Process]:
    """Every process that left evidence in `root` or its run folders, oldest first.

    `since` (seconds since the epoch) leaves out processes that ended writing before. Raises
    DumpError for a folder or a file that cannot be read, or is not what this module describes.
    """
    found = [read_process(path) for path in _files(Path(root))]
    return sorted((p for p in found if p.last >= since), key=lambda p: (p.began, p.rank, p.pid))


def _files(root: Path) -> Iterable[Path]:
    found: list[Path] = []
    try:
        folders = [root]
        with os.scandir(root) as entries:
            folders += [root / e.name for e in entries if e.is_dir(follow_symlinks=False)]
        for folder in folders:
            with os.scandir(folder) as entries:
                found += [folder / e.name for e in entries if FILE.fullmatch(e.name)]
    except PermissionError as error:
        raise DumpError(not_yours(error.filename or root)) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise DumpError(
            f"{str(root)!r} is not a folder of evidence ({why}); give the one that "
            "SGLANG_DDTREE_GUARD_DUMP_DIR names."
        ) from None
    if len(found) > MAX_FILES:
        raise DumpError(f"{str(root)!r} holds more than {MAX_FILES} evidence files.")
    return found


def read_process(path: Path) -> Process:
    """What one file says. A last line without its end is left out: its process was killed."""
    process = Process(path)
    lines = _text(path).split("\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            _take(process, json.loads(line))
        except (
            ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError
        ) as error:  # fmt: skip
            raise DumpError(
                f"{path}, line {number}: expected evidence of {SCHEMA}, found "
                f"{type(error).__name__} ({str(error)[:80]}); remove the file if it is foreign."
            ) from None
    if not process.pid:
        process.why = "its evidence file is empty"
    for latent, counts in ((False, process.found), (True, process.latent)):
        told = Counter(hit.rule for hit in process.hits if hit.latent == latent)
        counts |= told  # a full disk or a kill may cut off the counts behind a finding
    return process


def _text(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            kind = os.fstat(file.fileno())
            if not stat.S_ISREG(kind.st_mode) or kind.st_size > 2 * MAX_BYTES:
                raise DumpError(f"{path} is no evidence file: too large, or not a plain file.")
            return file.read(2 * MAX_BYTES).decode(errors="replace")
    except OSError as error:
        raise DumpError(f"{path} cannot be read ({error.strerror}).") from None


def _take(process: Process, line: dict[str, Any]) -> None:
    """Add one line to what is known."""
    kind = line["kind"]
    at = float(line.get("at", 0.0))
    if not math.isfinite(at):
        raise ValueError("at is no time")
    process.last = max(process.last, at)
    if kind == "process":
        if process.pid:
            raise ValueError("a second process in one file")
        if line["schema"] != SCHEMA:
            raise ValueError(f"schema {str(line['schema'])[:40]}")
        process.pid, process.ppid = int(line["pid"]), int(line["ppid"])
        process.rank, process.mode = str(line["rank"]), str(line["mode"])
        process.release, process.began = str(line["release"]), float(line["at"])
    elif kind == "state":
        _take_state(process, line)
    elif kind == "finding":
        process.hits.append(_hit(line))
    elif kind in ("steps", "fence"):
        _take_counts(process, line)
        if kind == "fence":
            process.fences[str(line["token"])] = int(line["steps"])
    elif kind == "end":
        process.ended = True
    else:
        raise ValueError(f"kind {str(kind)[:40]}")


def _take_state(process: Process, line: dict[str, Any]) -> None:
    if line["state"] not in (STARTING, ARMED, IDLE, NOT_ARMED):
        raise ValueError(f"state {str(line['state'])[:40]}")
    process.state, process.why = line["state"], str(line["why"])
    process.boot, process.rules = str(line.get("boot", "")), int(line.get("rules", 0))
    process.world, process.armed_ranks = int(line.get("world", 1)), int(line.get("armed", 0))
    process.missing = [str(why) for why in line.get("missing", [])]


def _take_counts(process: Process, line: dict[str, Any]) -> None:
    for name in _NUMBERS:
        setattr(process, name, _count(name, line[name]))
    for name in _COUNTS:
        counts = {str(key): _count(name, value) for key, value in line[name].items()}
        setattr(process, name, Counter(counts))


def _count(name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{name} is no count")
    return value


def _hit(line: dict[str, Any]) -> Hit:
    dump = line["dump"]
    return Hit(
        rule=str(line["rule"]),
        step=int(line["step"]),
        latent=bool(line["latent"]),
        headline=str(line["headline"]),
        text=str(line["text"]),
        line=str(line["line"]),
        dump=None if dump is None else str(dump),
        at=float(line["at"]),
        number=int(line["number"]),
    )


def alive(process: Process) -> bool:
    """Whether the process still runs and still writes."""
    return not process.ended and process.state != NOT_ARMED and runs(process.pid)


def runs(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie (Linux)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"
