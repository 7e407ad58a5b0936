"""Edge cases of the slot rules beyond the one fault that each rule owns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddtree_guard.guard import find_rule
from ddtree_guard.rule import Finding, NotEvaluable
from ddtree_guard.step import Contract, Step
from ddtree_guard.testing.steps import sound_step


def broken(rule: str, step: Step) -> Finding | None:
    return find_rule(rule).check(step)


def write(step: Step, request: int, row: int, slot: int) -> Step:
    out = step.slots.out_cache_loc.copy()
    out[request * step.w + row] = slot
    return step.replace(slots__out_cache_loc=out)


def slot(step: Step, request: int, row: int) -> int:
    return int(step.slots.out_cache_loc[request * step.w + row])


def edit(array: Any, at: Any, value: int) -> Any:
    changed = array.copy()
    changed[at] = value
    return changed


def small(**sizes: Any) -> Step:
    return sound_step(0, lens=(9, 30), w=4, block=4, full_trees=True, **sizes)


def short_tree() -> Step:
    """Request 1 holds two nodes and two padding rows."""
    step = small()
    return step.replace(tree__sizes=edit(step.tree.sizes, 1, 2))


def test_key_outside_the_pool_names_its_request() -> None:
    step = small()
    at = int(step.layout.kv_indptr[1]) + 3
    found = broken("K1", step.replace(layout__kv_indices=edit(step.layout.kv_indices, at, -1)))
    assert found is not None
    assert (found.request, found.row, found.actual) == (1, None, "-1")


def test_request_is_named_before_the_batch() -> None:
    step = write(small(), 1, 2, -1).replace(slots__ids={"swa_indices": ("swa", -1, 0)})
    found = broken("K1", step)
    assert found is not None
    assert (found.request, found.row) == (1, 2)


def test_tail_of_a_captured_index_buffer_is_not_read() -> None:
    step = small()
    buffer = np.concatenate([step.layout.kv_indices, [2**40, -5]])
    assert broken("K1", step.replace(layout__kv_indices=buffer)) is None
    assert broken("K1", step.replace(layout__kv_indices=buffer, layout__kv_indptr=None)) is not None


def test_padded_lanes_may_hold_their_declared_value() -> None:
    step = write(sound_step(1, padded_bs=4), 3, 5, -1)
    assert broken("K1", step) is not None
    pads = np.array(step.slots.out_cache_loc)
    pads[3 * 17 :] = -1
    pads_step = step.replace(
        slots__out_cache_loc=pads, contract=Contract(pad_lanes={"slots.out_cache_loc": -1})
    )
    assert broken("K1", pads_step) is None
    assert broken("K2", pads_step) is None


def test_pool_of_unknown_size_is_not_evaluable() -> None:
    with pytest.raises(NotEvaluable, match="'draft'"):
        broken("K1", small().replace(slots__pool="draft"))


def test_slot_of_another_request_makes_a_victim() -> None:
    step = small()
    found = broken("K2", write(step, 1, 2, slot(step, 0, 3)))
    assert found is not None
    assert (found.request, found.row, found.victims) == (1, 2, (0,))


def test_slot_used_twice_within_a_request() -> None:
    step = small()
    found = broken("K2", write(step, 1, 3, slot(step, 1, 1)))
    assert found is not None
    assert (found.request, found.row, found.victims) == (1, 3, ())


def test_padded_lane_on_a_live_slot() -> None:
    step = sound_step(1, padded_bs=4)
    found = broken("K2", write(step, 3, 2, slot(step, 2, 9)))
    assert found is not None
    assert (found.request, found.row, found.victims) == (3, 2, (2,))


def test_padded_lane_on_a_free_slot() -> None:
    step = sound_step(1, padded_bs=4)
    free = set(range(1, step.slots.pools["full"])) - set(step.slots.req_to_token.reshape(-1))
    found = broken("K2", write(step, 3, 2, min(free)))
    assert found is not None
    assert (found.request, found.row, found.expected) == (3, 2, "0")


def test_node_may_not_write_the_reserved_slot() -> None:
    found = broken("K2", write(short_tree(), 1, 1, 0))
    assert found is not None
    assert (found.request, found.row) == (1, 1)


def test_padding_rows_may_write_the_reserved_slot() -> None:
    step = write(write(short_tree(), 1, 2, 0), 1, 3, 0)
    assert broken("K2", step) is None
    assert broken("K3", step) is None


def test_shared_prefix_slot_and_foreign_owner() -> None:
    step = small()
    shared = broken("K2", step.replace(slots__refcounts=edit(step.slots.refcounts, 6, 2)))
    foreign = broken("K2", step.replace(slots__owners=edit(step.slots.owners, 6, 0)))
    assert shared is not None
    assert foreign is not None
    assert (shared.request, shared.row, shared.victims) == (1, 2, ())
    assert (foreign.request, foreign.row, foreign.victims) == (1, 2, (0,))


def test_uniqueness_needs_no_counts_nor_owners() -> None:
    step = small().replace(slots__refcounts=None, slots__owners=None)
    assert broken("K2", step) is None
    assert broken("K2", write(step, 1, 0, slot(step, 0, 0))) is not None


def test_counts_of_another_batch_are_not_evaluable() -> None:
    with pytest.raises(NotEvaluable, match=r"slots\.refcounts holds 5"):
        broken("K2", small().replace(slots__refcounts=np.ones(5, np.int64)))


def test_table_written_at_the_mirror() -> None:
    step = small()
    table = step.slots.req_to_token.copy()
    table[1, 31:35] = step.slots.out_cache_loc[4:]
    table[1, 30] = 0
    mirror = np.array([9, 31])
    found = broken("K3", step.replace(slots__req_to_token=table, layout__prefix_lens_cpu=mirror))
    assert found is not None
    assert (found.request, found.row) == (1, 0)
    assert "mirror, 31" in found.cause


def test_row_that_ends_before_the_reserve() -> None:
    step = small()
    assert broken("K3", step.replace(slots__row_width=34, slots__reserve=4)) is None
    found = broken("K3", step.replace(slots__row_width=34, slots__reserve=5))
    assert found is not None
    assert (found.request, found.row, found.actual) == (1, None, "35")


@pytest.mark.parametrize("length", [-1, 10**15, -(2**63), 2**63 - 1])
def test_hostile_lengths_do_not_read_outside_the_table(length: int) -> None:
    step = small()
    step = step.replace(layout__prefix_lens=np.array([9, length]))
    found = broken("K3", step)
    assert found is not None
    assert found.request == 1
    with pytest.raises(NotEvaluable, match="table row has"):
        broken("K4", step)


def test_keys_of_another_request() -> None:
    step = small()
    indices = step.layout.kv_indices.copy()
    indices[9:12] = step.slots.req_to_token[0, :3]
    found = broken("K4", step.replace(layout__kv_indices=indices))
    assert found is not None
    assert found.request == 1
    assert "that of request 0" in found.cause


def test_draft_rows_count_where_the_contract_says_so() -> None:
    step = small().replace(contract=Contract(kv_includes_draft=True))
    rows = [step.slots.req_to_token[i, : s + 4] for i, s in enumerate((9, 30))]
    whole = step.replace(
        layout__kv_indices=np.concatenate(rows), layout__kv_indptr=np.array([0, 13, 47])
    )
    assert broken("K4", whole) is None
    assert broken("K4", step) is not None


def test_indices_that_end_too_early() -> None:
    step = small()
    found = broken("K4", step.replace(layout__kv_indices=step.layout.kv_indices[:-1]))
    assert found is not None
    assert (found.request, found.actual) == (1, "39")


def test_empty_prefix() -> None:
    step = sound_step(0, lens=(0, 3), w=4, block=4)
    assert broken("K3", step) is None
    assert broken("K4", step) is None


@pytest.mark.parametrize(("least", "most"), [(-1, 3), (0, "size")])
def test_ids_declared_for_another_pool_are_judged_by_its_size(least: int, most: Any) -> None:
    step = small()
    size = step.slots.pools["swa"]
    ids = {"swa_indices": ("swa", least, size if most == "size" else most)}
    found = broken("K1", step.replace(slots__ids=ids))
    assert found is not None
    assert (found.expected, found.actual) == (f"0..{size - 1}", str(size if least == 0 else -1))
    inside = {"swa_indices": ("swa", 0, size - 1)}
    assert broken("K1", step.replace(slots__ids=inside)) is None
