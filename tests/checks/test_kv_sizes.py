"""Edge cases of the size rules beyond the one fault that each rule owns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddtree_guard.guard import find_rule
from ddtree_guard.rule import Finding, NotEvaluable
from ddtree_guard.step import Step
from ddtree_guard.testing.steps import sound_step


def broken(rule: str, step: Step) -> Finding | None:
    return find_rule(rule).check(step)


def small(**sizes: Any) -> Step:
    return sound_step(0, lens=(9, 30), w=4, block=4, **sizes)


def test_first_short_buffer_by_name_is_reported() -> None:
    buffers = {"mask": (5, 4), "indices": (9, 8), "exact": (7, 7)}
    found = broken("K5", small().replace(slots__capacity=buffers))
    assert found is not None
    assert found.equation == "indices needs 9 elements, but holds 8"


def test_owned_pages_are_optional() -> None:
    step = small(page_size=4).replace(slots__owned_pages=None)
    assert broken("K6", step) is None
    assert broken("K6", step.replace(slots__allocated=np.array([16, 33]))) is not None


def test_whole_pages_that_are_not_owned() -> None:
    step = small(page_size=4)
    allocated = step.slots.allocated + np.array([0, 4])
    found = broken("K6", step.replace(slots__allocated=allocated))
    assert found is not None
    assert (found.request, found.actual) == (1, str(int(allocated[1])))


def test_recorded_slots_lie_in_the_request_s_row() -> None:
    step = small().replace(slots__owned_pages=None)
    width = step.slots.row_width
    assert broken("K6", step.replace(slots__allocated=np.array([9, width]))) is None
    found = broken("K6", step.replace(slots__allocated=np.array([9, width + 2])))
    assert found is not None
    assert (found.request, found.actual, found.expected) == (1, str(width + 2), f"<= {width}")
    unknown = step.replace(slots__allocated=np.array([9, width + 2]), slots__row_width=None)
    assert broken("K6", unknown) is None


@pytest.mark.parametrize(("kept", "cause"), [(3, "never freed"), (5, "freed twice")])
def test_commit_accounts_for_each_row(kept: int, cause: str) -> None:
    found = broken("K6", small().replace(slots__kept=kept, slots__freed=4))
    assert found is not None
    assert found.expected == "8"
    assert cause in found.cause


def test_idle_pool_is_whole() -> None:
    step = small()
    found = broken("K6", step.replace(slots__idle_free=step.slots.idle_free - 1))
    assert found is not None
    assert found.expected == str(step.slots.pools["full"])


def test_page_size_zero_is_not_evaluable() -> None:
    with pytest.raises(NotEvaluable, match="page_size = 0"):
        broken("K6", small().replace(slots__page_size=0))
    with pytest.raises(NotEvaluable, match="page sizes 1 and 0"):
        broken("K9", small().replace(slots__kernel_page_size=0))


def test_kernel_with_another_page_size() -> None:
    found = broken("K9", small(page_size=4).replace(slots__kernel_page_size=2))
    assert found is not None
    assert (found.expected, found.actual) == ("4", "2")


def test_kernel_of_single_slots_needs_no_page_table() -> None:
    step = small(page_size=4).replace(slots__kernel_page_size=1)
    assert broken("K9", step.replace(slots__page_table=None)) is None
    assert broken("K9", step) is not None


def test_page_table_that_ends_before_the_prefix() -> None:
    step = small(page_size=4)
    found = broken("K9", step.replace(slots__page_table=step.slots.page_table[:, :7]))
    assert found is not None
    assert (found.request, found.expected, found.actual) == (1, ">= 30", "28")


def test_pages_are_compared_with_slots_where_these_are_known() -> None:
    step = small(page_size=4)
    swapped = step.slots.page_table.copy()
    swapped[1, [1, 2]] = swapped[1, [2, 1]]
    found = broken("K9", step.replace(slots__page_table=swapped))
    assert found is not None
    assert found.request == 1
    assert "page_table[1,1]" in found.equation
    unknown = step.replace(slots__page_table=swapped, slots__req_to_token=None)
    assert broken("K9", unknown) is None


def test_entries_behind_the_prefix_are_not_read() -> None:
    step = small(page_size=4)
    table = step.slots.page_table.copy()
    table[1, 8:] = -7
    assert broken("K9", step.replace(slots__page_table=table)) is None
    table[1, 7] = -7
    assert broken("K9", step.replace(slots__page_table=table)) is not None


def test_ring_without_a_pad() -> None:
    step = small().replace(limits__write_pad=None, limits__window=8)
    assert broken("K10", step.replace(limits__ring=10)) is None
    assert broken("K10", step.replace(limits__ring=9)) is not None


def test_mask_offsets_at_the_edge_of_32_bits() -> None:
    # One request: w*(s+w) = 4*(s+4) is 2^31 at s = 2^29-4.
    step = small().replace(bs=1, padded_bs=1, layout__offset_bits=32)
    edge = 2**29 - 4
    assert broken("K11", step.replace(layout__prefix_lens=np.array([edge - 1]))) is None
    found = broken("K11", step.replace(layout__prefix_lens=np.array([edge])))
    assert found is not None
    assert (found.request, found.actual) == (0, str(2**31))


def test_mask_offsets_of_many_long_requests() -> None:
    lens = np.full(1024, 131_072)
    step = Step(1024, 1024, small().widths).replace(widths__w=17, layout__prefix_lens=lens)
    assert broken("K11", step.replace(layout__offset_bits=64)) is None
    found = broken("K11", step.replace(layout__offset_bits=32))
    assert found is not None
    assert found.request == -(-(2**31) // (17 * (131_072 + 17))) - 1


@pytest.mark.parametrize(("slot", "sound"), [(2**21 - 1, True), (2**21, False)])
@pytest.mark.parametrize("where", ["slots__out_cache_loc", "layout__kv_indices"])
def test_slot_offsets_at_the_edge_of_32_bits(where: str, slot: int, sound: bool) -> None:
    step = small().replace(slots__index_bits=32, slots__token_stride=1024)
    values = step.get(where.replace("__", ".")).copy()
    values[-1] = slot
    found = broken("K11", step.replace(**{where: values}))
    assert (found is None) == sound
    assert sound or (found is not None and found.actual == str(2**31))


def test_slot_offsets_overflow() -> None:
    step = small().replace(slots__index_bits=32)
    slots = int(max(step.slots.out_cache_loc.max(), step.layout.kv_indices.max()))
    assert broken("K11", step.replace(slots__token_stride=(2**31 - 1) // slots)) is None
    found = broken("K11", step.replace(slots__token_stride=2**31 // slots + 1))
    assert found is not None
    assert found.cause == "slot index times token stride is computed in 32 bits"


def test_sum_of_hostile_lengths_does_not_wrap() -> None:
    lens = np.full(2, 2**63 - 1)
    found = broken("K11", small().replace(layout__prefix_lens=lens))
    assert found is not None
    assert found.actual == str(4 * (2**63 - 1 + 4))
