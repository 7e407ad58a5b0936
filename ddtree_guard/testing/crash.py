"""Kill a process at random moments while it writes dumps: what is left must be whole or nothing.

    python -m ddtree_guard.testing.crash ROOT KILLS SEED

Forks a child per kill, which writes dumps until it is killed. Prints one JSON object: kills, dumps
that a reader accepts, folders that it refuses, and how many temporary folders were left.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from ddtree_guard.config import Config
from ddtree_guard.dump.find import find_dumps
from ddtree_guard.dump.read import Dump
from ddtree_guard.dump.rotate import REMOVING, TEMPORARY
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.errors import DumpError
from ddtree_guard.guard import Guard
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step


def main(root: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill `kills` writers and read everything that each of them left."""
    step = FAULTS["W3"](sound_step(seed, lens=(37, 21)), 1).step
    findings = [(1, finding) for finding in Guard().check(step).findings]
    rng = random.Random(seed)
    told = {"kills": 0, "whole": 0, "refused": 0, "temporary": 0, "in_the_middle": 0}
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            # Few are kept, so that rotation is interrupted as well.
            writer = DumpWriter("run", Config(dump_dir=root, redact=False, dump_keep=2))
            while True:
                writer.write([step] * 2, findings)
        time.sleep(rng.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        told["kills"] += 1
        _read(root, told)
        shutil.rmtree(root, ignore_errors=True)
    return told


def _read(root: Path, told: dict[str, int]) -> None:
    left = [path for path in root.glob("run/*") if path.name.startswith((TEMPORARY, REMOVING))]
    told["temporary"] += len(left)
    told["in_the_middle"] += bool(left)
    for path in find_dumps(root) if root.exists() else []:
        try:
            dump = Dump(path)
            steps = list(dump.steps())
            told["whole"] += len(steps) == 2 and len(dump.findings()) >= 1
        except DumpError:
            told["refused"] += 1


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
