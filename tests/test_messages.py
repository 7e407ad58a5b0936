"""Golden text: what each rule says about its planted fault. UPDATE_GOLDEN=1 rewrites the file."""

import os
from pathlib import Path

import pytest

from ddtree_guard import render
from ddtree_guard.checks import ALL
from ddtree_guard.rule import Rule
from ddtree_guard.testing.examples import example

GOLDEN = Path(__file__).parent / "golden" / "messages.txt"


def text_of(rule: Rule) -> str:
    shown = example(rule)
    assert shown is not None, f"the fault of {rule.id} does not fire it"
    return f"{render.block(*shown)}\n{render.line(*shown)}\n"


def test_messages_are_golden() -> None:
    text = "\n".join(text_of(rule) for rule in ALL)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "run UPDATE_GOLDEN=1 pytest tests/test_messages.py"


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_a_message_states_values_cause_and_a_short_headline(rule: Rule) -> None:
    shown = example(rule)
    assert shown is not None
    finding, _ = shown
    assert len(finding.headline) <= 60
    assert finding.cause
    assert finding.expected != finding.actual
    assert finding.equation
