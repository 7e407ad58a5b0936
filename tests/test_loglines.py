"""What the guard's log lines mean: each is recognised, and its text stands on its own."""

from pathlib import Path

import pytest

from ddtree_guard import loglines

DOCS = Path(__file__).resolve().parents[1] / "docs"
each_line = pytest.mark.parametrize("line", loglines.LINES, ids=lambda line: line.head)


@each_line
def test_a_line_is_recognised_behind_a_time_and_before_its_values(line: loglines.Line) -> None:
    text = f"[2026-11-29 10:00 TP0] {line.head.replace('...', 'X')}5 and more"
    assert loglines.head(text) == line.head
    assert loglines.meaning(text).startswith(f"{line.head} ({line.level}): ")


@each_line
def test_a_meaning_has_no_markdown_link_left_and_names_files(line: loglines.Line) -> None:
    said = loglines.meaning(line.head)
    assert "](" not in said
    for word in said.split():
        if word.startswith("(docs/"):
            assert (DOCS.parent / word.strip("().,:").partition("#")[0]).is_file()


@pytest.mark.parametrize("reason", loglines.REASONS)
def test_a_reason_adds_what_to_do(reason: str) -> None:
    text = f"NOT GUARDED: rank 1 of 2, {reason.replace(' S ', ' metadata ')}; serving continues"
    assert loglines.meaning(text).endswith(loglines.REASONS[reason])
    assert loglines.REASONS[reason] not in loglines.meaning(f"ddtree_guard internal {reason}")


def test_the_line_that_stands_first_counts() -> None:
    assert loglines.head("ddtree_guard idle: NOT GUARDED") == "ddtree_guard idle"
    assert loglines.head("ddtree_guard shadow step=3 not compared") == "ddtree_guard shadow step="


@pytest.mark.parametrize(
    "text",
    [
        "",
        "W3",
        "mask-offset-gap",
        "/var/ddtree_guard/run-1",
        "/var/ddtree_guard old/run-1",
        "uvicorn: up",
    ],
)
def test_what_is_no_line_of_the_guard_means_nothing(text: str) -> None:
    assert (loglines.head(text), loglines.meaning(text)) == ("", "")
