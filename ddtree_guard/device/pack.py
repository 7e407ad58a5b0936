"""One launch packs a step's small arrays into a ring in device memory, beside the check.

The slot is the check's own count of launches, which `verify_kernel` has written just before in the
same stream: so the launch can be captured with the check, every replay fills the next slot without
the host, no word is read and written by different programs, and the step's verdict tells the host
which slot holds it. `Ring` (recorder.ring) reads slots of steps that the host has waited for.

The ring stays on the device: a kernel that writes to host memory ends only when PCIe has
acknowledged it, which took 7 to 14 us a step on an H200.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ddtree_guard.device.operands import Buffers, bind
from ddtree_guard.errors import UsageError

Tensor = Any
Kinds = dict[str, tuple[str, tuple[int, ...]]]  # field of a Step to dtype and shape
HAS = {"tokens": 1, "parents": 2, "positions": 4, "out_cache_loc": 8, "mask": 16, "sizes": 32,
       "qo_indptr": 64, "kv_indptr": 128, "mask_indptr": 256, "depths": 512}  # fmt: skip
_constant: Any = int if triton.knobs.runtime.interpret else tl.constexpr
(cTOKENS, cPARENTS, cPOSITIONS, cSLOTS, cMASK, cSIZES, cQO, cKV, cMI, cDEPTHS) = map(
    _constant, HAS.values()
)

PACK_ARGS = [
    "state", "ring", "lens", "qo", "kv", "mi", "sizes", "mask", "tokens", "parents", "depths",
    "positions", "slots", "lanes", "w", "steps", "words", "numel", "at_qo", "at_kv", "at_mi",
    "at_lens", "at_sizes", "at_tokens", "at_parents", "at_depths", "at_positions", "at_slots",
    "at_bits", "row_words",
]  # fmt: skip


@triton.jit
def _rows(
    slot: tl.tensor, at: tl.tensor, mine: tl.tensor, tokens: tl.tensor, parents: tl.tensor,
    depths: tl.tensor, positions: tl.tensor, slots: tl.tensor, at_tokens: tl.tensor,
    at_parents: tl.tensor, at_depths: tl.tensor, at_positions: tl.tensor, at_slots: tl.tensor,
    HAS: tl.constexpr,
) -> None:  # fmt: skip
    """One value a row. All loads come before the first store: a store may alias a later load, so
    the compiler would wait for each.
    """
    if HAS & cTOKENS:
        token = tl.load(tokens + at, mine, 0).to(tl.int64)
    if HAS & cPARENTS:
        parent = tl.load(parents + at, mine, 0).to(tl.int64)
    if HAS & cDEPTHS:
        depth = tl.load(depths + at, mine, 0).to(tl.int64)
    if HAS & cPOSITIONS:
        position = tl.load(positions + at, mine, 0).to(tl.int64)
    if HAS & cSLOTS:
        place = tl.load(slots + at, mine, 0).to(tl.int64)
    if HAS & cTOKENS:
        tl.store(slot + at_tokens + at, token, mine)
    if HAS & cPARENTS:
        tl.store(slot + at_parents + at, parent, mine)
    if HAS & cDEPTHS:
        tl.store(slot + at_depths + at, depth, mine)
    if HAS & cPOSITIONS:
        tl.store(slot + at_positions + at, position, mine)
    if HAS & cSLOTS:
        tl.store(slot + at_slots + at, place, mine)


@triton.jit
def _requests(
    slot: tl.tensor, lanes: tl.tensor, lens: tl.tensor, qo: tl.tensor, kv: tl.tensor,
    mi: tl.tensor, sizes: tl.tensor, at_qo: tl.tensor, at_kv: tl.tensor, at_mi: tl.tensor,
    at_lens: tl.tensor, at_sizes: tl.tensor, HAS: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """One value a request, of all of them."""
    at = tl.arange(0, LANES)
    one, more = at < lanes, at <= lanes
    length = tl.load(lens + at, one, 0).to(tl.int64)
    if HAS & cQO:
        q = tl.load(qo + at, more, 0).to(tl.int64)
    if HAS & cKV:
        k = tl.load(kv + at, more, 0).to(tl.int64)
    if HAS & cMI:
        m = tl.load(mi + at, more, 0).to(tl.int64)
    if HAS & cSIZES:
        size = tl.load(sizes + at, one, 0).to(tl.int64)
    tl.store(slot + at_lens + at, length, one)
    if HAS & cQO:
        tl.store(slot + at_qo + at, q, more)
    if HAS & cKV:
        tl.store(slot + at_kv + at, k, more)
    if HAS & cMI:
        tl.store(slot + at_mi + at, m, more)
    if HAS & cSIZES:
        tl.store(slot + at_sizes + at, size, one)


@triton.jit(do_not_specialize=PACK_ARGS, do_not_specialize_on_alignment=PACK_ARGS)
def pack_kernel(
    state: tl.tensor, ring: tl.tensor, lens: tl.tensor, qo: tl.tensor, kv: tl.tensor,
    mi: tl.tensor, sizes: tl.tensor, mask: tl.tensor, tokens: tl.tensor, parents: tl.tensor,
    depths: tl.tensor, positions: tl.tensor, slots: tl.tensor, lanes: tl.int32, w: tl.int32,
    steps: tl.int32, words: tl.int32, numel: tl.int64, at_qo: tl.int32, at_kv: tl.int32,
    at_mi: tl.int32, at_lens: tl.int32, at_sizes: tl.int32, at_tokens: tl.int32,
    at_parents: tl.int32, at_depths: tl.int32, at_positions: tl.int32, at_slots: tl.int32,
    at_bits: tl.int32, row_words: tl.int32,
    HAS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (lanes, blocks): row blocks of one request, first those of its rows, then for each word
    of mask bits, and at last one (used for request 0) of what is per request.
    """
    lane = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    blocks = tl.cdiv(w, ROWS)
    number = tl.load(state + 2)
    slot = ring + (number % steps) * words
    row = (part % blocks) * ROWS + tl.arange(0, ROWS)
    mine = row < w
    at = lane * w + row
    if part < blocks:
        _rows(
            slot, at, mine, tokens, parents, depths, positions, slots, at_tokens, at_parents,
            at_depths, at_positions, at_slots, HAS,
        )  # fmt: skip
    elif part == tl.num_programs(1) - 1:
        if lane == 0:
            tl.store(slot, number)
            _requests(
                slot, lanes, lens, qo, kv, mi, sizes, at_qo, at_kv, at_mi, at_lens, at_sizes,
                HAS, LANES,
            )  # fmt: skip
    elif HAS & cMASK:
        word = part // blocks - 1
        s = tl.load(lens + lane).to(tl.int64)
        rows = tl.load(qo + lane + 1).to(tl.int64) - tl.load(qo + lane).to(tl.int64)
        begin = tl.load(mi + lane).to(tl.int64) + row.to(tl.int64) * (s + rows) + s
        column = word * 64 + tl.arange(0, 64)
        cell = begin[:, None] + column[None, :]
        inside = mine[:, None] & (column < w)[None, :] & (column[None, :] < rows)
        inside = inside & (cell >= 0) & (cell < numel)
        seen = tl.load(mask + cell, inside, 0) != 0
        bits = tl.sum(seen.to(tl.int64) << tl.arange(0, 64).to(tl.int64)[None, :], 1)
        tl.store(slot + at_bits + at * row_words + word, bits, mine)


@dataclass(frozen=True, slots=True)
class Pack:
    """One bound launch, and what it writes. `has` are the bits of HAS that are present."""

    launch: Callable[[], None]
    buffers: Buffers
    lanes: int
    w: int
    has: int
    keep: tuple[Any, ...] = ()

    def kinds(self, bs: int) -> Kinds:
        """What a step of `bs` live requests leaves in a slot, for `Ring.note`."""
        return _kinds(self.buffers, {n for n in HAS if self.has & HAS[n]}, bs, self.lanes, self.w)


class Packer:
    """Binds pack launches to the slots of a `Ring` (`recorder.ring`) in one device's memory.

    `state` is that of the `DeviceCheck` beside which the launches run.
    """

    def __init__(self, ring: Any, state: Tensor) -> None:
        self.ring, self.state = ring, state
        self.tensor = torch.zeros((ring.steps, ring.words), dtype=torch.int64, device=state.device)

    def restart(self) -> None:
        """The check counts from 1 again, after warm-up and capture: forget every step. Queued on
        the current stream; not capturable.
        """
        self.tensor[:, 0].zero_()
        self.ring.restart()

    def bind(self, buffers: Buffers, lanes: int, w: int) -> Pack:
        """Bind the arrays of a launch: `lanes` requests of `w` rows.

        Compiles on first use of a kind: call before capture. Raises UsageError for a launch that
        does not fit into a slot of the ring.
        """
        if not self.ring.fits(lanes, w):
            raise UsageError(
                f"a ring for {self.ring.lanes} requests of {self.ring.w} rows was expected to "
                f"hold the step, found {lanes} of {w}; make the ring larger."
            )
        has = {name for name in HAS if getattr(buffers, name) is not None}
        if not {"mask", "qo_indptr", "mask_indptr"} <= has:
            has.discard("mask")
        places = {path: begin for path, (begin, _) in self.ring.places.items()}
        tensors = [_flat(getattr(buffers, name), self.state) for name in _TENSORS]
        mask = buffers.mask
        numbers = (
            lanes, w, self.ring.steps, self.ring.words, 0 if mask is None else mask.numel(),
            *(places[path] for path in _PLACES), -(-self.ring.w // 64),
        )  # fmt: skip
        rows, bits = 16, sum(HAS[name] for name in has)
        blocks = triton.cdiv(w, rows) * (1 + (-(-w // 64) if "mask" in has else 0)) + 1
        launch = bind(
            pack_kernel, (lanes, blocks),
            (self.state, self.tensor, *tensors, *numbers), 4,
            HAS=bits, ROWS=rows, LANES=triton.next_power_of_2(lanes + 1),
        )  # fmt: skip
        return Pack(launch, buffers, lanes, w, bits, (tensors, self.tensor))

    def reader(self) -> Reader:
        """What the host calls to get the slots."""
        return Reader(self.tensor)


class Reader:
    """Copies a device's ring to the host on a stream of its own: beside what runs, from any thread.

    Returns a (steps, words) int64 array, or None where the device does not answer in `wait_s`
    seconds. Raises what CUDA raises when the device has failed.
    """

    def __init__(self, tensor: Tensor, wait_s: float = 2.0) -> None:
        self.tensor, self.wait_s = tensor, wait_s
        self._lock = threading.Lock()
        self._cuda = tensor.device.type == "cuda"
        if self._cuda:
            self._stream = torch.cuda.Stream(tensor.device)
            self._host = torch.zeros(tensor.shape, dtype=torch.int64, pin_memory=True)

    def __call__(self) -> Any:
        if not self._cuda:
            return self.tensor.numpy().copy()
        with self._lock, torch.cuda.stream(self._stream):
            self._host.copy_(self.tensor, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
            end = time.monotonic() + self.wait_s
            while not arrived.query():
                if time.monotonic() > end:
                    return None
                time.sleep(0.0002)
            return self._host.numpy().copy()


_TENSORS = (
    "lens", "qo_indptr", "kv_indptr", "mask_indptr", "sizes", "mask", "tokens", "parents",
    "depths", "positions", "out_cache_loc",
)  # fmt: skip
_PLACES = (
    "layout.qo_indptr", "layout.kv_indptr", "layout.mask_indptr", "layout.prefix_lens",
    "tree.sizes", "tree.tokens", "tree.parents", "tree.depths", "positions.values",
    "slots.out_cache_loc", "mask.tree_bits",
)  # fmt: skip


def _flat(tensor: Tensor, spare: Tensor) -> Tensor:
    """The tensor, bool as bytes; `spare` where there is none."""
    if tensor is None:
        return spare
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _kinds(buffers: Buffers, has: set[str], bs: int, lanes: int, w: int) -> Kinds:
    """dtype and shape of each field as a Step holds it."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "qo_indptr": ("layout.qo_indptr", (lanes + 1,)),
        "kv_indptr": ("layout.kv_indptr", (lanes + 1,)),
        "mask_indptr": ("layout.mask_indptr", (lanes + 1,)),
        "sizes": ("tree.sizes", (bs,)),
        "tokens": ("tree.tokens", (bs, w)),
        "parents": ("tree.parents", (bs, w)),
        "depths": ("tree.depths", (bs, w)),
        "positions": ("positions.values", (lanes * w,)),
        "out_cache_loc": ("slots.out_cache_loc", (lanes * w,)),
    }
    kinds: Kinds = {"layout.prefix_lens": (_name(buffers.lens), (lanes,))}
    for name, (path, shape) in shapes.items():
        if name in has:
            kinds[path] = (_name(getattr(buffers, name)), shape)
    if "mask" in has:
        kinds["mask.tree_bits"] = ("uint8", (bs, w, -(-w // 8)))
    return kinds


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
