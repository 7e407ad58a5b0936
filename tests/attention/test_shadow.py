"""The device comparison against the oracle, over sizes, dtypes and faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ddtree_guard.attention import shadow
from ddtree_guard.attention.reference import verify_attention
from ddtree_guard.attention.shadow import Rows, ShadowCheck, tolerance


def _rows(w: int, s: int, heads: int, kv_heads: int, dim: int, dtype: Any, pads: int = 0) -> Rows:
    """A request whose output rows are the oracle's; the last `pads` rows are padding."""
    rng, count = np.random.default_rng(w + s), s + w + 7

    def put(*shape: int) -> Any:
        return torch.from_numpy(rng.normal(size=shape).astype(np.float32)).to(dtype)

    k, v, q = put(count, kv_heads, dim), put(count, kv_heads, dim), put(w, heads, dim)
    slots = torch.from_numpy(rng.permutation(count))
    parents = [-1, *(int(rng.integers(0, r)) for r in range(1, w - pads)), *([-1] * pads)]
    prefix, loc = slots[:s], slots[s : s + w]
    right = verify_attention(
        q.float().numpy(),
        *(part[at].float().numpy() for at in (prefix, loc) for part in (k, v)),
        parents,
        0.3,
    )
    output = torch.from_numpy(right).to(dtype)
    table = torch.cat([prefix, torch.full((5,), 1 << 20)]).to(torch.int32)  # never to be read
    tree = torch.tensor(parents, dtype=torch.int32)
    return Rows(q, output, k, v, table, loc, tree, torch.tensor([s]), 0.3)


def _errors(rows: Rows) -> Any:
    check = ShadowCheck("cpu", 64)
    return check.result(check.launch(rows), len(rows.loc))


@pytest.mark.parametrize(
    ("w", "s", "heads", "kv_heads", "dim"),
    [(8, 0, 2, 1, 16), (16, 31, 4, 4, 24), (17, 70, 6, 2, 32), (33, 5, 4, 1, 64)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_right_rows_are_within_the_tolerance_and_pads_are_left_out(
    w: int, s: int, heads: int, kv_heads: int, dim: int, dtype: Any
) -> None:
    found = _errors(_rows(w, s, heads, kv_heads, dim, dtype, pads=2))
    allowed = tolerance(dtype, "cpu")
    assert allowed is not None
    for errors in (found.dense, found.chain):
        assert errors[:-2].min() >= 0
        assert errors.max() <= allowed / 2
        assert (errors[-2:] == shadow.NOT_COMPARED).all()
    assert 0 <= found.decode <= allowed / 2
    assert found.length == s


@pytest.mark.parametrize("row", [0, 5, 16])
def test_a_wrong_row_is_wrong_alone(row: int) -> None:
    rows = _rows(17, 20, 4, 2, 16, torch.bfloat16)
    output = rows.output.clone()
    output[row, -1, -1] += 0.5
    found = _errors(replace(rows, output=output))
    assert np.flatnonzero(found.dense > 2.0**-6).tolist() == [row]
    assert np.flatnonzero(found.chain > 2.0**-6).tolist() == [row]
    assert (found.decode > 2.0**-6) is (row == 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_no_number_is_infinitely_wrong(value: float) -> None:
    rows = _rows(8, 12, 2, 1, 16, torch.float32)
    rows.output[3, 1, 2] = value
    found = _errors(rows)
    assert np.flatnonzero(np.isinf(found.dense)).tolist() == [3]


def test_a_model_that_overflows_is_not_the_kernels_fault() -> None:
    rows = _rows(8, 12, 2, 1, 16, torch.float32)
    rows.v[rows.loc[0]] = float("inf")
    rows.output[:] = float("inf")
    assert _errors(rows).dense.max() == 0


def test_a_cycle_in_the_tree_ends() -> None:
    rows = _rows(8, 12, 2, 1, 16, torch.float32)
    rows.parents[3], rows.parents[4] = 4, 3
    assert _errors(rows).dense[3] > 0


def test_results_come_back_in_turn() -> None:
    check, rows = ShadowCheck("cpu", 16), _rows(8, 12, 2, 1, 16, torch.float32)
    numbers = [check.launch(rows) for _ in range(shadow.RING + 1)]
    assert check.lost(numbers[0])
    assert not check.lost(numbers[1])
    assert all(check.result(number, 8).length == 12 for number in numbers[1:])


def test_the_self_test_passes_and_sees_a_comparison_that_is_blind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert shadow.self_test("cpu") == ""
    launch = ShadowCheck.launch

    def blind(self: Any, rows: Rows) -> int:
        return launch(self, replace(rows, output=shadow._dense(rows)))

    monkeypatch.setattr(ShadowCheck, "launch", blind)
    assert "was not seen" in shadow.self_test("cpu")


def test_slots_that_the_pool_does_not_have_are_not_read() -> None:
    rows = _rows(8, 12, 2, 1, 16, torch.float32)
    rows.slots[3], rows.slots[4], rows.loc[2] = -7, 1 << 30, 1 << 40
    found = _errors(rows)
    assert 0 < found.dense.max() < float("inf")
