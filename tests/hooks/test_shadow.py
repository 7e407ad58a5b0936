"""Shadow mode on SGLang's real backend: silent on sound rows, loud on wrong ones, never in the way."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
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
