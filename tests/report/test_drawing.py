"""Pictures of a step: true to scale, readable in 100 columns, true about what is misread."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_guard.recorder.ring import Ring
from ddtree_guard.report import drawing
from ddtree_guard.step import Step
from ddtree_guard.testing.steps import sound_step


def stock(step: Step, width: int = 8) -> Step:
    """The step as a backend of another width lays it out."""
    lens = step.layout.prefix_lens
    return step.replace(
        layout__qo_indptr=np.arange(step.padded_bs + 1) * width,
        layout__mask_indptr=np.concatenate([[0], np.cumsum(width * (lens + width))]),
    )


def test_the_ruler_is_drawn_to_scale_with_numbers() -> None:
    title, above, expected, actual, below, *words = drawing.ruler(
        "query rows", "rows", [0, 17, 34], [0, 8, 16], 1
    )
    assert title == "query rows, in rows, requests 0 to 1 of 2"
    assert (above.split(), below.split()) == (["0", "17", "34"], ["0", "8", "16"])
    marks = [at for at, c in enumerate(actual) if c == "┃"]
    scale = (len(expected) - 1 - marks[0]) / 34
    assert [round((at - marks[0]) / scale) for at in marks] == [0, 8, 16]
    assert actual[marks[0] : marks[1]].count("░") == 0
    assert set(actual[marks[1] + 1 : marks[2]]) == {"░"}
    assert [w.strip() for w in words] == [
        "request 0 gets rows 0 to 7; its own are 0 to 16",
        "request 1 gets rows 8 to 15; its own are 17 to 33",
        "rows 16 to 33 belong to nobody",
    ]


def test_a_wider_stretch_is_shaded_from_where_its_own_ends() -> None:
    lines = drawing.ruler("query rows", "rows", [0, 8, 16], [0, 16, 32], 1)
    actual = lines[3]
    first, second, _ = [at for at, c in enumerate(actual) if c == "┃"]
    half = (first + second) // 2
    assert set(actual[first + 1 : half - 1]) == {"━"}
    assert set(actual[half + 1 : second]) == {"░"}


def test_a_sound_step_reads_as_expected() -> None:
    lines = drawing.rulers(sound_step(lens=(37, 21, 50), padded_bs=5), 2)
    assert [line.strip() for line in lines].count("as expected") == 2
    assert not any("░" in line for line in lines)


def test_the_ruler_shows_the_neighbourhood_of_the_request() -> None:
    offsets = list(range(0, 330, 10))
    title = drawing.ruler("query rows", "rows", offsets, offsets, 30)[0]
    assert title == "query rows, in rows, requests 28 to 31 of 32"


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=9),
    st.integers(0, 9),
    st.data(),
)
def test_any_offsets_can_be_drawn(expected: list[int], request_: int, data: st.DataObject) -> None:
    size = len(expected)
    actual = data.draw(st.lists(st.integers(-(2**63), 2**63), min_size=size, max_size=size))
    lines = drawing.ruler("mask cells", "cells", expected, actual, min(request_, size - 2))
    assert max(map(len, lines[:5])) <= drawing.WIDTH


def naive_states(step: Step, request: int) -> list[list[int]]:
    """What `mask_states` must give, by walking each row and column on its own."""
    w, s = step.w, int(step.layout.prefix_lens[request])
    rows = int(step.layout.qo_indptr[request + 1] - step.layout.qo_indptr[request])
    start, cells = int(step.layout.mask_indptr[request]), step.mask.cells
    result = []
    for r in range(w):
        line = []
        for c in range(w):
            node = r
            while node > c:
                node = int(step.tree.parents[request, node])
            at = start + r * (s + rows) + s + c
            if r >= rows:
                line.append(drawing.UNWRITTEN)
            elif c < rows and not 0 <= at < len(cells):
                line.append(drawing.OUTSIDE)
            else:
                read = c < rows and bool(cells[at])
                names = (drawing.HIDDEN, drawing.LEAKED), (drawing.LOST, drawing.SEEN)
                line.append(names[node == c][read])
        result.append(line)
    return result


@given(
    seed=st.integers(0, 999),
    w=st.integers(2, 24),
    width=st.integers(1, 26),
    which=st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_mask_states_equal_a_walk_cell_by_cell(seed: int, w: int, width: int, which: int) -> None:
    step = stock(sound_step(seed, lens=(7, 3, 11), w=w), width)
    assert drawing.mask_states(step, which).tolist() == naive_states(step, which)


def test_the_heatmap_of_a_sound_step_has_no_alarm() -> None:
    head, *lines = drawing.heatmap(sound_step(2, lens=(37, 21, 50)), 2)
    assert head == "mask of request 2 (rid r2), 17 x 17 tree block: as the tree says"
    assert len(lines) == 17
    assert set("".join(line[10:] for line in lines)) == {"█", "·"}


@pytest.mark.parametrize(("w", "pooled"), [(65, False), (90, False), (129, True), (1025, True)])
def test_a_wide_heatmap_fits_and_says_when_it_pools(w: int, pooled: bool) -> None:
    head, *lines = drawing.heatmap(stock(sound_step(2, lens=(5, 9), w=w)), 1)
    assert max(map(len, lines)) <= drawing.WIDTH
    assert ("one character is" in head) is pooled
    assert "x" in lines[-1][10:]


def test_pooling_keeps_one_wrong_cell() -> None:
    step = sound_step(2, lens=(5, 9), w=200)
    cells = step.mask.cells.copy()
    last = int(step.layout.mask_indptr[1]) + 199 * (9 + 200) + 9
    cells[last + 3] ^= 1
    head, *lines = drawing.heatmap(step.replace(mask__cells=cells), 1)
    assert "1 of 40000 cells are wrong" in head
    assert sum(line[10:].count("+") + line[10:].count("-") for line in lines) == 1


def test_missing_parts_are_said() -> None:
    step = sound_step().replace(mask__cells=None, tree__parents=None, layout__qo_indptr=None)
    step = step.replace(layout__mask_indptr=None)
    assert "not whole in this step" in drawing.heatmap(step, 0)[0]
    assert drawing.tree(step, 0) == ["tree of request 0: not in this step"]
    assert drawing.rulers(step)[0] == "offsets: not in this step"


def with_tree(parents: list[int], size: int) -> Step:
    step = sound_step(lens=(4, 9), w=len(parents))
    both = np.array([[-1] * len(parents), parents])
    tokens = np.arange(2 * len(parents)).reshape(2, -1)
    sizes = np.array([1, size])
    accept = np.array([[0, -1, -1], [0, 2, -1]])
    return step.replace(
        tree__parents=both, tree__tokens=tokens, tree__sizes=sizes, outcome__accept_index=accept
    )


def test_the_tree_shows_branches_tokens_and_the_accepted_path() -> None:
    assert drawing.tree(with_tree([-1, 0, 0, 1, 2, -1], 5), 1) == [
        "tree of request 1 (rid r1): 5 nodes in 6 rows, accepted path 0 2",
        "0 token 6  *",
        "├─ 1 token 7",
        "│  └─ 3 token 9",
        "└─ 2 token 8  *",
        "   └─ 4 token 10",
    ]


def test_a_broken_tree_is_drawn_without_a_loop() -> None:
    lines = drawing.tree(with_tree([-1, 2, 1, 3, 99, -7], 6), 1)
    assert "row 1 has parent 2, which does not come before it" in lines
    assert "row 3 has parent 3, which does not come before it" in lines


@pytest.mark.parametrize("width", [60, 100])
def test_a_deep_chain_stays_within_the_columns(width: int) -> None:
    tokens = np.full((2, 70), 2**62)
    step = with_tree([-1, *range(69)], 70).replace(tree__tokens=tokens)
    _, *lines = drawing.tree(step, 1, width=width)
    assert max(map(len, lines)) <= width
    assert lines[5].startswith("            └─ 5 token")
    assert lines[69].split()[:4] == ["69", "…", "└─", "69"]


def test_a_large_tree_is_cut_and_says_so() -> None:
    lines = drawing.tree(with_tree([-1, *range(299)], 300), 1, limit=10)
    assert lines[-1] == "... and 290 more nodes"


@pytest.mark.parametrize("w", [5, 17, 65])
def test_a_step_of_the_ring_draws_the_mask_that_the_whole_step_draws(w: int) -> None:
    for step in (sound_step(2, lens=(37, 21, 50), w=w), stock(sound_step(2, lens=(37, 21), w=w))):
        ring = Ring(1, step.padded_bs, w)
        ring.put(step)
        (kept,) = ring.snapshot()
        assert kept.mask.cells is None
        for request in range(step.bs):
            whole, bits = (drawing.mask_states(s, request) for s in (step, kept))
            alike = (whole == bits) | (whole == drawing.OUTSIDE)  # bits do not know the mask's end
            assert alike.all()
