"""Keep the dumps of a root within a count and a size; the oldest go first, repeats before firsts.

The first dump of an incident (the oldest one of a process that names a rule) shows how it began,
later ones only that it lasts. So firsts go last: as many as half the count, those of the newest
runs, and in a run the earliest.

A dump leaves by a rename, so a reader sees it whole or not at all, also when the process dies in
the middle. Only folders named like a dump are ever removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path

FOLDER = re.compile(r"\d{8}T\d{6}\.\d{3}Z_[A-Za-z0-9.-]+_pid\d+_step-?\d+_[A-Za-z0-9.-]+(~\d+)?")
_INCIDENT = re.compile(r"\d{8}T\d{6}\.\d{3}Z_(.+_pid\d+)_step-?\d+_([A-Z]+\d+)(~\d+)?")
TEMPORARY, REMOVING = ".writing-", ".removing-"
ABANDONED_S = 3600.0


def rotate(root: Path, newest: Path, keep: int, max_bytes: int) -> None:
    """Remove the oldest dumps beyond `keep` and `max_bytes`, never `newest`, and what processes
    that died left behind. Never raises for what another process does at the same time.
    """
    found = [path for path in root.glob("*/*") if FOLDER.fullmatch(path.name)]
    dumps = sorted((path for path in found if not path.is_symlink()), key=lambda path: path.name)
    sizes = {path: size(path) for path in dumps}
    kept = _firsts(dumps, keep // 2)
    goes = [path for path in dumps if path not in kept] + kept[::-1]
    goes = [path for path in goes if path != newest]
    while goes and (len(sizes) > keep or sum(sizes.values()) > max_bytes):
        gone = goes.pop(0)
        _remove(gone)
        del sizes[gone]
    for pattern in (TEMPORARY, REMOVING):
        for path in root.glob(f"*/{pattern}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)


def _firsts(dumps: list[Path], most: int) -> list[Path]:
    """First dumps of incidents, the one to keep longest first; `dumps` are oldest first."""
    firsts: dict[tuple[str, ...], Path] = {}
    runs: dict[str, int] = {}  # run to the place of its newest dump
    for at, path in enumerate(dumps):
        runs[path.parent.name] = at
        named = _INCIDENT.fullmatch(path.name)
        if named is not None:
            firsts.setdefault((path.parent.name, named[1], named[2]), path)
    ranked = sorted(firsts.values(), key=lambda path: -runs[path.parent.name])  # stable
    return ranked[:most]


def _remove(dump: Path) -> None:
    gone = dump.with_name(f"{REMOVING}{dump.name}")
    with contextlib.suppress(OSError):
        dump.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def size(folder: Path) -> int:
    """Bytes of the files in a folder; what has gone meanwhile counts nothing."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_size
    return total
