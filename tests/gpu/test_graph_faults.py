"""SGLang's captured verify attention on a GPU: every planted fault is named correctly."""

from __future__ import annotations

import pytest

from ddtree_guard.device.verdict import disagreements, explain
from ddtree_guard.guard import Guard
from ddtree_guard.testing.graph_lab import FAULTS, Fault, error_of, long_and_short, run_fault

pytestmark = [pytest.mark.gpu, pytest.mark.sglang]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_in_a_captured_graph_is_named(fault: Fault) -> None:
    sound, bad = run_fault(fault, "cuda")
    report = explain(bad.verdict, bad.step, Guard().check, full=True)
    assert sound.verdict.rules == ()
    assert set(fault.device) <= set(bad.verdict.rules)
    assert set(fault.host) <= set(report.rules)
    assert disagreements(report) == ()


def test_sound_replay_computes_the_right_rows() -> None:
    sound, _ = run_fault(FAULTS[0], "cuda")
    assert error_of(sound, long_and_short()[0]) < 2e-2
