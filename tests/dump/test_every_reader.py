"""2,000 mutated dumps through every command: refused or answered, nothing else, nothing outside.

`benchmarks/hostile_dumps.py` runs 50,000 others; its result is in benchmarks/results.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from ddtree_guard import cli
from ddtree_guard.dump import read
from ddtree_guard.testing.hostile import MUTATIONS, Arena, attack

RUNS, EACH = 8, 250
RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "hostile_dumps.json"


@pytest.fixture
def arena() -> Iterator[Arena]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # thousands of small files
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Arena(Path(folder))


@pytest.mark.parametrize("run", range(RUNS))
def test_mutated_dumps_are_refused_or_answered(arena: Arena, run: int) -> None:
    outcomes = [attack(arena, run * EACH + n) for n in range(EACH)]
    assert [fault for outcome in outcomes for fault in outcome.faults] == []
    codes = Counter(code for outcome in outcomes for code in outcome.codes)
    assert codes[4] > EACH  # most are refused ...
    assert codes[0] + codes[1] > EACH // 2  # ... and some are well-formed lies
    assert {outcome.kind for outcome in outcomes} == set(MUTATIONS)


def test_the_sound_dump_is_answered_by_every_reader(arena: Arena) -> None:
    dump = arena.copy()
    with mock.patch.dict(MUTATIONS, {name: lambda *_: None for name in MUTATIONS}):
        outcome = attack(arena, 1)
    #      check show explain diff ranks request recompute bundle report
    assert outcome.codes == [1, 0, 0, 0, 0, 0, 1, 0, 0]
    assert outcome.faults == []
    assert dump.exists()


def test_the_watch_notices_a_reader_that_misbehaves(arena: Arena) -> None:
    arena.copy()

    def write(*_: object) -> int:
        (arena.root / "elsewhere").write_text("x")
        return 0

    with mock.patch.object(cli, "_run", write):
        assert any("elsewhere for writing" in fault for fault in attack(arena, 1).faults)


def test_a_reader_that_follows_links_would_be_noticed(arena: Arena) -> None:
    seeds = [n for n in range(400) if _kind(n) == "link"]

    def follow(folder: Path, name: str, *_: object) -> bytes:
        return (folder / name).read_bytes()

    with mock.patch.object(read, "_read_file", follow):
        # Pipes would block a reader that opens them, so only seeds with links are tried.
        linked = [n for n in seeds if _links(arena, n)][:3]
        faults = [fault for n in linked for fault in attack(arena, n).faults]
    assert linked
    assert faults


def _kind(seed: int) -> str:
    import random

    return random.Random(seed).choice(list(MUTATIONS))


def _links(arena: Arena, seed: int) -> bool:
    import random

    rng, dump = random.Random(seed), arena.copy()
    MUTATIONS[rng.choice(list(MUTATIONS))](dump, rng, arena)
    return any(path.is_symlink() for path in dump.iterdir()) and not dump.is_symlink()


def test_memory_stays_below_200_mb(tmp_path: Path) -> None:
    script = RESULT.parents[1] / "hostile_dumps.py"
    command = [sys.executable, str(script), "--count", "120", "--seed", "9", "--out", str(tmp_path)]
    env = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "hostile_dumps.json").read_text())
    assert told["peak_rss_mb"] < 200
    assert told["fault_count"] == 0


@pytest.mark.parametrize("command", ["check", "show", "report"])
def test_the_largest_tree_that_is_read_stays_below_200_mb(tmp_path: Path, command: str) -> None:
    code = (
        "from pathlib import Path\n"
        "from ddtree_guard import cli\n"
        "from ddtree_guard.config import Config\n"
        "from ddtree_guard.dump.write import DumpWriter\n"
        "from ddtree_guard.dump.schema import MAX_WIDTH\n"
        "from ddtree_guard.testing.steps import sound_step\n"
        "step = sound_step(1, lens=(3, 2), w=MAX_WIDTH, kind='star')\n"
        f"path = DumpWriter('r', Config(dump_dir=Path({str(tmp_path)!r}))).write([step])\n"
        f"argv = [{command!r}, str(path)]\n"
        f"argv += ['-o', {str(tmp_path / 'o.html')!r}] if {command!r} == 'report' else []\n"
        "assert cli.main(argv) in (0, 1)\n"
        "from ddtree_guard.testing.watch import peak_mb\n"
        "print('RSS', int(peak_mb()))"
    )
    env = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.rsplit("RSS", 1)[1]) < 200


def test_a_committed_result_of_50000_dumps_has_no_fault() -> None:
    told = json.loads(RESULT.read_text())
    assert told["dumps"] >= 50_000
    assert told["fault_count"] == 0
    assert set(told["exit_codes"]) <= {"0", "1", "2", "4"}
    assert told["peak_rss_mb"] < told["limit_mb"] == 200
    assert told["left_beside_the_dumps"] == ["canary-7f3a", "out", "sound", "work"]


def test_the_canary_and_the_odd_values_are_what_they_should_be(arena: Arena) -> None:
    assert (arena.root / "canary-7f3a").read_text() == "canary-7f3a"
    assert np.load  # readers never use it: no pickle reaches NumPy
