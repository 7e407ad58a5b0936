"""A ring whose words a device writes, also while the host copies them: no torn step comes out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ddtree_guard.recorder.ring import AHEAD, MEANWHILE, Ring, bare
from ddtree_guard.step import Step
from ddtree_guard.testing.steps import sound_step

STEPS = 12  # beside those that may be overwritten
KINDS = {"tree.tokens": ("int64", (3, 5)), "positions.values": ("int64", (15,))}


class Device:
    """A ring's memory. Every word of a step is its number, so a torn step shows."""

    def __init__(self) -> None:
        self.ring = Ring(STEPS, 3, 5, on_device=True)
        self.memory = np.zeros((self.ring.steps, self.ring.words), np.int64)
        self.ring.fetch = self.fetch
        self.base = bare(sound_step(0, lens=(37, 21, 50), w=5))

    def fetch(self, into: Any) -> Any:
        """What the ring asks for."""
        if into is None:
            return self.memory.copy()
        into[:] = self.memory
        return into

    def pack(self, mark: int, words: int | None = None) -> None:
        """Write a step, or its first words but not yet its mark."""
        slot = self.memory[mark % self.ring.steps]
        slot[1:words] = mark
        if words is None:
            slot[0] = mark

    def place(self, mark: int) -> None:
        self.ring.place(mark, self.base, KINDS, (mark, ("a", "b", "c")))

    def run(self, *marks: int) -> None:
        for mark in marks:
            self.pack(mark)
            self.place(mark)

    def restart(self) -> None:
        self.memory[:, 0] = 0
        self.ring.restart()


def numbers(steps: list[Step]) -> list[int]:
    """The steps' numbers; fails where a word of one is another's."""
    for one in steps:
        values = np.concatenate([one.tree.tokens.ravel(), one.positions.values])
        assert set(values.tolist()) == {one.who.step_id}
    return [one.who.step_id for one in steps]


@pytest.mark.parametrize("ahead", range(4 * AHEAD))
def test_the_device_may_be_far_ahead_of_what_was_placed(ahead: int) -> None:
    device = Device()
    device.run(*range(1, 31))
    for mark in range(31, 31 + ahead):  # steps of which the host keeps nothing
        device.pack(mark)
    device.pack(31 + ahead, 20)  # half of it is there
    first = max(31 + AHEAD, 31 + ahead + MEANWHILE) - device.ring.steps
    assert numbers(device.ring.snapshot()) == list(range(first, 31))


def test_a_step_that_ends_while_the_ring_is_copied_is_left_out() -> None:
    device = Device()
    device.run(*range(1, 31))

    def copied(_: Any) -> Any:
        device.pack(31, 20)
        block = device.memory[: 33 % device.ring.steps].copy()
        device.pack(31)
        for mark in range(32, 34):
            device.pack(mark)
        return np.concatenate([block, device.memory[len(block) :]])

    device.ring.fetch = copied
    assert numbers(device.ring.snapshot()) == list(range(34 + MEANWHILE - device.ring.steps, 31))


def test_steps_that_are_not_packed_leave_no_mark_in_the_ring() -> None:
    device = Device()
    device.run(*range(1, 13))
    assert numbers(device.ring.snapshot()) == list(range(1, 13))
    device.ring.passed(26)  # 13 to 26 were too large for a slot, and overwrite nothing
    device.pack(27, 20)
    assert numbers(device.ring.snapshot()) == [1, 2]


def test_what_the_host_is_told_while_it_copies_counts() -> None:
    device = Device()
    device.run(*range(1, 31))

    def copied(_: Any) -> Any:
        block = device.memory.copy()
        for mark in range(31, 39):
            block[mark % device.ring.steps, 20:] = mark  # as the device writes while it is copied
            device.run(mark)
        return block

    device.ring.fetch = copied
    assert numbers(device.ring.snapshot()) == list(range(39 + AHEAD - device.ring.steps, 31))


def test_marks_from_before_a_restart_hide_nothing() -> None:
    device = Device()
    device.run(*range(1, 40))
    device.restart()
    device.run(1, 2)
    assert numbers(device.ring.snapshot()) == [1, 2]


@pytest.mark.parametrize("restart", [True, False])
def test_a_restart_while_it_is_copied_leaves_nothing_of_before(restart: bool) -> None:
    device = Device()
    device.run(*range(1, 10))

    def copied(_: Any, then: Callable[[], None] = device.restart) -> Any:
        block = device.memory.copy()
        if restart:
            then()
            device.run(1, 2)
        return block

    device.ring.fetch = copied
    assert numbers(device.ring.snapshot()) == ([] if restart else list(range(1, 10)))


def test_what_is_kept_stays_while_the_next_copy_is_made() -> None:
    device = Device()
    device.run(*range(1, 6))
    given: list[Any] = []
    fetch = device.fetch

    def copied(into: Any) -> Any:
        given.append(fetch(into))
        return given[-1]

    device.ring.fetch = copied
    device.ring.drain()
    device.ring.drain()  # nothing is new
    assert len(given) == 1
    for newest in range(6, 12):
        device.run(newest)
        device.ring.drain()
    assert len({id(block) for block in given}) == 2  # no fresh memory in each turn
    device.run(12)

    def fails(into: Any) -> Any:
        if into is not None:
            into[:] = -1  # half a copy
        raise RuntimeError("CUDA error")

    device.ring.fetch = fails
    device.ring.drain()
    assert numbers(device.ring.snapshot()) == list(range(1, 12))


def _silent(into: Any) -> Any:
    """A device that does not answer in time, for now."""
    return None


def test_steps_of_a_kept_copy_stay_when_its_room_is_used_again() -> None:
    device = Device()
    device.ring = Ring(STEPS, 3, 64, on_device=True)  # rows of bits without a gap: no copy needed
    device.memory = np.zeros((device.ring.steps, device.ring.words), np.int64)
    device.base = bare(sound_step(0, lens=(37, 21, 50), w=64))
    kinds = {"mask.tree_bits": ("uint8", (3, 64, 8))}

    def run(mark: int) -> None:
        device.pack(mark)
        device.ring.place(mark, device.base, kinds, (mark, ("a", "b", "c")))

    for mark in range(1, 6):
        run(mark)
    device.ring.fetch = device.fetch
    device.ring.drain()
    device.ring.fetch = _silent
    held = device.ring.snapshot()
    device.ring.fetch = device.fetch  # it answers again, and steps go on while somebody reads
    for mark in range(6, 40):
        run(mark)
        device.ring.drain()
    assert [set(step.mask.tree_bits[:, :, 0].ravel().tolist()) for step in held] == [
        {step.who.step_id} for step in held
    ]


def test_a_kept_copy_is_read_anew_when_its_room_is_used_meanwhile() -> None:
    device = Device()
    device.run(*range(1, 6))
    device.ring.drain()
    torn, turns = device.ring._torn, iter((6, 7))

    def slowly(*args: int) -> bool:
        device.ring.fetch = device.fetch
        for mark in turns:  # two drains while the first slot is judged
            device.run(mark)
            device.memory[1:5] += 100  # steps 1 to 4 are overwritten
            device.ring.drain()
            device.memory[1:5] -= 100
        return torn(*args)

    device.ring.fetch = _silent
    device.ring._torn = slowly  # type: ignore[method-assign]
    assert numbers(device.ring.snapshot()) == [5, 6, 7]


def test_a_restart_right_behind_a_copy_leaves_nothing_of_before() -> None:
    device = Device()
    device.run(*range(1, 10))
    copy = device.ring._copy_of_device

    def copied(into: Any = None) -> Any:
        made = copy(into)
        device.restart()
        return made

    device.ring._copy_of_device = copied  # type: ignore[method-assign]
    device.ring.drain()
    device.ring._copy_of_device = copy  # type: ignore[method-assign]
    device.ring.fetch = _silent
    assert numbers(device.ring.snapshot()) == []
