"""The check's launch fills the ring with what the host would have put there."""

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from ddtree_guard.device.from_step import buffers_of, shape_of  # noqa: E402
from ddtree_guard.device.launch import DeviceCheck  # noqa: E402
from ddtree_guard.device.pack import Packer  # noqa: E402
from ddtree_guard.device.ring_program import PACKED  # noqa: E402
from ddtree_guard.errors import UsageError  # noqa: E402
from ddtree_guard.recorder.ring import AHEAD, MEANWHILE, Ring, bare  # noqa: E402
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

    def run(self, one: Step, settled: bool = True, without: int = 0, **other: Any) -> None:
        buffers = dataclasses.replace(buffers_of(one, DEVICE), **other)
        pack = self.packer.pack(buffers, one.padded_bs, one.w, without)
        self.check.check(self.check.bind(buffers, shape_of(one), pack=pack))
        self.check.close()
        self.mark += 1
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        if settled:
            who = one.who.step_id, one.who.rids
            self.ring.place(self.mark, bare(one), pack.kinds(buffers, one.bs), who)

    @property
    def ids(self) -> list[int]:
        return [one.who.step_id for one in self.ring.snapshot()]


@pytest.mark.parametrize("lanes", [None, 4])
@pytest.mark.parametrize("w", [5, 17, 32, 33, 65])
def test_the_device_writes_what_the_host_writes(w: int, lanes: int | None) -> None:
    host, device = Ring(2, 4, 65), Device(2, 4, 65)
    for seed in range(3):
        one = step(seed, w, lanes)
        host.put(one)
        device.run(one)
    assert device.ids == [1, 2]
    found = device.ring.snapshot()
    expected = host.snapshot()
    assert [differences(a, b) for a, b in zip(expected, found, strict=True)] == [[], []]


def test_wide_rows_fill_more_than_one_group_of_columns() -> None:
    host, device = Ring(3, 2, 140), Device(3, 2, 140)
    one = sound_step(4, lens=(21, 37), w=131).replace(outcome=Outcome())
    host.put(one)
    device.run(one)
    (expected,), (found,) = host.snapshot(), device.ring.snapshot()
    assert differences(expected, found) == []
    assert np.unpackbits(found.mask.tree_bits[1, 130], bitorder="little")[130] == 1


def test_cells_that_are_not_one_are_seen_as_attention_sees_them() -> None:
    one = step(0, 33, None)
    cells = np.random.default_rng(0).integers(0, 256, one.mask.cells.shape, np.uint8)
    one = one.replace(mask__cells=cells * (cells > 120))
    host, device = Ring(3, 4, 65), Device(3, 4, 65)
    host.put(one)
    device.run(one)
    (expected,), (found,) = host.snapshot(), device.ring.snapshot()
    assert differences(expected, found) == []


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
@pytest.mark.parametrize("odd", [0, 1, 2, 3])
def test_a_mask_may_begin_and_end_anywhere_in_a_word(odd: int, cut: int) -> None:
    one = sound_step(6, lens=(0, 3), w=9).replace(outcome=Outcome())
    cells = one.mask.cells[: len(one.mask.cells) - cut]
    one = one.replace(mask__cells=cells, mask__capacity=None)
    around = torch.full((len(cells) + 16,), 9, dtype=torch.uint8, device=DEVICE)
    around[odd + 4 : odd + 4 + len(cells)] = torch.from_numpy(cells.copy())
    mask = around[odd + 4 : odd + 4 + len(cells)]
    assert mask.data_ptr() % 4 == odd
    host, device = Ring(1, 2, 9), Device(1, 2, 9)
    host.put(one)
    device.run(one, mask=mask)
    (expected,), (found,) = host.snapshot(), device.ring.snapshot()
    assert differences(expected, found) == []


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_a_mask_of_a_few_cells_is_not_read_beyond_them(count: int) -> None:
    one = sound_step(6, lens=(0, 3), w=9).replace(outcome=Outcome(), mask__capacity=None)
    one = one.replace(mask__cells=np.ones(count, np.uint8))
    around = torch.full((32,), 9, dtype=torch.uint8, device=DEVICE)
    around[5 : 5 + count] = 1
    host, device = Ring(1, 2, 9), Device(1, 2, 9)
    host.put(one)
    device.run(one, mask=around[5 : 5 + count])
    (expected,), (found,) = host.snapshot(), device.ring.snapshot()
    assert differences(expected, found) == []
    assert np.unpackbits(found.mask.tree_bits).sum() == count


FAR = 2**62
HOSTILE: dict[str, dict[str, Any]] = {
    "mask before the buffer": {"layout__mask_indptr": [-5, -(10**6), 40, -FAR]},
    "mask behind the buffer": {"layout__mask_indptr": [10**9, FAR, 2**63 - 1, 0]},
    "lengths far away": {"layout__prefix_lens": [FAR, -FAR, 2**63 - 1]},
    "rows that go back": {"layout__qo_indptr": [50, 17, -FAR, FAR]},
    "rows that are none": {"layout__qo_indptr": [0, 0, 3, 2**31 + 3]},
    "offsets that wrap": {
        "layout__mask_indptr": [2**63 - 1] * 4, "layout__prefix_lens": [2**63 - 1] * 3,
        "layout__qo_indptr": [0, 2**63 - 1, -1, 2**63 - 1],
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", HOSTILE)
def test_offsets_that_lead_anywhere_are_packed_and_not_followed(name: str) -> None:
    garbage = {path: np.array(value, np.int64) for path, value in HOSTILE[name].items()}
    one = step(0, 17, None).replace(**garbage)
    host, device = Ring(3, 4, 20), Device(3, 4, 20)
    host.put(one)
    device.run(one)
    (expected,), (found,) = host.snapshot(), device.ring.snapshot()
    assert differences(expected, found) == []


def test_a_slot_gets_nothing_of_its_neighbours() -> None:
    device = Device(1, 3, 17)  # the step fills the slot to its last word
    device.packer.tensor.fill_(-7)
    one = step(0, 17, None)
    device.run(one)
    written = (device.packer.tensor != -7).any(1).nonzero().flatten().tolist()
    assert written == [1]
    words = device.packer.tensor[1]
    assert (words[4:] == -7).sum() == 0
    assert (words[1:4] == -7).all()


def test_steps_are_counted_beyond_32_bits() -> None:
    device = Device(3, 4, 17)
    device.mark = 2**33 + 5
    device.check.state[:2] = device.mark
    for n in range(3):
        device.run(step(2 * n, 5, None))
    assert device.packer.tensor[:, 0].max() == 2**33 + 8
    assert device.ids == [0, 2, 4]


def test_what_is_left_out_is_not_written() -> None:
    one, device = step(0, 17, 4), Device(3, 4, 17)
    chain = PACKED["parents"] | PACKED["depths"] | PACKED["sizes"]
    device.run(one, without=chain)
    (found,) = device.ring.snapshot()
    tree = found.tree
    assert (tree.parents, tree.depths, tree.sizes) == (None, None, None)
    assert tree.tokens.tolist() == one.tree.tokens.tolist()
    begin, size = device.ring.places["tree.parents"]
    assert device.packer.tensor[1, begin : begin + size].count_nonzero() == 0


def test_a_check_launched_twice_in_a_step_fills_one_slot() -> None:
    device, one = Device(3, 4, 17), step(2, 17, 4)
    buffers = buffers_of(step(0, 17, 4), DEVICE)
    pack = device.packer.pack(buffers, 4, 17)
    device.check.check(device.check.bind(buffers, shape_of(one), pack=pack))
    device.run(one)
    assert device.packer.tensor[:, 0].tolist()[:3] == [0, 1, 0]
    (found,) = device.ring.snapshot()
    assert found.tree.tokens.tolist() == one.tree.tokens.tolist()


def test_a_step_that_the_host_has_not_waited_for_is_not_in_the_snapshot() -> None:
    device = Device(3, 4, 17)
    device.run(step(0, 5, None))
    device.run(step(2, 5, None), settled=False)
    assert device.ids == [0]


def test_a_slot_that_is_being_written_is_left_out() -> None:
    device = Device(3, 4, 17)
    for n in range(13):
        device.run(step(2 * n, 5, None))
    in_flight = step(100, 5, None)
    for _ in range(AHEAD - MEANWHILE):
        device.run(in_flight, settled=False)
    assert device.ids == [20, 22, 24]


def test_a_check_that_counts_anew_mixes_no_steps() -> None:
    device = Device(8, 4, 17)
    for n in range(5):
        device.run(step(2 * n, 5, None))
    device.check.reset()
    device.packer.restart()
    device.mark = 0
    assert device.ids == []
    device.ring.place(3, bare(step(98, 5, None)), {}, (98, ()))  # nothing was packed for it
    for n in range(11, 13):
        device.run(step(2 * n, 5, None))
    assert device.ids == [22, 24]


def test_a_device_that_does_not_answer_leaves_what_was_drained() -> None:
    device = Device(8, 4, 17)
    for n in range(9):
        device.run(step(2 * n, 5, None))
    before = device.ids
    device.ring.drain()
    device.run(step(20, 5, None))
    for answer in (lambda _: None, lambda _: exec('raise RuntimeError("CUDA error")')):
        device.ring.fetch = answer
        assert device.ids == before


def test_a_pause_waits_for_the_copy_that_is_under_way() -> None:
    device = Device(2, 4, 17)
    device.run(step(2, 5, None))
    reader = device.ring.fetch
    assert reader is not None
    seen: list[Any] = []

    class Slow:
        """The ring's words: copied while somebody else wants to pause."""

        def numpy(self) -> Any:
            thread.start()
            thread.join(0.1)
            seen.append(reader.paused)
            return device.packer.tensor.cpu().numpy()

    thread = threading.Thread(target=reader.pause)
    tensor, reader.tensor, reader._cuda = reader.tensor, Slow(), False
    assert reader(None) is not None
    thread.join()
    reader.tensor = tensor
    assert (seen, reader.paused, reader(None)) == ([False], True, None)


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
