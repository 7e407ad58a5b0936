"""Rounds of the overhead benchmark: who goes when, what a pair is, rows over generations."""

from __future__ import annotations

import importlib
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FOUR = ("off", "guard", "control", "twin")
SIX = (*FOUR, "control2", "twin2")


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    yield importlib.import_module("server_overhead")
    for name in ("server_overhead", "pool", "rounds", "serving", "files"):
        sys.modules.pop(name, None)


class Engines:
    """Engines of one width; `speed` of a block is by engine and by how many blocks there were."""

    def __init__(self, overhead: Any, names: tuple[str, ...], speed: Callable[..., float]) -> None:
        self.asked: list[str] = []
        self.lengths: list[int] = []
        self.speed = speed
        self.case = overhead.Case(8, 32)
        self.bench = overhead.Bench(8, {}, [self.case], self.children(names))

    def children(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: Engine(self, name) for name in names}

    def play(self, rounds: int, tool: str = "guard") -> list[str]:
        """The engines in the order in which these rounds asked them."""
        begun = len(self.asked)
        for _ in range(rounds):
            self.bench.round(tool, self.case)
        return self.asked[begun:]

    def begin(self, generation: int, names: tuple[str, ...] = FOUR) -> None:
        self.bench.begin(generation)
        self.bench.children = self.children(names)

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["tool"]: row for row in self.bench.rows()}


class Engine:
    def __init__(self, all_: Engines, name: str) -> None:
        self.all, self.name = all_, name

    def ask(self, wait_s: float, **command: Any) -> dict[str, Any]:
        if command["do"] == "settled":
            return {}
        self.all.asked.append(self.name)
        self.all.lengths.append(command["length"])
        speed = self.all.speed(self.name, len(self.all.asked))
        made = {"steps": 5, "tokens": 20, "gaps": [0.001], "step_s": 1 / speed, "took_s": 0.6}
        return {"tokens_per_s": speed, **made}


def test_rounds_take_turns_and_pairs_cancel_who_goes_first(overhead: Any) -> None:
    # whoever goes second is faster
    engines = Engines(overhead, FOUR[:2], lambda name, at: 100.0 if at % 2 else 110.0)
    assert engines.play(6)[:4] == ["off", "guard", "guard", "off"]
    row = engines.rows["guard"]
    assert row["ratios"][:2] == [1.1, 0.9091]
    assert (row["ratio_to_off"], row["ratio_low"], row["ratio_high"]) == (1.0, 1.0, 1.0)
    assert (row["blocks"], row["pairs"], row["p99_ms"]) == (6, 3, 1.0)
    assert (row["step_to_off"], row["step_low"], row["step_high"]) == (1.0, 1.0, 1.0)


def test_two_engines_of_each_side_share_a_round_and_the_control_is_the_second(
    overhead: Any,
) -> None:
    speeds = {"off": 100.0, "control": 121.0, "guard": 90.0, "twin": 160.0}
    engines = Engines(overhead, FOUR, lambda name, at: speeds[name])
    asked = engines.play(4)
    assert asked[:8] == ["off", "guard", "twin", "control", "twin", "control", "off", "guard"]
    assert asked[8:] == ["control", "twin", "guard", "off", "guard", "off", "control", "twin"]
    rows = engines.rows
    assert set(rows) == {"off", "control", "guard"}
    assert rows["guard"]["ratio_to_off"] == pytest.approx(120 / 110, abs=1e-4)
    assert rows["guard"]["step_to_off"] == pytest.approx(120 / 110, abs=1e-4)
    assert rows["control"]["ratio_to_off"] == 1.21
    assert [rows[name]["engines"] for name in ("off", "control", "guard")] == [2, 1, 2]
    assert {row["steps_to_off"] for row in rows.values()} == {1.0}


@pytest.mark.parametrize("names", [FOUR, SIX])
def test_drift_inside_a_round_is_in_no_ratio(overhead: Any, names: tuple[str, ...]) -> None:
    engines = Engines(overhead, names, lambda name, at: 100.0 * 1.01**at)  # the GPU cools down
    engines.play(8)
    assert engines.rows["guard"]["ratio_to_off"] == pytest.approx(1.0)
    assert engines.rows["control"]["ratio_to_off"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("names", [FOUR[:2], FOUR, SIX])
def test_every_engine_of_every_generation_runs_as_early_as_any_other(
    overhead: Any, names: tuple[str, ...]
) -> None:
    engines = Engines(overhead, names, lambda name, at: 100.0)
    for generation, rounds in ((1, 7), (2, 4)):  # an odd number changes nothing for the next
        engines.begin(generation, names)
        asked = engines.play(rounds)[: 4 * len(names)]
        places = {name: [at % len(names) for at, one in enumerate(asked) if one == name]
                  for name in names}  # fmt: skip
        assert {sum(held) for held in places.values()} == {2 * (len(names) - 1)}
        first = [asked[at * len(names)] for at in range(4)]
        assert [name in names[1::2] for name in first] == [False, True, False, True]


def test_an_engine_whose_other_did_not_start_sits_out(overhead: Any) -> None:
    names = ("off", "guard", "twin", "control2", "twin2")
    engines = Engines(overhead, names, lambda name, at: 100.0)
    assert set(engines.play(2)) == {"off", "guard", "control2", "twin2"}
    assert engines.rows["guard"]["engines"] == 2


def test_no_pair_joins_rounds_of_two_generations_or_visits(overhead: Any) -> None:
    speeds = {1: 100.0, 2: 50.0, 3: 25.0}
    slow = {"guard", "twin"}
    engines = Engines(
        overhead, FOUR, lambda name, at: speeds[engines.bench.visit] if name in slow else 100.0
    )
    for generation, visits in ((1, 2), (2, 1)):
        engines.begin(generation)
        for _ in range(visits):
            engines.bench.settle(engines.case, 0.1)
            engines.play(3)
    row = engines.rows["guard"]
    assert row["ratios"] == [1.0] * 3 + [0.5] * 3 + [0.25] * 3
    assert (row["blocks"], row["pairs"], row["ratio_to_off"]) == (9, 3, 0.5)
    assert row["by_generation"] == [0.75, 0.25]
    assert row["step_to_off"] == 0.5


def test_rounds_of_two_generations_are_not_paired_even_in_one_visit(overhead: Any) -> None:
    rounds = [overhead.Round([], [], generation) for generation in (1, 2, 2, 2, 3)]
    module = importlib.import_module("rounds")
    assert module.paired(rounds, [9.0, 1.0, 4.0, 7.0, 8.0]) == {2: [2.0]}


def test_rounds_without_any_pair_have_no_interval(overhead: Any) -> None:
    engines = Engines(overhead, FOUR[:2], lambda name, at: 100.0 + at)
    for generation in (1, 2):
        engines.begin(generation, FOUR[:2])
        engines.bench.settle(engines.case, 0.1)
        engines.play(1)
    row = engines.rows["guard"]
    assert (row["blocks"], row["pairs"], row["by_generation"]) == (2, 0, [])
    assert (row["ratio_low"], row["ratio_high"]) == (None, None)
    assert not overhead.met(row)


def test_a_row_is_of_all_generations_and_tools_of_the_last(overhead: Any) -> None:
    engines = Engines(overhead, SIX, lambda name, at: 100.0)
    engines.play(2)
    engines.begin(2, (*FOUR, "kv_canary"))
    engines.play(4)
    engines.play(2, "kv_canary")
    rows = engines.rows
    assert {tool: (row["engines"], row["blocks"]) for tool, row in rows.items()} == {
        "off": (5, 6), "guard": (5, 6), "control": (2, 6), "kv_canary": (1, 2),
    }  # fmt: skip
    assert rows["kv_canary"]["pairs"] == 1


def test_a_length_is_found_once_and_every_generation_settles(overhead: Any) -> None:
    engines = Engines(overhead, FOUR, lambda name, at: 8000.0 / at)
    engines.case.length = 0
    engines.bench.settle(engines.case, 1.0)
    assert (engines.case.length, engines.lengths[:2]) == (500, [64, 64])
    before = len(engines.asked)
    engines.begin(2)
    engines.bench.settle(engines.case, 1.0)
    engines.bench.settle(engines.case, 1.0)
    assert engines.asked[before:] == [*FOUR] * 3  # twice in the first visit
    assert set(engines.lengths[before:]) == {500}


def test_rounds_that_come_while_a_row_is_made_are_in_the_next(overhead: Any) -> None:
    engines = Engines(overhead, FOUR, lambda name, at: 100.0)
    engines.play(2)
    held = importlib.import_module("rounds").rounds_of("guard", engines.case)
    engines.play(1)
    assert len(held) == 2


def visits(overhead: Any, kept: tuple[int, ...], *words: str) -> list[int]:
    """The cases of a lane in turn, where 8, 32 and 1 requests have so many pairs before."""
    seen: list[int] = []

    class Bench(overhead.Bench):  # type: ignore[misc, name-defined]
        def settle(self, case: Any, block_s: float) -> None:
            self.visit += 1
            seen.append(case.concurrency)

        def round(self, tool: str, case: Any) -> None:
            made = overhead.Round([], [], self.generation, self.visit)
            case.rounds.setdefault(tool, []).append(made)

    cases = [overhead.Case(c) for c in overhead.CONCURRENCY]
    for case, pairs in zip(cases, kept, strict=True):
        case.rounds["guard"] = [overhead.Round([], [], 1, at // 2) for at in range(2 * pairs)]
    bench = Bench(8, {}, cases, dict.fromkeys(FOUR), generation=2)
    options = overhead._parser().parse_args([*words, "--blocks", "8"])
    overhead.lane([bench], 1e12, options, lambda: None)
    return seen


def test_the_case_with_the_fewest_pairs_is_visited_next(overhead: Any) -> None:
    seen = visits(overhead, (4, 2, 0), "--rounds", "2")
    assert seen == [1, 1, 32, 1, 32, 1, 8, 32, 8, 32, 8, 8]  # eight rounds of each, then it ends
    assert visits(overhead, (0, 0, 0), "--rounds", "4") == [8, 32, 1] * 2


def test_a_round_without_its_other_is_no_pair_of_a_case(overhead: Any) -> None:
    places = [(1, 1), (1, 1), (1, 1), (1, 2), (2, 2), (2, 2)]  # generation, visit
    rounds = [overhead.Round([], [], *place) for place in places]
    case = overhead.Case(8, rounds={"guard": rounds, "kv_canary": rounds})
    assert overhead.coverage(case) == (2, 6)
    assert overhead.coverage(overhead.Case(8)) == (0, 0)


def test_cases_take_turns_even_if_a_visit_has_no_pair(overhead: Any) -> None:
    assert visits(overhead, (0, 0, 0), "--rounds", "1")[:6] == [8, 32, 1] * 2


def test_a_block_is_kept_with_its_own_p99_and_a_row_has_their_median(overhead: Any) -> None:
    module = importlib.import_module("rounds")
    block = {"tokens_per_s": 8216.54321, "took_s": 0.5, "step_s": 0.0123456789, "steps": 1234567,
             "tokens": 20}  # fmt: skip
    made = [module.compact(block | {"gaps": [0.001] * 99 + [slow]}) for slow in (1.0, 1.0)]
    slow = module.compact(block | {"gaps": [0.004]})
    assert made[0] == {"tokens_per_s": 8216.54, "took_s": 0.5, "step_s": 0.0123457,
                       "steps": 1234567, "tokens": 20, "p99_s": 0.001}  # fmt: skip
    rounds = [module.Round([slow], [one]) for one in (*made, slow)]
    row = module.summary("guard", 8, module.Case(8, rounds={"guard": rounds}), rounds, {})
    assert row["p99_ms"] == 1.0


def test_the_interval_of_150_pairs_resolves_half_a_percent(overhead: Any) -> None:
    """Rounds of one ride scatter by 1.5 %; of normal pairs 0.21 % either side are expected."""
    module, rng = importlib.import_module("rounds"), random.Random(5)
    widths, hits = [], 0
    for _ in range(20):
        pairs = [math.exp((rng.gauss(0, 0.015) + rng.gauss(0, 0.015)) / 2) for _ in range(150)]
        low, high = module.interval(pairs)
        widths.append((high - low) / 2)
        hits += low <= 1.0 <= high
    assert 0.0018 < statistics.median(widths) < 0.0025
    assert max(widths) < 0.004
    assert hits >= 17


def test_statistics(overhead: Any) -> None:
    module = importlib.import_module("rounds")
    low, high = module.interval([0.99, 1.0, 1.01, 0.995, 1.002] * 4)
    assert 0.99 <= low <= 1.0 <= high <= 1.01
    assert module.percentile([float(v) for v in range(1, 101)], 0.99) == 99.0
    assert module.percentile([], 0.99) is None
