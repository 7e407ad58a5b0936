"""The observer takes the width from the batch, else from the budget, never from what it judges."""

from __future__ import annotations

import pytest

from ddtree_guard.guard import Guard
from ddtree_guard.hooks.facts import facts_of

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
