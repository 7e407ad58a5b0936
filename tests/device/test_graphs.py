"""Birth certificates, and SGLang's real verify attention with the check inside (interpreter)."""

from __future__ import annotations

import pytest
import torch

from ddtree_guard.device.verdict import disagreements, explain
from ddtree_guard.guard import Guard, find_rule
from ddtree_guard.hooks.certificates import Certificate, static_of
from ddtree_guard.step import Graph, Step
from ddtree_guard.testing.graph_lab import FAULTS, Fault, error_of, long_and_short, run_fault
from ddtree_guard.testing.steps import sound_step

KEY = {"BS": 4, "w": 17, "mask": True}


def step_with(graph: Graph) -> Step:
    return sound_step(1, padded_bs=4).replace(graph=graph)


def test_static_describes_the_tensor() -> None:
    tensor = torch.zeros(4, 6, dtype=torch.int32)[:, ::2]
    static = static_of(tensor, 3)
    assert static.pointer == tensor.data_ptr()
    assert (static.dtype, static.shape, static.stride) == ("int32", (4, 3), (6, 2))
    assert (static.capacity, static.generation) == (24, 3)


def test_replay_of_the_captured_buffers_is_sound() -> None:
    tensors = {"positions": torch.zeros(68), "mask": torch.zeros(9), "absent": None}
    graph = Certificate.of(KEY, tensors).replay(KEY, tensors, {}, 5)
    for rule in ("G1", "G2", "G3", "W6"):
        assert find_rule(rule).check(step_with(graph)) is None


def test_replay_names_a_moved_a_stale_and_a_restrided_buffer_and_another_key() -> None:
    born = {"positions": torch.zeros(4, 17), "mask": torch.zeros(9), "lens": torch.zeros(4)}
    certificate = Certificate.of(KEY, born, constant=("lens",))
    live = {**born, "mask": torch.zeros(9), "positions": born["positions"].view(17, 4).T}
    step = step_with(certificate.replay({**KEY, "w": 8}, live, {"lens": 1, "positions": 4}, 5))
    headlines = {rule: find_rule(rule).check(step) for rule in ("G1", "G2", "G3", "W6")}
    assert {rule: found and found.headline for rule, found in headlines.items()} == {
        "G1": "the graph was captured for another w",
        "G2": "the graph reads positions of an earlier step",
        "G3": "mask is not the buffer that was captured",
        "W6": "positions is laid out with another stride than captured",
    }


@pytest.mark.sglang
@pytest.mark.parametrize(
    "fault",
    [fault for fault in FAULTS if fault.name in ("swapped-masks", "wrong-stride", "moved-pointer")],
    ids=lambda fault: fault.name,
)
def test_fault_between_replays_is_named(fault: Fault) -> None:
    """The whole list runs in real graphs: tests/gpu and benchmarks/graph_faults.py."""
    sound, bad = run_fault(fault, "cpu")
    report = explain(bad.verdict, bad.step, Guard().check, full=True)
    assert (sound.verdict.rules, Guard().check(sound.step).rules) == ((), ())
    assert error_of(sound, long_and_short()[0]) < 1e-5
    assert set(fault.device) <= set(bad.verdict.rules)
    assert set(fault.host) <= set(report.rules)
    assert disagreements(report) == ()
