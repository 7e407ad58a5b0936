"""Other algorithms, bit for bit: auto and corrected give what stock gives where stock is right."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ddtree_guard.testing.cases import VerifyCase

pytestmark = [pytest.mark.sglang, pytest.mark.matrix]

UNINITIALISED = ("attn_logits", "attn_lse", "swa_attn_logits")  # torch.empty: only shapes mean much
CASES = {
    "dflash": {"algorithm": "DFLASH", "kind": "chain"},
    "eagle-topk1": {"algorithm": "EAGLE", "kind": "chain", "topk": 1},
    "eagle-topk4": {"algorithm": "EAGLE", "topk": 4},
    "eagle3-topk4": {"algorithm": "EAGLE3", "topk": 4},
    "ngram": {"algorithm": "NGRAM"},
}


def _case(name: str, path: str) -> VerifyCase:
    size: dict[str, Any] = {"lens": (37, 21, 9), "budget": 7, "draft_tokens": 8, "head_dim": 16}
    return VerifyCase(padded_bs=5 if path == "graph" else None, **size, **CASES[name])


def _same(stock: Any, other: Any, name: str) -> None:
    import torch

    if not isinstance(stock, torch.Tensor):
        assert stock == other or type(stock).__name__ == "VerifyMask", name
        return
    assert (stock.dtype, stock.shape) == (other.dtype, other.shape), name
    if name not in UNINITIALISED:
        assert torch.equal(stock, other), name


def _built(name: str, choice: str, path: str, draft: bool) -> tuple[Any, Any, Any]:
    """A backend with the case's metadata, its inputs and its batch."""
    from ddtree_guard.testing import standins
    from ddtree_guard.testing.cases import make_inputs

    case = _case(name, path)
    backend, inputs = standins.build_backend(case, choice, draft), make_inputs(case)
    standins.fill_pools(backend, inputs)
    return backend, inputs, standins.build_metadata(backend, inputs, path)


# the draft runner verifies with DFLASH only; the others draft by decoding
BUILDS = [(name, path, False) for name in CASES for path in ("eager", "graph")]
BUILDS += [("dflash", "eager", True), ("dflash", "graph", True)]


@pytest.mark.parametrize("choice", ["auto", "corrected"])
@pytest.mark.parametrize(("name", "path", "draft"), BUILDS)
def test_metadata_and_buffers_equal_stock(name: str, choice: str, path: str, draft: bool) -> None:
    stock, _, _ = _built(name, "stock", path, draft)
    other, _, _ = _built(name, choice, path, draft)
    assert (type(stock) is type(other)) == (choice == "auto")
    for item in dataclasses.fields(stock.forward_metadata):
        a, b = (getattr(x.forward_metadata, item.name) for x in (stock, other))
        _same(a, b, item.name)
    held = {n for n in vars(stock) if n.startswith(("cuda_graph_", "_verify_mask"))}
    assert {n for n in vars(other) if n.startswith(("cuda_graph_", "_verify_mask"))} == held
    for attribute in held:
        a, b = (getattr(x, attribute) for x in (stock, other))
        _same(getattr(a, "buffer", a), getattr(b, "buffer", b), attribute)


@pytest.mark.parametrize("name", CASES)
def test_output_equals_stock(name: str) -> None:
    import torch

    from ddtree_guard.testing.standins import launch

    rows = [launch(*_built(name, choice, "eager", False)) for choice in ("stock", "corrected")]
    assert not rows[0].isnan().any()
    assert torch.equal(*rows)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("path", ["eager", "graph"])
def test_no_false_alarm_on_a_neighbour(name: str, path: str) -> None:
    from ddtree_guard.guard import Guard
    from ddtree_guard.testing.standins import finish

    run = finish(*_built(name, "stock", path, False), path)
    assert run.right
    # stock's captured mask lacks the w tree columns up to 0.5.16 (I11)
    assert set(Guard().check(run.step).rules) <= ({"M5"} if path == "graph" else set())


@pytest.mark.parametrize("mode", ["EXTEND", "DECODE"])
@pytest.mark.parametrize("name", ["ddtree", "dflash"])
def test_prefill_and_decode_metadata_equal_stock(name: str, mode: str) -> None:
    metas = [_plain_metadata(name, choice, mode) for choice in ("stock", "corrected")]
    for item in dataclasses.fields(metas[0]):
        if not item.name.startswith("lean_"):
            _same(*(getattr(meta, item.name) for meta in metas), item.name)


def _plain_metadata(name: str, choice: str, mode: str) -> Any:
    import torch

    from ddtree_guard.testing import fakes, standins
    from ddtree_guard.testing.batches import verify_batch
    from ddtree_guard.testing.cases import make_inputs

    case = VerifyCase(lens=(37, 21), budget=16) if name == "ddtree" else _case(name, "eager")
    backend, inputs = standins.build_backend(case, choice), make_inputs(case)
    standins.fill_pools(backend, inputs)
    batch = verify_batch(inputs)
    batch.forward_mode = getattr(
        fakes.sglang("model_executor.forward_batch_info").ForwardMode, mode
    )
    batch.spec_info = None
    batch.extend_prefix_lens = torch.tensor([5, 3, 2][: case.bs])
    batch.extend_prefix_lens_cpu = batch.extend_prefix_lens.tolist()
    batch.extend_seq_lens = batch.seq_lens - batch.extend_prefix_lens
    batch.extend_seq_lens_cpu = batch.extend_seq_lens.tolist()
    with fakes.host_context(standins.runner_of(backend).server_args):
        backend.init_forward_metadata(batch)
    return backend.forward_metadata
