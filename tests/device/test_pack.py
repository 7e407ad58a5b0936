"""The pack kernel fills the ring with what the host would have put there."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from ddtree_guard.device.from_step import buffers_of  # noqa: E402
from ddtree_guard.device.pack import Packer  # noqa: E402
from ddtree_guard.errors import UsageError  # noqa: E402
from ddtree_guard.recorder.ring import Ring, bare  # noqa: E402
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


@pytest.mark.parametrize("lanes", [None, 4])
@pytest.mark.parametrize("w", [5, 17, 32, 33, 65])
def test_the_device_writes_what_the_host_writes(w: int, lanes: int | None) -> None:
    host, device = Ring(3, 4, 65), Ring(3, 4, 65, pinned=True)
    packer = Packer(device, DEVICE)
    for seed in range(5):
        one = step(seed, w, lanes)
        host.put(one)
        pack = packer.bind(buffers_of(one, DEVICE), one.padded_bs, w)
        device.note(bare(one), pack.kinds(one.bs))
        pack.launch()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    expected, found = host.snapshot(), device.snapshot()
    assert [s.who.step_id for s in found] == [2, 3, 4]
    assert [differences(a, b) for a, b in zip(expected, found, strict=True)] == [[], [], []]


def test_a_step_that_has_not_arrived_is_not_in_the_snapshot() -> None:
    ring = Ring(3, 4, 17, pinned=True)
    packer, one = Packer(ring, DEVICE), step(0, 17, 4)
    pack = packer.bind(buffers_of(one, DEVICE), 4, 17)
    ring.note(bare(one), pack.kinds(3))  # noted, not launched
    assert ring.snapshot() == []


def test_missing_arrays_are_left_out() -> None:
    one = step(0, 17, 4).replace(
        mask__cells=None, layout__mask_indptr=None, positions__values=None, tree__parents=None
    )
    ring = Ring(3, 4, 17, pinned=True)
    pack = Packer(ring, DEVICE).bind(buffers_of(one, DEVICE), 4, 17)
    ring.note(bare(one), pack.kinds(3))
    pack.launch()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    (found,) = ring.snapshot()
    assert (found.mask.tree_bits, found.positions.values, found.tree.parents) == (None, None, None)
    assert found.tree.tokens.tolist() == one.tree.tokens.tolist()


def test_what_either_side_lost_is_left_out_and_the_rest_stays() -> None:
    ring = Ring(32, 4, 17, pinned=True)
    packer, one = Packer(ring, DEVICE), step(0, 17, 4)
    pack = packer.bind(buffers_of(one, DEVICE), 4, 17)

    def steps(*ids: int, launched: bool = True) -> None:
        for step_id in ids:
            ring.note(bare(one), pack.kinds(3), (step_id, ("a", "b", "c")))
            if launched:
                pack.launch()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    pack.launch()  # as warm-up and capture do: the device is ahead
    packer.realign()
    steps(1, 2)
    assert ring.arrived(ring.written)
    steps(3, launched=False)  # a forward pass that failed: the host is ahead
    assert not ring.arrived(ring.written)
    steps(4)
    packer.realign()
    steps(5, 6)
    assert ring.arrived(ring.written)
    assert [s.who.step_id for s in ring.snapshot()] == [1, 2, 5, 6]
    assert ring.snapshot()[-1].who.rids == ("a", "b", "c")


def test_a_launch_larger_than_a_slot_is_refused() -> None:
    packer, one = Packer(Ring(3, 4, 17, pinned=True), DEVICE), step(0, 33, 4)
    with pytest.raises(UsageError, match="expected to hold the step, found 4 of 33"):
        packer.bind(buffers_of(one, DEVICE), 4, 33)
