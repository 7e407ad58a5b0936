"""The command line: every command, exit codes, and one sentence for every bad input."""

import argparse
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ddtree_guard import cli
from ddtree_guard.checks import ALL
from ddtree_guard.commands.rules import table
from ddtree_guard.config import Config
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.guard import Guard
from ddtree_guard.render import line
from ddtree_guard.rule import Finding
from ddtree_guard.step import PARTS, Static, Step, Widths
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step

SOUND = sound_step(3, lens=(37, 21, 50), padded_bs=4)
BROKEN = FAULTS["W3"](SOUND.replace(who__step_id=912), 2).step


def dumped(root: Path, *steps: Step, redact: bool = False, findings: bool = True) -> str:
    found = [(i, f) for i, step in enumerate(steps) for f in Guard().check(step).findings]
    config = Config(dump_dir=root, redact=redact)
    return str(DumpWriter("run", config).write(list(steps), found if findings else []))


@pytest.fixture
def broken(tmp_path: Path) -> str:
    return dumped(tmp_path, SOUND, BROKEN)


@pytest.fixture
def sound(tmp_path: Path) -> str:
    return dumped(tmp_path, SOUND)


Output = tuple[int, str, str]
Run = Callable[..., Output]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*argv: str) -> Output:
        capsys.readouterr()
        code = cli.main(argv)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


BAD = {
    "unknown command": (["chek"], 2, "invalid choice: 'chek'"),
    "no command": ([], 2, "COMMAND"),
    "unknown option": (["rules", "--colour"], 2, "--colour"),
    "missing dump": (["check"], 2, "DUMP"),
    "unknown rule": (["explain", "W33"], 2, "Nearest: W3 mask-offset-gap"),
    "misspelt defect": (["explain", "mask-ofset-gap"], 2, "W3 mask-offset-gap"),
    "nothing like a rule": (["explain", ""], 2, "no rule is called ''"),
    "log line of an unknown rule": (["explain", "ddtree_guard finding rule=Q9"], 2, "'Q9'"),
    "no such dump": (["check", "/nowhere/at/all"], 4, "is not a dump folder"),
    "a file as dump": (["check", __file__], 4, "is not a dump folder"),
    "a foreign folder": (["check", str(Path(__file__).parent)], 4, "holds no manifest.json"),
    "explain no such dump": (["explain", "./nowhere/"], 4, "is not a dump folder"),
    "show no such dump": (["show", "/nowhere"], 4, "is not a dump folder"),
    "an empty path": (["check", ""], 2, "DUMP is empty; give the path of a folder"),
    "an empty file": (["report", "/nowhere", "-o", ""], 2, "--out is empty; give a path"),
    "pages into nothing": (["rules", "--markdown", ""], 2, "--markdown is empty"),
    "two dumps to explain": (["explain", "/", "nosuch"], 2, "one dump, found 'nosuch' behind '/'"),
    "an incident of no rule": (["explain", "I99"], 2, "docs/incidents.md lists all"),
    "pages into a file": (["rules", "--markdown", __file__], 2, "cannot be written"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_bad_input_is_one_sentence_and_an_exit_code(run: Run, case: str, as_json: bool) -> None:
    argv, code, words = BAD[case]
    found, out, err = run(*argv, *(["--json"] if as_json else []))
    assert found == code
    assert err.startswith("ddtree-guard: ")
    assert words in err
    assert err.count("\n") == 1
    if as_json:
        assert json.loads(out)["exit"] == code
    else:
        assert out == ""


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("step-0000.safetensors", lambda raw: raw[:99], "has 99 bytes"),
        ("manifest.json", lambda raw: raw[:500], "is not valid JSON"),
        ("step-0000.safetensors", lambda raw: raw[:-1] + b"?", "SHA-256 differs"),
    ],
)
def test_a_damaged_dump_says_which_and_what_to_do(
    run: Run, sound: str, tmp_path: Path, name: str, change: Callable[[bytes], bytes], words: str
) -> None:
    copy = shutil.copytree(sound, tmp_path / "copy")
    (copy / name).write_bytes(change((copy / name).read_bytes()))
    code, _, err = run("diff", sound, str(copy))
    assert code == 4
    assert words in err
    assert f"{name} of '{copy}'" in err
    assert err.endswith("copy the dump again.\n")


def test_a_dump_of_another_schema_says_who_can_read_it(
    run: Run, sound: str, tmp_path: Path
) -> None:
    copy = shutil.copytree(sound, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    for version, words in (("9.1", "9.1 wrote it"), ("\x1b[2J", "version of ddtree-guard that")):
        manifest |= {"schema": "ddtree-guard-dump/9", "versions": {"ddtree_guard": version}}
        (copy / "manifest.json").write_text(json.dumps(manifest))
        code, _, err = run("check", str(copy))
        assert code == 4
        assert "found 'ddtree-guard-dump/9'" in err
        assert words in err
        assert "\x1b" not in err


def test_bad_selections_name_what_is_right(run: Run, sound: str) -> None:
    for selection, words in (
        ("Q9", "no rule is called 'Q9'"),
        ("W3@2026", "rule selection 'W3@2026' is not understood"),
        ("-W3@tomorrow", "is not a day"),
    ):
        code, _, err = run("check", sound, f"--rules={selection}")
        assert code == 2
        assert words in err


@pytest.mark.parametrize(("flag", "value"), [("--step", "7"), ("--request", "3"), ("--step", "-1")])
def test_show_names_the_range(run: Run, sound: str, flag: str, value: str) -> None:
    code, _, err = run("show", sound, f"{flag}={value}")
    assert code == 2
    assert f"is {value}, but the dump holds" in err


def test_check_of_a_sound_dump_counts_and_exits_0(run: Run, sound: str) -> None:
    code, out, _ = run("check", sound)
    assert code == 0
    assert f"checked 1 step, {len(Guard().check(SOUND).checked)} rules, clean; " in out


def test_check_of_a_broken_dump_shows_the_block_and_exits_1(run: Run, broken: str) -> None:
    code, out, _ = run("check", broken)
    assert code == 1
    assert "mask_indptr[3] - mask_indptr[2] = 1072, expected w*(s+w) = 17*(50+17) = 1139" in out
    assert "step=912" in out
    assert "(W3" in out.splitlines()[-1]


def test_check_as_json(run: Run, broken: str) -> None:
    code, out, _ = run("check", "--json", broken)
    values = json.loads(out)
    assert code == values["exit"] == 1
    assert values["steps"] == 2
    assert ("W3", 912, "1139") in [
        (f["rule"], f["step"], f["expected"]) for f in values["findings"]
    ]
    assert set(values["rules_checked"]) >= {"W1", "W3"}


def test_check_with_a_selection_counts_the_rest_as_not_checked(run: Run, broken: str) -> None:
    code, out, _ = run("check", broken, "--rules", "W1")
    assert code == 0
    assert out.startswith(f"checked 2 steps, 1 rule, clean; {len(ALL) - 1} rule")


def test_check_says_why_a_rule_was_not_checked(run: Run, tmp_path: Path) -> None:
    step = SOUND.replace(layout__mask_indptr=None, contract__not_checked={"W1": "no queries here"})
    path = dumped(tmp_path, SOUND, step)
    _, out, _ = run("check", path, "--all")
    assert "W3 not checked on 1 of 2 steps: layout.mask_indptr is not in this step" in out
    assert "W1 not checked on 1 of 2 steps: no queries here" in out


def test_check_says_without_being_asked_what_it_could_not_judge(run: Run, tmp_path: Path) -> None:
    odd = SOUND.replace(layout__mask_indptr=SOUND.layout.mask_indptr.astype(float))
    code, out, _ = run("check", dumped(tmp_path, SOUND, odd), "--rules=W1,W3")
    assert code == 0
    assert "W3 not checked on 1 of 2 steps: layout.mask_indptr holds float64, expected whole" in out
    assert out.splitlines()[-1].startswith("checked 2 steps, 1 rule, clean; 1 rule on some steps")
    assert run("check", dumped(tmp_path, SOUND, odd))[0] == 1  # W5 sees it


def test_a_step_without_any_checked_rule_has_its_own_line(run: Run, tmp_path: Path) -> None:
    exempt = SOUND.replace(contract__not_checked={rule.id: "trust me" for rule in ALL})
    path = dumped(tmp_path, SOUND, exempt)
    _, out, _ = run("check", path)
    assert "NOT CHECKED: no rule could be evaluated on 1 of 2 steps (index 1)" in out
    assert "clean; " in out
    assert out.rstrip().endswith("(--all says why)")
    assert json.loads(run("check", path, "--json")[1])["steps_without_rules"] == [1]
    assert run("check", dumped(tmp_path, exempt))[0] == 4


def test_a_cause_is_written_once(run: Run, tmp_path: Path) -> None:
    step = SOUND.replace(
        layout__qo_indptr=SOUND.layout.qo_indptr // 17 * 8,
        widths__holders={"backend": 8},
        layout__max_extend_len=8,
    )
    out = run("check", dumped(tmp_path, step))[1]
    assert out.count("instead of from the batch") == 1
    assert out.count("same as CFG1") >= 2
    assert out.count("symbols: w rows per request") == 1
    assert run("show", dumped(tmp_path, step))[1].count("instead of from the batch") == 1


def test_what_reached_an_answer_is_shown_before_what_is_latent(run: Run, tmp_path: Path) -> None:
    early = SOUND.replace(mask__capacity=len(SOUND.mask.cells))  # too small at full context only
    assert [f.latent for f in Guard().check(early).findings] == [True]
    late = FAULTS["P1"](early, 2).step
    _, out, _ = run("check", dumped(tmp_path, early, late))
    assert out.index("\nM5 ") > out.index("P1 ")


def test_check_of_a_step_with_missing_parts_is_never_clean(run: Run, tmp_path: Path) -> None:
    code, out, err = run("check", dumped(tmp_path, Step(2, 2, Widths(17))), "--rules=W1,W3")
    assert code == 4
    assert "no selected rule can be evaluated on this dump" in err
    assert "clean" not in out


def test_a_recorded_finding_that_is_gone_is_a_mismatch(run: Run, tmp_path: Path) -> None:
    finding = Guard().check(BROKEN).findings[0]
    path = DumpWriter("run", Config(dump_dir=tmp_path)).write([SOUND], [(0, finding)])
    code, out, _ = run("check", str(path))
    assert code == 1
    assert (
        f"{finding.rule} was recorded when the dump was written; this check finds it sound" in out
    )


def test_a_recorded_finding_of_no_rule_is_not_lost(run: Run, tmp_path: Path) -> None:
    finding = Finding("bits and words differ", "a != b", "a", "b", rule="Z1\x1b[31m")
    path = DumpWriter("run", Config(dump_dir=tmp_path)).write([SOUND], [(0, finding)])
    code, out, _ = run("check", str(path))
    assert code == 1
    assert "Z1\\u001b[31m was recorded" in out


@pytest.mark.parametrize("hostile", [2**62, -5])
def test_lengths_that_overflow_are_findings_or_not_checked(
    run: Run, tmp_path: Path, hostile: int
) -> None:
    lens = SOUND.layout.prefix_lens.copy()
    lens[2] = hostile
    path = dumped(tmp_path, SOUND.replace(layout__prefix_lens=lens), findings=False)
    assert run("check", path)[0] == 1
    assert run("show", path)[0] == 0


def test_explain_prints_the_page(run: Run) -> None:
    for name in ("W3", "w3", "mask-offset-gap", "W3 mask-offset-gap: request 1 reads"):
        code, out, _ = run("explain", name)
        assert code == 0
        for words in ("W3 mask-offset-gap", "Holds when", "Breaks as", "Usual cause", "Seen in"):
            assert words in out


@pytest.mark.parametrize(
    "text",
    [
        "also W3 mask-offset-gap: request 1 reads",
        "2026-11-29T10:00:03 TP0 W3 mask-offset-gap: request 1",
        "found `mask-offset-gap` in the log",
        "  W3, W4",
    ],
)
def test_explain_finds_the_rule_anywhere_in_a_line(run: Run, text: str) -> None:
    for argv in ([text], text.split()):
        code, out, _ = run("explain", *argv)
        assert code == 0
        assert out.startswith("W3 mask-offset-gap\n")


def test_explain_a_family_lists_its_rules(run: Run) -> None:
    code, out, _ = run("explain", "w")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == [f"W{n}" for n in range(1, 9)]
    assert len(json.loads(run("explain", "W", "--json")[1])["rules"]) == 8


def test_explain_an_incident_points_to_its_page_and_rules(run: Run) -> None:
    code, out, _ = run("explain", "I08")
    assert code == 0
    assert "docs/incidents.md" in out
    assert "W6    captured-stride-stale" in out


def test_explain_spells_the_symbols_once(run: Run) -> None:
    assert run("explain", "W3")[1].count("symbols: w rows per request") == 1


def test_explain_a_log_line_states_its_values(run: Run) -> None:
    finding = Guard().check(BROKEN).findings[-1]
    text = "[2026-11-29 10:00 TP0] " + line(finding, BROKEN, dump="/var/dg/x")
    for argv in ([text], text.split()):  # quoted by the shell, or not
        code, out, _ = run("explain", *argv)
        assert code == 0
        assert "Step 912, request r2: expected 1139, found 1072" in out
        assert "ddtree-guard check /var/dg/x" in out
        assert "Holds when" in out


def test_explain_a_line_about_repeats_states_its_counts(run: Run) -> None:
    text = (
        "[2026-11-29 TP0] ddtree_guard repeated rule=W3 count=98 total=100 steps=2-101 rids=r2,r0+"
    )
    for argv in ([text], text.split()):
        code, out, _ = run("explain", *argv)
        assert code == 0
        assert "W3 was broken 98 more times in steps 2-101, requests r2,r0 and more; 100" in out
        assert "expected ?" not in out
        assert "Holds when" in out
    assert json.loads(run("explain", "--json", text)[1])["line"]["total"] == "100"


# as the package writes them; every head of docs/operations.md is in tests/test_loglines.py
NO_RULE = {
    "ddtree_guard NOT ACTIVE: expected SGLang, found none": "nothing is checked. The sentence",
    "ddtree_guard tainted rid=r1 source=r0 cached=40 name=r-1: it reuses KV": "empty the cache",
    "NOT GUARDED: rank 1 of 2, no report; is the plugin installed and loaded there; serving "
    "continues unchecked": "Install the same version on that node",
    "NOT GUARDED: site metadata failed 3 times and is disarmed; report": "restart to arm again",
    "ddtree_guard step=5 was not checked: no hook saw its metadata": "once a reason",
    "ddtree_guard armed=2/2 mode=log dumps=/var/dg release=0.5.16": "docs/operations.md#the-boot",
    "ddtree_guard dump trigger=run why='rule=W3 a/b' dump=/var/dg/x": "without a finding",
    "ddtree_guard request rid=a/b name=r-1 verdict=clean run=3": "A request ended a minute ago",
    "ddtree_guard shadow every=8 capture=meta": "shadow mode (docs/shadow.md)",
    "ddtree_guard: SGLANG_DDTREE_GUARD_MOOD is not a variable of the guard; did": "misspelt",
    "ddtree_guard: checked 3 of 3 steps": "a line of ddtree-guard without a rule",
}


@pytest.mark.parametrize("text", NO_RULE)
@pytest.mark.parametrize(
    "before", ["", "[2026-11-29 10:00:03 TP0] ", "2026/11/29 10:00 pod-1/sglang "]
)
def test_explain_a_line_without_a_rule_says_what_it_means(run: Run, before: str, text: str) -> None:
    for argv in ([before + text], (before + text).split()):
        code, out, err = run("explain", *argv)
        assert (code, err) == (0, "")
        assert NO_RULE[text] in " ".join(out.split())
        assert len(out.splitlines()) < 6
    told = json.loads(run("explain", "--json", before + text)[1])
    assert told["rules"] == []
    assert NO_RULE[text] in told["means"]


def test_a_dump_whose_path_looks_like_a_line_is_a_dump(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "ddtree_guard request of today"
    folder.mkdir()
    path = dumped(folder, BROKEN)
    assert "Holds when" in run("explain", path)[1]


def test_explain_a_dump_shows_its_findings(run: Run, broken: str, sound: str) -> None:
    _, out, _ = run("explain", broken)
    assert "step=912" in out
    assert "Holds when" in out
    assert "No finding was recorded" in run("explain", sound)[1]


def test_explain_as_json(run: Run, broken: str) -> None:
    assert json.loads(run("explain", "--json", "W3")[1])["rules"][0]["name"] == "mask-offset-gap"
    assert [1, "W3"] in json.loads(run("explain", "--json", broken)[1])["findings"]


def test_rules_lists_every_rule(run: Run) -> None:
    _, out, _ = run("rules")
    for rule in ALL:
        assert f"{rule.id:5} {rule.name}" in out
        assert rule.cost.value in next(row for row in out.splitlines() if f" {rule.name} " in row)
    facts = json.loads(run("rules", "--json")[1])
    assert [fact["id"] for fact in facts] == [rule.id for rule in ALL]
    assert all(fact["page"]["Holds when"] for fact in facts)


@pytest.mark.parametrize("width", [60, 80, 110])
def test_rules_are_folded_and_not_cut(width: int) -> None:
    lines = table(ALL, width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert all(rule.statement.split()[-1] in text for rule in ALL)
    assert "…" not in text


def test_a_rule_is_left_out_with_or_without_an_equals_sign(run: Run, broken: str) -> None:
    assert run("check", broken, "--rules=-W")[0] == run("check", broken, "--rules", "-W")[0]
    with_day = run("check", broken, "--rules", "-W3@2099-01-01,-M")[1]
    assert "W3" not in with_day
    assert run("check", broken, "--rules", "--all")[0] == 2


def test_show_says_that_tokens_are_hashes(run: Run, tmp_path: Path, sound: str) -> None:
    assert (
        "tokens and request ids are hashes" in run("show", dumped(tmp_path, SOUND, redact=True))[1]
    )
    assert "hashes" not in run("show", sound)[1]


HOSTILE = "\x1b]0;x\x07\x1b[31m\nforged\x9b2J"


def hostile(step: Step) -> Step:
    """The step with an escape sequence in every text that it holds, wherever it may stand."""
    changes: dict[str, object] = {}
    for part, kind in PARTS.items():
        for field in dataclasses.fields(kind):
            value, name = getattr(getattr(step, part), field.name), f"{part}__{field.name}"
            if isinstance(value, str):
                changes[name] = value + HOSTILE
            elif isinstance(value, tuple) and value and isinstance(value[0], str):
                changes[name] = tuple(text + HOSTILE for text in value)
            elif isinstance(value, dict) and not isinstance(next(iter(value.values()), 0), Static):
                changes[name] = {key + HOSTILE: inner for key, inner in value.items()}
    assert len(changes) > 15
    exempt = {"W1": HOSTILE}
    return step.replace(**changes).replace(contract__not_checked=exempt, outcome__walk=HOSTILE)


def test_no_command_passes_an_escape_sequence_on(run: Run, tmp_path: Path) -> None:
    a, b = (dumped(tmp_path / name, hostile(step)) for name, step in (("a", SOUND), ("b", BROKEN)))
    finding = dataclasses.replace(Guard().check(BROKEN).findings[0], rid=HOSTILE, expected=HOSTILE)
    pasted = line(finding, BROKEN, dump=HOSTILE)
    commands = (
        ["check", "--all", b], ["show", b], ["explain", b], ["explain", pasted],
        ["explain", HOSTILE], ["diff", a, b], ["ranks", str(tmp_path)], ["check", HOSTILE],
        ["request", HOSTILE, str(tmp_path)], ["recompute", b], ["check", b, f"--rules={HOSTILE}"],
        ["report", b, "-o", str(tmp_path / "x.html")], ["bundle", b, "-o", str(tmp_path / "x.zip")],
    )  # fmt: skip
    for argv in commands:
        _, out, err = run(*argv)
        shown = out + err
        assert shown
        assert all(c.isprintable() or c == "\n" for c in shown), argv
        assert not any(row.startswith("forged") for row in shown.splitlines()), argv


def test_show_draws_the_offender_by_default(run: Run, broken: str) -> None:
    code, out, _ = run("show", broken)
    assert code == 0
    for words in ("step 912 (index 1 of 2)", "query rows", "mask cells", "mask of request 2",
                  "tree of request 2", "1139 -> 1072"):  # fmt: skip
        assert words in out
    assert max(map(len, [row for row in out.splitlines() if "site=" not in row])) <= 260
    assert "\x1b" not in out


def test_show_takes_an_index_and_its_help_says_so(
    run: Run, broken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "step 912 (index 1 of 2)" in run("show", broken, "--step=1")[1]
    with pytest.raises(SystemExit):
        cli.main(["show", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "--step INDEX" in said
    assert "not the step's number" in said


def test_show_as_json(run: Run, broken: str) -> None:
    values = json.loads(run("show", "--json", "--step=0", "--request=1", broken)[1])
    assert (values["index"], values["request"], values["findings"]) == (0, 1, [])
    assert len(values["requests"]) == 3


def test_a_fault_of_the_program_is_a_sentence(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: argparse.Namespace) -> int:
        raise RuntimeError("\x1b[2J boom")

    monkeypatch.setattr(cli, "_run", fail)
    code, _, err = run("rules")
    assert code == cli.INTERNAL
    assert "this is a fault of ddtree-guard itself: RuntimeError: \\u001b[2J boom" in err


def test_an_interrupt_is_quiet(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(argv: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupt)
    assert run("rules") == (130, "", "")


def test_version_and_help_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--version"], ["--help"], ["check", "--help"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(argv)
        assert stop.value.code == 0
    assert "ddtree-guard 0.1.0" in capsys.readouterr().out
