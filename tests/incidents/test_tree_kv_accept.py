"""Published incidents of tree, slots and acceptance, each with its own numbers.

In every step request 0 is sound, and request 1 (the last) is the incident's. What a Step does not
hold is not tested here:
I20: the heap itself; the Step shows the order that its pops leave.
I23: the bitmask; the Step holds, per committed token, whether its node's bitmask row allows it.
I25: the captured kernel that reads the old buffer; the Step holds both addresses (P3).
I30: window metadata that one builder lacks: an absent array is "not checked", not a fault.
I32: the length of a prefix-cache key past the stop; A4 sees the wrong length that causes it.
I48: what argmax does to a row of -inf; the Step holds "not finite" and the id that came out.
I50: token counts per rank and ranks that differ: those need the Steps of several ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddtree_guard.guard import find_rule
from ddtree_guard.rule import Finding
from ddtree_guard.step import Contract, Layout, Outcome, Slots, Static, Step, Tree, Widths
from ddtree_guard.testing.steps import sound_step


def broken(rule: str, step: Step) -> Finding | None:
    return find_rule(rule).check(step)


def caught(rule: str, step: Step, request: int | None = 1, row: int | None = None) -> Finding:
    """The rule's finding, which must name this place."""
    found = broken(rule, step)
    assert found is not None, f"{rule} is silent"
    assert (found.request, found.row) == (request, row), found.equation
    return found


def depths_of(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def forest(parents: list[int], tokens: list[int], **changes: Any) -> Step:
    """Request 0 is a chain as wide as request 1, which has this tree."""
    w = len(parents)
    chain = list(range(-1, w - 1))
    tree = Tree(
        tokens=np.array([list(range(500, 500 + w)), tokens]),
        parents=np.array([chain, parents]),
        depths=np.array([depths_of(chain), depths_of(parents)]),
        sizes=np.array([w, w]),
    )
    return Step(2, 2, Widths(w=w, block=w), tree=tree).replace(**changes)


# B=6, depth 3: pops (d1r0), (d2r0), (d1r1), (d3r0), (d2r0 of r1), (d1r2) become rows 1 to 6.
HEAP_ORDER = [-1, 0, 1, 0, 2, 3, 0]
HEAP_TOKENS = [9, 10, 20, 11, 30, 21, 12]


def test_i20_heap_order() -> None:
    step = forest(HEAP_ORDER, HEAP_TOKENS)
    assert broken("T2", step) is None  # a mask by ancestors does not need depth order
    scan = step.replace(contract=Contract(depth_major=True))
    assert caught("T2", scan, row=3).expected == ">= 2"


def test_i20_depth_major_order_of_the_same_tree() -> None:
    step = forest([-1, 0, 0, 0, 1, 2, 4], [9, 10, 11, 12, 20, 21, 30])
    assert broken("T2", step.replace(contract=Contract(depth_major=True))) is None


def test_i20_pop_of_a_child_before_its_parent() -> None:
    parents = np.array([list(range(-1, 6)), [-1, 2, 0, 0, 1, 3, 0]])
    caught("T1", forest(HEAP_ORDER, HEAP_TOKENS).replace(tree__parents=parents), row=1)


def test_i20_early_stop_cuts_the_spine() -> None:
    top1 = np.array([[501, 502, 503], [10, 20, 30]])
    widths = Widths(w=7, block=4)
    whole = forest(HEAP_ORDER, HEAP_TOKENS, tree__top1=top1, widths=widths)
    assert broken("T5", whole) is None
    # The stop drops (d3r0): its row now holds a second child of row 1.
    cut = forest([-1, 0, 1, 0, 1, 3, 0], [9, 10, 20, 11, 22, 21, 12], tree__top1=top1)
    found = caught("T5", cut.replace(widths=widths), row=2)
    assert (found.expected, found.actual) == ("depth 3", "depth 2")


# w=5, node tokens [7, 0, 9, 4]: counting ids other than 0 gives size 4.
SENTINEL = forest([-1, 0, 0, 1, 2], [3, 7, 0, 9, 4])


def test_i21_size_counted_from_token_ids() -> None:
    assert broken("T4", SENTINEL) is None
    found = caught("T4", SENTINEL.replace(tree__sizes=np.array([5, 4])), row=4)
    assert (found.confidence, found.actual) == ("certain", "4")


def test_i21_first_rows_of_the_block_as_hidden_rows() -> None:
    accept = np.array([[0, -1, -1], [0, 2, 4]])
    step = SENTINEL.replace(outcome__accept_index=accept, outcome__hidden_rows=accept)
    assert broken("A5", step) is None
    prefix = step.replace(outcome__hidden_rows=np.array([[0, -1, -1], [0, 1, 2]]))
    assert caught("A5", prefix, row=2).confidence == "certain"


def test_i21_full_path_counted_although_output_stops() -> None:
    # Accept [0,2,4] and a stop as second committed token: 2 appended, 3 counted.
    outcome = Outcome(
        accept_lens=np.array([1, 2]),
        truncated=np.array([0, 1]),
        delta_output=np.array([1, 2]),
        delta_seq_lens=np.array([1, 3]),
    )
    assert "full accepted path" in caught("A4", SENTINEL.replace(outcome=outcome)).cause


def test_i21_rejected_slots_never_freed() -> None:
    slots = Slots(page_size=1, allocated=np.array([5, 5]), kept=4, freed=0)
    step = SENTINEL.replace(slots=slots)
    found = caught("K6", step, request=None)
    assert (found.expected, found.actual) == ("10", "4")
    assert broken("K6", step.replace(slots__freed=6)) is None


def test_i23_linear_bitmask_on_a_tree() -> None:
    # Token 66 is forbidden after node 2 only; the path 0 -> 2 commits it as the bonus.
    step = forest([-1, 0, 0, 1], [1, 2, 3, 4]).replace(
        outcome__accept_index=np.array([[0, -1], [0, 2]]),
        outcome__accept_lens=np.array([1, 2]),
        outcome__allowed=np.array([[-1, -1], [1, 1]]),
    )
    assert broken("L4", step) is None
    caught("L4", step.replace(outcome__allowed=np.array([[-1, -1], [1, 0]])), row=2)


def at_positions(parents: list[int], s: int, positions: list[int]) -> Step:
    w = len(parents)
    values = np.array([*range(40, 40 + w), *positions])
    lens = np.array([40, s])
    step = forest(parents, list(range(w)), layout__prefix_lens=lens, positions__values=values)
    return step.replace(layout__prefix_lens_cpu=lens)


def test_i24_row_index_as_position() -> None:
    assert broken("P1", at_positions([-1, 0, 0, 1], 100, [100, 101, 101, 102])) is None
    found = caught("P1", at_positions([-1, 0, 0, 1], 100, [100, 101, 102, 103]), row=2)
    assert (found.expected, found.actual) == ("101", "102")
    assert found.cause == "the row index was used instead of the depth"


def test_i25_base_from_the_optimistic_mirror() -> None:
    step = at_positions([-1, 0, 0, 1], 31, [45, 46, 46, 47])
    found = caught("P1", step.replace(layout__prefix_lens_cpu=np.array([40, 45])), row=0)
    assert (found.expected, found.actual, found.confidence) == ("31", "45", "certain")
    assert "prefix_lens_cpu[1] = 45" in found.cause


def test_i25_new_tensor_instead_of_the_captured_one() -> None:
    step = sound_step(1, padded_bs=4)
    assert broken("P3", step) is None
    moved = {**step.graph.live, "positions": Static(0xBEEF, "int64")}
    caught("P3", step.replace(graph__live=moved), request=None)


def test_i30_full_pool_ids_in_the_window_pool() -> None:
    slots = Slots(
        out_cache_loc=np.arange(1, 9),
        pools={"full": 4096, "swa": 512},
        ids={"swa_page_table": ("swa", 0, 511)},
    )
    step = forest([-1, 0, 0, 1], [1, 2, 3, 4], slots=slots)
    assert broken("K1", step) is None
    wrong = step.replace(slots__ids={"swa_page_table": ("swa", 0, 3000)})
    found = caught("K1", wrong, request=None)
    assert (found.expected, found.actual) == ("0..511", "3000")
    assert "'full'" in found.cause


def test_i30_written_slot_outside_the_window_pool() -> None:
    out = np.array([1, 2, 3, 4, 5, 6, 7, 3000])
    slots = Slots(out_cache_loc=out, pools={"full": 4096, "swa": 512}, pool="swa")
    caught("K1", forest([-1, 0, 0, 1], [1, 2, 3, 4], slots=slots), row=3)


def test_i32_tokens_recorded_pages_owned() -> None:
    # P=64, 100 committed and 34 more: 134 recorded, 3 pages = 192 slots owned.
    slots = Slots(page_size=64, allocated=np.array([128, 134]), owned_pages=np.array([2, 3]))
    step = forest([-1, 0], [1, 2], slots=slots)
    found = caught("K6", step)
    assert (found.expected, found.actual) == ("192", "134")
    assert broken("K6", step.replace(slots__allocated=np.array([128, 192]))) is None


def ring_step(w: int, pad: int) -> Step:
    step = Step(2, 2, Widths(w=w))
    return step.replace(limits__ring=16, limits__window=8, limits__write_pad=pad)


def test_i34_pad_for_four_draft_tokens() -> None:
    assert broken("K10", ring_step(4, 4)) is None
    found = caught("K10", ring_step(6, 4), request=None, row=0)
    assert "rows 0..1 are never kept" in found.equation


def test_i34_ring_bounds_the_width() -> None:
    assert broken("K10", ring_step(10, 10)) is None
    assert "at most w = 10" in caught("K10", ring_step(11, 11), request=None).cause


def prefix_hit(columns: int, refcount: int) -> Step:
    """Block size 16, prompt of 64 all cached, gamma 15: rows 64..79 need block 4."""
    w, table = 16, np.arange(1, 1 + 2 * columns).reshape(2, columns)
    out = np.concatenate([table[0, 20:36], np.resize(table[1, 48:], 2 * w)[-w:]])
    counts = np.ones(2 * w, np.int64)
    counts[w:] = refcount
    return Step(
        2,
        2,
        Widths(w=w, block=16),
        layout=Layout(prefix_lens=np.array([20, 64])),
        slots=Slots(
            out_cache_loc=out,
            req_to_token=table,
            refcounts=counts,
            page_size=16,
            kernel_page_size=16,
        ),
    )


def test_i35_rows_behind_the_block_table() -> None:
    # The table of request 1 has 4 blocks, so its rows are written over the last of them.
    found = caught("K3", prefix_hit(columns=64, refcount=1), row=0)
    assert found.expected == "absent (the row has 64)"
    assert broken("K3", prefix_hit(columns=80, refcount=1)) is None


def test_i35_reserve_behind_the_block_table() -> None:
    step = prefix_hit(columns=64, refcount=1).replace(slots__row_width=64, slots__reserve=16)
    assert caught("K3", step).actual == "80"


def test_i35_write_into_a_shared_prefix_block() -> None:
    assert broken("K2", prefix_hit(columns=64, refcount=1)) is None
    assert "shared prefix" in caught("K2", prefix_hit(columns=64, refcount=2), row=0).cause


def unverified(length: int, path: list[int]) -> Step:
    """w=4, chain tokens 5, 6, 7 and predict [9, ...]: nothing matches, so L must be 1."""
    committed = [[501, 99, -1, -1], [9, 6, 7, 8][:length] + [-1] * (4 - length)]
    return forest([-1, 0, 1, 2], [4, 5, 6, 7]).replace(
        outcome__predict=np.array([[501, 99, 1, 1], [9, 6, 7, 8]]),
        outcome__accept_index=np.array([[0, 1, -1, -1], path]),
        outcome__accept_lens=np.array([2, length]),
        outcome__committed=np.array(committed),
        outcome__greedy_kernel=True,
    )


def test_i47_one_token_is_committed_when_nothing_matches() -> None:
    step = unverified(1, [0, -1, -1, -1])
    assert [broken(rule, step) for rule in ("A1", "A2", "A3")] == [None, None, None]


def test_i47_unverified_first_draft() -> None:
    found = caught("A1", unverified(2, [0, 1, -1, -1]), row=1)
    assert found.expected == "predict[1,0] = 9"
    assert found.actual == "its token is 5"


@pytest.mark.parametrize("length", [0, 2])
def test_i47_commit_length_off_by_one(length: int) -> None:
    found = caught("A3", unverified(length, [0, -1, -1, -1]))
    assert (found.expected, found.actual) == ("1", str(length))


def test_i48_row_of_minus_infinity() -> None:
    # Tiles of 8192 columns: an argmax that never sees a larger value ends at V = 129280 itself.
    assert -(-129_280 // 8192) * 8192 == 131_072
    step = forest([-1, 0, 0, 1], [1, 2, 3, 4]).replace(
        outcome__finite=np.array([[True] * 4, [True, True, True, False]]),
        outcome__predict=np.array([[1] * 4, [1, 1, 1, 129_280]]),
        limits__vocab=129_280,
        limits__vocab_padded=131_072,
    )
    caught("L1", step, row=3)
    assert "without a largest value" in caught("L2", step, row=3).cause


def test_i48_node_without_a_parent() -> None:
    step = forest([-1, 0, 0, -1], [1, 2, 3, 4])
    assert "NaN" in caught("T1", step, row=3).cause


def test_i49_coin_zero_accepts_a_token_of_no_probability() -> None:
    # Target probabilities [0, 0.5, 0.5]; the draft is token 0 and the coin is 0.
    step = forest([-1, 0], [2, 0]).replace(
        outcome__accept_index=np.array([[0, -1], [0, 1]]),
        outcome__greedy_kernel=False,
        outcome__greedy=np.array([False, False]),
        outcome__target_probs=np.array([[-1.0], [0.0]]),
        outcome__coins=np.array([[0.3], [0.0]]),
    )
    assert "coin" in caught("L3", step, row=1).cause
    assert broken("L3", step.replace(outcome__target_probs=np.array([[-1.0], [0.5]]))) is None


def test_i49_sampled_request_in_the_greedy_kernel() -> None:
    step = forest([-1, 0], [2, 0]).replace(
        outcome__greedy_kernel=True, outcome__greedy=np.array([True, False])
    )
    caught("L3", step)


def test_i50_column_of_the_second_shard() -> None:
    # TP=2, V=100: 50 ids a rank, padded to 64. Column 70 is column 6 of rank 1: id 56.
    sharded = {"limits__vocab_per_rank": 50, "limits__vocab_per_rank_padded": 64}
    columns = np.array([[-1, 3, 49], [-1, 3, 70]])
    step = forest([-1, 0, 0], [9, 3, 56], limits__vocab=100, tree__columns=columns, **sharded)
    step = step.replace(tree__tokens=np.array([[9, 3, 49], [9, 3, 56]]))
    assert broken("T6", step) is None
    found = caught("T6", step.replace(tree__tokens=np.array([[9, 3, 49], [9, 3, 70]])), row=2)
    assert (found.expected, found.actual, found.confidence) == ("56", "70", "certain")


def test_i50_all_slots_masked() -> None:
    # Slot 0 of each draft block must be the last committed token; here all hold the mask token.
    step = sound_step(2, lens=(9, 30), w=5)
    mask = np.full(2, 49_999)
    found = broken("A7", step.replace(outcome__draft_anchor=mask))
    assert found is not None
    assert (found.request, found.row) == (0, 0)
    assert "mask token" in found.cause
