"""The last K steps of a process, in one block of memory that is allocated once.

A slot holds int64 words at fixed places: a header, then each field of FIELDS. The words of a step
come from the host (NumPy arrays and CPU tensors are copied) or from the device, whose pack kernel
writes them into pinned memory (see `device.pack`). What is not an array stays behind as a Step
without arrays, which steps of one shape may share.

The mask is kept as its tree columns only, one bit a cell, at the offsets that the kernel uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree_guard.step import ARRAY_SHAPES, PARTS, Step

MAX_BYTES = 8 << 20
HEADER = 4  # words: the number of this step, then spare ones
MARGIN = 8  # numbers left out by `realign`: more than a device can be ahead of the host
BITS = "mask.tree_bits"
# Field and its room in words, in terms of lanes L, width w and bit words per row.
FIELDS: Mapping[str, str] = {
    "layout.qo_indptr": "L+1", "layout.kv_indptr": "L+1", "layout.mask_indptr": "L+1",
    "layout.prefix_lens": "L", "tree.sizes": "L", "tree.tokens": "L*w", "tree.parents": "L*w",
    "positions.values": "L*w", "slots.out_cache_loc": "L*w", BITS: "L*w*words",
    "outcome.accept_lens": "L", "outcome.accept_index": "L*path", "outcome.predict": "L*w",
    "outcome.committed": "L*path",
}  # fmt: skip
PATH = 16  # columns of an accepted path that have room; a longer one is left out
OUTCOME = tuple(path for path in FIELDS if path.startswith("outcome."))
Kinds = dict[str, tuple[str, tuple[int, ...]]]  # field to dtype and shape, of those present


def bit_words(w: int) -> int:
    """64-bit words that hold one row's tree columns."""
    return -(-w // 64)


def room(lanes: int, w: int) -> dict[str, tuple[int, int]]:
    """Field to (first word, words) of a slot for `lanes` requests of `w` rows."""
    sizes = {"L": lanes, "L+1": lanes + 1, "L*w": lanes * w, "L*path": lanes * PATH}
    sizes["L*w*words"] = lanes * w * bit_words(w)
    places, at = {}, HEADER
    for path, size in FIELDS.items():
        places[path] = (at, sizes[size])
        at += sizes[size]
    return places


def slot_words(lanes: int, w: int) -> int:
    """Words of one slot."""
    begin, size = list(room(lanes, w).values())[-1]
    return begin + size


def bare(step: Step) -> Step:
    """The step without its arrays: what the ring keeps beside the words."""
    changes: dict[str, Any] = {}
    for part, kind in PARTS.items():
        names = [f.name for f in dataclasses.fields(kind) if f"{part}.{f.name}" in ARRAY_SHAPES]
        value = getattr(step, part)
        if any(getattr(value, name) is not None for name in names):
            changes[part] = dataclasses.replace(value, **dict.fromkeys(names))
    return dataclasses.replace(step, **changes)


@dataclass(slots=True)
class _Slot:
    """What is not in the words. `who` is (step id, rids) where steps share a base; `tokens` are
    the committed ones, per request.
    """

    number: int  # of the step, from 1
    base: Step
    kinds: Kinds
    who: tuple[int, tuple[str, ...]] | None = None
    tokens: tuple[tuple[int, ...], ...] | None = None


class Ring:
    """Steps in, the newest K of them out. `steps` may be fewer than asked for: `max_bytes` rules.

    `written` counts steps put in, `dropped` those that did not fit into a slot. One thread writes;
    any thread may take a snapshot.
    """

    def __init__(
        self, steps: int, lanes: int, w: int, max_bytes: int = MAX_BYTES, pinned: bool = False
    ) -> None:
        self.lanes, self.w = lanes, w
        self.places = room(lanes, w)
        self.words = slot_words(lanes, w)
        self.steps = max(0, min(steps, max_bytes // (self.words * 8)))
        self.tensor: Any = _pinned(self.steps, self.words) if pinned else None
        self.block = (
            np.zeros((self.steps, self.words), np.int64)
            if self.tensor is None
            else self.tensor.numpy()
        )
        self.written = self.dropped = self._sure = 0
        self._slots: list[_Slot | None] = [None] * self.steps

    @property
    def nbytes(self) -> int:
        """Memory of the block."""
        return int(self.block.nbytes)

    def fits(self, lanes: int, w: int) -> bool:
        """Whether a step of this size fits into a slot."""
        return self.steps > 0 and lanes <= self.lanes and w <= self.w

    def put(self, step: Step) -> bool:
        """Copy a step whose arrays are on the host. False, and counted, if it does not fit."""
        values = {path: _host(step.get(path)) for path in FIELDS if path != BITS}
        if not self._takes(step, values):
            self.dropped += 1
            return False
        at = self.written % self.steps
        self._slots[at] = None  # a snapshot taken meanwhile must not see half a step
        kinds = {}
        for path, value in values.items():
            if value is not None and value.size <= self.places[path][1]:
                kinds[path] = self._copy(at, path, value)
        self._copy_bits(at, step, kinds)
        self.written += 1
        self.block[at, 0] = self.written
        self._slots[at] = _Slot(self.written, bare(step), kinds)
        return True

    def note(self, base: Step, kinds: Kinds, who: tuple[int, tuple[str, ...]] | None = None) -> int:
        """The device packs a step into the next slot; here is what it does not write. Returns the
        step's number. `who` are its id and rids, for a base that many steps share.
        """
        at = self.written % self.steps
        self.written += 1
        self._slots[at] = _Slot(self.written, base, kinds, who)
        return self.written

    def unnote(self) -> None:
        """Take the newest note back: nothing was launched for it."""
        if self.written and self.steps:
            self._slots[(self.written - 1) % self.steps] = None
            self.written -= 1

    def realign(self) -> int:
        """The number of steps from which both sides count on, beyond what either has used: after
        warm-up and capture, or when a launch was lost. Steps that are known to have arrived stay;
        the words of later ones may be another step's.
        """
        seen = int(self.block[:, 0].max()) if self.steps else 0
        for at, slot in enumerate(self._slots):
            if slot is not None and slot.number > self._sure:
                self._slots[at] = None
        self.written = max(self.written, seen) + MARGIN
        return self.written

    def arrived(self, number: int) -> bool:
        """Whether the words of the step with this number, which the device has ended, are there,
        or newer ones.
        """
        there = self.steps > 0 and int(self.block[(number - 1) % self.steps, 0]) >= number
        self._sure = max(self._sure, number if there else 0)
        return there

    def outcome(self, number: int, values: Mapping[str, Any]) -> None:
        """Add host arrays of what verification decided to the step with this number."""
        slot = self._slots[(number - 1) % self.steps] if self.steps else None
        if slot is None or slot.number != number:
            return
        for path, value in values.items():
            array = _host(value)
            if array is not None and array.size <= self.places[path][1]:
                kinds = self._copy((number - 1) % self.steps, path, array)
                slot.kinds = {**slot.kinds, path: kinds}

    def committed(self, number: int, tokens: Sequence[Sequence[int]]) -> None:
        """Add the tokens that the step with this number committed, per request."""
        slot = self._slots[(number - 1) % self.steps] if self.steps else None
        if slot is not None and slot.number == number:
            slot.tokens = tuple(map(tuple, tokens))

    def snapshot(self) -> list[Step]:
        """Copies of the steps that are whole, oldest first."""
        steps, newest = [], self.written
        # Newest first: the oldest are overwritten while this thread waits for its turn.
        for number in range(newest, max(0, newest - self.steps), -1):
            at = (number - 1) % self.steps
            slot = self._slots[at]
            if slot is None or slot.number != number or self.block[at, 0] != number:
                continue  # overwritten, or its words have not arrived
            words = self.block[at].copy()
            if self._slots[at] is slot and self.block[at, 0] == number:
                steps.append(self._step(slot, words))
        return steps[::-1]

    def _takes(self, step: Step, values: Mapping[str, Any]) -> bool:
        return self.fits(step.padded_bs, step.w) and all(
            value is None
            or (
                value.dtype.kind in "iub"
                and (value.size <= self.places[path][1] or path in OUTCOME)
            )
            for path, value in values.items()
        )

    def _copy(self, at: int, path: str, value: Any) -> tuple[str, tuple[int, ...]]:
        begin, _ = self.places[path]
        np.copyto(self.block[at, begin : begin + value.size], value.reshape(-1), casting="unsafe")
        return value.dtype.name, value.shape

    def _copy_bits(self, at: int, step: Step, kinds: Kinds) -> None:
        bits = step.mask.tree_bits
        bits = tree_bits(step) if bits is None else _host(bits)
        if bits is None or bits.shape != (step.bs, step.w, -(-step.w // 8)):
            return
        begin, size = self.places[BITS]
        rows = self.block[at, begin : begin + size].view(np.uint8)
        rows = rows.reshape(-1, bit_words(self.w) * 8)[: step.bs * step.w]
        rows[:, : bits.shape[2]] = bits.reshape(-1, bits.shape[2])
        kinds[BITS] = ("uint8", bits.shape)

    def _step(self, slot: _Slot, words: Any) -> Step:
        changes: dict[str, Any] = {}
        for path, (dtype, shape) in slot.kinds.items():
            begin, size = self.places[path]
            if path == BITS:
                rows = words[begin : begin + size].view(np.uint8).reshape(-1, bit_words(self.w) * 8)
                value = rows[: shape[0] * shape[1], : shape[2]].reshape(shape)
            else:
                count = int(np.prod(shape))
                value = words[begin : begin + count].astype(dtype).reshape(shape)
            changes[path.replace(".", "__")] = np.ascontiguousarray(value)
        if slot.who is not None:
            changes["who__step_id"], changes["who__rids"] = slot.who
        if slot.tokens is not None and len(slot.tokens) == slot.base.bs:
            changes.setdefault("outcome__accept_lens", np.array(list(map(len, slot.tokens))))
            changes.setdefault("outcome__committed", _padded(slot.tokens))
        return slot.base.replace(**changes)


def tree_bits(step: Step) -> Any:
    """(bs, w, bytes) bits of the tree columns that the kernel reads, or None where they are not
    in this step. A cell outside the mask is 0.
    """
    layout, cells, w = step.layout, _host(step.mask.cells), step.w
    arrays = [_host(a) for a in (layout.mask_indptr, layout.qo_indptr, layout.prefix_lens)]
    if (
        cells is None
        or cells.ndim != 1
        or not len(cells)
        or any(
            a is None or a.ndim != 1 or len(a) < step.bs or a.dtype.kind not in "iu" for a in arrays
        )
    ):
        return None
    starts, rows, lens = (a.astype(np.int64) for a in arrays)
    if len(rows) < step.bs + 1:
        return None
    stride = lens[: step.bs] + np.diff(rows)[: step.bs]
    row, column = np.arange(w)[None, :, None], np.arange(w)[None, None, :]
    at = (starts[: step.bs] + lens[: step.bs])[:, None, None] + row * stride[:, None, None] + column
    inside = (at >= 0) & (at < len(cells)) & (column < np.diff(rows)[: step.bs, None, None])
    read = (cells[np.where(inside, at, 0)] != 0) & inside
    return np.packbits(read, axis=2, bitorder="little")


def _padded(rows: Sequence[Sequence[int]]) -> Any:
    """Rows of different lengths as one array, -1 behind their ends."""
    array = np.full((len(rows), max(map(len, rows), default=0)), -1, np.int64)
    for at, row in enumerate(rows):
        array[at, : len(row)] = row
    return array


def _host(value: Any) -> Any:
    """A host array as NumPy, without a copy; None for what is absent or on a device."""
    if value is None or isinstance(value, np.ndarray):
        return value
    if hasattr(value, "numpy") and getattr(value, "device", None) is not None:
        return value.detach().numpy() if value.device.type == "cpu" else None
    return None


def _pinned(steps: int, words: int) -> Any:
    import torch

    return torch.zeros((steps, words), dtype=torch.int64, pin_memory=torch.cuda.is_available())
