"""Step: replacing, dotted paths, declared shapes; and that sound steps are what they claim."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from ddtree_guard.step import ARRAY_SHAPES, PARTS, Step, Who, Widths
from ddtree_guard.testing.steps import sound_step


def test_replace_changes_parts_and_whole_fields_and_leaves_the_original() -> None:
    step = sound_step()
    changed = step.replace(bs=2, widths__w=5, widths__block=9, who__rank="TP3")
    assert (changed.bs, changed.w, changed.widths.block, changed.who.rank) == (2, 5, 9, "TP3")
    assert (step.bs, step.w, step.widths.block, step.who.rank) == (3, 17, 8, "TP0")
    assert changed.layout is step.layout


@pytest.mark.parametrize("path", ["layout__nothing", "nothing__w", "nothing"])
def test_replace_refuses_unknown_fields(path: str) -> None:
    with pytest.raises((TypeError, AttributeError)):
        sound_step().replace(**{path: 1})


@pytest.mark.parametrize("name", PARTS)
def test_parts_are_frozen(name: str) -> None:
    part: Any = getattr(sound_step(), name)
    first = dataclasses.fields(part)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(part, first, None)


def test_get_follows_dotted_paths() -> None:
    step = sound_step()
    assert step.get("layout.qo_indptr") is step.layout.qo_indptr
    assert step.get("bs") == 3


def test_arrays_lists_what_is_present_with_its_declared_shape() -> None:
    step = Step(bs=2, padded_bs=4, widths=Widths(w=3)).replace(tree__sizes=np.array([1, 2]))
    ((path, value, declared),) = list(step.arrays())
    assert (path, declared) == ("tree.sizes", ("bs",))
    assert value is step.tree.sizes


def test_declared_shapes_use_known_symbols_only() -> None:
    symbols = {symbol for shape in ARRAY_SHAPES.values() for symbol in shape}
    assert symbols == {"bs", "BS", "BS+1", "w", "*"}


@pytest.mark.parametrize("sizes", [{}, {"padded_bs": 5}, {"page_size": 4}, {"kind": "chain"}])
def test_sound_steps_have_the_declared_shapes(sizes: dict[str, Any]) -> None:
    assert sound_step(**sizes).misfits() == {}


@pytest.mark.parametrize(
    ("path", "shape", "text"),
    [
        ("layout.qo_indptr", (4,), "has shape (4), expected BS+1 = (6)"),
        ("layout.prefix_lens", (3,), "has shape (3), expected BS = (5)"),
        ("tree.parents", (3, 16), "has shape (3, 16), expected bs x w = (3, 17)"),
        ("tree.parents", (51,), "has shape (51), expected bs x w = (3, 17)"),
        ("outcome.accept_index", (2, 9), "has shape (2, 9), expected bs x * = (3, any)"),
        ("mask.cells", (), "has shape (), expected * = (any)"),
    ],
)
def test_misfit_says_both_shapes(path: str, shape: tuple[int, ...], text: str) -> None:
    step = sound_step(padded_bs=5).replace(**{path.replace(".", "__"): np.zeros(shape)})
    assert step.misfits() == {path: text}
    assert step.misfit(path) == text


def test_absent_arrays_do_not_misfit() -> None:
    step = Step(bs=2, padded_bs=2, widths=Widths(w=3))
    assert step.misfits() == {}


@pytest.mark.parametrize(("request_", "rid"), [(0, "a"), (1, "b"), (2, None), (-1, None)])
def test_rid_of_a_request(request_: int, rid: str | None) -> None:
    assert Who(rids=("a", "b")).rid(request_) == rid


def test_no_request_has_no_rid() -> None:
    assert Who(rids=("a",)).rid(None) is None


def test_sound_steps_differ_by_seed_and_repeat_by_seed() -> None:
    first, again, other = sound_step(1), sound_step(1), sound_step(2)
    assert (first.tree.tokens == again.tree.tokens).all()
    assert not (first.tree.tokens == other.tree.tokens).all()


def test_sound_step_has_unequal_trees_and_branches() -> None:
    step = sound_step(0, full_trees=True)
    assert not (step.tree.parents[0] == step.tree.parents[2]).all()
    assert (step.tree.parents[:, 1:] != np.arange(16)).any(axis=1).all()
    assert len(set(step.layout.prefix_lens.tolist())) == step.bs
