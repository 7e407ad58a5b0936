"""What the result files of runs that add up share: what was measured, and a row a line."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def sources() -> dict[str, str]:
    """What was measured: this project's version, a hash of its sources, and one of device/."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from ddtree_guard import __version__

    files = sorted(p for name in ("checks", "ddtree_guard", "hooks")
                   for p in (ROOT / name).rglob("*.py"))  # fmt: skip
    device = [path for path in files if path.parent.name == "device"]
    hashes = [hashlib.sha256(b"".join(path.read_bytes() for path in part)).hexdigest()[:12]
              for part in (files, device)]  # fmt: skip
    return {"version": __version__, "sources": hashes[0], "device": hashes[1]}


def put(path: Path, text: str) -> None:
    """Rewrite a file as a whole: whoever is killed leaves the last one, and several may write the
    same at the same time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    part.write_text(text)
    part.replace(path)


def write(path: Path, value: dict[str, Any]) -> None:
    """Write a result with a row a line."""
    put(path, lines_of(value))


def lines_of(value: dict[str, Any]) -> str:
    """JSON with one row of a list, or one entry of a mapping, a line; rows that are lists without
    spaces.
    """
    parts = []
    for name, held in value.items():
        if isinstance(held, list):
            tight = (",", ":")
            inner = [json.dumps(entry, separators=tight if isinstance(entry, list) else None)
                     for entry in held]  # fmt: skip
            ends = "[]"
        else:
            inner = [f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in held.items()]
            ends = "{}"
        body = ",\n  ".join(inner)
        parts.append(f" {json.dumps(name)}: {ends[0]}\n  {body}\n {ends[1]}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
