"""Dumps are their server's alone: who may not read them is told so, and not that there are none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_guard.config import Config
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.testing.steps import sound_step

# Root reads everything; without these rights it is a user like others.
ALONE = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
ALONE += ["--inh-caps=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


def run(*words: object, rights: int, folder: Path) -> tuple[int, str]:
    """The command line on a folder with these rights, as a user who is not above them."""
    before = folder.stat().st_mode
    folder.chmod(rights)
    command = [*(ALONE if os.geteuid() == 0 else ()), sys.executable, "-m", "ddtree_guard"]
    try:
        done = subprocess.run(
            [*command, *map(str, words)], capture_output=True, text=True, check=False,
            env={"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"], "COLUMNS": "1000"},
        )  # fmt: skip
    finally:
        folder.chmod(before)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    if os.geteuid() == 0 and not any(
        Path(place, "setpriv").exists() for place in os.environ["PATH"].split(":")
    ):
        pytest.skip("root reads everything, and there is no setpriv (util-linux) to drop that")
    return DumpWriter("run-1", Config(dump_dir=tmp_path)).write([sound_step(1)])


def test_a_dump_of_another_user(dump: Path) -> None:
    for folder in (dump, dump / "manifest.json"):
        code, text = run("check", dump, rights=0, folder=folder)
        assert code == 4
        assert f"'{folder}' cannot be read by this user" in text
        assert "user of the server" in text
        assert "Traceback" not in text


@pytest.mark.parametrize("command", [("ranks",), ("request", "r0"), ("ci-report",)])
def test_a_run_of_another_user(dump: Path, command: tuple[str, ...]) -> None:
    code, text = run(*command, dump.parents[1], rights=0, folder=dump.parent)
    assert code == 4
    assert f"'{dump.parent}' cannot be read by this user" in text


def test_one_s_own_runs_beside_those_of_another_user(dump: Path) -> None:
    DumpWriter("run-2", Config(dump_dir=dump.parents[1])).write([sound_step(1)])
    code, text = run("ranks", dump.parents[1], rights=0, folder=dump.parent)
    assert (code, "found TP0" in text) == (2, True)  # what can be read is one rank's
    code, text = run("request", "r0", dump.parents[1], rights=0, folder=dump.parent)
    assert (code, "found no request" in text) == (2, True)
