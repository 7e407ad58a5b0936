"""The soak and the overhead benchmark without a GPU: cells, arguments, protocol, arithmetic.

The engines are a fake package named `sglang` that answers like SGLang's Engine.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FAKE = """
import asyncio, types
__version__ = "0.5.16"
class Engine:
    def __init__(self, **options):
        if options.get("kv_canary"):
            raise RuntimeError("no canary here")
        self.loop = asyncio.new_event_loop()
        self.options, self.stopped = options, set()
        self.tokenizer_manager = types.SimpleNamespace(abort_request=self.stopped.add)
    def generate(self, input_ids, sampling_params):
        return {"output_ids": [sum(input_ids) % 97] * sampling_params["max_new_tokens"]}
    async def async_generate(self, input_ids, sampling_params, stream=False, rid=None):
        count = sampling_params["max_new_tokens"]
        async def chunks():
            for made in range(4, count + 1, 4):
                await asyncio.sleep(0)
                for at in range(len(input_ids)):
                    meta = {"completion_tokens": made, "spec_verify_ct": made // 4}
                    yield {"index": at, "meta_info": meta}
        if stream:
            return chunks()
        await asyncio.sleep(0.001)
        return {"output_ids": [1] * count}
    def freeze_gc(self):
        pass
    def shutdown(self):
        pass
"""


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in ("serving", "soak", "server_overhead", "pool", "rounds", "files"):
        sys.modules.pop(name, None)


def _module(name: str) -> Any:
    return importlib.import_module(name)


@pytest.fixture
def fake_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Children import the fake engine; their files go to the test's folder."""
    package = tmp_path / "fake" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    serving = _module("serving")
    folder = str(tmp_path / "cells")
    monkeypatch.setattr(serving.Cell.__init__, "__defaults__",
                        (*serving.Cell.__init__.__defaults__[:-1], folder))  # fmt: skip
    return tmp_path


def test_cells_cover_graphs_and_overlap_for_every_algorithm() -> None:
    cells = _module("soak").cells()
    assert len(cells) >= 12
    assert len({cell.name for cell in cells}) == len(cells)
    for algorithm in ("NGRAM", "DFLASH", "EAGLE", "DDTREE"):
        mine = [cell for cell in cells if cell.algorithm == algorithm]
        pairs = {(cell.graphs, cell.overlap) for cell in mine}
        assert pairs == set(itertools.product((True, False), repeat=2))
        assert {cell.depth for cell in mine} == {"fast", "full"}


def test_planted_faults_are_of_known_rules_that_the_cell_can_hold() -> None:
    from ddtree_guard.testing.faults import FAULTS

    soak = _module("soak")
    for cell in soak.cells():
        rules = soak.plants_of(cell)
        assert bool(rules) is (cell.algorithm != "NONE")
        assert set(rules) <= set(FAULTS)
        assert cell.graphs or "G4" not in rules
        assert cell.algorithm != "DFLASH" or not {"W3", "M2", "A1"} & set(rules)


def test_the_second_release_takes_half_and_repeats_what_servers_run() -> None:
    cells = _module("soak").cells(("0.5.17", "/site"))
    for algorithm in ("NGRAM", "DFLASH", "EAGLE", "DDTREE"):
        mine = [c for c in cells if c.algorithm == algorithm]
        own = {(c.graphs, c.overlap) for c in mine if not c.site}
        other = {(c.graphs, c.overlap) for c in mine if c.release == "0.5.17"}
        assert (True, True) in own & other
        assert own | other == set(itertools.product((True, False), repeat=2))
        assert {c.graphs for c in mine if c.site} == {True, False}


def test_model_configurations_fit_each_other(tmp_path: Path) -> None:
    paths = _module("serving").write_model(tmp_path, "small")
    target, dflash, eagle = (
        json.loads((paths[name] / "config.json").read_text())
        for name in ("target", "dflash", "eagle")
    )
    taps = dflash["dflash_config"]["target_layer_ids"]
    assert max(taps) <= target["num_hidden_layers"] - 2
    assert len({c["hidden_size"] for c in (target, dflash, eagle)}) == 1
    assert target["vocab_size"] == eagle["vocab_size"]


@pytest.mark.sglang
@pytest.mark.parametrize("algorithm", ["NONE", "NGRAM", "DFLASH", "EAGLE"])
def test_engine_options_are_arguments_of_this_sglang(tmp_path: Path, algorithm: str) -> None:
    import dataclasses

    from ddtree_guard.testing.fakes import sglang

    serving = _module("serving")
    known = {f.name for f in dataclasses.fields(sglang("server_args").ServerArgs)}
    models = serving.write_model(tmp_path, "small")
    for tool in ("off", "guard"):
        cell = serving.Cell(algorithm, tool=tool)
        assert set(serving.engine_options(cell, models)) <= known


def test_a_planted_fault_that_was_not_found_is_missed(
    fake_sglang: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    soak = _module("soak")
    monkeypatch.setattr(soak, "PLANT_S", 0.2)
    monkeypatch.setattr(soak, "SETTLE_S", 0.0)
    out = fake_sglang / "soak.json"
    command = ["--only", "NGRAM", "--match", "eager-sync-guard", "--plant", "--seconds", "0.2"]
    assert soak.main([*command, "--out", str(out)]) == 1  # the fake engine has no guard
    rows = json.loads(out.with_name("soak_planted.json").read_text())["rows"]
    assert [row["planted"]["rule"] for row in rows] == ["M2", "W3", "A4", "A1"]
    assert not any(row["plant_verdict"]["right_step"] for row in rows)
    assert capsys.readouterr().out.count("MISSED NGRAM-small-w16-eager-sync-guard") == 4


def test_a_fault_that_ends_the_engine_leaves_the_sound_row(tmp_path: Path) -> None:
    soak = _module("soak")

    class Ended:
        cell = soak.Cell("NGRAM", folder=str(tmp_path))

        def ask(self, *args: Any, **command: Any) -> None:
            raise RuntimeError("no answer within 60 s")

    Ended.cell.path("probe.plant").parent.mkdir(parents=True, exist_ok=True)
    sound: dict[str, Any] = {"cell": "x"}
    assert list(soak._planted(Ended(), sound, ("W3", "A1"))) == []
    assert sound["plant_error"] == "W3: no answer within 60 s"


def test_the_probe_is_found_as_a_plugin(tmp_path: Path) -> None:
    site = _module("serving").write_plugins(tmp_path / "plugins")
    found = importlib.metadata.distributions(path=[str(site)])
    names = {e.name: e for d in found for e in d.entry_points}
    assert callable(names["ddtree_guard_probe"].load())


def test_environment_switches_one_tool_on() -> None:
    serving = _module("serving")
    seen = {
        tool: serving.environment(serving.Cell("NGRAM", tool=tool))
        for tool in ("off", "guard", "async_assert")
    }
    assert [seen[tool]["SGLANG_DDTREE_GUARD"] for tool in seen] == ["off", "log", "off"]
    assert "SGLANG_ENABLE_ASYNC_ASSERT" not in seen["guard"]
    assert seen["async_assert"]["SGLANG_ENABLE_ASYNC_ASSERT"] == "1"


def test_a_row_reads_the_log() -> None:
    soak = _module("soak")
    line = (
        "[ts TP0] ddtree_guard finding rule=K2 scope=request rid=soak-1-000003 step=40 expected=1 "
        "actual=2 tokens_left=no incident=dg-1 dump=-"
    )
    probe = {"planted": {"rule": "K2", "at": 40, "rid": "soak-1-000003"}, "findings": 1}
    cell = soak.Cell("NGRAM", plant="K2@40")
    start = {"release": "0.5.16", "start_s": 1.0}
    found = soak.row(cell, start, [], {}, probe, f"x\n{line}\nddtree_guard armed=1/1 mode=log\n")
    found["planted"] = probe["planted"]
    found["plant_verdict"] = soak.judge_plant(found)
    assert found["boot"] == ["ddtree_guard armed=1/1 mode=log"]
    assert soak._hit(found)
    late = {**found, "planted": {**probe["planted"], "at": 39}}
    assert not soak._hit({**late, "plant_verdict": soak.judge_plant(late)})


def test_totals_bound_the_rate() -> None:
    soak = _module("soak")
    row = {"steps_checked": 15_000, "verify_steps": 15_000, "findings": 0}
    assert soak.totals([row, row])["rate_below"] == 1e-4
    assert soak.totals([row, {**row, "findings": 1}])["rate_below"] is None


def test_a_soak_runs_resumes_and_compares(
    fake_sglang: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    soak = _module("soak")
    out = fake_sglang / "soak.json"
    command = ["--only", "NGRAM", "--seconds", "0.3", "--parallel", "2", "--out", str(out)]
    monkeypatch.setattr(soak, "SETTLE_S", 0.0)
    assert soak.main([*command, "--minutes", "0.1"]) == 0  # too short for any cell
    assert json.loads(out.read_text())["rows"] == []
    assert soak.main([*command, "--minutes", "5"]) == 1  # the fake engine has no guard
    assert capsys.readouterr().out.count("NOT COVERED NGRAM") == 4
    result = json.loads(out.read_text())
    rows = result["rows"]
    assert result["failed"] == {}
    assert len(rows) == 4
    keys = {"release", "algorithm", "graphs", "overlap", "steps_checked", "verify_steps",
            "findings", "outputs_identical"}  # fmt: skip
    assert all(keys <= set(row) for row in rows)
    assert [r["outputs_identical"] for r in rows if r["graphs"] and r["overlap"]] == [True]
    assert all(row["traffic"]["sent"] > 0 and not row["traffic"]["failed"] for row in rows)
    assert all(row["guard"] == soak.sources() for row in rows)
    soak.main([*command, "--minutes", "5"])
    assert "done" not in capsys.readouterr().out
    del rows[0]["guard"]  # measured before rows said by what
    out.write_text(json.dumps(result))
    soak.main([*command, "--minutes", "5", "--again"])
    assert capsys.readouterr().out.count(f"done {rows[0]['cell']}") == 1


def _overhead(monkeypatch: pytest.MonkeyPatch) -> Any:
    overhead = _module("server_overhead")
    monkeypatch.setattr(overhead, "ANSWERED_S", 0.0)  # the fake engine has no probe
    return overhead


def test_overhead_measures_in_turns_and_names_what_did_not_start(
    fake_sglang: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overhead = _overhead(monkeypatch)
    out = fake_sglang / "overhead.json"
    overhead.main(
        ["--w", "8,16", "--seconds", "240", "--blocks", "4", "--block", "0.02", "--shape", "small",
         "--warm", "0", "--rounds", "2", "--tools", "kv_canary", "--gpus", "0,1",
         "--out", str(out)]
    )  # fmt: skip
    result = json.loads(out.read_text())
    mine = result["rows"]
    assert {(row["w"], row["tool"], row["concurrency"]) for row in mine} == {
        (w, tool, c)
        for w, tool in itertools.product((8, 16), ("off", "guard", "control"))
        for c in (1, 8, 32)
    }
    assert all(row["blocks"] == 8 for row in mine)
    engines = {row["tool"]: row["engines"] for row in mine}
    assert engines == {"off": 5, "guard": 5, "control": 2}  # three, then two beside the tool
    assert {(r["pairs"], len(r["by_generation"])) for r in mine if r["tool"] != "off"} == {(4, 2)}
    assert all(row["tokens_per_s"] > 0 for row in mine)
    assert all(row["accept_length"] == 4 and row["steps_to_off"] == 1 for row in mine)
    assert {row["ratio_to_off"] for row in mine if row["tool"] == "off"} == {1.0}
    assert list(result["failed"]) == ["g2-w16-kv_canary"]
    assert "no canary here" in result["failed"]["g2-w16-kv_canary"]
    assert "of 6 rows" in result["environment"]["note"]


FOUR = ("off", "guard", "control", "twin")
SIX = (*FOUR, "control2", "twin2")
OLD = {"tool": "guard", "w": 8, "ratio_to_off": 1.0, "ratio_low": 1.0, "release": "0.5.16"}
QUICK = ["--seconds", "240", "--blocks", "2", "--block", "0.02", "--shape", "small", "--warm", "0",
         "--rounds", "2", "--tools", "", "--gpus", "0", "--generations", "1"]  # fmt: skip


def test_rows_of_before_are_no_measurement(
    fake_sglang: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overhead = _overhead(monkeypatch)
    (fake_sglang / "fake/sglang/__init__.py").write_text("raise SystemExit('no GPU')")
    out = fake_sglang / "overhead.json"
    before = {"environment": {"device": "of the rows"}, "rows": [OLD], "failed": {"g9": "x"}}
    out.write_text(json.dumps(before))
    assert overhead.main([*QUICK, "--w", "8", "--out", str(out)]) == 1
    failed = json.loads(out.read_text())
    assert (failed["environment"], failed["rows"]) == (before["environment"], [OLD])
    assert list(failed["failed"]) == [f"g1-w8-{name}" for name in SIX]


def test_a_generation_that_does_not_start_is_said_and_the_others_count(
    fake_sglang: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overhead = _overhead(monkeypatch)
    package = fake_sglang / "fake/sglang/__init__.py"
    first = "if 'generation-1' in os.environ['DDTREE_GUARD_PROBE']: raise SystemExit('no memory')"
    package.write_text(f"import os\n{first}\n{FAKE}")
    out = fake_sglang / "overhead.json"
    overhead.main([*QUICK, "--w", "8", "--generations", "2", "--out", str(out)])
    result = json.loads(out.read_text())
    assert {name.partition("-")[0] for name in result["failed"]} == {"g1"}
    assert "no memory" in result["failed"]["g1-w8-off"]
    guard = [row for row in result["rows"] if row["tool"] == "guard"]
    assert [(row["engines"], row["blocks"], row["pairs"]) for row in guard] == [(3, 2, 1)] * 3


def _pool(overhead: Any, folder: Path) -> Any:
    return overhead.Pool.open(folder / "made.json", False, {})


class Clock:
    """Time that only what is asked for takes."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("took", "second"), [(218, 510), (18, 410)])
def test_each_generation_has_an_equal_share_of_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, took: float, second: float
) -> None:
    overhead = _module("server_overhead")
    clock, seen = Clock(), []
    monkeypatch.setattr(overhead, "time", clock)

    def live(benches: Any, deadline: float, *_: Any) -> None:
        seen.append(([bench.generation for bench in benches], deadline))
        clock.now += took

    monkeypatch.setattr(overhead, "live", live)
    options = overhead._parser().parse_args(["--seconds", "618", "--generations", "3"])
    overhead.measure(options, _pool(overhead, tmp_path))
    assert seen == [([1, 1], 298), ([2, 2], second), ([3, 3], 710)]


def test_a_visit_has_pairs_of_each_tool_and_begins_only_if_a_round_still_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    overhead = _module("server_overhead")
    clock, begun, played = Clock(), [], []
    monkeypatch.setattr(overhead, "time", clock)

    def round_(bench: Any, tool: str, case: Any) -> None:
        clock.now += 10
        played.append(tool)

    monkeypatch.setattr(overhead.Bench, "settle", lambda *_: begun.append(clock.now))
    monkeypatch.setattr(overhead.Bench, "round", round_)
    children = dict.fromkeys((*FOUR, "kv_canary"))
    bench = overhead.Bench(8, {}, [overhead.Case(8)] * 3, children)
    options = overhead._parser().parse_args(["--rounds", "2"])
    overhead.lane([bench], 185.0, options, lambda: None)
    assert (begun, clock.now) == ([100, 140], 180)
    assert played == ["guard", "guard", "kv_canary", "kv_canary"] * 2


def test_engines_are_ended_when_one_cannot_even_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overhead = _module("server_overhead")
    made, stopped = [], []

    class Child:
        def __init__(self, cell: Any) -> None:
            if len(made) == 3:
                raise OSError("no more processes")
            made.append(self)

        def stop(self, patience: float) -> None:
            stopped.append(self)

    monkeypatch.setattr(overhead, "Child", Child)
    options = overhead._parser().parse_args(["--w", "8", "--generations", "1"])
    pool = _pool(overhead, tmp_path)
    assert overhead.measure(options, pool) == []
    assert json.loads(pool.path.read_text())["failed"] == {"g1": "no more processes"}
    assert {*stopped} == {*made}


def test_what_was_measured_is_on_disk_when_a_later_generation_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overhead = _module("server_overhead")
    block = {"tokens_per_s": 1.0, "step_s": 1.0, "steps": 5, "tokens": 20, "gaps": [0.001]}
    block = overhead.compact(block | {"took_s": 0.6})

    def live(benches: Any, *more: Any) -> None:
        if benches[0].generation == 2:
            raise KeyboardInterrupt
        benches[0].cases[0].rounds["guard"] = [overhead.Round([block], [block])] * 2
        benches[0].facts["off"] = [{"release": "0.5.16", "run": 1, "generation": 1}]
        overhead.join(benches, more[-2])

    monkeypatch.setattr(overhead, "live", live)
    out = tmp_path / "overhead.json"
    with pytest.raises(KeyboardInterrupt):
        overhead.main(["--w", "8", "--out", str(out)])
    found = json.loads(out.read_text())["rows"]
    assert [(row["tool"], row["blocks"]) for row in found] == [("off", 2), ("guard", 2)]


def test_a_width_that_was_not_measured_is_not_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overhead = _module("server_overhead")
    monkeypatch.setattr(overhead, "measure", lambda *_: [OLD])
    assert overhead.main(["--w", "8", "--out", str(tmp_path / "made.json")]) == 0
    assert overhead.main(["--w", "8,64", "--out", str(tmp_path / "made.json")]) == 1


def test_every_engine_is_ended_and_a_probe_that_is_silent_has_counted_nothing(
    fake_sglang: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overhead, serving = _overhead(monkeypatch), _module("serving")
    made: list[Any] = []

    class Child(serving.Child):  # type: ignore[misc, name-defined]
        def __init__(self, cell: Any) -> None:
            super().__init__(cell)
            made.append(self)

    monkeypatch.setattr(overhead, "Child", Child)
    out = fake_sglang / "overhead.json"
    overhead.main([*QUICK, "--w", "8,8", "--out", str(out)])
    left = [child for child in made if child.process.poll() is None]
    for child in left:
        child.stop(0.1)
    assert [child.cell.tool for child in left] == []
    assert [child.cell.tool for child in made] == [*SIX]
    guard = [row for row in json.loads(out.read_text())["rows"] if row["tool"] == "guard"]
    assert {row["findings"] for row in guard} == {None}  # the fake engine has no guard


def test_a_tool_that_does_not_exist_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _module("server_overhead")._parser().parse_args(["--tools", "kv_canary,canary"])
    assert "expected kv_canary and async_assert, found canary" in capsys.readouterr().err


def test_each_width_has_a_gpu_and_processors_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    overhead = _module("server_overhead")
    options = overhead._parser().parse_args(["--w", "64,8", "--gpus", "0,1"])
    cells = overhead.cells(options, 2, True)
    assert [(c.tool, c.w, c.gpu) for c in cells] == [
        ("off", 64, "0"), ("off", 8, "1"), ("guard", 64, "0"), ("guard", 8, "1"),
        ("control", 64, "0"), ("control", 8, "1"), ("twin", 64, "0"), ("twin", 8, "1"),
        ("kv_canary", 8, "1"), ("async_assert", 8, "1"),
    ]  # fmt: skip
    by_gpu = {gpu: {c.cpus for c in cells if c.gpu == gpu} for gpu in "01"}
    assert [len(held) for held in by_gpu.values()] == [1, 1]  # off and guard share theirs
    assert not set(*by_gpu["0"]) & set(*by_gpu["1"])
    assert overhead._spelled("0-2,8") == [0, 1, 2, 8]


@pytest.mark.parametrize(("words", "first", "last"), [
    ("--w 64,8 --gpus 0,1", SIX, (*FOUR, "kv_canary", "async_assert")),
    ("--w 8 --tools async_assert", SIX, (*FOUR, "async_assert")),
    ("--w 8 --tools=", SIX, SIX),
    ("--w 64,8 --tools kv_canary", FOUR[:2], (*FOUR[:2], "kv_canary")),  # that fit on one GPU
])  # fmt: skip
def test_tools_of_sglang_run_in_the_last_generation_instead_of_third_engines(
    words: str, first: tuple[str, ...], last: tuple[str, ...]
) -> None:
    overhead = _module("server_overhead")
    options = overhead._parser().parse_args([*words.split(), "--generations", "3"])
    assert [overhead.tools_of(end, options) for end in (False, True)] == [first, last]


def test_no_two_engines_share_a_log_and_a_whole_side_is_guarded() -> None:
    overhead, serving = _module("server_overhead"), _module("serving")
    options = overhead._parser().parse_args(["--w", "64,8", "--gpus", "0,1"])
    cells = [*overhead.cells(options, 1, False), *overhead.cells(options, 2, True)]
    assert len({cell.path("log.txt") for cell in cells}) == len(cells) == 22
    modes = {c.tool: serving.environment(c)["SGLANG_DDTREE_GUARD"] for c in cells}
    assert {tool for tool, mode in modes.items() if mode == "log"} == {"guard", "twin", "twin2"}


class Probe:
    """An engine whose probe answers `found`; its log is in a folder."""

    def __init__(self, folder: Path, found: dict[str, Any]) -> None:
        self.folder, self.found, self.cell = folder, found, self
        folder.mkdir(parents=True)
        (folder / "log.txt").write_text("a violation\n" if found else "")

    def path(self, name: str) -> Path:
        return self.folder / name

    def ask_probe(self) -> None:
        pass

    def probe(self) -> dict[str, Any]:
        return self.found


def test_counts_are_sums_over_generations_and_engines_and_memory_is_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overhead = _overhead(monkeypatch)
    bench = overhead.Bench(8, {}, [])
    for generation, names in enumerate((SIX, FOUR), 1):
        bench.begin(generation)
        for at, name in enumerate(names):
            found = {"verify_steps": 10**at * generation, "findings": 0, "gpu_bytes": generation,
                     "recorder": {"dumps": 1}}  # fmt: skip
            folder = tmp_path / str(generation) / name
            bench.children[name] = Probe(folder, found if name in SIX[1::2] else {})
            fact = {"start_s": 30.0 * generation, "run": 1, "generation": generation}
            bench.facts.setdefault(name, []).append(fact)
        known = bench.known("guard")  # started, not asked yet
        assert (known["verify_steps"], known["uncounted"]) == ((None, 3), (101_010, 2))[
            generation - 1
        ]
        overhead.count([bench])
    known = bench.known("guard")
    assert (known["verify_steps"], known["dumps"], known["findings"]) == (103_030, 5, 0)
    assert known["violations_logged"] == 5
    assert (known["gpu_bytes"], known["start_s"]) == (1, 30.0)
    assert known["steps_checked"] is None  # no probe has said
    assert bench.known("off")["verify_steps"] is None
    assert bench.known("kv_canary")["findings"] is None  # it never ran


def test_a_fault_in_one_lane_is_kept_and_ends_that_lane_only() -> None:
    overhead = _module("server_overhead")
    failed: dict[str, str] = {}
    bench = overhead.Bench(64, {}, [overhead.Case(8)] * 3)
    bench.begin(2)
    options = overhead._parser().parse_args([])
    overhead._guarded(failed, [bench], 1e12, options, None)
    assert "off" in failed["g2-w64"]


class Streams:
    """An engine whose streams give a chunk of so many tokens every so many seconds, by a clock."""

    def __init__(self, chunks: list[tuple[float, int, int, int]]) -> None:
        self.chunks, self.now = chunks, 0.0

    async def async_generate(self, input_ids: Any, sampling_params: Any, stream: bool) -> Any:
        async def made() -> Any:
            for when, index, tokens, steps in self.chunks:
                self.now = when
                meta = {"completion_tokens": tokens, "spec_verify_ct": steps}
                yield {"index": index, "meta_info": meta}

        return made()


def test_a_block_measures_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the moment when all streams have begun and their last token."""
    engine = Streams([(1.0, 0, 1, 0), (3.0, 1, 1, 0), (3.5, 0, 5, 1), (3.5, 1, 4, 1),
                      (4.0, 0, 9, 2), (5.0, 1, 9, 2)])  # fmt: skip
    serving = _module("serving")
    monkeypatch.setattr(serving.time, "perf_counter", lambda: engine.now)
    found = asyncio.run(serving.block(engine, 2, 9, warm_s=0.0))
    assert found["tokens_per_s"] == pytest.approx((4 + 3 + 4 + 5) / 2.0)
    assert (found["tokens"], found["steps"], found["took_s"]) == (18, 4, 2.0)
    assert found["step_s"] == pytest.approx(1.0)


def test_processors_are_shared_out_by_core(monkeypatch: pytest.MonkeyPatch) -> None:
    overhead = _module("server_overhead")
    monkeypatch.setattr(overhead, "_siblings", lambda cpu: f"{cpu % 8}")
    scheduler, engine, waiting = overhead.shares(range(16))
    assert scheduler == [0, 8]
    assert waiting == [6, 14, 7, 15]
    assert engine == [1, 9, 2, 10, 3, 11, 4, 12, 5, 13]
    assert overhead.shares([0, 1, 2, 8, 9, 10]) == ([], [], [])


def test_the_members_of_an_engine_are_what_it_has_started() -> None:
    serving = _module("serving")
    code = "import subprocess, sys, time; subprocess.Popen(['sleep', '30']); time.sleep(30)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        for _ in range(200):
            found = serving.members(child.pid)
            if len(found) == 2:
                break
            time.sleep(0.05)
        assert [name.startswith("sleep") for name in found.values()] == [False, True]
        assert os.getpid() not in found
    finally:
        os.killpg(child.pid, 9)
        child.wait()


def test_a_thread_that_has_ended_keeps_no_other_from_its_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serving = _module("serving")
    child = object.__new__(serving.Child)
    child._members = {7: "sglang::scheduler", 8: "gone", 9: "sglang::detokenizer"}
    threads = {"/proc/7/task": ["7", "70", "71"], "/proc/9/task": ["9"]}
    pinned: dict[int, Any] = {}

    def set_(thread: int, cpus: Any) -> None:
        if thread == 70:
            raise ProcessLookupError(thread)
        pinned[thread] = cpus

    def listed(path: str) -> list[str]:
        if path not in threads:
            raise FileNotFoundError(path)
        return threads[path]

    monkeypatch.setattr(serving.os, "listdir", listed)
    monkeypatch.setattr(serving.os, "sched_setaffinity", set_)
    child.pin([1, 2], [0])
    monkeypatch.undo()
    assert pinned == {7: [0], 71: [1, 2], 9: [1, 2]}
