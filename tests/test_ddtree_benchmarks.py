"""The DDTREE benchmarks without a GPU: engines are played, everything around them is real."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def losslessness(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import losslessness as module

    for name, value in (
        ("PROMPTS", 6),
        ("COUNT", 12),
        ("SIZES", (1, 2, 3)),
        ("NOISE_SHAPES", (1, 3)),
    ):
        monkeypatch.setattr(module, name, value)
    yield module
    for name in ("losslessness", "ddtree_watch", "engines", "common", "cells"):
        sys.modules.pop(name, None)


class Engine:
    """Answers by a rule: the next token is the sum of the last three, modulo 97, and one more."""

    def __init__(self, spoil: int | None = None, shift: float = 0.0) -> None:
        self.spoil, self.shift = spoil, shift

    def generate(self, input_ids: list[list[int]], sampling_params: Any, **more: Any) -> Any:
        found = []
        for at, prompt in enumerate(input_ids):
            text = list(prompt)
            for _ in range(sampling_params["max_new_tokens"]):
                text.append((sum(text[-3:]) + 1) % 97)
            ids = text[len(prompt) :]
            if self.spoil is not None and at == len(input_ids) - 1:
                ids[self.spoil] = 96 - ids[self.spoil]
            low = -0.52 - (self.shift if len(input_ids) == 1 else 0.0)
            best = [[[-0.5, t, None], [low, 96 - t, None]] for t in ids]
            meta = {"spec_verify_ct": 4, "output_top_logprobs": best}
            found.append({"output_ids": ids, "meta_info": meta})
        return found

    def shutdown(self) -> None:
        """Nothing to end."""


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, plan: Any) -> Any:
    """Play every engine of the plan, the plain one last, and report."""
    args = argparse.Namespace(model=Path(), seconds=100.0, wait=0.0, widest=256, plain=module.SIZES)
    folder.mkdir()
    for setup, engine in [*plan.items(), (module.PLAIN, plan[module.PLAIN])]:
        monkeypatch.setattr(module, "start", lambda *_, engine=engine: engine)
        module.cell(setup, args, folder)
        (folder / "texts.done").touch()
    return module.report(folder, list(plan))


def test_a_difference_within_what_plain_decoding_shows_is_a_tie(
    losslessness: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tree = losslessness.Setup("DDTREE", 16)
    plan = {losslessness.PLAIN: Engine(shift=0.05), tree: Engine(spoil=5)}
    result = run(losslessness, monkeypatch, tmp_path / "cells", plan)
    assert result["yardstick"] == pytest.approx(0.05)
    assert [row["sequences_differing"] for row in result["rows"]] == [1, 1, 1]
    assert [row["differing"] for row in result["rows"]] == [0, 0, 0]
    assert result["rows"][0]["max_logit_gap_of_differing"] == pytest.approx(0.02)
    assert result["rows"][2]["compared"] == 2 * 12 + 6
    assert result["ddtree_gaps"]["count"] == 3


def test_a_difference_beyond_that_counts_and_so_does_any_in_float32(
    losslessness: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tree = losslessness.Setup("DDTREE", 16)
    exact = replace(tree, dtype="float32")
    plan = {
        losslessness.PLAIN: Engine(), losslessness.PLAIN_EXACT: Engine(),
        tree: Engine(spoil=0), exact: Engine(spoil=0),
    }  # fmt: skip
    rows = run(losslessness, monkeypatch, tmp_path / "cells", plan)["rows"]
    assert [row["differing"] for row in rows] == [1] * 6
    assert {row["dtype"] for row in rows} == {"bfloat16", "float32"}


def test_every_budget_of_the_issue_is_planned(losslessness: ModuleType) -> None:
    plan = losslessness.setups()
    assert len({setup.name for setup in plan}) == len(plan)
    whole = [s for s in plan if s.algorithm == "DDTREE" and not s.incident and s.dtype == "auto"]
    for block in (8, 16):
        graphs = {s.budget for s in whole if s.graphs and s.block == block}
        assert graphs >= {7, 8, 15, 16, 17, 31, 32, 64, 256}
        sweep = next(s for s in whole if not s.graphs and s.block == block and s.budget == 256)
        assert {job[1] for job in losslessness.jobs_of(sweep)} == {*range(1, 33), 48, 64, 128, 256}


def test_runs_put_together_share_one_yardstick(
    losslessness: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tree = losslessness.Setup("DDTREE", 16)
    other = replace(tree, budget=32)
    strict = run(
        losslessness,
        monkeypatch,
        tmp_path / "a",
        {losslessness.PLAIN: Engine(), tree: Engine(spoil=5)},
    )
    loose = run(
        losslessness, monkeypatch, tmp_path / "b",
        {losslessness.PLAIN: Engine(shift=0.05), tree: Engine(), other: Engine(spoil=5)},
    )  # fmt: skip
    whole = losslessness.merged([strict, loose])
    assert [row["differing"] for row in strict["rows"]] == [1, 1, 1]
    assert [(row["budget"], row["differing"]) for row in whole["rows"]] == [(16, 0)] * 3 + [
        (32, 0)
    ] * 3
    assert whole["plain_noise"]["count"] == 2 * strict["plain_noise"]["count"]


def test_acceptance_compares_the_same_prompts(losslessness: ModuleType, tmp_path: Path) -> None:
    tree = losslessness.Setup("DDTREE", 16)
    for setup, steps in ((losslessness.Setup("DFLASH"), 4), (tree, 3)):
        outs = [{"ids": [1] * 12, "steps": steps}] * 6
        run = {"budget": setup.budget, "bs": 6, "first": 0, "outs": outs}
        (tmp_path / f"{setup.name}.json").write_text(json.dumps([run]))
    rows = losslessness.acceptance(tmp_path, [losslessness.Setup("DFLASH"), tree])
    assert [row["mean"] for row in rows] == [3.0, 4.0]
    assert rows[1]["gain_on_dflash"] == [1.0, 1.0]


def test_sampling_statistics_reject_what_is_not_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sampling

    assert sampling.verdict(*sampling.pooled([50, 50], [50, 50]))["passed"]
    assert not sampling.verdict(*sampling.pooled([70, 30], [50, 50]))["passed"]
    assert sampling.pooled([50, 49, 1], [50, 50, 0])[0] == float("inf")  # never drawn by plain
    same = sampling.chi_square({"1": 500, "2": 300}, {"1": 490, "2": 310})
    assert sampling.verdict(*same)["passed"]
    assert not sampling.verdict(*sampling.chi_square({"1": 500, "2": 300}, {"1": 300, "2": 500}))[
        "passed"
    ]


def test_every_fault_has_a_row_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import ddtree_watch

    from ddtree_guard.testing.faults import FAULTS

    assert set(ddtree_watch.ABSENT) <= set(FAULTS)
    reasons = ("cannot occur", "one rank has no peers")
    assert all(why.split(":")[0] in reasons for why in ddtree_watch.ABSENT.values())


def test_the_results_hold_every_fault() -> None:
    from ddtree_guard.testing.faults import FAULTS

    rows = json.loads((BENCHMARKS / "results" / "ddtree_watch.json").read_text())["rows"]
    assert {row["graphs"] for row in rows} == {True, False}
    for row in rows:
        assert {*row["planted"], *row["absent"]} == set(FAULTS)
        assert "not reached" not in row["absent"].values()
        missed = [rule for rule, plan in row["planted"].items()
                  if not (plan["found"] and plan["tokens_left"] is False)]  # fmt: skip
        assert missed == ([] if row["graphs"] else ["M9"])  # an eager mask lies in a longer buffer


def test_a_shuffled_model_says_the_same_in_other_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import ddtree_life
    import torch
    from safetensors.torch import load_file, save_file

    table = torch.arange(320.0)[:, None].repeat(1, 2)
    for name, weights, more in (
        ("target", {"model.embed_tokens.weight": table, "lm_head.weight": table}, {}),
        ("draft", {"fc.weight": table}, {"dflash_config": {"mask_token_id": 256}}),
    ):
        (tmp_path / name).mkdir()
        save_file({key: value.clone() for key, value in weights.items()},
                  tmp_path / name / "model.safetensors")  # fmt: skip
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": 320, **more}))
    out = ddtree_life.shuffle(tmp_path, tmp_path / "out")
    names = [ddtree_life.renamed(token) for token in range(257)]
    assert len(set(names)) == 257
    found = load_file(out / "target" / "model.safetensors")
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        assert found[key].shape == (290, 2)
        assert found[key][names, 0].tolist() == list(range(257))
    draft = json.loads((out / "draft" / "config.json").read_text())
    assert draft["dflash_config"]["mask_token_id"] == names[256]
    assert draft["vocab_size"] == 290
    assert load_file(out / "draft" / "model.safetensors")["fc.weight"].equal(table)


def test_engines_of_the_speed_run_are_measured_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import ddtree_speed as speed

    spans: list[tuple[float, float]] = []

    def busy(*_: Any) -> list[dict[str, Any]]:
        begun = time.monotonic()
        time.sleep(0.005)
        spans.append((begun, time.monotonic()))
        return [{}]

    engine = argparse.Namespace(shutdown=lambda: None)
    monkeypatch.setattr(speed, "start", lambda *_, **__: engine)
    monkeypatch.setattr(speed, "generate", lambda *_: [])
    monkeypatch.setattr(speed, "text_prompts", lambda *_, **__: [[1]] * 16)
    monkeypatch.setattr(speed, "measured", busy)
    monkeypatch.setattr(speed, "measured_shaped", busy)
    setups = [speed.TINY[0], speed.TINY[1], speed.SHAPED[0], speed.SHAPED[2]]
    names = ",".join(setup.name for setup in setups)
    args = argparse.Namespace(names=names, rounds=3, until=time.time() + 60, model=None)
    with ThreadPoolExecutor(len(setups)) as pool:
        jobs = [pool.submit(speed.engine_cell, setup, args, tmp_path) for setup in setups]
        for job in jobs:
            job.result(timeout=20)
    spans.sort()
    assert len(spans) == 2 * 3 + 2
    assert all(end <= begun for (_, end), (begun, _) in itertools.pairwise(spans))
    assert len(json.loads((tmp_path / f"{setups[0].name}.json").read_text())) == 3


def test_report_of_an_engine_on_two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import ddtree_life

    spoilt = ddtree_life.TWO[-1]
    (tmp_path / f"{spoilt.name}.log").write_text(
        "[t TP0] ddtree_guard armed=2/2 mode=log dumps=/x release=0.5.16\n"
        "[t TP0] ddtree_guard finding rule=X1 scope=server rid=- step=64 expected=- actual=- "
        "tokens_left=- incident=dg-1 dump=-\n"
    )
    live = {"verify_steps": 9, "findings": 1, "ranks_compared": 2, "planted": {"X1": {"at": 64}}}
    for rank in ("", ".TP1"):
        (tmp_path / f"{spoilt.name}.live{rank}.json").write_text(json.dumps(live))
    row = ddtree_life.guarded(tmp_path, spoilt)
    assert row["boot"] == ["[t TP0] ddtree_guard armed=2/2 mode=log"]
    assert [line["rule"] for line in row["lines"]] == ["X1"]
    assert {rank: r["ranks_compared"] for rank, r in row["ranks"].items()} == {"TP0": 2, "TP1": 2}
    assert row["planted"] == {"X1": {"at": 64}}
    (tmp_path / f"{ddtree_life.PLAIN.name}.json").write_text('{"aborts": [[1, 200], [300, 4]]}')
    assert ddtree_life.upper_half(tmp_path) == 0.5


def test_the_live_file_of_each_rank_is_its_own() -> None:
    from ddtree_guard.testing.tree_probe import file_of

    target = Path("/x/cell.live.json")
    assert file_of(target, None) == target
    assert file_of(target, argparse.Namespace(rank="TP0")) == target
    assert file_of(target, argparse.Namespace(rank="TP1")) == Path("/x/cell.live.TP1.json")
