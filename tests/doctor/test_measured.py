"""What docs/doctor.md says was measured is what the raw results hold."""

import json
from pathlib import Path

from ddtree_guard.doctor.canary import APART

ROOT = Path(__file__).parents[2]
AGAIN = ROOT / "benchmarks" / "results" / "doctor_url_repeat.json"
ROWS = json.loads((ROOT / "benchmarks" / "results" / "doctor_url.json").read_text())["rows"]
TEXT = (ROOT / "docs" / "doctor.md").read_text()


def test_every_server_was_told_right_in_every_run() -> None:
    assert len(ROWS) >= 24
    assert [row["server"] for row in ROWS if not row["as_expected"]] == []
    assert [row["server"] for row in ROWS if (row["exit"] == 1) is not row["garbled"]] == []


def test_the_margin_is_as_wide_as_the_text_says() -> None:
    bad = [row["canaries"]["other"] for row in ROWS if row["garbled"]]
    sound = [row["canaries"]["other"] for row in ROWS if not row["garbled"]]
    assert f"{min(bad)} to {max(bad)} of 96 tokens differ" in TEXT
    assert max(sound) == 1
    assert {row["canaries"]["asked"] for row in ROWS} == {96}


def test_the_first_prompt_of_a_garbled_batch_looks_right() -> None:
    first = [row["canaries"]["prompts"][0]["other"] for row in ROWS if row["garbled"]]
    assert first == [0] * len(first)


def test_the_bound_lies_between_garbled_and_sound_in_every_run() -> None:
    for row in (*ROWS, *json.loads(AGAIN.read_text())["rows"]):
        share = row["canaries"]["other"] / row["canaries"]["asked"]
        bad = row["server"].startswith("incident-16")
        assert (share > APART) is bad
        assert bad or share <= APART / 4
