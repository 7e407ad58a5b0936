"""Every rule has something to do about it, and what the runbook calls a cure is one."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from ddtree_guard.checks import ALL
from ddtree_guard.commands.explain import page
from ddtree_guard.report.pages import runbook
from ddtree_guard.rule import Rule
from ddtree_guard.runbook import ADVICE, FAMILIES, Cure, Harm, advice_on


def test_every_rule_and_family_is_covered_and_no_other() -> None:
    assert set(ADVICE) == {rule.id for rule in ALL}
    assert set(FAMILIES) == {rule.family for rule in ALL}
    assert {cure for row in ADVICE.values() for cure in row.cures} == set(Cure)


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_explain_says_the_harm_and_every_cure(rule: Rule) -> None:
    row = ADVICE[rule.id]
    assert row.cures
    assert len(set(row.cures)) == len(row.cures)
    text = " ".join(page(rule).split())
    assert f"Harm: {row.harm.value}" in text
    assert all(f"What to do, {n}: {cure.value}" in text for n, cure in enumerate(row.cures, 1))


def test_the_runbook_names_every_rule_and_its_links_lead_somewhere() -> None:
    text = runbook(ALL)
    assert [
        rule.id for rule in ALL if f"| [{rule.id}]({rule.id}.md) | {rule.name} |" not in text
    ] == []
    links, places = set(re.findall(r"\]\(#(\w+)\)", text)), re.findall(r"<a id='(\w+)'>", text)
    assert links <= set(places)
    assert len(places) == len(set(places))


def test_speed_only_never_asks_to_stop_the_server() -> None:
    for row in ADVICE.values():
        assert (row.harm is Harm.SPEED) == (Cure.SLOW in row.cures)
        assert not (row.harm is Harm.SPEED and Cure.PLAIN in row.cures)


@pytest.mark.sglang
def test_every_flag_is_one_of_this_sglang() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    srt = Path(spec.submodule_search_locations[0], "srt")
    files = [srt / "server_args.py", *(srt / "arg_groups").rglob("*.py")]
    source = "".join(file.read_text() for file in files)
    flags = {flag for cure in Cure for flag in re.findall(r"--[a-z][a-z-]+", cure.value)}
    ours = {"--speculative-ddtree-budget"}
    assert len(flags) > 8
    missing = [
        flag
        for flag in flags - ours
        if f'"{flag}"' not in source and f"\n    {flag[2:].replace('-', '_')}:" not in source
    ]
    assert missing == []


def test_a_rule_without_a_row_is_still_explained() -> None:
    assert advice_on("Q9").cures == (Cure.PLAIN,)
