"""What benchmarks look at in a live worker: planted faults, and the chain beside the tree."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from ddtree_guard.config import Config, Depth, Mode  # noqa: E402
from ddtree_guard.ddtree.tree import Trees  # noqa: E402
from ddtree_guard.hooks import arm  # noqa: E402
from ddtree_guard.hooks.witness import witness_of  # noqa: E402
from ddtree_guard.testing import tree_probe as live  # noqa: E402
from ddtree_guard.testing.cases import VerifyCase  # noqa: E402
from ddtree_guard.testing.toy_server import ToyServer  # noqa: E402

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2], [1, 6, 1, 8, 0, 3, 3, 9, 8, 8, 7, 4]]


class RadixAttention(torch.nn.Module):
    """Named as SGLang's."""


def rotary(rows: int) -> Any:
    """A model with one attention layer and a rotary table."""
    layer = torch.nn.Module()
    layer.attn, layer.rotary_emb = RadixAttention(), torch.nn.Module()
    layer.rotary_emb.cos_sin_cache = torch.zeros(rows, 2)
    return layer


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_every_planted_fault_is_found_on_its_step(
    interpreter: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph: bool, half: int
) -> None:
    from ddtree_guard.testing.server import MiniServer

    monkeypatch.setattr(live, "GAP", 1)
    monkeypatch.setattr(live, "SAMPLED", 1)
    case = VerifyCase(
        algorithm="DDTREE", budget=16, lens=(19, 11, 26), head_dim=16, heads=2, kv_heads=1,
        padded_bs=4 if graph else None,
    )  # fmt: skip
    server = MiniServer(case, "auto")
    guard = server.arm(Config(mode=Mode.LOG, dump_dir=tmp_path))
    server.runner.model = rotary(8192)
    try:
        order = arm.active_rules(guard)
        planter = live.Planter(guard, order[half::2])
        for _ in range(len(planter.todo) + 1):
            server.step()
            # a position off the table is put right again before a model would look it up
            assert server.inputs.positions.max() < 8192
    finally:
        while arm.GUARDS:
            arm.GUARDS.pop().remove()
    assert not planter.todo
    assert ("P2" in planter.rows) == (half == order.index("P2") % 2)
    assert len(planter.rows) > 10
    # M9 does not apply to a captured mask, W7 to an eager step, K9 to a page size of 1
    open_ = {rule for rule, row in planter.rows.items() if {"not_checked", "error"} & set(row)}
    assert open_ <= {"K9", "M9" if graph else "W7"}
    for rule in set(planter.rows) - open_:
        row = planter.rows[rule]
        assert rule in [found["rule"] for found in row["found"]], (rule, row)


def test_faults_of_the_worker_are_found_on_their_step(
    interpreter: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "GAP", 1)
    monkeypatch.setattr(live, "SAMPLED", 1)
    server = ToyServer(PROMPTS, 16, 8, skill=0.4)
    guard = server.watch(Config(mode=Mode.LOG, dump_dir=tmp_path))
    rules = ["A5", "A7", "G7", "L1", "L3", "T5", "W4"]
    planter = live.Planter(guard, rules, server.worker)
    computed = guard.witness.computed  # the toy server has no graphs
    guard.witness.computed = lambda output, info, _: computed(output, info, True)
    for _ in range(len(rules) + 1):
        server.step()
    guard.remove()
    assert not planter.todo
    for rule in rules:
        row = planter.rows[rule]
        assert "error" not in row, row
        own = [found for found in row["found"] if found["rule"] == rule]
        assert [found["tokens_left"] for found in own] == [False], (rule, row)
        assert own[0]["rid"] in ("r2", None)


def test_positions_that_nobody_wrote_are_found_in_a_replay(
    interpreter: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddtree_guard.testing.server import MiniServer

    monkeypatch.setattr(live, "GAP", 1)
    monkeypatch.setattr(live, "SAMPLED", 2)
    case = VerifyCase(algorithm="DDTREE", budget=8, lens=(9, 4, 12), padded_bs=4, head_dim=16,
                      heads=2, kv_heads=1)  # fmt: skip
    server = MiniServer(case, "auto")
    guard = server.arm(Config(mode=Mode.LOG, dump_dir=tmp_path))
    worker = SimpleNamespace(witness=None, observers=[], _block=None, _predict=None, _commit=None)
    guard.witness = witness_of(guard, worker)
    planter = live.Planter(guard, ["G2"], worker)
    server.redress = lambda spec: guard.witness.building(server.runner)
    try:
        for _ in range(4):
            server.step()
    finally:
        while arm.GUARDS:
            arm.GUARDS.pop().remove()
    row = planter.rows["G2"]
    assert (row["at"], row["path"]) == (2, "graph")  # the first step says what is written
    assert {found["rule"] for found in row["found"]} >= {"G2", "P1"}
    assert guard.coverage.findings == len(row["found"])


def test_a_benchmark_may_ask_for_more_steps_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtree_guard.hooks import device_checker

    monkeypatch.setattr(device_checker, "SAMPLE", dict(device_checker.SAMPLE))
    config = Config(mode=Mode.LOG, depth=Depth.FULL)
    guard = SimpleNamespace(config=config, witness=SimpleNamespace(every=64))
    live.read_every(guard, 3)
    assert device_checker.SAMPLE[Depth.FULL] == guard.witness.every == 3
    assert device_checker.SAMPLE[Depth.FAST] > 1000


def test_chain_lengths_are_those_of_a_walk_along_the_spine() -> None:
    tokens = torch.tensor([[9, 1, 2, 3, 7], [9, 1, 2, 3, 7], [9, 1, 2, 3, 7]])
    predict = torch.tensor([[1, 2, 3, 0, 0], [1, 0, 3, 0, 0], [7, 2, 3, 0, 5]])
    trees = Trees(tokens, None, None, None, None, None)
    assert live.chain_lengths(trees, predict.view(-1), 4).tolist() == [4, 2, 1]


def test_a_tree_commits_at_least_what_its_chain_would(interpreter: None) -> None:
    server = ToyServer(PROMPTS, 16, 8, skill=0.3)
    meter = live.Meter()
    server.worker.observers.append(meter)
    for _ in range(4):
        server.step()
    seen: dict[str, Any] = meter.values()
    chain, tree = np.array(seen["chain"]), np.array(seen["tree"])
    assert len(tree) == seen["tree_steps"] * len(PROMPTS)
    assert (tree >= chain).all()
    assert tree.sum() > chain.sum()
