"""The soak and the overhead benchmark without a GPU: cells, arguments, protocol, arithmetic.

The engines are a fake package named `sglang` that answers like SGLang's Engine.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import json
import sys
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
                yield {"meta_info": {"completion_tokens": made}}
        if stream:
            return chunks()
        await asyncio.sleep(0.001)
        return {"output_ids": [1] * count}
    def shutdown(self):
        pass
"""


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in ("serving", "soak", "server_overhead"):
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
    assert [row["planted"]["rule"] for row in rows] == ["M2", "W3", "A1", "A4"]
    assert not any(row["plant_verdict"]["right_step"] for row in rows)
    assert capsys.readouterr().out.count("MISSED NGRAM-small-w16-eager-sync-guard") == 4


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
    soak.main([*command, "--minutes", "5"])
    assert "done" not in capsys.readouterr().out


def test_overhead_measures_in_turns_and_names_what_did_not_start(fake_sglang: Path) -> None:
    overhead = _module("server_overhead")
    out = fake_sglang / "overhead.json"
    overhead.main(
        ["--w", "8", "--seconds", "25", "--blocks", "3", "--block", "0.05", "--shape", "small",
         "--tools", "guard,kv_canary", "--out", str(out)]
    )  # fmt: skip
    result = json.loads(out.read_text())
    assert {(row["tool"], row["concurrency"]) for row in result["rows"]} == {
        (tool, c) for tool in ("off", "guard") for c in (1, 8, 32)
    }
    assert all(row["blocks"] == 3 and row["tokens_per_s"] > 0 for row in result["rows"])
    assert [row["ratio_to_off"] for row in result["rows"] if row["tool"] == "off"] == [1.0] * 3
    assert "no canary here" in result["failed"]["w8-kv_canary"]


def test_statistics() -> None:
    overhead = _module("server_overhead")
    low, high = overhead.interval([0.99, 1.0, 1.01, 0.995, 1.002] * 4)
    assert 0.99 <= low <= 1.0 <= high <= 1.01
    values = [float(v) for v in range(1, 101)]
    assert overhead.percentile(values, 100, 0.99) == 100.0
    assert overhead.percentile(values[-50:], 1000, 0.99) == 91.0
    assert overhead.percentile([], 0, 0.99) is None
