"""Adapters are chosen by what a class looks like; a fork can bring its own."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ddtree_guard.guard import Guard
from ddtree_guard.hooks.adapters import (
    Adapter,
    adapter_for,
    register_adapter,
    unregister_adapter,
)
from ddtree_guard.hooks.contracts import contract_elsewhere, row_of
from ddtree_guard.hooks.links import local_rows, with_parents
from ddtree_guard.step import Tree
from ddtree_guard.testing.steps import sound_step


class Other:
    """A backend that looks like nothing we know."""


@pytest.fixture
def registered() -> Iterator[Adapter]:
    adapter = register_adapter("other", lambda cls: cls is Other, lambda view: sound_step(0))
    yield adapter
    unregister_adapter(adapter)


def test_an_unknown_class_gets_the_generic_adapter() -> None:
    assert adapter_for(Other).name == "generic"


def test_a_registered_adapter_comes_first_and_can_go_again(registered: Adapter) -> None:
    assert adapter_for(Other) is registered
    assert adapter_for(type("Else", (), {})).name == "generic"


@pytest.mark.parametrize("seed", range(5))
def test_links_give_the_parents_back(seed: int) -> None:
    tree = sound_step(seed, full_trees=True).tree
    bare = Tree(
        retrieve_index=tree.retrieve_index,
        retrieve_next_token=tree.retrieve_next_token,
        retrieve_next_sibling=tree.retrieve_next_sibling,
    )
    found = with_parents(bare)
    assert np.array_equal(found.parents, tree.parents)
    assert np.array_equal(found.depths, tree.depths)


def test_hostile_links_are_not_followed() -> None:
    child = np.array([[2, 99, -7, 1]])
    tree = Tree(retrieve_next_token=child, retrieve_next_sibling=np.full((1, 4), -1))
    assert with_parents(tree).parents.tolist() == [[-1, -1, 0, -1]]


def test_rows_over_the_batch_become_rows_of_the_request() -> None:
    index = np.array([[0, 3, -1], [17, 20, 33]], np.int32)
    assert local_rows(index, 17).tolist() == [[0, 3, -1], [0, 3, 16]]


def test_contract_rows() -> None:
    assert row_of("corp_ddtree_v2").algorithm == "DDTREE"
    assert row_of("DSPARK").chain
    assert row_of("something").algorithm == "SOMETHING"
    contract = contract_elsewhere("EAGLE", "FlashAttentionBackend", "graph")
    assert {"W1", "W3", "M2", "K4"} <= set(contract.not_checked)
    assert not {"T1", "P1", "K1", "K2", "K3", "A1", "CFG1"} & set(contract.not_checked)
    assert "FlashAttentionBackend keeps its offsets" in contract.not_checked["W1"]


@pytest.mark.sglang
def test_the_generic_adapter_checks_tree_positions_and_slots() -> None:
    from ddtree_guard.hooks.adapters import generic
    from ddtree_guard.hooks.view import View
    from ddtree_guard.testing import standins
    from ddtree_guard.testing.batches import verify_batch
    from ddtree_guard.testing.cases import VerifyCase, make_inputs

    case = VerifyCase(algorithm="EAGLE", draft_tokens=17, topk=4, lens=(19, 11, 26))
    backend, inputs = standins.build_backend(case), make_inputs(case)
    standins.fill_pools(backend, inputs)
    batch = verify_batch(inputs)

    def check() -> Any:
        view = View(Other(), batch, standins.runner_of(backend), rids=("a", "b", "c"))
        return Guard().check(generic.read_step(view))

    report = check()
    assert report.rules == ()
    assert {"T1", "T2", "T3", "T4", "T6", "P1", "K1", "K2", "K3"} <= set(report.checked)
    batch.positions[-1] += 1
    assert check().rules == ("P1",)
    batch.spec_info = SimpleNamespace(ragged_verify_layout=object())
    with pytest.raises(ValueError, match="states no single width"):
        check()
