"""Keep a step with its findings as a dump, and check the dump again as anybody can later.

    python examples/keep_and_recheck.py [FOLDER]

The dump is redacted: token ids and request ids are hashed with a key that is thrown away.
"""

import sys
import tempfile
from pathlib import Path

from ddtree_guard import Config, Guard
from ddtree_guard.dump.read import Dump
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.render import headline
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step


def main(folder: str) -> None:
    """Plant a fault in a sound step, dump it, and check what was read back."""
    step = FAULTS["W3"](sound_step(seed=1), 2).step
    found = Guard().check(step).findings
    writer = DumpWriter("example", Config(dump_dir=Path(folder)))
    path = writer.write([step], [(0, finding) for finding in found])
    print(f"dump {path}")

    again = Guard().check(Dump(path).step(0))
    for finding in again.findings:
        print(headline(finding))
    same = again.rules == tuple(finding.rule for finding in found)
    print("the dump says what the step said" if same else "the dump says something else")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="ddtree-guard-"))
