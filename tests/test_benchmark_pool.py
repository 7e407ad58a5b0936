"""Runs of the overhead benchmark that add up, with engines that are played in this process."""

from __future__ import annotations

import importlib
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

MODULES = ("server_overhead", "pool", "rounds", "serving", "files")
WORDS = ["--seconds", "240", "--blocks", "4", "--rounds", "2", "--block", "0.1", "--warm", "0"]


class Lab:
    """The benchmark with engines of this process; what they are can change from run to run."""

    def __init__(self, overhead: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.overhead, self.folder, self.out = overhead, folder, folder / "made.json"
        self.sources, self.device, self.release, self.start_s = "aaa", "H200", "0.5.16", 30.0
        self.speed: Callable[[str], float] = lambda tool: 1000.0
        self.broken, self.silent = "", ""  # tools
        self.asked: list[tuple[int, str, int, int]] = []  # w, tool, concurrency, length
        where = {"processors": 4, "torch": "2", "python": "3"}
        monkeypatch.setattr(overhead, "where", lambda: {"device": self.device, **where})
        monkeypatch.setattr(overhead, "sources", lambda: {"sources": self.sources})
        monkeypatch.setattr(overhead, "ANSWERED_S", 0.0)
        monkeypatch.setattr(overhead, "Child", lambda cell: Played(self, cell))

    def run(self, *words: str, w: str = "8", generations: int = 1, tools: str = "") -> Any:
        """One call of the benchmark; what is in the file then."""
        self.asked.clear()
        named = ["--w", w, "--generations", str(generations), "--tools", tools]
        self.overhead.main([*WORDS, *named, "--out", str(self.out), *words])
        return self.read()

    def read(self) -> Any:
        """What is in the file, with names for the columns of its rounds."""
        found = json.loads(self.out.read_text())
        names = found["environment"]["round"]
        found["rounds"] = [dict(zip(names, line, strict=True)) for line in found["rounds"]]
        return found

    def put(self, found: Any) -> None:
        """Have this in the file."""
        rounds = [list(line.values()) for line in found["rounds"]]
        self.out.write_text(json.dumps(found | {"rounds": rounds}))


class Played:
    """An engine that answers at once."""

    def __init__(self, lab: Lab, cell: Any) -> None:
        self.lab, self.cell = lab, replace(cell, folder=str(lab.folder), cpus=())
        self.cell.path("log.txt").parent.mkdir(parents=True, exist_ok=True)
        self.cell.path("log.txt").write_text("")

    def answer(self, seconds: float) -> dict[str, Any]:
        if self.cell.tool in self.lab.broken:
            raise RuntimeError("no GPU")
        return {"start_s": self.lab.start_s, "release": self.lab.release}

    def ask(self, wait_s: float, /, **command: Any) -> dict[str, Any]:
        if command["do"] != "block":
            return {}
        tool, concurrency = self.cell.tool, command["concurrency"]
        self.lab.asked.append((self.cell.w, tool, concurrency, command["length"]))
        speed = self.lab.speed(tool) * concurrency
        return {"tokens_per_s": speed, "took_s": 0.61234567, "step_s": 10 / speed, "steps": 5,
                "tokens": 20, "gaps": [0.001] * 98 + [0.002, 0.009]}  # fmt: skip

    def ask_probe(self) -> None:
        pass

    def probe(self) -> dict[str, Any]:
        if self.cell.tool == self.lab.silent:
            return {}
        if self.cell.tool in ("off", "control", "control2"):
            return {"gpu_bytes": 7}
        return {"verify_steps": 100, "steps_checked": 100, "findings": 0, "gpu_bytes": 9,
                "recorder": {"dumps": 1}}  # fmt: skip

    def pin(self, *cpus: Any) -> None:
        pass

    def stop(self, patience: float) -> None:
        pass


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    yield Lab(importlib.import_module("server_overhead"), tmp_path, monkeypatch)
    for name in MODULES:
        sys.modules.pop(name, None)


def _rows(found: dict[str, Any], tool: str = "guard", w: int = 8) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if (row["tool"], row["w"]) == (tool, w)]


def _only(rows: list[dict[str, Any]], *names: str) -> tuple[Any, ...]:
    """What all rows say of these."""
    said = {json.dumps([row[name] for name in names]) for row in rows}
    assert len(said) == 1
    return tuple(json.loads(*said))


def test_runs_add_up(lab: Lab) -> None:
    lab.run(generations=2, tools="kv_canary")
    lab.start_s = 40.0
    found = lab.run(generations=2, tools="kv_canary")
    runs = found["environment"]["runs"]
    assert [(run["run"], run["generations"]) for run in runs] == [(1, [1, 2]), (2, [3, 4])]
    assert {"when", "device", "torch", "python", "processors", "load_before", "seconds", "guard",
            "release", "shape"} <= runs[0].keys()  # fmt: skip
    rows = _rows(found)
    assert _only(rows, "runs", "blocks", "pairs", "engines") == (2, 16, 8, 10)
    assert [len(row["by_generation"]) for row in rows] == [4] * 3
    assert _only(rows, "verify_steps", "dumps", "uncounted", "start_s") == (1000, 10, 0, 40.0)
    assert _only(_rows(found, "off"), "gpu_bytes", "verify_steps", "uncounted") == (7, None, 0)
    assert _only(_rows(found, "kv_canary"), "runs", "blocks", "engines") == (2, 8, 2)
    assert "2 runs, 4 generations of engines" in found["environment"]["note"]


def test_a_row_is_what_its_kept_rounds_say(lab: Lab) -> None:
    rng = random.Random(4)
    lab.speed = lambda tool: rng.gauss(1000, 15)
    lab.run(generations=2)
    found = lab.run()
    for row in _rows(found):
        visits: dict[Any, list[float]] = {}
        for line in found["rounds"]:
            if line["concurrency"] == row["concurrency"]:
                off, mine = ([block[0] for block in line[side]] for side in ("off", "mine"))
                ratio = math.prod(mine) ** (1 / len(mine)) / math.prod(off) ** (1 / len(off))
                visits.setdefault((line["generation"], line["visit"]), []).append(ratio)
        pairs = [math.sqrt(one * two) for one, two in visits.values()]
        assert len(pairs) == row["pairs"] == 6
        assert row["ratio_to_off"] == pytest.approx(statistics.median(pairs), abs=6e-5)
        assert row["ratio_low"] < row["ratio_to_off"] < row["ratio_high"]
        assert row["p99_ms"] == 2.0


def test_requests_of_a_later_run_are_those_of_the_first(lab: Lab) -> None:
    lab.speed = lambda tool: 5000.0
    lab.run()
    lab.speed = lambda tool: 9000.0
    found = lab.run()
    assert {length for *_, length in lab.asked} == {500}
    assert _only(_rows(found), "new_tokens", "runs") == (500, 2)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("sources", ()), ("device", ()), ("release", ()), ("shape", ("--shape", "small"))],
)
def test_rounds_of_another_kind_are_dropped_and_said(
    lab: Lab, capsys: pytest.CaptureFixture[str], kind: str, words: tuple[str, ...]
) -> None:
    lab.run()
    if kind != "shape":
        setattr(lab, kind, "new")
    found = lab.run(*words)
    assert [run["run"] for run in found["environment"]["runs"]] == [2]
    assert {line["generation"] for line in found["rounds"]} == {2}
    assert {fact["run"] for fact in found["facts"]} == {2}
    assert _only(_rows(found), "runs", "blocks") == (1, 4)
    said = capsys.readouterr().out
    assert "w=8: 0 rounds of earlier runs are kept; 12 are dropped: 12 for other " in said
    assert kind in said
    lab.run(*words)
    assert "w=8: 12 rounds of earlier runs are kept\n" in capsys.readouterr().out


def test_rounds_of_other_requests_are_dropped_for_their_case_alone(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.run()
    found = lab.run()
    for line in found["rounds"]:
        if (line["run"], line["concurrency"]) == (1, 32):
            line["new_tokens"] += 1
    lab.put(found)
    found = lab.run()
    assert {row["concurrency"]: row["blocks"] for row in _rows(found)} == {8: 12, 32: 8, 1: 12}
    said = capsys.readouterr().out
    assert "20 rounds of earlier runs are kept; 4 are dropped: 4 for other requests" in said


def test_a_width_that_is_not_measured_stays_as_it_was_measured(lab: Lab) -> None:
    before = lab.run()
    lab.sources = "bbb"
    found = lab.run(w="64")
    assert _rows(found) == _rows(before)
    assert [line for line in found["rounds"] if line["w"] == 8] == before["rounds"]
    assert [run["run"] for run in found["environment"]["runs"]] == [1, 2]
    assert "different sources of the guard: w=8 aaa, w=64 bbb" in found["environment"]["note"]
    found = lab.run(w="8")
    assert _only(_rows(found), "runs") == _only(_rows(found, w=64), "runs") == (1,)
    assert [run["run"] for run in found["environment"]["runs"]] == [2, 3]
    assert "different sources" not in found["environment"]["note"]


@pytest.mark.parametrize("words", [(), ("--fresh",)])
def test_nothing_is_dropped_for_a_run_that_measured_nothing(
    lab: Lab, words: tuple[str, ...]
) -> None:
    before = lab.run()
    lab.sources, lab.broken = "bbb", "guard"
    found = lab.run(*words)
    assert list(found.pop("failed")) == ["g2-w8-guard" if not words else "g1-w8-guard"]
    assert found == {name: held for name, held in before.items() if name != "failed"}


def test_a_file_of_the_older_form_is_replaced_whole_and_said(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    old = {"environment": {"device": "H200"}, "rows": [{"tool": "off", "w": 64}], "failed": {}}
    lab.out.write_text(json.dumps(old))
    found = lab.run()
    assert {row["w"] for row in found["rows"]} == {8}
    assert "older form, without rounds to go on from: its 1 rows" in capsys.readouterr().out
    lab.run()
    assert "older form" not in capsys.readouterr().out


def test_fresh_goes_on_from_nothing(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.run(w="8,64", generations=2)
    found = lab.run("--fresh")
    assert "--fresh: what" in capsys.readouterr().out
    assert [run["generations"] for run in found["environment"]["runs"]] == [[1]]
    assert {row["w"] for row in found["rows"]} == {8}


@pytest.mark.parametrize("text", ['{"rows": [', "[1]"])
def test_a_file_that_is_no_result_is_said_before_anything_starts(lab: Lab, text: str) -> None:
    lab.out.write_text(text)
    with pytest.raises(SystemExit, match=r"made\.json is no result file: .*--fresh"):
        lab.run()
    assert lab.out.read_text() == text
    assert _only(_rows(lab.run("--fresh")), "blocks") == (4,)


def test_rounds_that_no_run_is_named_for_are_said_before_anything_starts(lab: Lab) -> None:
    found = lab.run()
    found["environment"]["runs"][0]["run"] = 3
    lab.put(found)
    with pytest.raises(SystemExit, match=r"no result file: environment\.runs lacks \[1\]"):
        lab.run()
    assert lab.asked == []


def test_a_run_that_is_killed_leaves_its_rounds_and_the_next_goes_on(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.run()
    with monkeypatch.context() as patched:

        def killed(benches: Any) -> None:
            raise KeyboardInterrupt

        patched.setattr(lab.overhead, "count", killed)
        with pytest.raises(KeyboardInterrupt):
            lab.run(generations=2)
    left = lab.read()
    assert _only(_rows(left), "runs", "blocks", "uncounted", "verify_steps") == (2, 8, 3, 300)
    assert left["environment"]["runs"][1]["generations"] == [2]
    assert "3 guarded engines did not say what they counted" in left["environment"]["note"]
    found = lab.run()
    assert _only(_rows(found), "runs", "blocks", "uncounted", "verify_steps") == (3, 12, 3, 600)
    assert _only(_rows(found), "gpu_bytes") == (9,)


def test_an_engine_whose_probe_is_silent_is_not_counted_as_nothing(lab: Lab) -> None:
    lab.silent = "twin"
    lab.run()
    found = lab.run()
    assert _only(_rows(found), "verify_steps", "uncounted") == (400, 2)
    lab.silent = "guard"
    found = lab.run()
    assert _only(_rows(found), "verify_steps", "uncounted") == (600, 3)
    assert _only(_rows(found), "gpu_bytes") == (9,)  # of the newest run that knows it


def test_the_control_resolves_a_percent_or_the_note_says_that_it_does_not(lab: Lab) -> None:
    found = lab.run()
    assert "Two engines without a guard (control)" in found["environment"]["note"]
    lab.speed = lambda tool: 1030.0 if tool == "control" else 1000.0
    found = lab.run("--fresh")
    assert "Not resolved to 1 %: two engines" in found["environment"]["note"]
    assert "1.030 to 1.030" in found["environment"]["note"]


def test_a_round_has_a_line_of_few_bytes(lab: Lab) -> None:
    found = lab.run(generations=2)
    lines = [line for line in lab.out.read_text().splitlines() if line.startswith("  [8,")]
    assert len(lines) == len(found["rounds"]) == 24
    assert " " not in lines[0].strip().rstrip(",")
    # ten runs of 27 rounds of each of six cases, with six engines; other numbers are longer
    assert 10 * 6 * 27 * 1.3 * max(map(len, lines)) < 0.7e6
    assert found["environment"]["block"] == [
        "tokens_per_s", "took_s", "step_s", "steps", "tokens", "p99_s"
    ]  # fmt: skip
    assert found["rounds"][0]["off"][0] == [8000.0, 0.6123, 0.00125, 5, 20, 0.002]
