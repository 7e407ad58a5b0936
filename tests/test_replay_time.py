"""The benchmark of replays without a GPU: engines that answer, and what is made of it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GRAPH = {"off": 6000.0, "control": 6010.0, "guard": 6004.0, "in_line": 6015.0, "early2": 5990.0}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    module = importlib.import_module("replay_time")
    monkeypatch.setattr(module, "Child", Child)
    monkeypatch.setattr(sys.modules["server_overhead"], "ANSWERED_S", 0.0)
    Child.made = []
    yield module
    for name in ("replay_time", "server_overhead", "rounds", "serving", "soak"):
        sys.modules.pop(name, None)


class Child:
    """An engine: each block gives one run to the probe, which forgets it when it is asked."""

    made: list[Child]
    steps = 40
    dies_at = -1
    dead = ""
    found: dict[str, Any]

    def __init__(self, cell: Any) -> None:
        self.cell, self.asked, self.stopped = cell, [], 0
        self.runs: dict[str, list[list[float]]] = {}
        guarded = cell.tool not in ("off", "control")
        self.found = {"gpu_bytes": 5}
        if guarded:
            self.found |= {"verify_steps": 90, "steps_checked": 90, "findings": 0, "faults": {},
                           "beside": 0 if cell.tool == "in_line" else 7}  # fmt: skip
        self.made.append(self)

    def answer(self, seconds: float) -> dict[str, Any]:
        if self.cell.tool == self.dead:
            raise RuntimeError("no memory left")
        return {"start_s": 1.0, "release": "0.5.16"}

    def ask(self, wait_s: float, /, **command: Any) -> dict[str, Any]:
        self.asked.append((command["do"], command.get("concurrency"), command.get("length")))
        if len(self.asked) == self.dies_at:
            raise RuntimeError("the engine has ended")
        if command["do"] == "block":
            graph = GRAPH[self.cell.tool] + len(self.asked) % 3
            self.runs.setdefault(str(command["concurrency"]), []).append([self.steps, graph])
        return {"steps": self.steps + 9}

    def pin(self, *cpus: Any) -> None:
        pass

    def ask_probe(self) -> None:
        names = ("graph_us", "gap_us", "launch_us", "forward_us", "step_us")
        self.found["replays"] = {
            requests: {"n": self.steps * len(runs), "runs": runs}
            | {name: {"median": GRAPH[self.cell.tool] + int(requests)} for name in names}
            for requests, runs in self.runs.items()
        }
        self.runs = {}

    def probe(self) -> dict[str, Any]:
        return self.found

    def stop(self, patience: float) -> None:
        self.stopped += 1


def run(bench: Any, tmp_path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "replay_time.json"
    code = bench.main(["--seconds", "8", "--shape", "small", "--out", str(out), *more])
    return code, json.loads(out.read_text()) if out.exists() else {}


def test_engines_take_turns_and_rows_are_of_what_came_behind_the_warm_up(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = run(bench, tmp_path, "--w", "8,64", "--gpus", "0,1")
    assert (code, result["failed"], result["faults"]) == (0, {}, [])
    keys = [(row["w"], row["requests"], row["engine"], row["tool"]) for row in result["rows"]]
    kinds = {"off": "off", "control": "off", "guard": "guard", "in_line": "in_line"}
    assert keys == [(w, requests, *kind) for w in (8, 64) for requests in (1, 8, 32)
                    for kind in kinds.items()]  # fmt: skip
    row = next(row for row in result["rows"] if row["engine"] == "in_line")
    assert (row["n"], len(row["runs"]), row["blocks"]) == (40, 1, 1)
    assert (row["graph_us"]["median"], row["graph_low"], row["steps"]) == (6016.0, None, 49.0)
    assert {child.cell.gpu for child in Child.made if child.cell.w == 64} == {"1"}
    assert all(child.stopped == 1 for child in Child.made)
    assert len({child.cell.path("log.txt") for child in Child.made}) == len(Child.made) == 8
    assert all(child.cell.replays and child.cell.asked for child in Child.made)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["graph_us", "requests", "off", "control", "guard", "in_line"]
    assert lines[1].split() == ["w=8", "1", "6001.0", "6011.0", "6005.0", "6016.0"]
    assert lines[6].split() == ["w=64", "32", "6032.0", "6042.0", "6036.0", "6047.0"]
    assert [lines[7 * at].split()[0] for at in range(4)] == [
        "graph_us", "graph_to_off", "launch_us", "forward_us"
    ]  # fmt: skip
    assert "differ by up to 10 us" in result["environment"]["note"]
    assert set(result["environment"]["guard"]) == {"version", "sources", "device"}


def test_blocks_are_compared_with_those_of_the_same_round(bench: Any) -> None:
    drift = [0.0, 300.0, 100.0, 900.0, 500.0, 200.0]

    def one(engine: str, added: list[float], blocks: int = 6, load: int = 8) -> dict[str, Any]:
        runs = [[40, 6000 + base + more] for base, more in zip(drift, added, strict=False)]
        return {"w": 8, "requests": load, "engine": engine, "blocks": blocks, "runs": runs}

    guard = one("guard", [10, 12, 11, 14, 9, 11])
    lost, alone = one("twin", [1] * 5), one("guard", [5] * 6, load=1)
    bench.compare([one("off", [0] * 6), guard, lost, alone])
    assert guard["graph_to_off"] == {"median": 11.0, "low": 9.5, "high": 13.0}
    assert "graph_to_off" not in lost  # which round it was of is not known
    assert "graph_to_off" not in alone


def test_all_requests_of_a_block_fit_into_the_pool_and_the_context(bench: Any) -> None:
    for w in (8, 64, 128):
        for requests in bench.LOADS:
            length = bench.length_of(w, requests)
            assert requests * (bench.PROMPT + length + 2 * w) <= bench.POOL
            assert 300 < length < 2048 - bench.PROMPT - w


def test_blocks_go_round_backwards_every_other_time(bench: Any) -> None:
    order: list[tuple[str, int]] = []

    class Bench:
        children = dict.fromkeys(("off", "guard"))
        cases = (bench.Case(1, 60), bench.Case(8, 50))

        def settle(self, case: Any, block_s: float) -> None:
            order.clear()

        def block(self, tool: str, case: Any) -> dict[str, int]:
            order.append((tool, case.concurrency))
            return {"steps": len(order)}

    steps: dict[tuple[str, int], list[int]] = {}
    ticks = iter(range(100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "read", lambda bench: order.clear())
        patch.setattr(bench.time, "monotonic", lambda: next(ticks))
        bench.lane(Bench(), 6, steps)
    assert order == [("off", 1), ("guard", 1), ("off", 8), ("guard", 8),
                     ("guard", 1), ("off", 1), ("guard", 8), ("off", 8)]  # fmt: skip
    assert steps[("guard", 1)] == [2, 5]


def test_an_engine_that_does_not_start_is_named_and_the_others_go_on(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Child, "dead", "in_line")
    code, result = run(bench, tmp_path, "--w", "8")
    assert code == 1
    assert result["failed"] == {"g1-w8-in_line": "no memory left"}
    assert result["faults"] == ["w=8 in_line: not measured"]
    assert len(result["rows"]) == 9


def test_what_was_measured_before_an_engine_ended_counts(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Child, "dies_at", 11)  # 3 x 2 blocks and settled, then the first ones
    code, result = run(bench, tmp_path, "--w", "8", "--engines", "off,guard")
    assert code == 1
    assert result["failed"] == {"w8": "RuntimeError: the engine has ended"}
    measured = {(row["requests"], row["engine"]): row["n"] for row in result["rows"]}
    assert measured == {(1, "off"): 40, (1, "guard"): 40, (8, "off"): 0, (8, "guard"): 0,
                        (32, "off"): 0, (32, "guard"): 0}  # fmt: skip


@pytest.mark.parametrize(
    ("tool", "change", "text"),
    [
        ("guard", {"steps_checked": 89}, "not every step was checked and sound"),
        ("guard", {"verify_steps": 0, "steps_checked": 0}, "not every step was checked"),
        ("guard", {"verify_steps": None, "steps_checked": None}, "not every step was checked"),
        ("guard", {"findings": 1}, "not every step was checked and sound"),
        ("in_line", {"beside": 7}, "the check is not at its place: beside=7"),
        ("early2", {"beside": 0}, "the check is not at its place: beside=0"),
        ("off", {"steps_checked": 4}, ""),
    ],
)
def test_a_guard_that_was_not_there_is_no_evidence(
    bench: Any, tool: str, change: dict[str, Any], text: str
) -> None:
    one = {"tool": tool.removesuffix("2"), "verify_steps": 90, "steps_checked": 90, "findings": 0,
           "beside": 0 if tool == "in_line" else 7}  # fmt: skip
    assert bench.guard_faults(one) == []
    found = bench.guard_faults(one | change)
    assert [one[: len(text)] for one in found] == ([text] if text else [])


def test_short_blocks_and_unequal_work_are_told(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Child.__init__

    def differs(self: Any, cell: Any) -> None:
        made(self, cell)
        self.steps = 20 if cell.tool == "guard" else 40

    monkeypatch.setattr(Child, "__init__", differs)
    code, result = run(bench, tmp_path, "--w", "8", "--engines", "off,guard")
    assert code == 1
    short = [text for text in result["faults"] if "expected 30 steady steps" in text]
    assert [text.partition(":")[0] for text in short] == [
        f"w=8 requests={requests} guard" for requests in (1, 8, 32)
    ]
    unequal = [text for text in result["faults"] if "not the same work" in text]
    assert unequal[0] == "w=8 requests=1: blocks are not the same work: [49.0, 29.0] steps"
    assert len(result["faults"]) == 6
    assert "no two engines" in result["environment"]["note"]


@pytest.mark.parametrize("fault", ["no engine", "no replays"])
def test_nothing_is_written_over_where_nothing_was_measured(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    (tmp_path / "replay_time.json").write_text("{}")
    if fault == "no engine":
        monkeypatch.setattr(Child, "dead", "off")
    else:
        monkeypatch.setattr(Child, "probe", lambda child: {})
    code, result = run(bench, tmp_path, "--w", "8", "--engines", "off")
    assert (code, result) == (1, {})


def test_unknown_engines_are_refused(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--engines", "off,inline"])
    assert "in_line, in_line2, early, early2, found inline" in capsys.readouterr().err
