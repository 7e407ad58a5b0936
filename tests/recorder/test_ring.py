"""The ring: what goes in comes out, newest wins, drops are counted, memory stays as it is."""

import gc
import threading
import tracemalloc

import numpy as np
import pytest

from ddtree_guard.recorder.ring import (
    AHEAD,
    BITS,
    FIELDS,
    MAX_BYTES,
    Ring,
    bare,
    slot_words,
    tree_bits,
)
from ddtree_guard.step import Step
from ddtree_guard.testing.compare import differences
from ddtree_guard.testing.steps import paint_mask, sound_step

LENS = (37, 21, 50)


def step(number: int, w: int = 17, lanes: int | None = 4) -> Step:
    return sound_step(number, lens=LENS, w=w, padded_bs=lanes).replace(who__step_id=number)


@pytest.mark.parametrize("lanes", [None, 4])
@pytest.mark.parametrize("w", [3, 17, 64, 65, 130])
def test_what_goes_in_comes_out(w: int, lanes: int | None) -> None:
    ring = Ring(4, 4, w)
    original = step(5, w, lanes)
    assert ring.put(original)
    (back,) = ring.snapshot()
    expected = bare(original).replace(
        **{path.replace(".", "__"): original.get(path) for path in FIELDS if path != BITS},
        mask__tree_bits=tree_bits(original),
    )
    assert differences(expected, back) == []
    assert back.mask.cells is None
    assert back.layout.kv_indices is None


@pytest.mark.parametrize("w", [3, 17, 65])
def test_the_bits_are_the_tree_columns_of_the_mask(w: int) -> None:
    original = step(2, w)
    bits = np.unpackbits(tree_bits(original), axis=2, count=w, bitorder="little")
    for i, s in enumerate(LENS):
        rows = paint_mask(original.tree, LENS, w, original.layout.prefix_lens)
        start = int(rows[1][i])
        block = rows[0][start : start + w * (s + w)].reshape(w, s + w)[:, s:]
        assert np.array_equal(bits[i], block)


def test_the_bits_are_read_where_the_kernel_reads() -> None:
    offsets = step(3).layout.mask_indptr.copy()
    offsets[2] -= 70  # as an earlier request's shorter stride would shift it
    broken = step(3).replace(layout__mask_indptr=offsets)
    same = [
        np.array_equal(a, b) for a, b in zip(tree_bits(broken), tree_bits(step(3)), strict=True)
    ]
    assert same == [True, True, False]


@pytest.mark.parametrize("value", [2**62, -(2**62)])
def test_absurd_offsets_give_no_bits_and_no_error(value: int) -> None:
    offsets = step(3).layout.mask_indptr.copy()
    offsets[1] = value
    broken = step(3).replace(layout__mask_indptr=offsets)
    assert not tree_bits(broken)[1].any()


def test_the_newest_win() -> None:
    ring = Ring(3, 4, 17)
    for number in range(1, 8):
        ring.put(step(number))
    assert [s.who.step_id for s in ring.snapshot()] == [5, 6, 7]
    assert (ring.written, ring.dropped) == (7, 0)


def test_a_step_that_does_not_fit_is_counted_and_changes_nothing() -> None:
    ring = Ring(3, 4, 17)
    ring.put(step(1))
    assert not ring.put(step(2, w=18))
    assert not ring.put(step(3).replace(tree__tokens=np.ones((3, 17))))  # not integers
    assert not ring.put(step(4).replace(positions__values=np.zeros(999, np.int64)))
    assert ring.dropped == 3
    assert [s.who.step_id for s in ring.snapshot()] == [1]


def test_the_ring_stays_below_8_mib_whatever_is_asked_for() -> None:
    assert Ring(10**6, 32, 65).nbytes <= MAX_BYTES
    assert Ring(64, 32, 65).steps >= 50
    device = Ring(64, 32, 65, on_device=True)
    assert (device.steps, device.nbytes <= MAX_BYTES) == (64 + AHEAD, True)
    small = Ring(64, 4, 17)
    assert (small.steps, small.nbytes) == (64, 64 * 8 * slot_words(4, 17))


def test_a_slot_larger_than_the_ring_drops_everything_and_says_so() -> None:
    ring = Ring(64, 256, 1025)
    assert ring.steps == 0
    assert not ring.put(step(1))
    assert (ring.dropped, ring.snapshot()) == (1, [])


def test_a_path_longer_than_its_room_is_left_out() -> None:
    original = step(1).replace(outcome__committed=np.ones((3, 40), np.int64))
    ring = Ring(2, 4, 17)
    assert ring.put(original)
    (back,) = ring.snapshot()
    assert back.outcome.committed is None
    assert np.array_equal(back.outcome.accept_index, original.outcome.accept_index)


def test_the_outcome_can_come_later() -> None:
    ring, original = Ring(2, 4, 17), step(1)
    empty = original.replace(outcome=type(original.outcome)())
    ring.put(empty)
    lens, committed = original.outcome.accept_lens, original.outcome.committed
    ring.outcome(1, {"outcome.accept_lens": lens, "outcome.committed": committed})
    (back,) = ring.snapshot()
    assert np.array_equal(back.outcome.accept_lens, lens)
    assert np.array_equal(back.outcome.committed, committed)
    ring.put(step(2))
    ring.put(step(3))
    ring.outcome(1, {"outcome.accept_lens": lens * 0})  # overwritten meanwhile
    assert [s.who.step_id for s in ring.snapshot()] == [2, 3]
    assert all(s.outcome.accept_lens.any() for s in ring.snapshot())


def test_steps_do_not_grow_memory() -> None:
    ring, steps = Ring(8, 4, 17), [step(n) for n in range(4)]
    tracemalloc.start()
    try:
        for n in range(2400):
            ring.put(steps[n % 4])
            if n == 1999:  # caches of names have filled up
                gc.collect()
                before, _ = tracemalloc.get_traced_memory()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 256 << 10  # a step of its own size per put would be megabytes


def test_a_snapshot_while_steps_come_in_holds_whole_steps_only() -> None:
    ring, stop = Ring(4, 4, 17), threading.Event()
    # Every integer of a step is its number, so a torn step shows.
    steps = [
        step(n).replace(
            **{p.replace(".", "__"): np.full_like(step(1).get(p), n) for p in FIELDS if p != BITS},
            mask__tree_bits=np.full((3, 17, 3), n, np.uint8),
        )
        for n in range(1, 6)
    ]

    def write() -> None:
        n = 0
        while not stop.is_set():
            ring.put(steps[n % 5])
            n += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen = [s for _ in range(300) for s in ring.snapshot()]
    finally:
        stop.set()
        thread.join()
    assert len(seen) > 50
    for one in seen:
        values = {int(v) for path in FIELDS for v in np.unique(one.get(path))}
        assert values == {one.who.step_id}


def test_a_reader_that_is_slower_than_the_writer_gets_what_was_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring, steps = Ring(4, 4, 17), [step(n) for n in range(1, 9)]
    for one in steps[:4]:
        ring.put(one)
    copy, rest = ring._step, iter(steps[4:])

    def slow(slot: object, words: object) -> Step:
        for one in rest:  # the writer laps the reader
            ring.put(one)
        return copy(slot, words)  # type: ignore[arg-type]

    monkeypatch.setattr(ring, "_step", slow)
    assert [s.who.step_id for s in ring.snapshot()] == [1, 2, 3, 4]
    assert [s.who.step_id for s in Ring.snapshot(ring)] == [5, 6, 7, 8]


def test_torch_tensors_on_the_host_are_taken_without_torch_at_import() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    original = step(1)
    arrays = {
        p.replace(".", "__"): torch.from_numpy(original.get(p))
        for p in FIELDS
        if p != BITS and original.get(p) is not None
    }
    ring, cells = Ring(2, 4, 17), torch.from_numpy(original.mask.cells)
    assert ring.put(original.replace(**arrays, mask__cells=cells))
    (back,) = ring.snapshot()
    assert np.array_equal(back.mask.tree_bits, tree_bits(original))
    assert np.array_equal(back.tree.tokens, original.tree.tokens)
