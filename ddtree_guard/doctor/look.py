"""Runs the survey of this environment in a process of its own and reads what it found."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddtree_guard.errors import IncompatibleError

TIMEOUT_S = 300.0  # SGLang imports in 5 to 40 s; a cold file system takes longer
_STEPS = {
    "environment": "reading package versions",
    "sglang": "importing SGLang",
    "hooks": "looking at the hooks",
    "plugin": "loading SGLang's plugins",
    "arguments": "resolving the serve arguments",
}


def look(words: Sequence[str] | None, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """The survey of `hooks.survey`; `words` are serve arguments, None without any.

    Its key `ended` says why it is not whole, empty where it is. Raises IncompatibleError where the
    survey did not even begin.
    """
    with tempfile.TemporaryDirectory(prefix="ddtree-guard-") as folder:
        out = Path(folder) / "survey.json"
        command = [sys.executable, "-m", "ddtree_guard.hooks.survey", str(out)]
        command += [] if words is None else ["--", *words]
        ended, said = _run(command, timeout_s)
        found = _read(out)
    if found is None:
        raise IncompatibleError(
            f"the survey of this environment did not begin ({ended or 'no result'}): {said}; run "
            f"`{sys.executable} -m ddtree_guard.hooks.survey out.json` to see what it says."
        )
    during = str(found.get("during") or "")
    if during:
        ended = f"{_STEPS.get(during, during)}: {ended or said or 'it ended without a word'}"
    return {**found, "ended": ended if during else ""}


def _run(command: list[str], timeout_s: float) -> tuple[str, str]:
    """(how the child ended if not well, the last line that it wrote)."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"stopped after {timeout_s:.0f} s", ""
    except OSError as error:
        return f"cannot start {command[0]}: {error}", ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    how = f"killed by signal {-done.returncode}" if done.returncode < 0 else ""
    if done.returncode > 0:
        how = f"exit code {done.returncode}"
    return how, lines[-1][:300] if lines else ""


def _read(out: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(out.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, Mapping) else None  # type: ignore[return-value]
