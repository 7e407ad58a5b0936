"""Incidents of width, stride and mask, with their own numbers, each caught by the rule it names.

Not expressible as one Step, and why:
    I14  both sides of the fault live in the kernel's window bound; the mask cells outside a window
         are not read, so no cell is wrong. The sampled oracles (node against chain) cover it.
    I16  a wrapper keeps the mask of an earlier plan: the Step of the later call is sound. Only a
         comparison of two launches shows it.
    I17  second part, 512*512*32*256 elements: offsets into query rows, not into the mask (K11).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from ddtree_guard.guard import Guard
from ddtree_guard.rule import Finding
from ddtree_guard.step import Contract, Layout, Mask, Static, Step, Tree, Widths
from ddtree_guard.testing.steps import paint_mask, sound_step


def findings(step: Step) -> dict[str, Finding]:
    """Rule id to finding, for the families of this file."""
    found = Guard().check(step).findings
    return {f.rule: f for f in found if f.rule.rstrip("0123456789") in ("CFG", "W", "M")}


def running(*lengths: int) -> Any:
    """Offsets by plain sums."""
    return np.array([sum(lengths[:n]) for n in range(len(lengths) + 1)], np.int64)


def with_trees(step: Step, *parents: list[int]) -> Step:
    """The step with these trees, and depths and mask to match."""
    depths = np.zeros((step.bs, step.w), np.int64)
    for i, row in enumerate(parents):
        for r, parent in enumerate(row):
            depths[i, r] = depths[i, parent] + 1 if parent >= 0 else 0
    table = np.array(parents, np.int64)
    tree = Tree(parents=table, sizes=np.full(step.bs, step.w), depths=depths)
    lens = step.layout.prefix_lens
    cells, _ = paint_mask(tree, tuple(int(s) for s in lens[: step.bs]), step.w, lens)
    return step.replace(tree=tree, mask__cells=cells)


# --- I01: the incident -------------------------------------------------------------------------


def incident(**sizes: Any) -> Step:
    """bs=2, s=[100,50], b=8, w=17: sound."""
    return sound_step(4, lens=(100, 50), w=17, block=8, full_trees=True, **sizes)


def stock(step: Step) -> Step:
    """What the stock backend derives from the block size: the batch and its mask stay right."""
    return step.replace(
        layout__qo_indptr=np.array([0, 8, 16], np.int32),
        layout__mask_indptr=np.array([0, 864, 1328]),
        layout__max_extend_len=8,
        widths__holders={"backend": 8, "logits_buffer": 17},
    )


def test_I01_good_numbers() -> None:
    step = incident()
    assert step.layout.qo_indptr.tolist() == [0, 17, 34]
    assert step.layout.mask_indptr.tolist() == [0, 1989, 3128]
    assert findings(step) == {}


def test_I01_stock_offsets_break_the_width_rules_and_not_the_mask_rules() -> None:
    assert set(findings(stock(incident()))) == {"CFG1", "W1", "W3", "W4", "W8"}


def test_I01_every_finding_has_the_numbers_and_the_cause() -> None:
    found = findings(stock(incident()))
    numbers = {rule: (f.actual, f.expected, f.request, f.row) for rule, f in found.items()}
    assert numbers == {
        "CFG1": ("8", "17", None, None),
        "W1": ("8", "17", 0, 8),
        "W3": ("864", "1989", 0, 0),
        "W4": ("108", "117", 0, 1),
        "W8": ("8", "17", 0, 8),
    }
    assert {(f.confidence, "draft block size" in f.cause) for f in found.values()} == {
        ("very likely", True)
    }


def test_I01_w3_names_the_victim() -> None:
    w3 = findings(stock(incident()))["W3"]
    assert w3.victims == (1,)
    assert w3.headline == "request 1 reads mask cells that are not its own"
    assert "17*(100+17) = 1989" in w3.equation


@pytest.mark.parametrize("budget", range(1, 65))
def test_I01_every_budget_but_the_clean_one_is_caught(budget: int) -> None:
    w, block = budget + 1, 8
    step = sound_step(budget, lens=(37, 21), w=w, block=block)
    bad = step.replace(
        layout__qo_indptr=running(block, block),
        layout__mask_indptr=running(*(block * (s + block) for s in (37, 21))),
        layout__max_extend_len=block,
    )
    rules = {"W1", "W3", "W4", "W8"} | ({"M5"} if w < block else set())  # offsets past the mask
    assert set(findings(bad)) == (set() if budget == 7 else rules)


def test_I01_captured_buffer_sized_by_the_block_is_latent_below_full_context() -> None:
    step = incident(padded_bs=2).replace(limits__context=4096, mask__capacity=2 * 8 * 4096)
    m5 = findings(step)["M5"]
    assert (m5.actual, m5.expected, m5.latent) == ("65536", ">= 139842", True)


def test_I01_captured_buffer_sized_by_the_block_overflows_at_full_context() -> None:
    step = incident().replace(
        layout__prefix_lens=np.array([4096, 4096]),
        layout__mask_indptr=np.array([0, 69_921, 139_842]),
        mask__capacity=2 * 8 * 4096,
    )
    m5 = findings(step)["M5"]
    assert (m5.actual, m5.request, m5.row, m5.latent) == ("69921", 0, 15, False)


# --- other widths ------------------------------------------------------------------------------


def test_I02_draft_worker_inherits_the_targets_width() -> None:
    step = sound_step(lens=(64, 64), w=7, block=7, kind="chain").replace(
        layout__qo_indptr=np.array([0, 8, 16]),
        widths__draft_width=8,
        widths__draft_rows=7,
        widths__budget=None,
        who__worker="draft",
    )
    found = findings(step)
    assert (found["CFG2"].actual, found["CFG2"].expected) == ("8", "7")
    assert (found["W1"].request, found["W1"].actual, found["W1"].expected) == (0, "8", "7")


def test_I03_draft_extend_stride_of_steps_plus_one() -> None:
    step = sound_step(lens=(30, 20, 10), w=8, block=4).replace(
        layout__qo_indptr=np.array([0, 4, 8, 12])
    )
    w1 = findings(step)["W1"]
    assert (w1.request, w1.actual, w1.expected, w1.victims) == (0, "4", "8", (1,))


@pytest.mark.parametrize(
    ("path", "rule"),
    [("layout.mask_indptr", "W3"), ("layout.qo_indptr", "W1"), ("layout.kv_indptr", "W2")],
)
def test_I05_first_element_of_a_persistent_buffer_never_written(path: str, rule: str) -> None:
    step = sound_step(lens=(40, 25), w=8, block=16)
    offsets = step.get(path).copy()
    offsets[0] = 37
    found = findings(step.replace(**{path.replace(".", "__"): offsets}))[rule]
    assert (found.request, found.row, found.actual, found.expected) == (0, 0, "37", "0")
    assert "never written" in found.cause


def test_I05_a_consumer_keeps_the_block_as_width() -> None:
    step = sound_step(lens=(40, 25), w=8, block=16)
    step = step.replace(widths__holders={"backend": 8, "hidden_extraction": 16})
    cfg1 = findings(step)["CFG1"]
    assert (cfg1.headline, cfg1.confidence) == (
        "hidden_extraction holds width 16, not 8",
        "very likely",
    )


def test_I06_capacity_used_as_stride() -> None:
    step = sound_step(lens=(30, 20, 10), w=8, block=16)
    assert step.layout.rows["q"] == 24
    found = findings(step.replace(layout__qo_indptr=np.array([0, 16, 32, 48])))
    assert (found["W1"].request, found["W1"].actual, found["W1"].expected) == (0, "16", "8")


def test_I06_tokens_compared_with_a_batch_size() -> None:
    """B=16: 68 tokens of 4 requests taken for 68 requests."""
    step = sound_step(lens=(9, 8, 7, 6), w=17, padded_bs=4)
    assert step.graph.num_tokens == 68
    lanes = Step(bs=4, padded_bs=68, widths=step.widths, graph=step.graph)
    w7 = findings(lanes)["W7"]
    assert (w7.actual, w7.expected) == ("68", str(68 * 17))


def test_I08_stride_baked_by_capture() -> None:
    born = Static(pointer=4096, dtype="int32", shape=(4, 8), stride=(8, 1), capacity=32)
    live = dataclasses.replace(born, stride=(4, 1))
    step = sound_step(padded_bs=4).replace(
        graph__born={"page_table": born}, graph__live={"page_table": live}
    )
    w6 = findings(step)["W6"]
    assert (w6.actual, w6.expected) == ("(4, 1)", "(8, 1)")


# --- mask layout -------------------------------------------------------------------------------


def test_I10_mask_for_the_batch_and_offsets_for_the_lanes() -> None:
    step = sound_step(lens=(10, 20, 30), w=8, block=8, padded_bs=4)
    assert int(step.layout.mask_indptr[-1]) == 744
    step = step.replace(
        mask__cells=step.mask.cells[:672], mask__capacity=672, contract__mask_length="exact"
    )
    found = findings(step)
    assert (found["M5"].actual, found["M5"].request, found["M5"].latent) == ("744", 3, False)
    assert (found["M9"].actual, found["M9"].expected, found["M9"].request) == ("672", "744", 3)


@pytest.mark.parametrize(
    ("lanes", "w", "context", "has", "needs"),
    [(4, 8, 1024, 32_768, 33_024), (2, 17, 4096, 139_264, 139_842)],
)
def test_I11_captured_mask_misses_the_tree_columns(
    lanes: int, w: int, context: int, has: int, needs: int
) -> None:
    step = sound_step(lens=(12, 9)[:lanes], w=w, block=8, padded_bs=lanes)
    step = step.replace(limits__context=context, mask__capacity=has)
    m5 = findings(step)["M5"]
    assert (m5.actual, m5.expected, m5.latent) == (str(has), f">= {needs}", True)
    assert "without the w tree columns" in m5.cause
    assert "M5" not in findings(step.replace(mask__capacity=needs))


def test_I11_full_batch_at_full_context_reads_outside() -> None:
    full = Step(
        bs=4,
        padded_bs=4,
        widths=Widths(w=8),
        layout=Layout(prefix_lens=np.full(4, 1024), mask_indptr=running(*[8 * 1032] * 4)),
        mask=Mask(capacity=32_768),
        contract=Contract(mask_length="capacity"),
    )
    m5 = findings(full)["M5"]
    assert (m5.actual, m5.request, m5.row, m5.latent) == ("33024", 3, 7, False)


SIBLINGS = [-1, 0, 0, 1]


def windowed(start: list[int], stride: list[int]) -> Step:
    """s=[200,50], W=128, w=4: the kernel reads window-clipped keys, from mask column `start`."""
    step = with_trees(sound_step(lens=(200, 50), w=4, block=4), SIBLINGS, SIBLINGS)
    return step.replace(
        layout__kv_indptr=running(128, 50),
        mask__window=128,
        mask__window_start=np.array(start),
        mask__row_stride=np.array(stride),
    )


def relaid() -> Step:
    """The same mask with the 72 columns before the window cut out of every row."""
    step = windowed([0, 0], [132, 54])
    cells = step.mask.cells
    kept = np.concatenate([cells[: 4 * 204].reshape(4, 204)[:, 72:].reshape(-1), cells[4 * 204 :]])
    return step.replace(
        mask__cells=kept, layout__mask_indptr=running(4 * 132, 4 * 54), mask__capacity=len(kept)
    )


def test_I13_full_prefix_mask_under_clipped_keys() -> None:
    w4 = findings(windowed([0, 0], [204, 54]))["W4"]
    assert (w4.request, w4.actual, w4.expected) == (0, "132", "204")


def test_I13_both_right_layouts_are_clean() -> None:
    assert findings(windowed([72, 0], [204, 54])) == {}
    assert findings(relaid()) == {}


def test_I13_window_bound_by_row_instead_of_depth() -> None:
    """Rows 1 and 2 are siblings at depth 1: both see from position 201 - 128 + 1 = 74 on."""
    step = windowed([72, 0], [204, 54])
    cells = step.mask.cells.copy()
    rows = cells[: 4 * 204].reshape(4, 204)
    for r in range(4):
        rows[r, : 200 + r - 128 + 1] = 0
    found = findings(step.replace(mask__cells=cells))
    assert {(f.request, f.row) for f in found.values()} == {(0, 2)}
    assert "mask[0, 2, 74] = 0" in found["M1"].equation
    assert (found["M3"].actual, found["M3"].expected) == ("127", "128")


def test_I17_offsets_overflow_32_bits() -> None:
    bs, w, s = 1024, 17, 131_072
    offsets = np.arange(bs + 1, dtype=np.int64) * (w * (s + w))
    assert int(offsets[-1]) == 2_281_997_312
    step = Step(
        bs=bs,
        padded_bs=bs,
        widths=Widths(w=w),
        layout=Layout(prefix_lens=np.full(bs, s), mask_indptr=offsets.astype(np.int32)),
    )
    w3 = findings(step)["W3"]
    assert w3.request == 2**31 // (w * (s + w))
    assert "32-bit" in w3.cause
    assert findings(step.replace(layout__mask_indptr=offsets)) == {}


# --- mask content ------------------------------------------------------------------------------


def test_I18_mask_never_reaches_the_kernel() -> None:
    step = with_trees(sound_step(lens=(30, 20), w=3, block=3), [-1, 0, 1], [-1, 0, 0])
    assert findings(step) == {}
    m7 = findings(step.replace(mask__present=False))["M7"]
    assert (m7.request, m7.row) == (1, 2)


def test_I18_chains_need_no_mask() -> None:
    step = with_trees(sound_step(lens=(30, 20), w=3, block=3), [-1, 0, 1], [-1, 0, 1])
    assert findings(step.replace(mask__present=False)) == {}


def twins() -> Step:
    """Two requests of one length and width, with different trees."""
    step = sound_step(lens=(31, 31), w=4, block=4)
    return with_trees(step, [-1, 0, 0, 1], [-1, 0, 1, 1])


def test_I19_swapped_masks_are_named_by_content() -> None:
    step = twins()
    half = len(step.mask.cells) // 2
    swapped = np.concatenate([step.mask.cells[half:], step.mask.cells[:half]])
    found = findings(step.replace(mask__cells=swapped))
    assert set(found) == {"M2", "M3"}
    assert (found["M2"].request, found["M2"].row, found["M2"].victims) == (0, 2, (1,))
    assert "request 1's" in found["M2"].cause


def test_I19_swapped_masks_are_named_by_request_id() -> None:
    m8 = findings(twins().replace(mask__rids=("r1", "r0")))["M8"]
    assert (m8.request, m8.victims, m8.actual, m8.expected) == (0, (1,), "r1", "r0")


def test_I19_optimistic_kv_length() -> None:
    """The KV range was planned for 45 tokens; the device length is 31."""
    w2 = findings(twins().replace(layout__kv_indptr=running(31, 45)))["W2"]
    assert (w2.request, w2.actual, w2.expected) == (1, "45", "31")


def test_I19_a_dropped_tree_was_accepted_as_a_chain() -> None:
    step = twins().replace(
        outcome__masked_walk=np.array([1, 0]), outcome__accept_lens=np.array([2, 3])
    )
    m7 = findings(step)["M7"]
    assert (m7.request, m7.actual, m7.expected) == (1, "3", "1")
    sound = step.replace(outcome__accept_lens=np.array([2, 1]))
    assert findings(sound) == {}


def test_I19_a_masked_tree_was_walked_as_a_chain() -> None:
    m7 = findings(twins().replace(outcome__walk="chain"))["M7"]
    assert (m7.request, m7.row) == (0, 2)


def test_I21_short_mask_extended_with_ones() -> None:
    """H2: a mask built for w=8 and filled up with True to the length that w=17 asks for."""
    step = incident()
    narrow = Tree(parents=step.tree.parents[:, :8])
    short, _ = paint_mask(narrow, (100, 50), 8, np.array([100, 50]))
    assert len(short) == 1328
    assert findings(step.replace(mask__cells=short))["M9"].expected == "3128"
    filled = np.concatenate([short, np.ones(3128 - 1328, np.uint8)])
    found = findings(step.replace(mask__cells=filled))
    assert "M9" not in found
    assert (found["M2"].request, found["M2"].row) == (0, 0)


# --- hazards read off the code -----------------------------------------------------------------


def test_H1_masked_padding_rows_where_the_contract_says_self() -> None:
    step = sound_step(3, lens=(30, 20), w=9, block=4)
    size = int(step.tree.sizes[1])
    assert size < 9
    cells = step.mask.cells.copy()
    start = 9 * 39 + size * 29
    cells[start:] = 0
    step = step.replace(mask__cells=cells)
    m4 = findings(step)["M4"]
    assert (m4.request, m4.row) == (1, size)
    assert m4.headline == f"padding row {size} of request 1 is not 'self'"


def test_H1_masked_padding_rows_where_the_contract_says_masked() -> None:
    step = sound_step(3, lens=(30, 20), w=9, block=4)
    cells = step.mask.cells.copy()
    for start, s, size in ((0, 30, step.tree.sizes[0]), (9 * 39, 20, step.tree.sizes[1])):
        cells[start + int(size) * (s + 9) : start + 9 * (s + 9)] = 0
    step = step.replace(mask__cells=cells, contract__pad_rows="masked")
    assert findings(step) == {}


def test_H1_no_padding_rows_allowed() -> None:
    step = sound_step(3, lens=(30, 20), w=9, block=4).replace(contract__pad_rows="none")
    assert findings(step)["M4"].request == next(i for i in range(2) if int(step.tree.sizes[i]) < 9)
