"""A finding of the init site has no requests; its dump is read like any other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ddtree_guard import cli
from ddtree_guard.config import Config
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.guard import Guard
from ddtree_guard.rule import Site
from ddtree_guard.step import Step, Who, Widths

COMMANDS = ("check", "show", "explain", "diff", "ranks", "recompute", "bundle", "report")


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # `bundle` writes to the working directory
    widths = Widths(w=17, holders={"backend": 8}, block=8, budget=16)
    step = Step(bs=0, padded_bs=0, widths=widths, who=Who(algorithm="DDTREE"))
    findings = Guard().check(step, (Site.INIT,)).findings
    assert [finding.rule for finding in findings] == ["CFG1"]
    config = Config.from_env({"SGLANG_DDTREE_GUARD_DUMP_DIR": str(tmp_path / "dumps")})
    path = DumpWriter("run", config).save([step], [(0, finding) for finding in findings])
    assert path is not None
    return Path(path)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    code = cli.main(args)
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_reader_answers(
    command: str, as_json: bool, dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(dump)] * 2 if command == "diff" else [str(dump)]
    given += ["-o", str(tmp_path / "out.html")] if command == "report" else []
    code, said = run(capsys, command, *given, *(["--json"] if as_json else []))
    assert code == {"check": 1, "ranks": 2, "recompute": 2}.get(command, 0), said
    if as_json and code != 2:
        json.loads(said)
    assert as_json or not re.search(r"(?<![\w-])-1(?!\d)", said)  # a folder may be called x-1


def test_show_says_that_there_are_no_requests(
    dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = run(capsys, "show", str(dump))
    assert code == 0
    assert "no requests: this step is the configuration that a server started with" in said
    code, said = run(capsys, "show", str(dump), "--request", "0")
    assert code == 2
    assert "no requests" in said
