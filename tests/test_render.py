"""Text of findings and summaries: the frozen line, the block, and quoting."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_guard import render
from ddtree_guard.guard import NotChecked, Report
from ddtree_guard.rule import Finding, Scope, Site
from ddtree_guard.step import Step, Who, Widths
from ddtree_guard.testing.steps import sound_step

FINDING = Finding(
    headline="request 1 reads mask cells that are not its own",
    equation="mask_indptr[2] - mask_indptr[1] = 1024, expected w*(s+w) = 17*(48+17) = 1105",
    expected="1105",
    actual="1024",
    request=1,
    row=0,
    victims=(2,),
    cause="the builder used the budget B where the kernel uses B+1",
    rule="W3",
    name="mask-offset-gap",
    scope=Scope.BATCH,
    site=Site.BUILD,
    rid="7f3a",
    bindings={"w": 17, "s": 48, "bs": 4, "BS": 4},
    tokens_left=False,
    action="stopped before the launch",
    next_step="ddtree-guard explain W3",
)
STEP = Step(4, 4, Widths(17), who=Who(rids=("a", "7f3a", "b", "c"), step_id=912))


def test_line_is_frozen() -> None:
    assert render.line(FINDING, STEP, incident="dg-7f3a", dump="/var/dg/a dump") == (
        "ddtree_guard finding rule=W3 scope=batch rid=7f3a step=912 expected=1105 actual=1024 "
        'tokens_left=no incident=dg-7f3a dump="/var/dg/a dump" name=-'
    )


@pytest.mark.parametrize(("left", "word"), [(True, "yes"), (False, "no"), (None, "unknown")])
def test_line_says_whether_tokens_left(left: bool | None, word: str) -> None:
    finding = dataclasses.replace(FINDING, tokens_left=left, rid=None)
    assert f"rid=- step=912 expected=1105 actual=1024 tokens_left={word} " in render.line(
        finding, STEP
    )


def test_block_is_frozen() -> None:
    assert render.block(FINDING, STEP, dump="/var/dg/d1").splitlines() == [
        "W3 mask-offset-gap: request 1 reads mask cells that are not its own",
        "  mask_indptr[2] - mask_indptr[1] = 1024, expected w*(s+w) = 17*(48+17) = 1105",
        "  w=17 s=48 bs=4 BS=4",
        "  site=build step=912 rank=TP0 request=1 row=0 rid=7f3a victims=request 2 "
        "backend=triton/stock graph=eager  read by this kernel",
        "  usual cause (likely): the builder used the budget B where the kernel uses B+1",
        "  stopped before the launch; its tokens did not leave; dump /var/dg/d1; "
        "next: ddtree-guard explain W3",
    ]


def test_block_says_latent() -> None:
    text = render.block(dataclasses.replace(FINDING, latent=True), STEP)
    assert "latent (this kernel does not read it)" in text
    assert "read by this kernel" not in text


@given(st.text(), st.text())
def test_no_value_can_forge_a_line_or_a_terminal_command(rid: str, expected: str) -> None:
    finding = dataclasses.replace(FINDING, rid=rid, expected=expected, headline=rid, cause=rid)
    line = render.line(finding, STEP)
    assert line.isprintable()
    fields = render.parse_line("[2026-11-29 TP0] " + line)
    assert tuple(fields) == render.LOG_KEYS
    assert (fields["rid"], fields["expected"]) == (rid, expected)
    block = render.block(finding, STEP)
    assert len(block.split("\n")) == 6
    assert block.replace("\n", "").isprintable()


def test_a_text_without_a_rule_is_no_log_line() -> None:
    assert render.parse_line("step=4 expected=1 actual=2") == {}


def test_incident_follows_rank_and_step_not_words() -> None:
    same = render.incident_id(dataclasses.replace(FINDING, headline="x"), STEP)
    other = render.incident_id(FINDING, STEP.replace(who__rank="TP1"))
    assert same == render.incident_id(FINDING, STEP) != other
    assert same.startswith("dg-")
    assert len(same) == 7


CLEAN = Report((), ("W1", "W3"), (NotChecked("M1", "mask.cells is not in this step"),))


def test_summary_of_clean_steps_counts_what_was_not_checked() -> None:
    assert render.summary(CLEAN, CLEAN) == "checked 2 steps, 2 rules, clean; 1 rule not checked"


def test_summary_names_broken_rules_once() -> None:
    broken = Report((FINDING,), ("W3",), ())
    assert render.summary(broken, broken, CLEAN, selected_out=2) == (
        "checked 3 steps, 1 rule, 2 findings (W3); 1 rule on some steps only; 3 rules not checked"
    )


def test_a_step_that_was_not_checked_does_not_hide_behind_one_that_was() -> None:
    part = Report((), ("W1",), (NotChecked("W3", "holds float64 (see W5)"), CLEAN.not_checked[0]))
    assert render.summary(CLEAN, part) == (
        "checked 2 steps, 1 rule, clean; 1 rule on some steps only; 1 rule not checked"
    )


def test_reasons_in_the_data_are_told_from_the_others() -> None:
    data = NotChecked("W3", "holds float64 (see W5)")
    absent = NotChecked("M1", "mask.cells is not in this step", by_data=False)
    report = Report((), (), (data, absent))
    assert render.not_checked(report, by_data=True) == [f"W3 not checked: {data.why}"]
    assert render.not_checked(report, by_data=False) == [f"M1 not checked: {absent.why}"]


def test_summary_never_calls_nothing_clean() -> None:
    nothing = Report((), (), CLEAN.not_checked)
    assert render.summary(nothing) == (
        "checked 1 step, 0 rules, so nothing is known; 1 rule not checked"
    )


def test_not_checked_lists_each_reason_with_its_steps() -> None:
    assert render.not_checked(CLEAN, Report((), ("M1",), ())) == [
        "M1 not checked on 1 of 2 steps: mask.cells is not in this step"
    ]


def test_json_holds_plain_values() -> None:
    values = render.as_json(FINDING, sound_step())
    assert values["scope"] == "batch"
    assert values["site"] == "build"
    assert values["victims"] == [2]
    assert values["step"] == 0
