"""The device check on a GPU: equal to NumPy on a sample, no sync, no allocation, capturable."""

from __future__ import annotations

import pytest
import torch

from ddtree_guard.device import selftest
from ddtree_guard.device.from_step import operands_from_step, run_step
from ddtree_guard.device.launch import DeviceCheck
from ddtree_guard.testing.device_cases import compare, random_case
from ddtree_guard.testing.steps import sound_step

pytestmark = pytest.mark.gpu


def test_every_rule_alarms_eager_and_in_a_captured_graph() -> None:
    results = selftest.run("cuda")
    assert {result.path for result in results} == {"eager", "graph"}
    assert [result.text for result in results if not result.passed] == []


@pytest.mark.parametrize("start", [0, 50])
def test_fused_bits_equal_the_numpy_rules(start: int) -> None:
    check = DeviceCheck("cuda")
    for seed in range(start, start + 50):
        case = random_case(seed, widths=(8, 17, 65))
        operands = operands_from_step(check, case.step, case.depth)
        run_step(check, operands)
        torch.cuda.synchronize()
        (verdict,) = check.poll()
        assert compare(case, verdict, operands.rules)[1] == "", (seed, case.done)


def test_clean_path_neither_synchronises_nor_allocates() -> None:
    check = DeviceCheck("cuda")
    operands = operands_from_step(check, sound_step(1, padded_bs=4))
    run_step(check, operands)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            run_step(check, operands)
            check.poll()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()
    check.poll()
    assert (check.lost, check.coverage) == (0, 1.0)
