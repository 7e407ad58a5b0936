"""The fused kernel: each rule's fault gives its bit and first offender, sound steps give none."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from ddtree_guard.checks import ALL
from ddtree_guard.config import Depth
from ddtree_guard.device import operands
from ddtree_guard.device.from_step import buffers_of, operands_from_step, run_step, shape_of
from ddtree_guard.device.launch import DeviceCheck
from ddtree_guard.device.operands import Tile, bytes_read
from ddtree_guard.device.protocol import BITS, HAS_BITS
from ddtree_guard.device.verdict import Verdict
from ddtree_guard.errors import UsageError
from ddtree_guard.step import Contract, Step
from ddtree_guard.testing.device_cases import compare, random_case
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step

SMALL = {"w": 9, "lens": (21, 9, 30), "full_trees": True}


def verdict_of(step: Step, depth: Depth = Depth.FULL) -> Verdict:
    check = DeviceCheck("cpu")
    run_step(check, operands_from_step(check, step, depth))
    (verdict,) = check.poll()
    return verdict


@pytest.mark.parametrize(
    "tile", [Tile(32, 4, 2, 1, 2), Tile(64, 8, 8, 2), Tile(128, 16, 16, 8, 8)], ids=str
)
@pytest.mark.parametrize("rule", ["M2", "T4", "T3"])
def test_verdict_does_not_depend_on_the_tile(rule: str, tile: Tile) -> None:
    step = FAULTS[rule](sound_step(5, w=37, lens=(9, 70, 4)), 2).step
    twice = step.slots.out_cache_loc.copy()
    twice[-1] = twice[-30]
    step = step.replace(slots__out_cache_loc=twice)
    verdicts = []
    for chosen in (None, tile):
        check = DeviceCheck("cpu")
        check.check(check.bind(buffers_of(step, "cpu"), shape_of(step), chosen))
        check.close()
        check.collect()
        verdicts += check.poll()
    assert {rule, "K2"} <= set(verdicts[0].rules)
    assert verdicts[0] == verdicts[1]


def test_a_tree_wider_than_one_pass_of_each_filter() -> None:
    """More than 257 rows: several passes over links and words of the mask, and blocks of pairs."""
    step, rows = sound_step(5, w=300, lens=(3, 6), full_trees=True), {"K2": (1, 299)}
    for rule in ("M2", "T4", "T3"):
        planted = FAULTS[rule](step, 1)
        step, rows[rule] = planted.step, (1, planted.row)
    slots = step.slots.out_cache_loc.copy()
    slots[-1] = slots[-290]
    verdict = verdict_of(step.replace(slots__out_cache_loc=slots), Depth.FAST)
    assert {rule: verdict.first.get(rule) for rule in rows} == rows


@pytest.mark.parametrize("w", [7, 300])
def test_siblings_apart_in_a_sorted_tree(w: int) -> None:
    """Sorted by depth; the last node moves to the parent of the first of its depth."""
    step = sound_step(5, w=w, kind="star", block=3, lens=(3, 6), full_trees=True)
    parents, depths = step.tree.parents.copy(), step.tree.depths.copy()
    parents[:, w - 3 :], depths[:, w - 3 :] = [1, 2, 3], 2
    step = step.replace(
        contract=dataclasses.replace(step.contract, depth_major=True),
        tree__parents=parents, tree__depths=depths,
    )  # fmt: skip
    assert "T2" not in verdict_of(step, Depth.FAST).rules
    parents[1, w - 1] = 1
    assert verdict_of(step.replace(tree__parents=parents), Depth.FAST).first["T2"] == (1, w - 1)


def test_bits_are_those_of_the_rules() -> None:
    assert {rule.id: rule.bit for rule in ALL if rule.bit is not None} == BITS


@pytest.mark.parametrize("depth", Depth)
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"padded_bs": 5},
        {"w": 1, "lens": (0, 3)},
        {"w": 2, "lens": (5, 0), "block": 2},
        {"w": 65, "lens": (5, 3)},
        {"w": 4, "block": 16, "lens": (9, 1), "padded_bs": 4},
        {"kind": "chain"},
        {"kind": "star", "page_size": 4},
    ],
    ids=str,
)
def test_sound_step_is_clean(sizes: dict[str, Any], depth: Depth) -> None:
    verdict = verdict_of(sound_step(5, **sizes), depth)
    assert (verdict.rules, verdict.launches) == ((), 1)


@pytest.mark.parametrize("rule", sorted(BITS))
def test_fault_gives_its_bit_and_first_offender(rule: str) -> None:
    step = sound_step(3, padded_bs=4, **SMALL)
    if rule == "M6":
        step = step.replace(contract=Contract(name="causal", causal_with_mask=True))
    planted = FAULTS[rule](step, 0 if rule == "K2" else step.bs - 1)
    request, row = verdict_of(planted.step).first[rule]
    assert planted.request in (None, request)
    assert planted.row in (None, row)


def test_lowest_request_then_lowest_row_is_the_offender() -> None:
    step = sound_step(3, **SMALL)
    positions = step.positions.values.copy()
    for request, row in ((2, 1), (1, 8), (1, 4)):
        positions[request * step.w + row] += 1
    verdict = verdict_of(step.replace(positions__values=positions))
    assert verdict.first == {"P1": (1, 4)}


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_both_integer_widths_of_every_array(kind: Any) -> None:
    step = sound_step(4, padded_bs=4, **SMALL)
    arrays = {
        path.replace(".", "__"): value.astype(kind)
        for path, value, _ in step.arrays()
        if value.dtype.kind == "i"
    }
    assert verdict_of(step.replace(**arrays)).rules == ()
    slots = arrays["slots__out_cache_loc"].copy()
    slots[2 * step.w + 3] = slots[2 * step.w + 1]
    verdict = verdict_of(step.replace(**{**arrays, "slots__out_cache_loc": slots}))
    assert verdict.first["K2"] == (2, 3)


def test_mask_of_bool_and_of_bytes() -> None:
    step = sound_step(4, **SMALL)
    as_bool = step.replace(mask__cells=step.mask.cells.astype(np.bool_))
    assert verdict_of(as_bool).rules == verdict_of(step).rules == ()
    twos = step.replace(mask__cells=step.mask.cells * 2)
    assert {"M1", "M2"} <= set(verdict_of(twos).rules)


@pytest.mark.parametrize(("w", "offset"), [(1, 3), (17, 0), (17, 15), (40, 7)])
def test_mask_cells_at_the_edges_of_a_buffer_at_any_address(w: int, offset: int) -> None:
    """Rows begin and end within words, the buffer too; around it are ones that do not count."""
    step = sound_step(4, w=w, lens=(0, 5), full_trees=True)
    buffers, check = buffers_of(step, "cpu"), DeviceCheck("cpu")
    room = torch.ones(buffers.mask.numel() + 64, dtype=torch.uint8)
    room = room[-room.data_ptr() % 16 + offset :]
    mask = room[: buffers.mask.numel()]
    mask.copy_(buffers.mask)
    operands = check.bind(dataclasses.replace(buffers, mask=mask), shape_of(step))
    zeros = [cell for cell in torch.nonzero(mask == 0).flatten().tolist() if cell >= w]
    cells = {(0, 1), (w * w - 1, 1), (len(mask) - 1, 1), (len(mask) - w, 1), (len(mask) - 1, 2)}
    cells |= {(cell, 1) for cell in (*zeros[:1], *zeros[-1:])}  # ones too many
    rules = {}
    for cell, bit in [(0, 0), *cells]:
        mask[cell] ^= bit
        check.check(operands)
        check.close()
        check.collect()
        rules[cell, bit] = ["M2" in verdict.rules for verdict in check.poll()]
        mask[cell] ^= bit
    assert rules == {(0, 0): [False]} | {cell: [True] for cell in cells}


@pytest.mark.parametrize("w", [9, 70])
def test_ones_that_moved_are_found_though_no_row_has_more_or_fewer(w: int) -> None:
    """The last row loses the root, or its parent, for a node that is not on its path."""
    step = sound_step(4, w=w, lens=(3, 6), full_trees=True)
    last = step.mask.cells[-w:]
    free = int(np.flatnonzero(last == 0)[0])
    for lost in (0, int(step.tree.parents[1, w - 1])):
        cells = step.mask.cells.copy()
        cells[len(cells) - w + lost], cells[len(cells) - w + free] = 0, 1
        verdict = verdict_of(step.replace(mask__cells=cells), Depth.FAST)
        assert verdict.first["M2"] == (1, w - 1)


@pytest.mark.parametrize("back", [2, 18, 19, 20, 21])  # wherever they lie in a word
def test_cells_that_add_up_to_nothing_in_a_byte_are_found(back: int) -> None:
    step = sound_step(4, w=70, kind="star", block=3, lens=(3, 6), full_trees=True)
    cells = step.mask.cells.copy()
    assert not cells[-back - 2 : -back].any()
    cells[-back - 2 : -back] = 128
    verdict = verdict_of(step.replace(mask__cells=cells), Depth.FAST)
    assert verdict.first["M2"] == (1, 69)


def test_fast_depth_sees_the_ends_of_the_prefix_only() -> None:
    step = sound_step(4, **SMALL)
    start = int(step.layout.mask_indptr[2])
    hidden = {}
    for column in (0, 1, 29):
        cells = step.mask.cells.copy()
        cells[start + column] = 0
        hidden[column] = "M1" in verdict_of(step.replace(mask__cells=cells), Depth.FAST).rules
    assert hidden == {0: True, 1: False, 29: True}


@pytest.mark.parametrize("why", ["window", "contract"])
def test_a_mask_that_no_rule_judges_is_not_read(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = sound_step(4, **SMALL)
    shape = shape_of(step)
    if why == "window":
        shape = dataclasses.replace(shape, window=True)
    else:
        skipped = dict.fromkeys(("M1", "M2", "M3", "M4", "M6"), "not read")
        contract = dataclasses.replace(step.contract, not_checked=skipped)
        shape = dataclasses.replace(shape, contract=contract)
    launched: list[int] = []
    monkeypatch.setattr(operands, "bind", lambda *a, HAS, **k: launched.append(HAS) or (lambda: 0))
    buffers = buffers_of(step, "cpu")
    bound = DeviceCheck("cpu").bind(buffers, shape)
    assert not launched[-1] & (HAS_BITS["mask"] | HAS_BITS["words"])
    assert bound.bytes_read == bytes_read(dataclasses.replace(buffers, mask=None), shape)
    assert not {"M1", "M2", "M3", "M4", "M6"} & set(bound.rules)
    DeviceCheck("cpu").bind(buffers, shape_of(step))
    assert launched[-1] & HAS_BITS["mask"]


def test_siblings_in_another_order_are_sound() -> None:
    step = sound_step(4, w=9, kind="star", block=2, full_trees=True, lens=(8, 5))
    child, sibling = step.tree.retrieve_next_token.copy(), step.tree.retrieve_next_sibling.copy()
    child[1, 0], sibling[1] = 8, [-1, -1, 1, 2, 3, 4, 5, 6, 7]
    backwards = step.replace(tree__retrieve_next_token=child, tree__retrieve_next_sibling=sibling)
    assert verdict_of(backwards).rules == ()
    circle = sibling.copy()
    circle[1, 1] = 8
    looped = verdict_of(backwards.replace(tree__retrieve_next_sibling=circle))
    assert looped.rules == ("T3",)


def test_padded_lanes_do_not_need_a_tree() -> None:
    step = sound_step(6, padded_bs=8, **SMALL)
    buffers = buffers_of(step, "cpu")
    garbage = {
        name: torch.full_like(getattr(buffers, name), 77)
        for name in ("tokens", "parents", "depths", "sizes")
    }
    for name, value in garbage.items():
        value[: step.bs] = getattr(buffers, name)[: step.bs]
    check = DeviceCheck("cpu")
    check.check(check.bind(dataclasses.replace(buffers, **garbage), shape_of(step)))
    check.close()
    check.collect()
    assert check.poll()[0].rules == ()


def test_live_count_is_read_from_the_device() -> None:
    step = sound_step(6, padded_bs=4, **SMALL)
    buffers = buffers_of(step, "cpu")
    check = DeviceCheck("cpu")
    operands = check.bind(buffers, shape_of(step))
    buffers.live_count.fill_(2)
    check.check(operands)
    check.close()
    check.collect()
    (verdict,) = check.poll()
    assert verdict.live == 2
    assert verdict.first["G4"] == (2, 0)


def test_too_short_or_strided_array_is_refused() -> None:
    step = sound_step(6, **SMALL)
    buffers, check = buffers_of(step, "cpu"), DeviceCheck("cpu")
    short = dataclasses.replace(buffers, qo_indptr=buffers.qo_indptr[:-1])
    with pytest.raises(UsageError, match="qo_indptr must be contiguous and hold at least 4"):
        check.bind(short, shape_of(step))
    strided = dataclasses.replace(buffers, tokens=buffers.tokens.repeat(1, 2)[:, ::2])
    with pytest.raises(UsageError, match="tokens must be contiguous"):
        check.bind(strided, shape_of(step))


@pytest.mark.parametrize("depth", Depth)
@pytest.mark.parametrize("value", [-1, 2**31 - 1, -(2**31), 2**62, -(2**62)])
def test_hostile_numbers_are_flagged_and_read_nothing_outside(value: int, depth: Depth) -> None:
    """Operands lie inside larger poisoned buffers; other poison must give the same verdict."""
    verdicts = []
    for poison in (0, 0x55):
        step = sound_step(6, padded_bs=4, **SMALL)
        check = DeviceCheck("cpu")
        buffers = _guarded(buffers_of(step, "cpu"), poison)
        for name in ("qo_indptr", "kv_indptr", "mask_indptr", "lens", "parents", "sizes",
                     "out_cache_loc", "retrieve_next_token", "retrieve_next_sibling"):  # fmt: skip
            _put(getattr(buffers, name), value)
        check.check(check.bind(buffers, shape_of(step, depth)))
        check.close()
        check.collect()
        verdicts += check.poll()
    assert verdicts[0].bits == verdicts[1].bits
    assert {"W1", "W2", "W3", "T1", "T4", "K1"} <= set(verdicts[0].rules)


def _guarded(buffers: Any, poison: int) -> Any:
    """The same buffers, each in the middle of a larger one filled with a byte."""
    inside = {}
    for name in buffers.__dataclass_fields__:
        value = getattr(buffers, name)
        if value is None:
            continue
        room = torch.full((value.numel() + 8192,), 0, dtype=value.dtype)
        room.view(torch.uint8).fill_(poison)
        middle = room[4096 : 4096 + value.numel()]
        middle.copy_(value.reshape(-1))
        inside[name] = middle
    return dataclasses.replace(buffers, **inside)


def _put(tensor: Any, value: int) -> None:
    """Overwrite two elements in the middle, as far as the type holds the value."""
    limits = torch.iinfo(tensor.dtype)
    tensor[1:3] = min(max(value, limits.min), limits.max)


@pytest.mark.parametrize("start", [0, 12, 24, 36])
def test_fused_bits_equal_the_numpy_rules(start: int) -> None:
    """A sample; `benchmarks/device_equality.py` runs 20,000 on a GPU."""
    check = DeviceCheck("cpu")
    for seed in range(start, start + 12):
        case = random_case(seed, widths=(1, 2, 3, 8, 9, 16, 17))
        operands = operands_from_step(check, case.step, case.depth)
        run_step(check, operands)
        (verdict,) = check.poll()
        _, difference = compare(case, verdict, operands.rules)
        assert difference == "", (seed, case.done)
