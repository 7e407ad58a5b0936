"""What docs/doctor.md says was measured is what the raw results hold."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from ddtree_guard.doctor.canary import APART

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "benchmarks" / "results" / "doctor_url.json").read_text())["rows"]
ASKED = [row for row in ROWS if not row["refused"]]
TEXT = (ROOT / "docs" / "doctor.md").read_text()


def test_every_server_was_told_right_in_every_run() -> None:
    assert len(ASKED) >= 24
    assert [row["server"] for row in ROWS if not row["as_expected"]] == []
    assert [row["server"] for row in ASKED if (row["exit"] == 1) is not row["garbled"]] == []


def test_every_row_is_of_the_server_that_it_names() -> None:
    assert {row["deployment"]["release"] == row["release"] for row in ASKED} == {True}
    keys = [(row["release"], row["server"], row["round"]) for row in ROWS]
    assert len(set(keys)) == len(keys)


def test_the_margin_is_as_wide_as_the_text_says() -> None:
    garbled = [row for row in ASKED if row["garbled"]]
    bad = [row["canaries"]["other"] for row in garbled]
    # the printed text is of a run of its own
    bad += [int(n) for r in garbled for n in re.findall(r"(\d+) of 96", r.get("text", ""))]
    sound = [row["canaries"]["other"] for row in ASKED if not row["garbled"]]
    assert f"{min(bad)} to {max(bad)} of 96 tokens differ" in TEXT
    assert max(sound) == 1
    assert {row["canaries"]["asked"] for row in ASKED} == {96}
    took = [row["seconds"] for row in ASKED]
    assert f"A run takes {min(took):.1f} to {max(took):.1f} seconds." in TEXT


def test_the_first_prompt_of_a_garbled_batch_looks_right() -> None:
    first = [row["canaries"]["prompts"][0]["other"] for row in ASKED if row["garbled"]]
    assert first == [0] * len(first)


def test_the_bound_lies_between_garbled_and_sound_in_every_run() -> None:
    for row in ASKED:
        share = row["canaries"]["other"] / row["canaries"]["asked"]
        assert (share > APART) is row["garbled"]
        assert row["garbled"] or share <= APART / 4


@pytest.mark.sglang
def test_what_garbles_on_one_release_is_refused_on_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("doctor_url")
    for name in ("doctor_url", "serving", "engines", "common"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(script, "release", lambda: "0.5.16")
    found = script.servers(("0.5.17", "/site"))
    told = {(s.release, s.name): (s.garbled, s.refused) for s in found}
    assert told["0.5.16", "incident-16-graphs"] == (True, False)
    assert told["0.5.17", "incident-16-graphs"] == (False, True)
    assert told["0.5.17", "ddtree-16-graphs"] == (False, False)
    assert ("0.5.17", "incident-7-graphs") not in told
    assert [s.site for s in found if s.release == "0.5.16"] == [""] * 8
