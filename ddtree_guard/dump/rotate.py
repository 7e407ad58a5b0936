"""Keep the dumps of a root within a count and a size; the oldest go first.

A dump leaves by a rename, so a reader sees it whole or not at all, also when the process dies in
the middle. Only folders named like a dump are ever removed.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from pathlib import Path

FOLDER = re.compile(r"\d{8}T\d{6}\.\d{3}Z_[A-Za-z0-9.-]+_pid\d+_step-?\d+_[A-Za-z0-9.-]+(~\d+)?")
TEMPORARY, REMOVING = ".writing-", ".removing-"
ABANDONED_S = 3600.0


def rotate(root: Path, newest: Path, keep: int, max_bytes: int) -> None:
    """Remove the oldest dumps beyond `keep` and `max_bytes`, never `newest`, and what processes
    that died left behind. Never raises for what another process does at the same time.
    """
    found = [path for path in root.glob("*/*") if FOLDER.fullmatch(path.name)]
    dumps = sorted((path for path in found if not path.is_symlink()), key=lambda path: path.name)
    sizes = {path: size(path) for path in dumps}
    while dumps and (len(dumps) > keep or sum(sizes.values()) > max_bytes):
        oldest = dumps.pop(0)
        if oldest != newest:
            _remove(oldest)
        sizes.pop(oldest)
    for pattern in (TEMPORARY, REMOVING):
        for path in root.glob(f"*/{pattern}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)


def _remove(dump: Path) -> None:
    gone = dump.with_name(f"{REMOVING}{dump.name}")
    with contextlib.suppress(OSError):
        dump.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def size(folder: Path) -> int:
    """Bytes of the files in a folder; what has gone meanwhile counts nothing."""
    total = 0
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total
