"""A ring in device memory for the recorder, into which the check's launch packs each step.

The programs are in `ring_program`; `Ring` (recorder.ring) reads slots of steps that the host has
waited for.

The ring stays on the device: a kernel that writes to host memory ends only when PCIe has
acknowledged it, which took 7 to 14 us a step on an H200.
"""

from __future__ import annotations

import operator
import threading
import time
from typing import Any, NamedTuple

import numpy as np
import torch

from ddtree_guard.device.operands import Buffers
from ddtree_guard.device.ring_program import PACKED
from ddtree_guard.errors import UsageError

LOOK_S = 0.001  # 8 MiB take a fifth of it
Tensor = Any
Kinds = dict[str, tuple[str, tuple[int, ...]]]  # field of a Step to dtype and shape


class Pack(NamedTuple):
    """What a launch packs besides its check: `has` are the bits of PACKED that are present, `place`
    the ring's tensor and the sizes that tell where in it.
    """

    place: tuple[Tensor, int, int, int]
    lanes: int
    w: int
    has: int

    def kinds(self, buffers: Buffers, bs: int) -> Kinds:
        """What a step of `bs` live requests in buffers like these leaves in a slot, for
        `Ring.place`.
        """
        has = {name for name, bit in PACKED.items() if self.has & bit}
        return _kinds(buffers, has, bs, self.lanes, self.w)


class Packer:
    """The slots of a `Ring` (`recorder.ring`) in one device's memory."""

    def __init__(self, ring: Any, device: torch.device | str) -> None:
        self.ring = ring
        self.tensor = torch.zeros((ring.steps, ring.words), dtype=torch.int64, device=device)
        self._sizes = (self.tensor, ring.steps, ring.lanes, ring.w)

    def restart(self) -> None:
        """The check counts from 1 again, after warm-up and capture: forget every step. Queued on
        the current stream; not capturable.
        """
        self.tensor[:, 0].zero_()
        self.ring.restart()

    def pack(self, buffers: Buffers, lanes: int, w: int, without: int = 0) -> Pack:
        """For `DeviceCheck.bind`: the arrays of a launch of `lanes` requests of `w` rows, but those
        whose bit of PACKED is in `without`.

        Raises UsageError for a launch that does not fit into a slot of the ring.
        """
        if not self.ring.fits(lanes, w):
            raise UsageError(
                f"a ring for {self.ring.lanes} requests of {self.ring.w} rows was expected to "
                f"hold the step, found {lanes} of {w}; make the ring larger."
            )
        has = ~without & _ALL
        if any(map(operator.is_, _arrays(buffers), _NOTHING)):  # an eager step asks anew: be quick
            has &= sum(bit for name, bit in PACKED.items() if getattr(buffers, name) is not None)
        if has & _MASK_NEEDS != _MASK_NEEDS:
            has &= ~PACKED["mask"]
        return Pack(self._sizes, lanes, w, has)

    def reader(self) -> Reader:
        """What the host calls to get the slots."""
        return Reader(self.tensor)


_arrays = operator.attrgetter(*PACKED)
_ALL, _NOTHING = sum(PACKED.values()), (None,) * len(PACKED)
_MASK_NEEDS = PACKED["mask"] | PACKED["qo_indptr"] | PACKED["mask_indptr"]


class Reader:
    """Copies a device's ring to the host on a stream of its own: beside what runs, from any thread.

    Returns a (steps, words) int64 array, `into` if that is given, or None where the device does
    not answer in `wait_s` seconds, or while `paused`. Raises what CUDA raises when the device has
    failed.
    """

    def __init__(self, tensor: Tensor, wait_s: float = 2.0) -> None:
        self.tensor, self.wait_s = tensor, wait_s
        self.paused = False
        self._lock = threading.Lock()
        self._cuda = tensor.device.type == "cuda"
        if self._cuda:
            self._stream = torch.cuda.Stream(tensor.device)
            self._arrived = torch.cuda.Event()
            self._host = torch.zeros(tensor.shape, dtype=torch.int64, pin_memory=True)

    def pause(self) -> None:
        """A graph is about to be captured, and CUDA breaks a capture if another thread asks for an
        event meanwhile. Waits for the copy that is under way. Whoever knows that captures are over
        resets `paused`.
        """
        with self._lock:
            self.paused = True

    def __call__(self, into: Any = None) -> Any:
        with self._lock:
            if self.paused:
                return None
            if not self._cuda:
                return _copied(self.tensor.numpy(), into)
            with torch.cuda.stream(self._stream):
                self._host.copy_(self.tensor, non_blocking=True)
                self._arrived.record(self._stream)
            end = time.monotonic() + self.wait_s
            # each look may have to wait for a busy interpreter, and makes it wait
            time.sleep(LOOK_S)
            while not self._arrived.query():
                if time.monotonic() > end:
                    return None
                time.sleep(LOOK_S)
            return _copied(self._host.numpy(), into)


def _copied(words: Any, into: Any) -> Any:
    """A copy, in the array that is given if any: fresh memory costs more than the copy."""
    if into is None:
        return words.copy()
    np.copyto(into, words)
    return into


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
