"""What the guard knows of SGLang's decode graph runner, on the release that is installed here."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from ddtree_guard.hooks.certificates import INPUTS
from ddtree_guard.hooks.statics import replayed

pytestmark = [pytest.mark.sglang, pytest.mark.matrix]


def _runner_module() -> Any:
    from ddtree_guard.testing.fakes import sglang

    try:
        return sglang("model_executor.runner.decode_cuda_graph_runner")
    except ModuleNotFoundError:
        return sglang("model_executor.cuda_graph_runner")  # 0.5.12


def _code(method: Any) -> set[str]:
    code = inspect.unwrap(method).__code__
    return {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}


def _buffers(rows: int, lanes: int) -> Any:
    import torch

    made = mock.MagicMock()
    for at, name in enumerate(INPUTS):
        count = rows if name in ("input_ids", "positions", "out_cache_loc") else lanes
        setattr(made, name, torch.full((count,), at))
    made.seq_lens_cpu = made.seq_lens
    return made


def test_the_graph_reads_every_input_from_the_runners_buffers() -> None:
    held = _runner_module().DecodeInputBuffers
    assert {*INPUTS} <= {f.name for f in dataclasses.fields(held)}


def test_a_replay_view_becomes_what_the_graph_reads() -> None:
    """SGLang's own view of a padded replay: 3 of 4 lanes are live, 5 rows each."""
    import torch

    build = getattr(_runner_module(), "build_replay_fb_view", None)
    if build is None:
        pytest.skip("0.5.12 hands its fields over one by one")
    buffers, live = _buffers(rows=40, lanes=8), mock.MagicMock()
    live.seq_lens_sum, live.seq_lens_cpu, live.lora_ids = 12, None, None
    live.out_cache_loc = torch.arange(15)
    given = {"forward_batch": live, "buffers": buffers, "bs": 4, "raw_bs": 3, "num_tokens": 20,
             "seq_len_fill_value": 1, "is_encoder_decoder": False}  # fmt: skip
    asked = inspect.signature(build).parameters
    view = build(**{name: given.get(name) for name in asked})
    whole = replayed(
        view, SimpleNamespace(decode_cuda_graph_runner=SimpleNamespace(buffers=buffers))
    )
    for name in INPUTS:
        read = getattr(whole, name)
        assert read.data_ptr() == getattr(buffers, name).data_ptr(), name
        assert len(read) == (4 if name in ("seq_lens", "req_pool_indices") else 20)
    assert len(view.out_cache_loc) == 15  # SGLang's own view stays as it is


def test_a_view_without_a_known_runner_is_left_alone() -> None:
    view = SimpleNamespace(input_ids=[0] * 4, out_cache_loc=[0] * 3)
    assert replayed(view, SimpleNamespace()) is view


def test_the_chosen_graph_is_where_the_guard_looks() -> None:
    module = _runner_module()
    if hasattr(module, "DecodeCudaGraphRunner"):
        runner = module.DecodeCudaGraphRunner
        assert {"_replay_graph_key", "raw_bs"} <= _code(runner.load_batch)
        assert "size" in {f.name for f in dataclasses.fields(module.ShapeKey)}
        assert "ragged_verify_mode" in _code(runner.load_batch)
    else:
        assert {"bs", "raw_bs"} <= _code(module.CudaGraphRunner.replay_prepare)


def test_planned_replays_copy_positions_and_tokens_again() -> None:
    """Why a fault is planted in the spec info too, and why checks must run inside the graph."""
    module = _runner_module()
    runner = getattr(module, "DecodeCudaGraphRunner", None) or module.CudaGraphRunner
    copied = {name for part in vars(runner).values() if inspect.isfunction(part)
              for name in _code(part)}  # fmt: skip
    assert {"input_ids", "positions", "copy_"} <= copied
