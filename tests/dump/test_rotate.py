"""Which dumps go first: repeats before the first of an incident, old runs before the newest one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ddtree_guard.dump.rotate import rotate, size


def dump(root: Path, run: str, at: int, rule: str, pid: int = 7, size: int = 10) -> Path:
    """A folder named like a dump, `at` seconds after midnight."""
    path = root / run / f"20260101T0000{at:02d}.000Z_TP0_pid{pid}_step{at}_{rule}"
    path.mkdir(parents=True)
    (path / "blob").write_bytes(b"x" * size)
    return path


def test_the_first_dump_of_an_incident_outlives_its_repeats(tmp_path: Path) -> None:
    made = [dump(tmp_path, "run", at, "W3") for at in range(10)]
    rotate(tmp_path, made[-1], keep=4, max_bytes=1 << 20)
    assert [path.exists() for path in made] == [True] + [False] * 6 + [True] * 3


def test_every_process_and_rule_has_its_own_first(tmp_path: Path) -> None:
    firsts = [dump(tmp_path, "run", at, rule, pid) for at, (rule, pid) in enumerate(
        (("W3", 7), ("CFG1", 7), ("W3", 8)))]  # fmt: skip
    rest = [dump(tmp_path, "run", at, "W3", 7 + at % 2) for at in range(3, 12)]
    rotate(tmp_path, rest[-1], keep=6, max_bytes=1 << 20)
    assert all(path.exists() for path in firsts)
    assert [path.exists() for path in rest] == [False] * 6 + [True] * 3


def test_firsts_of_the_newest_run_stay_and_half_the_room_is_for_the_newest(tmp_path: Path) -> None:
    old = [dump(tmp_path, f"old{at}", at, "W3") for at in range(6)]
    first = dump(tmp_path, "now", 20, "K2")
    asked = [dump(tmp_path, "now", at, "signal") for at in range(21, 25)]
    rotate(tmp_path, asked[-1], keep=4, max_bytes=1 << 20)
    assert [path.exists() for path in old] == [False] * 5 + [True]
    assert first.exists()
    assert [path.exists() for path in asked] == [False, False, True, True]


def test_a_dump_that_was_asked_for_is_no_incident(tmp_path: Path) -> None:
    made = [dump(tmp_path, "run", at, "signal") for at in range(6)]
    rotate(tmp_path, made[-1], keep=2, max_bytes=1 << 20)
    assert [path.exists() for path in made] == [False] * 4 + [True, True]


@pytest.mark.parametrize("keep", [1, 2, 3, 20])
def test_the_caps_hold_whatever_is_first(tmp_path: Path, keep: int) -> None:
    made = [dump(tmp_path, "run", at, f"W{at + 1}", size=100) for at in range(9)]
    rotate(tmp_path, made[-1], keep, max_bytes=450)
    left = [path for path in made if path.exists()]
    assert len(left) == min(keep, 4)
    assert made[-1] in left
    assert keep < 2 or made[0] in left


def test_a_dump_that_goes_while_it_is_sized_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = os.scandir

    def gone(path: Any = ".") -> Any:
        if Path(path).name == "gone":
            (Path(path) / "blob").unlink()  # another process rotates
            Path(path).rmdir()
        return here(path)

    folders = tmp_path / "kept", tmp_path / "gone"
    for folder in folders:
        folder.mkdir()
        (folder / "blob").write_bytes(b"12345")
    monkeypatch.setattr(os, "scandir", gone)
    assert [size(folder) for folder in folders] == [5, 0]
