"""The target's token per row: each row under the parameters of its own request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ddtree_guard.ddtree import choose as module  # noqa: E402
from ddtree_guard.ddtree.choose import choose, expand  # noqa: E402

WIDTH, VOCAB = 5, 12


class Recorder:
    """A sampler that keeps what it is given and takes the most probable token."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def _sample_from_probs(self, probs: Any, info: Any, positions: Any, plain: bool) -> Any:
        self.calls.append((probs, info, positions, plain))
        return probs.argmax(-1).to(torch.int32)


def sampling_info(**changes: Any) -> SimpleNamespace:
    """Three requests: hot, greedy in a mixed batch, cold with a seed."""
    held: dict[str, Any] = {
        "is_all_greedy": False, "need_top_p_sampling": True, "need_top_k_sampling": True,
        "need_min_p_sampling": False, "temperatures": torch.tensor([[2.0], [1.0], [0.5]]),
        "top_ks": torch.tensor([9, 1, 4]), "top_ps": torch.tensor([0.9, 1.0, 0.8]),
        "min_ps": None, "sampling_seed": torch.tensor([7, 8, 9]),
    }  # fmt: skip
    return SimpleNamespace(**(held | changes))


def test_without_parameters_or_all_greedy_it_is_the_argmax() -> None:
    logits = torch.randn(3 * WIDTH, VOCAB)
    wanted = logits.argmax(-1).view(3, WIDTH)
    assert torch.equal(choose(logits, None, WIDTH, None, None), wanted)
    info = sampling_info(is_all_greedy=True)
    assert torch.equal(choose(logits, info, WIDTH, None, None), wanted)


@pytest.mark.parametrize("at_once", [4, 7, 2048])
def test_every_row_has_its_request_s_parameters(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", at_once)
    logits, sampler = torch.randn(3 * WIDTH, VOCAB), Recorder()
    info, positions = sampling_info(), torch.arange(3 * WIDTH) + 40
    chosen = choose(logits.clone(), info, WIDTH, positions, sampler)
    assert chosen.shape == (3, WIDTH)
    assert torch.equal(chosen.view(-1), logits.argmax(-1))
    seen = {
        name: torch.cat([getattr(call[1], name) for call in sampler.calls])
        for name in ("temperatures", "top_ks", "top_ps", "sampling_seed")
    }
    for name, rows in seen.items():
        assert torch.equal(rows, getattr(info, name).repeat_interleave(WIDTH, dim=0)), name
    assert torch.equal(torch.cat([call[2] for call in sampler.calls]), positions)
    probs = torch.cat([call[0] for call in sampler.calls])
    assert torch.allclose(probs, torch.softmax(logits / seen["temperatures"], -1))
    assert {call[3] for call in sampler.calls} == {False}


def test_temperature_alone_takes_the_plain_path_and_logits_stay_as_they_are() -> None:
    info = sampling_info(need_top_p_sampling=False, need_top_k_sampling=False)
    logits, sampler = torch.randn(3 * WIDTH, VOCAB), Recorder()
    before = logits.clone()
    choose(logits, info, WIDTH, torch.arange(3 * WIDTH), sampler)
    assert sampler.calls[0][3] is True
    assert torch.equal(logits, before)


def test_absent_parameters_stay_absent() -> None:
    rows = expand(sampling_info(sampling_seed=None), WIDTH)
    assert rows.sampling_seed is None
    assert rows.min_ps is None
    assert rows.top_ks.tolist() == [9] * WIDTH + [1] * WIDTH + [4] * WIDTH
