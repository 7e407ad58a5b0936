"""Every command can be read in 100 columns and in 60, and no id or path is broken."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from ddtree_guard import cli, render
from ddtree_guard.checks import ALL
from ddtree_guard.commands.rules import table
from ddtree_guard.config import Config
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.fold import columns, fold
from ddtree_guard.guard import Guard
from ddtree_guard.rule import Rule
from ddtree_guard.step import Step
from ddtree_guard.testing.examples import example
from ddtree_guard.testing.steps import sound_step

RIDS = tuple(f"{i}b6e5f3c2d4a41f8a0b1c2d3e4f5061{i}" for i in range(3))  # as SGLang makes them


def step(number: int) -> Step:
    one = sound_step(number, lens=(37, 21, 50), padded_bs=4)
    return one.replace(who__step_id=number, who__rids=RIDS)


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """The incident: four rules broken, with victims and long request ids."""
    one = step(2)
    cells = np.cumsum([0, *(8 * (int(s) + 8) for s in one.layout.prefix_lens)])
    bad = one.replace(
        layout__qo_indptr=one.layout.qo_indptr * 8 // 17,
        layout__mask_indptr=cells,
        widths__holders={"backend": 8, "graph_runner": 17},
    )
    found = [(1, finding) for finding in Guard().check(bad).findings]
    return DumpWriter("run", Config(dump_dir=tmp_path, redact=False)).write([step(1), bad], found)


COMMANDS = (
    "rules", "explain W3", "explain W", "explain I01", "explain DUMP", "check DUMP",
    "check DUMP --all", "show DUMP", "show DUMP --request 2", "diff DUMP DUMP", "ranks ROOT",
    "request nobody ROOT", "recompute DUMP", "report DUMP -o ROOT/r.html",
    "bundle DUMP -o ROOT/b.zip", "ci-report ROOT", "check ROOT", "dump --pid 99999999",
    "check DUMP --rules ZZ", "--help", "doctor --help", "recompute --help",
)  # fmt: skip


@pytest.mark.parametrize("width", [100, 60])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_keeps_to_the_columns(
    command: str, width: int, dump: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    words = [w.replace("DUMP", str(dump)).replace("ROOT", str(dump.parents[1])) for w in
             command.split()]  # fmt: skip
    with contextlib.suppress(SystemExit):  # --help
        cli.main(words)
    lines = "".join(capsys.readouterr()).splitlines()
    assert lines
    # a line may be longer only where it is one word: a path
    long = [x for x in lines if len(x) > width and len(x.split()) > 1]
    assert [x for x in long if not x.strip().lower().startswith("next: ddtree-guard ")] == []


@pytest.mark.parametrize("width", [100, 60])
@pytest.mark.parametrize("command", ["check", "show", "explain"])
def test_ids_and_paths_stay_whole(
    command: str, width: int, dump: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    cli.main([command, str(dump)])
    words = capsys.readouterr().out.replace(",", " ").split()
    assert f"rid={RIDS[0]}" in words
    assert command != "show" or set(RIDS) <= set(words)
    assert cli.main([command, f"/nowhere/{'x' * 120}"]) == 4
    assert f"/nowhere/{'x' * 120}" in capsys.readouterr().err


@pytest.mark.parametrize("width", [60, 70, 80, 100, 120, 200])
def test_the_catalogue_has_a_place_for_every_cell(width: int) -> None:
    lines = table(ALL, width)
    assert max(map(len, lines)) <= width
    for rule in ALL:
        (row,) = [line for line in lines if line.split()[:2] == [rule.id, rule.name]]
        assert row.split()[2:5] == [rule.scope.value, rule.site.value, rule.cost.value]


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_every_block_folds(rule: Rule) -> None:
    found = example(rule)
    assert found is not None
    text = render.block(*found, "/var/ddtree-guard/run-1/dump")
    for width in (60, 100):
        folded = fold(text, width)
        assert max(map(len, folded.split("\n"))) <= width
        assert folded.split() == text.split()


def test_a_command_to_copy_stays_in_one_line() -> None:
    text = fold("see " * 12 + "`ddtree-guard explain W3 --json` for more of it", 60)
    assert "    `ddtree-guard explain W3 --json` for" in text.replace("\n  ", "\n    ")
    assert "`ddtree-guard explain W3 --json`" in text
    told = f"  next: ddtree-guard check /{'x' * 80}"
    assert fold(told, 60) == told
    assert "\n  ddtree-guard explain CFG1" in fold(
        f"{'a' * 38}; next: ddtree-guard explain CFG1", 60
    )


def test_what_a_ci_runner_would_obey_does_not_begin_a_line() -> None:
    text = fold("a" * 58 + " ::error::from a dump " + "b" * 58 + " ##[group]x", 60)
    assert [line.split()[0][:1] for line in text.split("\n")] == ["a", "|", "b", "|"]


@pytest.mark.parametrize(("value", "width"), [("80", 80), ("20", 60), ("", 100), ("x", 100)])
def test_the_columns_are_those_that_are_asked_for(
    value: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", value)
    assert columns() == width
