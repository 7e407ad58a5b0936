"""Dumps that a server under test has written."""

from __future__ import annotations

import time
from pathlib import Path

from ddtree_guard.dump.find import find_dumps
from ddtree_guard.dump.read import Dump

WAIT_S, PAUSE_S = 60.0, 0.025


def dumps_of(root: Path, kind: str) -> list[Dump]:
    """The dumps below `root` whose trigger is of this kind, in the order of `find_dumps`."""
    found = [Dump(path) for path in find_dumps(root)]
    return [dump for dump in found if dump.trigger["kind"] == kind]


def awaited(root: Path, kind: str) -> Dump:
    """The first dump of this kind, once it is there. Raises AssertionError after a minute."""
    for _ in range(int(WAIT_S / PAUSE_S)):
        found = dumps_of(root, kind)
        if found:
            return found[0]
        time.sleep(PAUSE_S)
    raise AssertionError(f"no dump of kind {kind} was written")
