"""What the runbook names as the cure of the incident's rules takes their findings away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddtree_guard.config import Config, Mode
from ddtree_guard.hooks import arm
from ddtree_guard.runbook import ADVICE, Cure
from ddtree_guard.testing.cases import VerifyCase

pytestmark = pytest.mark.sglang

Lines = Callable[[], list[dict[str, str]]]


@pytest.fixture
def broken(tmp_path: Path, lines: Lines, caplog: pytest.LogCaptureFixture) -> Callable[..., Any]:
    """The rules that a guarded DDTREE server breaks at its start and in two steps."""
    from ddtree_guard.testing.server import MiniServer

    def serve(budget: int, choice: Any, padded: int | None) -> set[str]:
        caplog.clear()
        sizes: Any = {"lens": (19, 11, 26), "head_dim": 16, "heads": 2, "kv_heads": 1}
        case = VerifyCase(algorithm="DDTREE", budget=budget, padded_bs=padded, **sizes)
        server = MiniServer(case, choice)
        try:
            assert server.arm(Config(mode=Mode.LOG, dump_dir=tmp_path)) is not None
            for _ in range(2):
                server.step()
            return {line["rule"] for line in lines()}
        finally:
            while arm.GUARDS:
                arm.GUARDS.pop().remove()

    return serve


@pytest.mark.parametrize("padded", [None, 4], ids=["eager", "graph"])
def test_the_first_cure_of_each_rule_that_the_incident_breaks(
    broken: Callable[..., set[str]], padded: int | None
) -> None:
    assert broken(16, "corrected", padded) == set()
    assert broken(7, "stock", padded) == set()  # Cure.NARROW
    found = broken(16, "stock", padded)
    if not found:
        pytest.skip("this release follows the batch: stock is right")
    assert {"CFG1", "W1", "W3", "W8"} <= found
    firsts = {rule: ADVICE[rule].cures[0] for rule in found}
    assert set(firsts.values()) <= {Cure.CORRECTED, Cure.OTHERS}, firsts
