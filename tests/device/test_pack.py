"""The check's launch fills the ring with what the host would have put there."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from ddtree_guard.device.from_step import buffers_of, shape_of  # noqa: E402
from ddtree_guard.device.launch import DeviceCheck  # noqa: E402
from ddtree_guard.device.pack import Packer  # noqa: E402
from ddtree_guard.errors import UsageError  # noqa: E402
from ddtree_guard.recorder.ring import AHEAD, Ring, bare  # noqa: E402
from ddtree_guard.step import Outcome, Step  # noqa: E402
from ddtree_guard.testing.compare import differences  # noqa: E402
from ddtree_guard.testing.faults import FAULTS  # noqa: E402
from ddtree_guard.testing.steps import sound_step  # noqa: E402

LENS = (37, 21, 50)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def step(seed: int, w: int, lanes: int | None) -> Step:
    made = sound_step(seed, lens=LENS, w=w, padded_bs=lanes)
    made = FAULTS["W3"](made, 2).step if seed % 2 else made
    return made.replace(who__step_id=seed, outcome=Outcome())


class Device:
    """A ring beside a check: what a step does, and what the host does once it has waited."""

    def __init__(self, steps: int, lanes: int, w: int) -> None:
        self.check = DeviceCheck(DEVICE)
        self.ring = Ring(steps, lanes, w, on_device=True)
        self.packer = Packer(self.ring, DEVICE)
        self.ring.fetch = self.packer.reader()
        self.mark = 0

    def run(self, one: Step, settled: bool = True) -> None:
        buffers = buffers_of(one, DEVICE)
        pack = self.packer.pack(buffers, one.padded_bs, one.w)
        self.check.check(self.check.bind(buffers, shape_of(one), pack=pack))
        self.check.close()
        self.mark += 1
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        if settled:
            who = one.who.step_id, one.who.rids
            self.ring.place(self.mark, bare(one), pack.kinds(one.bs), who)

    @property
    def ids(self) -> list[int]:
        return [one.who.step_id for one in self.ring.snapshot()]


@pytest.mark.parametrize("lanes", [None, 4])
@pytest.mark.parametrize("w", [5, 17, 32, 33, 65])
def test_the_device_writes_what_the_host_writes(w: int, lanes: int | None) -> None:
    host, device = Ring(3, 4, 65), Device(3, 4, 65)
    for seed in range(5):
        one = step(seed, w, lanes)
        host.put(one)
        device.run(one)
    assert device.ids == [2, 3, 4]
    found = device.ring.snapshot()
    expected = host.snapshot()
    assert [differences(a, b) for a, b in zip(expected, found, strict=True)] == [[], [], []]


def test_a_step_that_the_host_has_not_waited_for_is_not_in_the_snapshot() -> None:
    device = Device(3, 4, 17)
    device.run(step(0, 17, 4))
    device.run(step(2, 17, 4), settled=False)
    assert device.ids == [0]


def test_a_slot_that_is_being_written_is_left_out() -> None:
    device = Device(3, 4, 17)
    for n in range(13):
        device.run(step(2 * n, 17, 4))
    in_flight = step(100, 17, 4)
    for _ in range(AHEAD):  # more are never on their way
        device.run(in_flight, settled=False)
    assert device.ids == [20, 22, 24]


def test_a_check_that_counts_anew_mixes_no_steps() -> None:
    device = Device(8, 4, 17)
    for n in range(5):
        device.run(step(2 * n, 17, 4))
    device.check.reset()
    device.packer.restart()
    device.mark = 0
    assert device.ids == []
    device.ring.place(3, bare(step(98, 17, 4)), {}, (98, ()))  # nothing was packed for it
    for n in range(11, 13):
        device.run(step(2 * n, 17, 4))
    assert device.ids == [22, 24]


def test_a_device_that_does_not_answer_leaves_what_was_drained() -> None:
    device = Device(8, 4, 17)
    for n in range(9):
        device.run(step(2 * n, 17, 4))
    before = device.ids
    device.ring.drain()
    device.run(step(20, 17, 4))
    for answer in (lambda: None, lambda: exec('raise RuntimeError("CUDA error")')):
        device.ring.fetch = answer
        assert device.ids == before


def test_missing_arrays_are_left_out() -> None:
    one = step(0, 17, 4).replace(
        mask__cells=None, layout__mask_indptr=None, positions__values=None, tree__parents=None
    )
    device = Device(3, 4, 17)
    device.run(one)
    (found,) = device.ring.snapshot()
    assert (found.mask.tree_bits, found.positions.values, found.tree.parents) == (None, None, None)
    assert found.tree.tokens.tolist() == one.tree.tokens.tolist()


def test_a_launch_larger_than_a_slot_is_refused() -> None:
    device, one = Device(3, 4, 17), step(0, 33, 4)
    with pytest.raises(UsageError, match="expected to hold the step, found 4 of 33"):
        device.packer.pack(buffers_of(one, DEVICE), 4, 33)
