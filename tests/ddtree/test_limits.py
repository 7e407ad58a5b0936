"""Refusals of steps that cannot fit, with the numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_guard.ddtree.limits import (
    can_move,
    check_arguments,
    check_model,
    check_step,
    step_bytes,
)
from ddtree_guard.errors import IncompatibleError


def test_a_step_holds_logits_twice_the_mask_and_the_drafter_s_hidden_states() -> None:
    need = step_bytes(bs=48, w=257, tokens=500_000, vocab=151_936, hidden=3 * 4096, item=2)
    rows = 48 * 257
    assert need.logits == rows * 151_936 * 6
    assert need.mask == sum(257 * (s + 257) for s in [500_000 // 48] * 47 + [500_000 - 47 * 10_416])
    assert need.hidden == rows * 12_288 * 2
    assert need.total == need.logits + need.mask + need.hidden


def test_a_step_that_fits_or_an_unknown_device_is_accepted() -> None:
    need = step_bytes(bs=2, w=17, tokens=100, vocab=1000, hidden=64, item=2)
    check_step(need, need.total, 2, 17)
    check_step(need, None, 2, 17)


def test_a_step_that_cannot_fit_is_refused_with_the_memory_it_needs() -> None:
    need = step_bytes(bs=48, w=1025, tokens=500_000, vocab=151_936, hidden=12_288, item=2)
    with pytest.raises(IncompatibleError, match=r"48 requests x 1025 rows") as refusal:
        check_step(need, need.total - 1, 48, 1025)
    text = str(refusal.value)
    assert f"{need.total / 2**30:.2f} GiB" in text
    assert "--speculative-ddtree-budget" in text
    assert text.count(". ") == 0


def _pool(k: Any, **more: Any) -> Any:
    return SimpleNamespace(k_buffer=[k], v_buffer=[k], data_ptrs=None, **more)


def test_only_rows_that_lie_side_by_side_are_moved() -> None:
    """A page-major pool's rows of one layer have the other layers' between them."""
    torch = pytest.importorskip("torch")
    plain = torch.zeros(8, 2, 4)
    assert can_move(_pool(plain))
    assert can_move(_pool(plain, k_scale_buffer=None, use_hnd=False))
    assert not can_move(_pool(torch.zeros(8, 3, 2, 4)[:, 1]))
    assert not can_move(_pool(torch.zeros(8, 1, 2, 4)))
    assert not can_move(_pool(plain, k_scale_buffer=[plain]))
    assert not can_move(_pool(plain, use_hnd=True))
    assert not can_move(SimpleNamespace(kv_buffer=[plain], data_ptrs=None))


@pytest.mark.parametrize(
    ("name", "value", "change"),
    [
        ("page_size", 64, "--page-size 1"),
        ("pp_size", 2, "--pp-size 1"),
        ("dcp_size", 2, "--dcp-size 1"),
        ("enable_dp_attention", True, "--enable-dp-attention"),
        ("enable_lora", True, "--enable-lora"),
        ("lora_paths", ["a"], "--lora-paths"),
        ("disaggregation_mode", "decode", "--disaggregation-mode"),
        ("enable_pdmux", True, "--enable-pdmux"),
        ("speculative_adaptive", True, "--speculative-adaptive"),
        ("speculative_draft_window_size", 512, "--speculative-draft-window-size"),
    ],
)
def test_an_argument_that_a_tree_cannot_serve_is_named_with_its_flag(
    name: str, value: Any, change: str
) -> None:
    check_arguments(SimpleNamespace())
    with pytest.raises(IncompatibleError, match=f"found {name}=") as refusal:
        check_arguments(SimpleNamespace(**{name: value}))
    assert str(refusal.value).endswith(f"{change}.")


@pytest.mark.parametrize(
    ("window", "recurrent", "pool", "says"),
    [
        (None, True, None, "recurrent layers"),
        (128, False, None, "a sliding window of 128 tokens"),
        (None, False, SimpleNamespace(kv_buffer=[]), "--kv-cache-dtype auto"),
    ],
)
def test_a_model_that_a_tree_cannot_branch_is_refused(
    window: int | None, recurrent: bool, pool: Any, says: str
) -> None:
    runner = SimpleNamespace(sliding_window_size=None, token_to_kv_pool=None)
    check_model(runner, recurrent=False)
    runner = SimpleNamespace(sliding_window_size=window, token_to_kv_pool=pool)
    with pytest.raises(IncompatibleError, match=says) as refusal:
        check_model(runner, recurrent)
    assert str(refusal.value).count(". ") == 0
