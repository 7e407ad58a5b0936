"""Every rule of the catalogue: identity, manual page, silence on sound steps, and its fault."""

from __future__ import annotations

import pytest

from ddtree_guard.checks import ALL
from ddtree_guard.guard import Guard
from ddtree_guard.rule import HEADINGS, HEADLINE, Finding, Rule
from ddtree_guard.step import ARRAY_SHAPES, PARTS, Step
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step

# Device bits are part of the verdict's format: fixed for ever.
BITS = {
    "W1": 0, "W2": 1, "W3": 2, "W4": 3, "W8": 4, "M1": 5, "M2": 6, "M4": 7, "M6": 8,
    "T1": 9, "T2": 10, "T3": 11, "T4": 12, "T6": 13, "P1": 14, "K1": 15, "K2": 16, "G4": 17,
    "A1": 18, "A2": 19, "A3": 20, "K3": 21, "K4": 22, "M3": 23,
}  # fmt: skip

SOUND = {
    "eager": {},
    "graph": {"padded_bs": 4},
    "chain": {"kind": "chain"},
    "full-chain": {"kind": "chain", "w": 8, "full_trees": True},
    "star": {"kind": "star"},
    "full": {"full_trees": True, "w": 33, "block": 6},
    "pages": {"page_size": 4},
    "narrow": {"w": 4, "block": 16, "lens": (9, 1), "padded_bs": 8},
    "smallest": {"w": 2, "block": 2, "lens": (5, 4)},
}
PLANTABLE = ("eager", "graph", "chain", "star", "pages")

each_rule = pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)


def finding_of(step: Step, rule_id: str) -> Finding | None:
    """The finding of one rule, or None; fails the test if the rule was not evaluated."""
    report = Guard().check(step)
    assert rule_id in report.checked, report.not_checked
    return next((f for f in report.findings if f.rule == rule_id), None)


def section(rule: Rule, heading: str) -> str:
    """The text of a manual page from a heading to the next."""
    text = rule.page.partition(f"\n{heading}:")[2]
    ends = [text.find(f"\n{other}:") for other in HEADINGS]
    return text[: min([e for e in ends if e >= 0], default=len(text))].strip()


@each_rule
def test_page_has_a_statement_and_the_four_headings(rule: Rule) -> None:
    assert rule.statement.endswith(".")
    assert [h for h in HEADINGS if not section(rule, h)] == []


@each_rule
def test_page_ends_with_incident_ids_or_says_that_there_are_none(rule: Rule) -> None:
    seen = section(rule, "Seen in")
    names = [part.strip(" .") for part in seen.split(",")]
    numbered = all(name[:1] in ("I", "H") and name[1:3].strip(".").isdigit() for name in names)
    assert numbered or seen.startswith("none reported"), seen


@each_rule
def test_identity_is_well_formed(rule: Rule) -> None:
    assert rule.family.isupper()
    assert rule.name == rule.name.lower()
    assert all(part.isalnum() for part in rule.name.split("-")), rule.name
    assert not rule.name.startswith(("check-", "validate-"))


@each_rule
def test_needs_name_fields_of_a_step(rule: Rule) -> None:
    known = {f"{part}.{name}" for part, kind in PARTS.items() for name in kind.__dataclass_fields__}
    assert set(rule.needs) <= known
    assert set(ARRAY_SHAPES) <= known


def test_ids_and_names_are_unique() -> None:
    assert len({rule.id for rule in ALL}) == len(ALL)
    assert len({rule.name for rule in ALL}) == len(ALL)


@each_rule
def test_device_bit_is_the_fixed_one(rule: Rule) -> None:
    assert rule.bit == BITS.get(rule.id)


def test_every_rule_has_a_fault_and_every_fault_a_rule() -> None:
    assert set(FAULTS) == {rule.id for rule in ALL}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", SOUND)
def test_sound_step_is_clean(kind: str, seed: int) -> None:
    report = Guard().check(sound_step(seed, **SOUND[kind]))
    assert report.findings == ()


@pytest.mark.parametrize("kind", ["eager", "graph"])
def test_most_rules_are_evaluated_on_a_sound_step(kind: str) -> None:
    report = Guard().check(sound_step(**SOUND[kind]))
    assert len(report.checked) > len(report.not_checked)
    assert len(report.checked) + len(report.not_checked) == len(ALL)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule_id", sorted(FAULTS))
def test_fault_fires_its_rule_and_names_the_planted_place(rule_id: str, seed: int) -> None:
    places = []
    for kind in PLANTABLE:
        step = sound_step(seed, **SOUND[kind])
        planted = FAULTS[rule_id](step, step.bs - 1)
        if rule_id not in Guard().check(planted.step).checked:
            continue  # the fault needs a part that this kind of step lacks
        finding = finding_of(planted.step, rule_id)
        assert finding is not None, kind
        assert (finding.request, finding.row) == (planted.request, planted.row), kind
        places.append(kind)
    assert places, f"no kind of step lets {rule_id} be evaluated"


@pytest.mark.parametrize("rule_id", sorted(FAULTS))
def test_fault_at_another_request_is_named_there(rule_id: str) -> None:
    """With four requests the second is neither the first nor the last."""
    step = sound_step(7, lens=(12, 40, 33, 8), padded_bs=6)
    planted = FAULTS[rule_id](step, 1)
    finding = finding_of(planted.step, rule_id)
    assert finding is not None
    assert (finding.request, finding.row) == (planted.request, planted.row)


@each_rule
def test_finding_is_complete_and_short(rule: Rule) -> None:
    step = sound_step(1, padded_bs=4)
    finding = finding_of(FAULTS[rule.id](step, step.bs - 1).step, rule.id)
    assert finding is not None
    assert 0 < len(finding.headline) <= HEADLINE
    assert not finding.headline.endswith("...")
    assert all((finding.equation, finding.expected, finding.actual, finding.cause))
    assert finding.expected != finding.actual
    assert finding.request not in finding.victims
    assert (finding.rule, finding.name, finding.site) == (rule.id, rule.name, rule.site)


@each_rule
def test_without_a_needed_field_the_rule_is_not_checked(rule: Rule) -> None:
    step = sound_step(2, padded_bs=4)
    planted = FAULTS[rule.id](step, step.bs - 1).step
    for path in rule.needs:
        report = Guard().check(planted.replace(**{path.replace(".", "__"): None}))
        why = {skipped.rule: skipped.why for skipped in report.not_checked}
        assert path in why.get(rule.id, ""), path
