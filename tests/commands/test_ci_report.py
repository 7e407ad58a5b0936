"""`ddtree-guard ci-report`: the verdict, its exit codes, and its forms."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ddtree_guard.cli import main
from ddtree_guard.config import Config, Mode
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.evidence import ARMED, IDLE, NOT_ARMED
from ddtree_guard.guard import find_rule
from ddtree_guard.hooks.evidence import Evidence, note
from ddtree_guard.testing.examples import example
from ddtree_guard.testing.steps import sound_step

Write = Callable[..., None]


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_ACTIONS", "SGLANG_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Evidence of one process in `tmp_path/dumps`."""

    def make(
        rank: str = "TP0", steps: int = 9, rules: tuple[str, ...] = (), state: str = ARMED,
        why: str = "", skipped: int = 0, text: str = "",
    ) -> None:  # fmt: skip
        config = Config(mode=Mode.LOG, dump_dir=tmp_path / "dumps")
        if state != ARMED:
            note(config, rank, "0.5.16", state, why)
            return
        counts: dict[str, Any] = {
            "steps": steps, "verify_steps": steps, "steps_checked": steps - skipped, "open": 0,
            "skipped": {"no hook saw its metadata": skipped} if skipped else {}, "faults": {},
        }  # fmt: skip
        evidence = Evidence(config, "run-1", rank, "0.5.16", lambda: counts).begin()
        evidence.state(ARMED, rules=36, world=1, armed=1)
        for rule in rules:
            made = example(find_rule(rule))
            assert made is not None
            evidence.finding(*made, None, text or f"{rule} in words")
        evidence.close()

    return make


def ask(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    code = main(["ci-report", *args])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_clean_is_zero_and_says_what_was_checked(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write()
    write("TP1", steps=4)
    code, out = ask(capsys, str(tmp_path / "dumps"))
    assert code == 0
    assert out.splitlines()[-1] == "checked 13 of 13 verify steps in 2 processes; clean"


def test_findings_are_one_with_their_words(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(rules=("W3", "W3", "K2"))
    code, out = ask(capsys, str(tmp_path / "dumps"))
    assert code == 1
    assert "W3 in words" in out
    assert "3 findings (K2 x1, W3 x2)" in out


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ([], "no process left evidence"),
        ([], "dumps, which does not exist; was the suite run with"),
        ([(NOT_ARMED, "no hooks")], "NOT GUARDED: run-*TP0*: no hooks"),
        ([(IDLE, "no speculative algorithm is active")], "no speculative algorithm is active"),
    ],
)
def test_nobody_armed_is_three_with_the_reason(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    states: list[tuple[str, str]], words: str,
) -> None:  # fmt: skip
    for state, why in states:
        write(state=state, why=why)
    code, out = ask(capsys, str(tmp_path / "dumps"))
    assert code == 3
    assert words.rpartition("*")[2] in out
    assert "guard saw no verify step" in out
    assert "clean" not in out


def test_dumps_of_the_test_process_are_told_from_missing_evidence(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "dumps"
    for run in ("run-1", "run-2"):
        DumpWriter(run, Config(dump_dir=root)).write([sound_step(1, lens=(9, 8))])
    for folder, dumps in ((root, "2 dumps lie"), (root / "run-2", "1 dump lies")):
        code, out = ask(capsys, str(folder))
        text = " ".join(out.split())
        assert code == 3
        assert "no process left evidence" in text
        assert (
            f"{dumps} there without evidence, as those of checks inside a test process do" in text
        )
        assert "pytest's own summary and --ddtree-guard-report" in text
    write(state=NOT_ARMED, why="no hooks")
    assert "without evidence" not in ask(capsys, str(root))[1]


def test_one_unarmed_rank_among_armed_ones_is_three(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write()
    write("TP1", state=NOT_ARMED, why="site build is not hooked")
    assert ask(capsys, str(tmp_path / "dumps"))[0] == 3


def test_armed_without_a_step_is_three_and_unchecked_steps_are_one(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(steps=0)
    code, out = ask(capsys, str(tmp_path / "dumps"))
    assert (code, "the armed processes ran none" in out) == (3, True)
    write("TP1", skipped=2)
    code, out = ask(capsys, str(tmp_path / "dumps"))
    assert (code, "ran unchecked: no hook saw its metadata x2" in out) == (1, True)


def test_excluded_by_sglang_plugins_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "a,b")
    code, out = ask(capsys, str(tmp_path))
    assert (code, "SGLANG_PLUGINS=a,b" in out) == (3, True)


def test_json_and_junit_say_the_same(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(rules=("W3",))
    write("TP1")
    xml = tmp_path / "out" / "junit.xml"
    code, out = ask(capsys, str(tmp_path / "dumps"), "--json", "--junit", str(xml))
    value = json.loads(out)
    assert (code, value["exit"], value["findings"]) == (1, 1, {"W3": 1})
    assert [p["steps_checked"] for p in value["processes"]] == [9, 9]
    suite = ElementTree.parse(xml).getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("3", "1")
    (failure,) = suite.iter("failure")
    assert failure.text == "W3 in words"


def test_github_annotations_cannot_be_forged(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write(rules=("W3",), text="100% wrong\n::set-env name=X::y\x1b[31m\x00")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    _, out = ask(capsys, str(tmp_path / "dumps"))
    commands = [line for line in out.splitlines() if line.startswith("::")]
    assert len(commands) == 2  # not the block that a person reads: it is quoted
    assert "| ::set-env" in out
    assert commands[0].startswith("::error title=ddtree_guard W3 in run-1 TP0 pid ")
    assert "100%25 wrong%0A::set-env name=X::y\\u001b[31m\\u0000" in commands[0]
    assert commands[1].startswith("::error title=ddtree_guard::checked 9 of 9")


def test_old_evidence_can_be_left_out(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write()
    assert ask(capsys, str(tmp_path / "dumps"), "--since", "2020-01-01T00:00:00")[0] == 0
    assert ask(capsys, str(tmp_path / "dumps"), "--since", "99999999999")[0] == 3
    code, out = ask(capsys, str(tmp_path / "dumps"), "--since", "yesterday")
    assert (code, "'yesterday' is no time" in out) == (2, True)


HOSTILE = {
    "foreign": b"hello\n",
    "list": b"[1]\n",
    "kind": b'{"kind": "x"}\n',
    "schema": b'{"kind": "process", "schema": "other/9"}\n',
    "deep": b"[" * 100_000 + b"\n",
    "count": b'{"kind": "steps", "steps": -1}\n',
    "binary": bytes(range(256)) + b"\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_foreign_file_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "evidence_TP0_pid1.jsonl").write_bytes(HOSTILE[name])
    code, out = ask(capsys, str(tmp_path))
    assert code == 4
    assert "evidence_TP0_pid1.jsonl, line 1: expected evidence" in out
    assert "Traceback" not in out


def test_links_pipes_and_large_files_are_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import os

    target = tmp_path / "evidence_TP0_pid1.jsonl"
    target.symlink_to("/etc/passwd")
    assert ask(capsys, str(tmp_path))[0] == 4
    target.unlink()
    os.mkfifo(target)
    assert ask(capsys, str(tmp_path))[0] == 4
    target.unlink()
    with target.open("wb") as file:
        file.truncate(1 << 30)
    code, out = ask(capsys, str(tmp_path))
    assert (code, "too large" in out) == (4, True)


HEAD = {
    "kind": "process", "schema": "ddtree-guard-evidence/1", "pid": 1, "ppid": 1, "rank": "TP0",
    "mode": "log", "release": "0.5.16", "at": 1.0,
}  # fmt: skip
STATE = {"kind": "state", "state": "armed", "why": "", "rules": 61, "world": 1, "armed": 1}
COUNTS: dict[str, Any] = {
    "kind": "steps", "steps": 3, "verify_steps": 3, "steps_checked": 3, "open": 0, "skipped": {},
    "faults": {}, "found": {}, "latent": {}, "at": 2.0,
}  # fmt: skip
HIT = {
    "kind": "finding", "rule": "W3", "step": 1, "latent": False, "headline": "h", "text": "t",
    "line": "l", "dump": None, "at": 2.0, "number": 1,
}  # fmt: skip


def put(tmp_path: Path, *lines: dict[str, Any], end: str = "\n") -> str:
    folder = tmp_path / "dumps" / "run-1"
    folder.mkdir(parents=True)
    text = "\n".join(json.dumps(line) for line in lines) + end
    (folder / "evidence_TP0_pid1.jsonl").write_text(text)
    return str(tmp_path / "dumps")


def test_a_finding_counts_where_its_count_was_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = put(tmp_path, HEAD, STATE, COUNTS, HIT, end='\n{"kind": "steps", "st')
    assert ask(capsys, folder)[0] == 1


@pytest.mark.parametrize(
    "lines",
    [
        [{**HEAD, "pid": float("inf")}],
        [{**HEAD, "at": float("nan")}],
        [HEAD, STATE, {**COUNTS, "found": {"W3": -1}}],
        [HEAD, STATE, {**COUNTS, "skipped": {"x": 1.5}}],
        [HEAD, STATE, {**COUNTS, "steps_checked": 10**60}],
        [HEAD, STATE, {**HIT, "step": float("inf")}],
        [HEAD, STATE, {**COUNTS, "found": {"W3": 1}}, HEAD, STATE, COUNTS],
    ],
)  # fmt: skip
def test_numbers_that_are_no_counts_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[dict[str, Any]]
) -> None:
    code, said = ask(capsys, put(tmp_path, *lines))
    assert code == 4
    assert "expected evidence of" in said
    assert "fault of ddtree-guard" not in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps_checked": 1, "kind": "steps"}, "2 of 3 steps unaccounted for"),
        ({"faults": {"judge": 3}}, "the guard itself failed at judge (3x)"),
    ],
)
def test_steps_that_nobody_accounts_for_are_no_clean_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], words: str
) -> None:
    code, said = ask(capsys, put(tmp_path, HEAD, STATE, {**COUNTS, **change}))
    assert (code, words in said) == (3, True), said


def test_a_process_armed_without_a_rule_is_three(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = ask(capsys, put(tmp_path, HEAD, {**STATE, "rules": 0}, COUNTS))
    assert code == 3
    assert "no rule" in said


@pytest.mark.parametrize("since", ["nan", "inf", "-inf", "1e999", "9999-99-99", "0001-01-01"])
def test_a_since_that_is_no_time_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], since: str
) -> None:
    code, said = ask(capsys, put(tmp_path, HEAD, STATE, COUNTS), f"--since={since}")
    assert code == 2
    assert "is no time" in said


@pytest.mark.parametrize("junit", ["dumps", "file/j.xml", "/proc/none/j.xml"])
def test_junit_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], junit: str
) -> None:
    folder = put(tmp_path, HEAD, STATE, COUNTS)
    (tmp_path / "file").write_text("")
    code, said = ask(capsys, folder, f"--junit={tmp_path / junit}")
    assert code == 2
    assert "--junit" in said
    assert "fault of ddtree-guard" not in said


@pytest.mark.parametrize("rank", ["\ud800", "\ufffe\uffff", "\x00\x1b[31m", "]]><x>&\u2028"])
def test_words_that_xml_cannot_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rank: str
) -> None:
    hit = {**HIT, "text": rank, "rule": rank}
    counts = {**COUNTS, "found": {rank: 2}, "skipped": {rank: 1}}
    folder = put(tmp_path, {**HEAD, "rank": rank}, STATE, hit, counts)
    junit = tmp_path / "j.xml"
    code, said = ask(capsys, folder, f"--junit={junit}", "--github")
    assert (code, "\x1b" in said) == (1, False)
    ElementTree.parse(junit)


def test_a_run_folder_that_is_a_link_is_not_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(put(tmp_path, HEAD, STATE, COUNTS))
    (folder / "run-1").rename(tmp_path / "elsewhere")
    (folder / "run-1").symlink_to(tmp_path / "elsewhere")
    code, _ = ask(capsys, str(folder))
    assert code in (2, 3)
