"""Edge cases of the tree rules beyond the one fault that each rule owns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddtree_guard.guard import find_rule
from ddtree_guard.rule import Finding, NotEvaluable
from ddtree_guard.step import Contract, Limits, Step, Tree, Widths
from ddtree_guard.testing.steps import sound_step


def broken(rule: str, step: Step) -> Finding | None:
    return find_rule(rule).check(step)


def links(parents: list[int], newest_first: bool = False) -> tuple[list[int], list[int]]:
    """Left-child right-sibling links, with each node's children in either order."""
    w = len(parents)
    child, sibling = [-1] * w, [-1] * w
    for parent in range(w):
        kids = [r for r in range(1, w) if parents[r] == parent]
        kids = kids[::-1] if newest_first else kids
        for node, following in zip([None, *kids], kids, strict=False):
            if node is None:
                child[parent] = following
            else:
                sibling[node] = following
    return child, sibling


def step_of(*trees: list[int], newest_first: bool = False, **changes: Any) -> Step:
    """A step with one tree per request, given as parents; -1 behind the root marks padding."""
    bs, w = len(trees), len(trees[0])
    depths = np.zeros((bs, w), np.int64)
    for i, parents in enumerate(trees):
        for r in range(1, w):
            depths[i, r] = depths[i, parents[r]] + 1 if parents[r] >= 0 else 0
    pairs = [links(parents, newest_first) for parents in trees]
    tree = Tree(
        tokens=np.arange(100, 100 + bs * w).reshape(bs, w),
        parents=np.array(trees),
        depths=depths,
        sizes=np.array([sum(p >= 0 for p in parents) + 1 for parents in trees]),
        retrieve_index=np.arange(bs * w).reshape(bs, w),
        retrieve_next_token=np.array([child for child, _ in pairs]),
        retrieve_next_sibling=np.array([sibling for _, sibling in pairs]),
    )
    step = Step(bs, bs, Widths(w=w, block=4, depth_max=3), tree=tree, limits=Limits(vocab=1000))
    return step.replace(**changes)


CHAIN, FORK = [-1, 0, 1, 2, -1], [-1, 0, 0, 1, 2]


def edit(array: Any, at: tuple[int, int], value: int) -> Any:
    changed = array.copy()
    changed[at] = value
    return changed


@pytest.mark.parametrize("rule", ["T1", "T2", "T3", "T4"])
@pytest.mark.parametrize("trees", [(CHAIN, FORK), ([-1], [-1]), ([-1, -1], [-1, 0])])
def test_small_trees_are_sound(rule: str, trees: tuple[list[int], ...]) -> None:
    assert broken(rule, step_of(*trees)) is None


def test_root_with_a_parent() -> None:
    step = step_of(CHAIN, FORK)
    found = broken("T1", step.replace(tree__parents=edit(step.tree.parents, (1, 0), 0)))
    assert found is not None
    assert (found.request, found.row, found.expected) == (1, 0, "-1")


def test_second_root() -> None:
    step = step_of(CHAIN, FORK)
    found = broken("T1", step.replace(tree__parents=edit(step.tree.parents, (1, 3), -1)))
    assert found is not None
    assert (found.request, found.row) == (1, 3)
    assert "no parent" in found.cause


def test_lowest_request_then_lowest_row_is_named() -> None:
    parents = step_of(CHAIN, FORK).tree.parents.copy()
    parents[1, 1] = parents[0, 3] = parents[0, 2] = 4
    found = broken("T1", step_of(CHAIN, FORK, tree__parents=parents))
    assert found is not None
    assert (found.request, found.row) == (0, 2)


def test_a_parent_of_a_padding_row_is_the_business_of_t4() -> None:
    step = step_of(FORK, CHAIN)
    step = step.replace(tree__parents=edit(step.tree.parents, (1, 4), 7))
    assert broken("T1", step) is None
    found = broken("T4", step)
    assert found is not None
    assert (found.request, found.row) == (1, 4)


def test_node_deeper_than_the_block() -> None:
    step = step_of(CHAIN, FORK, widths=Widths(w=5, depth_max=1))
    found = broken("T2", step)
    assert found is not None
    assert (found.request, found.row, found.expected) == (0, 2, "<= 1")


def test_depth_limit_follows_from_the_block() -> None:
    assert broken("T2", step_of(CHAIN, FORK, widths=Widths(w=5, block=4))) is None
    assert broken("T2", step_of(CHAIN, FORK, widths=Widths(w=5, block=3))) is not None


def test_depth_ignores_padding_rows() -> None:
    step = step_of(FORK, CHAIN)
    assert broken("T2", step.replace(tree__depths=edit(step.tree.depths, (1, 4), 99))) is None


def test_order_matters_only_where_the_contract_says_so() -> None:
    deep_first = [-1, 0, 1, 0, 3]
    step = step_of(FORK, deep_first)
    assert broken("T2", step) is None
    found = broken("T2", step.replace(contract=Contract(depth_major=True)))
    assert found is not None
    assert (found.request, found.row, found.expected) == (1, 3, ">= 2")


def test_siblings_apart() -> None:
    apart = [-1, 0, 0, 1, 2, 1]
    together = [-1, 0, 0, 1, 1, 2]
    step = step_of(together, apart, contract=Contract(depth_major=True))
    found = broken("T2", step)
    assert found is not None
    assert (found.request, found.row, found.expected) == (1, 5, "adjacent")


def test_children_may_be_listed_in_any_order() -> None:
    bushy = [-1, 0, 0, 0, 1]
    assert broken("T3", step_of(CHAIN, bushy, newest_first=True)) is None


def test_dropped_sibling() -> None:
    step = step_of(CHAIN, [-1, 0, 0, 0, 1])
    cut = edit(step.tree.retrieve_next_sibling, (1, 2), -1)
    found = broken("T3", step.replace(tree__retrieve_next_sibling=cut))
    assert found is not None
    assert (found.request, found.row) == (1, 3)
    assert found.actual == "0 links lead to row 3"


def test_sibling_circle_apart_from_the_tree() -> None:
    # Rows 2 and 3 lead to each other: one link leads to each, and none comes from the root.
    step = step_of(CHAIN, [-1, 0, 0, 0, 1])
    circle = edit(edit(step.tree.retrieve_next_sibling, (1, 1), -1), (1, 3), 2)
    found = broken("T3", step.replace(tree__retrieve_next_sibling=circle))
    assert found is not None
    assert (found.request, found.row) == (1, 2)


def test_link_into_another_branch() -> None:
    step = step_of(CHAIN, FORK)
    found = broken(
        "T3", step.replace(tree__retrieve_next_token=edit(step.tree.retrieve_next_token, (1, 1), 4))
    )
    assert found is not None
    assert (found.request, found.row, found.expected) == (1, 1, "-1 or a child")


def test_row_index_of_another_width() -> None:
    step = step_of(CHAIN, FORK, tree__retrieve_index=np.arange(10).reshape(2, 5) - [[0], [1]])
    found = broken("T3", step)
    assert found is not None
    assert (found.request, found.row, found.expected) == (1, 0, "5")


def test_links_of_padding_rows_are_latent() -> None:
    step = step_of(FORK, CHAIN)
    step = step.replace(tree__retrieve_next_token=edit(step.tree.retrieve_next_token, (1, 4), 1))
    found = broken("T3", step)
    assert found is not None
    assert (found.request, found.row, found.latent) == (1, 4, True)
    assert broken("T3", step.replace(contract=Contract(pad_rows="none"))) is None


def test_equal_tokens_matter_only_among_siblings() -> None:
    step = step_of(CHAIN, FORK)
    same_under_other_parents = edit(step.tree.tokens, (1, 4), int(step.tree.tokens[1, 3]))
    assert broken("T4", step.replace(tree__tokens=same_under_other_parents)) is None
    siblings = edit(step.tree.tokens, (1, 2), int(step.tree.tokens[1, 1]))
    found = broken("T4", step.replace(tree__tokens=siblings))
    assert found is not None
    assert (found.request, found.row) == (1, 2)


def test_padding_rows_may_repeat_tokens() -> None:
    step = step_of([-1, 0, -1, -1], [-1, -1, -1, -1], tree__tokens=np.zeros((2, 4), np.int64))
    assert broken("T4", step) is None


@pytest.mark.parametrize("size", [0, -3, 6, 2**62])
def test_size_out_of_range(size: int) -> None:
    found = broken("T4", step_of(CHAIN, FORK, tree__sizes=np.array([4, size])))
    assert found is not None
    assert (found.request, found.row, found.actual) == (1, 0, str(size))


def test_spine_may_lie_anywhere_in_the_rows() -> None:
    # Spine of request 1: rows 0, 2, 4.
    top1 = np.array([[101, 102, 103], [107, 109, -1]])
    assert broken("T5", step_of(CHAIN, FORK, tree__top1=top1)) is None


def test_spine_needs_no_more_nodes_than_the_tree_has() -> None:
    top1 = np.array([[101, 102, 103], [6, 7, 8]])
    assert broken("T5", step_of(CHAIN, [-1] * 5, tree__top1=top1)) is None


def test_spine_token_elsewhere_in_the_tree_does_not_count() -> None:
    # 109 is in row 4, under row 2; the spine of request 1 goes through row 1.
    found = broken("T5", step_of(CHAIN, FORK, tree__top1=np.array([[101, 102], [106, 109]])))
    assert found is not None
    assert (found.request, found.row) == (1, 1)


def test_spine_token_in_a_padding_row_does_not_count() -> None:
    step = step_of(CHAIN, FORK, tree__top1=np.array([[101, 102], [107, 109]]))
    assert broken("T5", step.replace(tree__sizes=np.array([4, 4]))) is not None


def test_spine_ends_at_the_block() -> None:
    deep = [-1, 0, 1, 2, 3]
    top1 = np.array([[101, 102, 103, 104], [106, 107, 108, 1]])
    assert broken("T5", step_of(deep, deep, tree__top1=top1)) is None
    found = broken("T5", step_of(deep, deep, tree__top1=top1, widths=Widths(w=5, block=5)))
    assert found is not None
    assert (found.request, found.row, found.actual) == (1, 3, "depth 3")


def test_column_in_shard_padding_is_no_token() -> None:
    sharded = {"limits__vocab_per_rank": 50, "limits__vocab_per_rank_padded": 64}
    columns = np.full((2, 5), -1)
    columns[1, 2] = 60  # rank 0, but only columns 0..49 are tokens
    found = broken("T6", step_of(CHAIN, FORK, tree__columns=columns, **sharded))
    assert found is not None
    assert (found.request, found.row) == (1, 2)


def test_columns_without_shard_sizes_are_no_evidence() -> None:
    assert broken("T6", step_of(CHAIN, FORK, tree__columns=np.zeros((2, 5), int))) is None


def test_impossible_shard_is_not_evaluable() -> None:
    step = step_of(CHAIN, FORK, tree__columns=np.zeros((2, 5), int), limits__vocab_per_rank=0)
    with pytest.raises(NotEvaluable, match="shard of 0 ids"):
        broken("T6", step)


@pytest.mark.parametrize("w", [1, 2])
@pytest.mark.parametrize("rule", ["T1", "T2", "T3", "T4", "T5", "T6"])
def test_narrow_steps_are_sound(rule: str, w: int) -> None:
    assert broken(rule, sound_step(3, lens=(5, 9), w=w)) is None
