"""The command line as a process: its exit codes, and outputs that take no more."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_guard import cli, errors
from ddtree_guard.config import Config
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.guard import Guard
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def broken(tmp_path: Path) -> str:
    step = FAULTS["W3"](sound_step(3, lens=(37, 21, 50), padded_bs=4), 2).step
    findings = [(0, found) for found in Guard().check(step).findings]
    return str(DumpWriter("run", Config(dump_dir=tmp_path)).write([step], findings))


def test_every_exit_code_is_documented() -> None:
    owned = {kind.exit_code for kind in vars(errors).values() if hasattr(kind, "exit_code")}
    codes = {0, *owned, cli.INTERNAL, cli.INTERRUPTED, cli.READER_GONE}
    words = " ".join((ROOT / "README.md").read_text().split())
    told = words.partition("Exit codes: ")[2].partition(" A rule that")[0]
    for text in (told, cli.build_parser().epilog or ""):
        assert {int(code) for code in re.findall(r"\b\d+(?= )", text)} == codes


def child(*argv: str, **how: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddtree_guard", *argv]
    env = {"PYTHONPATH": ":".join(sys.path)}
    return subprocess.run(command, text=True, env=env, check=False, stderr=subprocess.PIPE, **how)  # type: ignore[call-overload,no-any-return]


def test_a_closed_pipe_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "ddtree_guard", "rules", "--json"]
    env = {"PYTHONPATH": ":".join(sys.path)}  # with buffered output, whatever the caller has set
    done = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, env=env, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_reader_that_has_seen_enough_is_no_finding(broken: str) -> None:
    """`show DUMP | head`, also where rich prints: it would end the process with 1."""
    read, write = os.pipe()
    os.close(read)
    done = child("show", broken, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        done = child("rules", stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith("ddtree-guard: the output cannot be written (No space left")
    assert done.stderr.count("\n") == 1


def test_a_closed_output_is_one_sentence() -> None:
    done = child("rules", preexec_fn=lambda: os.close(1))
    assert done.returncode == 2
    assert done.stderr.startswith("ddtree-guard: there is no standard output")
    assert done.stderr.count("\n") == 1


def test_a_terminal_without_unicode_gets_the_pictures_too(broken: str) -> None:
    command = [sys.executable, "-m", "ddtree_guard", "show", broken]
    env = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path), "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "mask of request 2" in done.stdout
    ruler = next(row for row in done.stdout.splitlines() if row.startswith("expected"))
    assert set(ruler[10:]) == {"=", "|"}
    assert "???" not in done.stdout.replace("?? no mask", "")
