"""The launch before a check: bs, the trees of the live requests, and their slots."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from ddtree_guard.device.edges import LINKS, PARENTS, TOLD
from ddtree_guard.device.from_step import buffers_of, shape_of
from ddtree_guard.device.launch import DeviceCheck
from ddtree_guard.device.operands import moving
from ddtree_guard.errors import UsageError
from ddtree_guard.hooks.links import with_parents
from ddtree_guard.step import Step, Tree
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step

STEP = {"w": 9, "lens": (21, 9), "padded_bs": 3, "full_trees": True}


def _bound(step: Step) -> tuple[DeviceCheck, Any, Any]:
    """The launch for a step whose buffers hold no trees and no bs yet."""
    check = DeviceCheck("cpu")
    buffers = buffers_of(step, "cpu")
    empty = {
        name: torch.full_like(getattr(buffers, name).to(torch.int32), 7)
        for name in ("parents", "depths", "sizes", "live_count")
    }
    buffers = dataclasses.replace(buffers, **empty)
    table = torch.from_numpy(np.ascontiguousarray(step.slots.req_to_token))
    before = check.bind_before(buffers, shape_of(step), table, torch.arange(3))
    return check, buffers, before


def _rules(check: DeviceCheck) -> tuple[str, ...]:
    check.state[0] = check.state[1] + 1  # a check has begun the step
    check.close()
    check.collect()
    (verdict,) = check.poll()
    return verdict.rules


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("kind", [LINKS, PARENTS])
def test_it_writes_bs_and_the_live_trees(kind: int, dtype: torch.dtype) -> None:
    step = sound_step(3, **STEP)
    tree = step.tree
    check, buffers, before = _bound(step)
    links = (tree.retrieve_next_token, tree.retrieve_next_sibling)
    given = (*links, links[1]) if kind == LINKS else (tree.parents, tree.depths, tree.sizes)
    before(2, kind, *(torch.from_numpy(part).to(dtype) for part in given))
    if kind == LINKS:
        tree = with_parents(Tree(retrieve_next_token=links[0], retrieve_next_sibling=links[1]))
    assert buffers.live_count.tolist() == [2]
    assert np.array_equal(buffers.parents[:2].numpy(), tree.parents)
    assert np.array_equal(buffers.depths[:2].numpy(), tree.depths)
    assert buffers.sizes.tolist() == ([7, 7, 7] if kind == LINKS else [9, 9, 7])
    assert (buffers.parents[2] == 7).all()
    assert _rules(check) == ()


def _told(step: Step) -> tuple[DeviceCheck, Any, Any, Any]:
    """As a graph holds it: bs and the addresses of the links lie on the device."""
    check, buffers, _ = _bound(step)
    buffers.sizes.fill_(step.w)
    cell = torch.zeros(2, dtype=torch.int64)
    table = torch.from_numpy(np.ascontiguousarray(step.slots.req_to_token))
    bound = check.bind_table(
        buffers, shape_of(step), table, torch.arange(3), trees=TOLD, given=(cell,) * 3
    )
    return check, buffers, cell, bound.launch


def test_what_a_graph_was_told_of_nothing_does_nothing() -> None:
    check, buffers, _, launch = _told(FAULTS["K3"](sound_step(3, **STEP), 1).step)
    buffers.live_count.fill_(2)
    launch()
    assert (buffers.parents == 7).all()
    assert (buffers.depths == 7).all()
    assert _rules(check) == ()


@pytest.mark.parametrize("live", [1, 2])
@pytest.mark.parametrize("rule", ["", "K3", "K4"])
def test_a_graph_finds_bs_and_the_links_on_the_device(rule: str, live: int) -> None:
    step = sound_step(3, **STEP)
    step = FAULTS[rule](step, 1).step if rule else step
    links = step.tree.retrieve_next_token, step.tree.retrieve_next_sibling
    check, buffers, cell, launch = _told(step)
    held = [torch.from_numpy(part).to(torch.int64).contiguous() for part in links]
    cell.copy_(torch.tensor([part.data_ptr() for part in held]))
    buffers.live_count.fill_(live)
    launch()
    tree = with_parents(Tree(retrieve_next_token=links[0], retrieve_next_sibling=links[1]))
    assert np.array_equal(buffers.parents[:live].numpy(), tree.parents[:live])
    assert np.array_equal(buffers.depths[:live].numpy(), tree.depths[:live])
    assert (buffers.parents[live:] == 7).all()
    assert buffers.live_count.tolist() == [live]
    assert _rules(check) == ((rule,) if rule and live == 2 else ())


@pytest.mark.parametrize("rule", ["K3", "K4"])
@pytest.mark.parametrize("kind", [0, PARENTS])
def test_it_looks_at_the_table_of_the_live_requests(rule: str, kind: int) -> None:
    step = FAULTS[rule](sound_step(3, **STEP), 1).step
    tree = step.tree
    parts = (tree.parents, tree.depths, tree.sizes)
    given = tuple(torch.from_numpy(part) for part in parts) if kind else ()
    check, _, before = _bound(step)
    before(1, kind, *given)
    assert _rules(check) == ()
    before(2, kind, *given)
    assert _rules(check) == (rule,)


def test_arrays_that_lie_elsewhere_since_are_read_there() -> None:
    sound = sound_step(3, **STEP)
    check, _, before = _bound(sound)
    before(2)
    assert _rules(check) == ()
    moved = buffers_of(sound, "cpu")
    moved.out_cache_loc[9:18] += 1
    out, kvi = moved.out_cache_loc, moved.kv_indices
    before.moved = moving(moved.lens, moved.kv_indptr, kvi, out, torch.arange(3), check.state)
    before(2)
    assert _rules(check) == ("K3",)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_trees_that_are_too_short_are_not_read(at: int) -> None:
    step = sound_step(3, **STEP)
    _, _, before = _bound(step)
    given = [torch.zeros(18), torch.zeros(18), torch.zeros(2)]
    given[at] = given[at][:-1]
    with pytest.raises(UsageError, match="trees of 2 requests of 9 rows"):
        before(2, PARENTS, *given)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_strided_trees_are_refused_whatever_came_before(at: int) -> None:
    step = sound_step(3, **STEP)
    _, _, before = _bound(step)
    parts = (step.tree.parents, step.tree.depths, step.tree.sizes)
    given = [torch.from_numpy(part) for part in parts]
    before(2, PARENTS, *given)
    given[at] = torch.stack([given[at], given[at]], dim=-1)[..., 0]
    with pytest.raises(UsageError, match="contiguous"):
        before(2, PARENTS, *given)
