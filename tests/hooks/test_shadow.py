"""Shadow mode on SGLang's real backend: silent on sound rows, loud on wrong ones, harmless."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ddtree_guard.config import Capture, Config, Mode, RuleSelection
from ddtree_guard.hooks import arm
from ddtree_guard.testing.cases import VerifyCase

if TYPE_CHECKING:
    from ddtree_guard.hooks.runtime import ServerGuard
    from ddtree_guard.testing.server import MiniServer

pytestmark = pytest.mark.sglang

SIZES: dict[str, Any] = {"lens": (19, 11, 26), "head_dim": 16, "heads": 4, "kv_heads": 2}
WIDTHS: dict[str, dict[str, Any]] = {
    "w=8": {"budget": 7},
    "w=16 ngram": {"algorithm": "NGRAM", "budget": 15, "draft_tokens": 16},
    "w=17": {"budget": 16},
    "w=33": {"budget": 32},
    "chain": {"algorithm": "DFLASH", "budget": 7, "draft_tokens": 8, "kind": "chain"},
}
PATHS = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def _case(graph: bool = False, **sizes: Any) -> VerifyCase:
    return VerifyCase(padded_bs=4 if graph else None, **{**SIZES, "budget": 16, **sizes})


Start = Callable[..., "tuple[MiniServer, ServerGuard]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers whose steps are shadowed; their hooks are gone afterwards."""
    from ddtree_guard.testing.server import MiniServer

    def make(case: VerifyCase, choice: str = "corrected", layers: int = 2, **config: Any) -> Any:
        server = MiniServer(case, choice)  # type: ignore[arg-type]
        server.layers = layers
        settings = {"mode": Mode.LOG, "dump_dir": tmp_path, "shadow_every": 1, **config}
        guard = server.arm(Config(**settings))
        assert guard is not None
        return server, guard

    yield make
    while arm.GUARDS:
        assert arm.GUARDS.pop().remove() == ()


@PATHS
@pytest.mark.parametrize("width", WIDTHS)
def test_sound_rows_are_compared_and_silent(
    start: Start, lines: Callable[[], list[dict[str, str]]], width: str, graph: bool
) -> None:
    server, guard = start(_case(graph, **WIDTHS[width]))
    for _ in range(3):
        server.step()
    assert guard.shadow.compared == 3, guard.shadow.skipped
    assert lines() == []
    assert not guard.fuses.faults


@PATHS
def test_the_incident_alarms_and_names_the_first_wrong_row(
    start: Start, lines: Callable[[], list[dict[str, str]]], graph: bool
) -> None:
    """Stock writes 8 of 17 rows of the first request and reads the second one's mask within it."""
    server, guard = start(_case(graph), "stock", rules=RuleSelection.parse("D"))
    if _follows(guard):
        pytest.skip("this release follows the batch: stock is right")
    for _ in range(4):
        server.step()
    found = {line["rule"]: line for line in lines()}
    assert {"D1", "D4"} <= set(found)
    assert guard.shadow.compared == 4
    assert not guard.fuses.faults


def _follows(guard: ServerGuard) -> bool:
    from ddtree_guard.hooks.facts import facts_of

    return facts_of(type(guard.backends()[0][1])).follows_batch


def _plant_next(
    guard: ServerGuard, monkeypatch: pytest.MonkeyPatch, rule: str, **where: Any
) -> None:
    """The fault of `rule` in the live tensors of the next launch, after all checks have read it."""
    from ddtree_guard.testing.plant import plant

    build = guard.checker.build

    def planted(record: Any, view: Any) -> None:
        plant(rule, view, **where)
        monkeypatch.setattr(guard.checker, "build", build)
        build(record, view)

    monkeypatch.setattr(guard.checker, "build", planted)


@PATHS
def test_a_dump_of_a_finding_can_be_recomputed(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, graph: bool
) -> None:
    from ddtree_guard.commands.recompute import recompute
    from ddtree_guard.dump.read import Dump

    server, guard = start(_case(graph), capture=Capture.QKV, redact=False, shadow_every=0)
    server.step()
    _plant_next(guard, monkeypatch, "M2")
    server.step()
    assert not guard.fuses.faults
    (path,) = list(tmp_path.rglob("*_M2"))
    result = recompute(0, Dump(path).step(0))
    assert result is not None
    assert {request for request, _ in result.wrong} == {2}
