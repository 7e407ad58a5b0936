"""Generated documents are current, and the rules they come from are complete."""

import re
from pathlib import Path

import pytest

from ddtree_guard import cli
from ddtree_guard.checks import ALL
from ddtree_guard.report.pages import pages, write_pages
from ddtree_guard.rule import HEADINGS, Rule
from ddtree_guard.testing.faults import FAULTS

DOCS = Path(__file__).parent.parent / "docs" / "rules"


def test_rule_pages_are_current() -> None:
    on_disk = {path.name: path.read_text() for path in DOCS.iterdir()}
    assert on_disk == pages(ALL), "run `ddtree-guard rules --markdown docs/rules`"


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_a_rule_has_a_whole_page_and_a_fault(rule: Rule) -> None:
    assert [heading for heading in HEADINGS if f"\n{heading}: " not in rule.page] == []
    assert rule.statement.endswith(".")
    assert rule.id in FAULTS


def test_pages_of_rules_that_are_gone_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("W99.md", "notes.md", "README.md"):
        (tmp_path / name).write_text("old")
    assert write_pages(str(tmp_path), ALL) == len(ALL) + 2
    assert not (tmp_path / "W99.md").exists()
    assert (tmp_path / "notes.md").read_text() == "old"
    assert "[W3](W3.md)" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("code", ["2", "3"])
def test_the_help_of_doctor_says_what_its_manual_says_of_a_failure(
    capsys: pytest.CaptureFixture[str], code: str
) -> None:
    manual = (DOCS.parent / "doctor.md").read_text()
    (words,) = re.findall(rf"^\| {code} \| (.+?) \|", manual, re.MULTILINE)
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--help"])
    codes = " ".join(capsys.readouterr().out.partition("exit codes: ")[2].split())
    said = re.split(r",? ?\b([0-3]) ", codes)
    meanings = dict(zip(said[1::2], said[2::2], strict=True))
    assert [word for word in re.findall("`(.+?)`", words) if word not in meanings[code]] == []
