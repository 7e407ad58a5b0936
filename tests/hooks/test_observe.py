"""The observer takes the width from the batch, else from the budget, never from what it judges."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddtree_guard.guard import Guard
from ddtree_guard.hooks.facts import GENERATIONS, facts_of

pytestmark = pytest.mark.sglang


def test_a_batch_that_states_no_width_is_judged_by_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ddtree_guard.hooks import observe
    from ddtree_guard.testing.standins import VerifyCase, build_backend, run_verify

    monkeypatch.setattr(observe, "stated_width", lambda facts, spec: None)
    case = VerifyCase(lens=(9, 30), budget=16, block=8, heads=2, kv_heads=1, head_dim=16)
    backend = build_backend(case)
    step = run_verify(backend, case).step
    broken = set() if facts_of(type(backend)).follows_batch else {"CFG1", "W1", "W3"}
    assert step.w == 17
    assert broken <= set(Guard().check(step).rules)


def test_width_is_the_batchs_then_the_budgets_then_the_backends() -> None:
    from ddtree_guard.hooks.observe import verify_width

    facts = GENERATIONS[0]
    args = SimpleNamespace(speculative_algorithm="DDTREE", speculative_ddtree_budget=16)
    runner = SimpleNamespace(server_args=args, is_draft_worker=False)
    backend = SimpleNamespace(num_draft_tokens=8)
    assert verify_width(backend, runner, facts, SimpleNamespace(draft_token_num=5)) == 5
    assert verify_width(backend, runner, facts, None) == 17
    args.speculative_algorithm = "DFLASH"
    assert verify_width(backend, runner, facts, None) == 8


@pytest.mark.parametrize(
    ("choice", "budget"), [("stock", 7), ("corrected", 7), ("corrected", 16), ("corrected", 33)]
)
def test_of_a_large_captured_mask_only_the_reachable_part_is_read(
    choice: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddtree_guard.hooks import observe
    from ddtree_guard.testing.standins import VerifyCase, build_backend, run_verify

    case = VerifyCase(lens=(30, 4, 9), budget=budget, block=8, heads=2, kv_heads=1, head_dim=16)
    whole = run_verify(build_backend(case, choice), case, "graph").step
    monkeypatch.setattr(observe, "WHOLE", 0)
    part = run_verify(build_backend(case, choice), case, "graph").step
    assert part.mask.capacity == whole.mask.capacity == len(whole.mask.cells)
    need = (budget + 1) * (30 + 4 + 9 + 3 * (budget + 1))
    assert need <= len(part.mask.cells) < len(whole.mask.cells)
    assert (part.mask.cells == whole.mask.cells[: len(part.mask.cells)]).all()
    assert Guard().check(part).rules == Guard().check(whole).rules
