"""What a server's configuration says of itself, and why some rules cannot be evaluated on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddtree_guard.config import Config, Mode
from ddtree_guard.guard import Guard
from ddtree_guard.hooks import arm
from ddtree_guard.hooks.configuration import read_configuration
from ddtree_guard.hooks.rope import rope_rows
from ddtree_guard.testing.cases import VerifyCase
from ddtree_guard.testing.faults import FAULTS

pytestmark = pytest.mark.sglang
CONTEXT = 54


class RadixAttention(torch.nn.Module):
    """Named as SGLang's."""


def _layer(rows: int, attends: bool = True) -> torch.nn.Module:
    made = torch.nn.Module()
    made.rotary_emb = torch.nn.Module()
    made.rotary_emb.cos_sin_cache = torch.zeros(rows, 2)
    if attends:
        made.attn = RadixAttention()
    return made


def _model(*layers: torch.nn.Module) -> Any:
    return SimpleNamespace(model=torch.nn.ModuleList(layers))


def test_the_shortest_table_beside_an_attention_layer_counts() -> None:
    assert rope_rows(_model(_layer(99), _layer(64), _layer(8, attends=False))) == 64
    assert rope_rows(_model(_layer(8, attends=False))) is None
    assert rope_rows(SimpleNamespace()) is None


@pytest.mark.parametrize(
    ("target", "draft", "context", "says"),
    [(62, 62, 54, None), (61, 62, 54, "rope rows = 61"), (62, 61, 54, "draft rope rows = 61"),
     (62, 62, 40, "draft context = 40")],
)  # fmt: skip
def test_a_rotary_table_must_reach_the_end_of_the_tree(
    target: int, draft: int, context: int, says: str | None
) -> None:
    """A tree of 17 rows is at most as deep as the block of 8, so 54 + 8 rows are enough."""
    from ddtree_guard.testing.standins import build_backend, runner_of

    case = VerifyCase(lens=(37, 21), budget=16, block=8, head_dim=16, context=CONTEXT)
    backend = build_backend(case, "corrected")
    runner = runner_of(backend)
    runner.model = _model(_layer(target)).model
    other = SimpleNamespace(
        model=_model(_layer(draft)).model, model_config=SimpleNamespace(context_len=context)
    )
    step = read_configuration(runner, backend, [(other, backend)])
    assert step.limits.context == CONTEXT
    found = [f for f in Guard().check(step).findings if f.rule == "CFG6"]
    assert [f.equation.split(",")[0] for f in found] == ([] if says is None else [says])


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    from ddtree_guard.hooks import shadow
    from ddtree_guard.testing.server import MiniServer

    monkeypatch.setattr(shadow, "self_test", lambda device: "")
    servers: list[Any] = []

    def make(algorithm: str, topk: int = 1, **config: Any) -> Any:
        case = VerifyCase(
            algorithm=algorithm, lens=(9, 4), head_dim=16, heads=2, kv_heads=1, budget=6,
            draft_tokens=7, topk=topk,
        )  # fmt: skip
        server = MiniServer(case)
        guard = server.arm(Config(mode=Mode.LOG, dump_dir=tmp_path, **config))
        assert guard is server.guard
        servers.append(server)
        return guard

    make.servers = servers  # type: ignore[attr-defined]
    yield make
    while arm.GUARDS:
        assert arm.GUARDS.pop().remove() == ()


def test_every_rule_is_active_or_has_a_reason(start: Callable[..., Any]) -> None:
    guard = start("NGRAM")
    active, why = set(arm.active_rules(guard)), arm.not_checked(guard)
    assert active | set(why) == {rule.id for rule in guard.guard.rules}
    assert not active & set(why)
    assert why["T4"] == "pads are nodes"
    assert why["CFG6"].startswith("this server gives no limits.draft_context")
    assert why["D4"] == "this server gives no shadow.dense, shadow.request, shadow.tolerance"


def test_positions_are_compared_with_the_table_of_a_running_model(
    start: Any, lines: Callable[[], list[dict[str, str]]]
) -> None:
    guard, server = start("NGRAM"), start.servers[-1]
    assert "P2" in arm.not_checked(guard)
    for rows in (99, 9):
        for runner, _ in guard.backends():
            runner.model = _model(_layer(rows)).model
        server.step()
    assert arm.configuration_of(guard).limits.rope_rows == 9
    assert "P2" not in arm.not_checked(guard)
    assert {(line["rule"], line["step"]) for line in lines()} == {("P2", "2")}


def test_a_draft_count_that_its_steps_cannot_give_is_named_at_start(
    start: Callable[..., Any], lines: Callable[[], list[dict[str, str]]]
) -> None:
    """EAGLE's own arithmetic, which a DDTREE server does not have."""
    guard = start("EAGLE", topk=4)
    assert "CFG4" in arm.active_rules(guard)
    assert lines() == []
    guard.judge(FAULTS["CFG4"](arm.configuration_of(guard), 0).step)
    assert {(line["rule"], line["step"]) for line in lines()} == {("CFG4", "0")}


def test_dumps_say_what_the_doctor_would(start: Callable[..., Any]) -> None:
    boot, whose, release, *words = start("NGRAM").flight.recorder.doctor
    assert boot.startswith("ddtree_guard armed=1/1")
    assert (whose, release.partition(":")[0][:7]) == ("rank 0 of 1", "SGLang ")
    assert any(word.startswith("hook build in place: ") for word in words)
    assert "not checked T4: pads are nodes" in words
    assert not any("shadow every" in word for word in words)


def test_dumps_say_what_shadow_mode_compares(start: Callable[..., Any]) -> None:
    guard = start("NGRAM", shadow_every=4)
    (line,) = [w for w in guard.flight.recorder.doctor if w.startswith("ddtree_guard shadow")]
    assert line == guard.shadow.line()
    assert "every=4" in line
    assert "D4" not in arm.not_checked(guard)
