"""Stale inputs of a replay, by torch's own count of writes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ddtree_guard.config import Config, Mode  # noqa: E402
from ddtree_guard.hooks import arm  # noqa: E402
from ddtree_guard.hooks.stamps import Stamps  # noqa: E402
from ddtree_guard.hooks.witness import witness_of  # noqa: E402
from ddtree_guard.testing.cases import VerifyCase  # noqa: E402

NAMES = ("positions", "seq_lens")


def _buffers() -> Any:
    return SimpleNamespace(positions=torch.zeros(8), seq_lens=torch.zeros(4))


def _step(stamps: Stamps, buffers: Any, step_id: int, *written: str) -> Any:
    stamps.note(step_id, buffers, NAMES)
    for name in written:
        getattr(buffers, name)[:2].copy_(torch.ones(2))
    return stamps.written({name: getattr(buffers, name)[:3] for name in NAMES})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_buffer_that_was_written_before_and_is_not_now_is_old(mode: Any) -> None:
    stamps, buffers = Stamps(), _buffers()
    with mode():
        assert _step(stamps, buffers, 4, *NAMES) == (4, {})
        assert _step(stamps, buffers, 8, "seq_lens") == (8, {"positions": 7})
        assert _step(stamps, buffers, 12, *NAMES) == (12, {})


def test_a_copy_of_several_tensors_at_once_counts() -> None:
    stamps, buffers = Stamps(), _buffers()
    stamps.note(1, buffers, NAMES)
    views = [buffers.positions[:2], buffers.seq_lens[:2]]
    torch._foreach_copy_(views, [torch.ones(2), torch.ones(2)])
    stamps.written(vars(buffers))
    assert stamps.moving == {*NAMES}


def test_a_buffer_that_never_seemed_to_be_written_is_not_judged() -> None:
    stamps, buffers = Stamps(), _buffers()
    for step in range(3):
        assert _step(stamps, buffers, step, "seq_lens") == (step, {})


def test_what_has_no_count_moved_or_is_missing_is_not_judged() -> None:
    stamps, buffers = Stamps(), _buffers()
    _step(stamps, buffers, 1, *NAMES)
    stamps.note(2, buffers, NAMES)
    assert stamps.written({"positions": torch.zeros(8), "seq_lens": None}) == (2, {})
    assert stamps.written(vars(buffers)) is None
    with torch.inference_mode():
        buffers.positions = torch.zeros(8)
    stamps.note(3, buffers, NAMES)
    stamps.note(3, None, NAMES)
    assert stamps.written(vars(buffers)) == (3, {})


@pytest.mark.sglang
@pytest.mark.parametrize("skipped", ["positions", "out_cache_loc", "seq_lens"])
def test_a_replay_with_an_input_of_an_earlier_step_is_named(
    lines: Callable[[], list[dict[str, str]]],
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    skipped: str,
) -> None:
    from ddtree_guard.hooks.facts import release
    from ddtree_guard.testing import server as module

    if release() == "0.5.12":
        pytest.skip("DDTREE does not run on 0.5.12, whose replays are handed their fields")
    case = VerifyCase(algorithm="DDTREE", budget=8, lens=(9, 4, 12), padded_bs=4, head_dim=16,
                      heads=2, kv_heads=1)  # fmt: skip
    server = module.MiniServer(case, "auto")
    guard = server.arm(Config(mode=Mode.LOG, dump_dir=tmp_path))
    assert guard is not None
    worker = SimpleNamespace(witness=None, observers=[], model_runner=server.runner)
    guard.witness = witness_of(guard, worker)
    server.redress = lambda spec: worker.witness.building(server.runner)  # as a worker asks
    monkeypatch.setattr(server, "plan", lambda: None)
    try:
        server.step()
        server.step()
        assert lines() == []
        assert guard.certificates.stamps.moving == {
            "input_ids", "positions", "seq_lens", "req_pool_indices", "out_cache_loc"
        }  # fmt: skip
        monkeypatch.setattr(module, "STATIC", tuple(n for n in module.STATIC if n != skipped))
        server.step()
    finally:
        while arm.GUARDS:
            arm.GUARDS.pop().remove()
    found = {line["rule"]: line for line in lines()}
    assert (found["G2"]["expected"], found["G2"]["actual"]) == ("3", "2")
    assert found["G2"]["tokens_left"] == "no"
    assert not guard.fuses.faults
