"""Find the dumps and trail files below a folder, without following links."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ddtree_guard.dump.rotate import FOLDER
from ddtree_guard.errors import DumpError, not_yours

MAX_FOUND = 10_000
_TRAIL = re.compile(r"trail_[A-Za-z0-9.-]+_pid\d+\.jsonl(\.old)?")


def find_dumps(root: Path | str) -> list[Path]:
    """Dump folders in `root` or in the run folders below it, oldest first.

    Raises DumpError where there is no such folder.
    """
    return sorted(_find(Path(root), FOLDER, folders=True), key=lambda path: path.name)


def find_trails(root: Path | str) -> list[Path]:
    """Trail files in `root` or in the run folders below it. Raises DumpError."""
    return sorted(_find(Path(root), _TRAIL, folders=False))


def _find(root: Path, pattern: re.Pattern[str], folders: bool) -> list[Path]:
    found, denied = _look(root, pattern, folders)
    if denied and not found:
        raise DumpError(not_yours(denied[0]))
    return found


def _look(
    root: Path, pattern: re.Pattern[str], folders: bool, below: bool = True
) -> tuple[list[Path], list[Path]]:
    """What fits the pattern, and the folders that are another user's."""
    found: list[Path] = []
    denied: list[Path] = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                is_folder = entry.is_dir(follow_symlinks=False)
                if pattern.fullmatch(entry.name) and is_folder == folders:
                    found.append(root / entry.name)
                elif below and is_folder:
                    inside, closed = _look(root / entry.name, pattern, folders, below=False)
                    found += inside
                    denied += closed
                if len(found) > MAX_FOUND:
                    raise DumpError(f"{str(root)!r} holds more than {MAX_FOUND} dumps.")
    except PermissionError:
        denied.append(root)
    except (OSError, ValueError) as error:
        if below:
            why = getattr(error, "strerror", None) or str(error)
            raise DumpError(
                f"{str(root)!r} is not a folder of dumps ({why}); give the one that "
                "SGLANG_DDTREE_GUARD_DUMP_DIR names."
            ) from None
    return found, denied
