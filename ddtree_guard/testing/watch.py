"""What a command touches while it reads a hostile file, and how much memory it takes."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

CANARY = "canary-7f3a"
_CACHE = "__pycache__"  # Python keeps what it compiles when a command is first imported


def peak_mb() -> float:
    """Largest resident memory of this process. `getrusage` would count the parent's at the fork."""
    text = Path("/proc/self/status").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


class Watch:
    """Notes writes outside the arena's own folders, reads of the canary, and anything executed."""

    _active: Watch | None = None
    _hooked = False

    def __init__(self, root: Path) -> None:
        temporary = os.path.join(tempfile.gettempdir(), "ddtree-guard-")
        self.allowed = (str(root / "out"), temporary, "/dev/null")
        self.events: list[str] = []

    def __enter__(self) -> Watch:
        if not Watch._hooked:
            sys.addaudithook(Watch._hook)  # hooks cannot be removed; this one sleeps
            Watch._hooked = True
        Watch._active = self
        return self

    def __exit__(self, *_: object) -> None:
        Watch._active = None

    @staticmethod
    def _hook(event: str, args: tuple[Any, ...]) -> None:
        watch = Watch._active
        if watch is None:
            return
        if event == "open":
            watch._opened(str(args[0]), args[2])
        elif event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.chmod"):
            # Names beside a folder descriptor are relative: those of a temporary folder's removal.
            path = str(args[0])
            if path.startswith("/") and not path.startswith(watch.allowed) and _CACHE not in path:
                watch.events.append(f"{event} {path}")
        elif event in ("subprocess.Popen", "os.system", "os.exec", "pickle.find_class",
                       "socket.connect", "os.posix_spawn"):  # fmt: skip
            watch.events.append(event)

    def _opened(self, path: str, flags: int) -> None:
        if CANARY in path or ("/" in path and CANARY in os.path.realpath(path)):
            self.events.append(f"the canary was opened as {path}")
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        bare = "/" not in path  # opened beside a folder descriptor
        if writes and not bare and not path.startswith(self.allowed) and _CACHE not in path:
            self.events.append(f"opened {path} for writing")
