"""The last K steps of a process, in one block of memory that is allocated once.

A slot holds int64 words at fixed places: a header, then each field of FIELDS. The words of a step
come from the host (NumPy arrays and CPU tensors are copied) or lie in a device's memory, where its
pack kernel has put them (see `device.pack`). What is not an array stays behind as a Step without
arrays, which steps of one shape may share.

The mask is kept as its tree columns only, one bit a cell, at the offsets that the kernel uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree_guard.step import ARRAY_SHAPES, PARTS, Step

MAX_BYTES = 8 << 20
HEADER = 4  # words: the mark of this step, then spare ones
AHEAD = 6  # slots that a device may be writing: more steps than can be in flight
MEANWHILE = 3  # more steps than a device can begin while its ring is copied
BITS = "mask.tree_bits"
# Field and its room in words, in terms of lanes L, width w and bit words per row.
FIELDS: Mapping[str, str] = {
    "layout.qo_indptr": "L+1", "layout.kv_indptr": "L+1", "layout.mask_indptr": "L+1",
    "layout.prefix_lens": "L", "tree.sizes": "L", "tree.tokens": "L*w", "tree.parents": "L*w",
    "tree.depths": "L*w", "positions.values": "L*w", "slots.out_cache_loc": "L*w",
    BITS: "L*w*words",
    "outcome.accept_lens": "L", "outcome.accept_index": "L*path", "outcome.predict": "L*w",
    "outcome.committed": "L*path",
}  # fmt: skip
PATH = 16  # columns of an accepted path that have room; a longer one is left out
OUTCOME = tuple(path for path in FIELDS if path.startswith("outcome."))
Kinds = dict[str, tuple[str, tuple[int, ...]]]  # field to dtype and shape, of those present


def bit_words(w: int) -> int:
    """64-bit words that hold one row's tree columns."""
    return -(-w // 64)


def room(lanes: int, w: int, outcome: bool = True) -> dict[str, tuple[int, int]]:
    """Field to (first word, words) of a slot for `lanes` requests of `w` rows; with the fields of
    the outcome or without.
    """
    sizes = {"L": lanes, "L+1": lanes + 1, "L*w": lanes * w, "L*path": lanes * PATH}
    sizes["L*w*words"] = lanes * w * bit_words(w)
    places, at = {}, HEADER
    for path, size in FIELDS.items():
        if outcome or path not in OUTCOME:
            places[path] = (at, sizes[size])
            at += sizes[size]
    return places


def slot_words(lanes: int, w: int, outcome: bool = True) -> int:
    """Words of one slot."""
    begin, size = list(room(lanes, w, outcome).values())[-1]
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
    """What is not in the words. `mark` is what the header must hold; `who` is (step id, rids) where
    steps share a base; `tokens` are the committed ones, per request.
    """

    number: int  # of the step, from 1
    mark: int
    base: Step
    kinds: Kinds
    who: tuple[int, tuple[str, ...]] | None = None
    tokens: tuple[tuple[int, ...], ...] | None = None


@dataclass(slots=True)
class _Copy:
    """A device's ring as it was copied: its words, the ring's `written` before, its slots before
    and after, and the newest mark that the host had waited for after.
    """

    block: Any
    written: int
    before: list[_Slot | None]
    after: list[_Slot | None]
    newest: int


class Ring:
    """Steps in, the newest K of them out. `steps` may be fewer than asked for: `max_bytes` rules.

    `written` counts steps put in, `dropped` those that were not kept. One thread writes; any thread
    may take a snapshot. A ring `on_device` gets its words by `fetch`, a call that returns a copy of
    all slots or None, in the array that it is given if any; `drain` keeps one for the time when the
    device does not answer any more.
    """

    def __init__(
        self, steps: int, lanes: int, w: int, max_bytes: int = MAX_BYTES, on_device: bool = False
    ) -> None:
        self.lanes, self.w, self.on_device = lanes, w, on_device
        # what a device decides stays there; the committed tokens come from the host
        self.places = room(lanes, w, outcome=not on_device)
        self.words = slot_words(lanes, w, outcome=not on_device)
        more = AHEAD if on_device else 0
        self.steps = max(0, min(steps + more, max_bytes // (self.words * 8)))
        self.block = np.zeros((0 if on_device else self.steps, self.words), np.int64)
        self.fetch: Callable[[Any], Any] | None = None
        self.written = self.dropped = 0
        self._newest = 0  # the mark that the device wrote last, as far as is known
        self._slots: list[_Slot | None] = [None] * self.steps
        self._where: dict[int, int] = {}  # number of a step to its slot
        self._kept: _Copy | None = None  # the newest drained one
        self._spare: Any = None  # room for the next

    @property
    def nbytes(self) -> int:
        """Memory of the block, wherever it lies."""
        return self.steps * self.words * 8

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
        self._clear(at)  # a snapshot taken meanwhile must not see half a step
        kinds = {}
        for path, value in values.items():
            if value is not None and value.size <= self.places[path][1]:
                kinds[path] = self._copy(at, path, value)
        self._copy_bits(at, step, kinds)
        self.block[at, 0] = self.written + 1
        self._set(at, self.written + 1, bare(step), kinds)
        return True

    def place(self, mark: int, base: Step, kinds: Kinds, who: tuple[int, tuple[str, ...]]) -> None:
        """The host has waited for a step that the device packed under this mark. `who` are its id
        and rids, for a base that many steps share.
        """
        self._newest = mark
        self._set(mark % self.steps, mark, base, kinds, who)

    def passed(self, mark: int) -> None:
        """The host has waited for a step with this mark, of which nothing is placed."""
        self._newest = mark

    def restart(self) -> None:
        """Forget every step: the device counts its marks from 1 again."""
        self._newest = 0
        self._slots, self._where, self._kept = [None] * self.steps, {}, None

    def _set(self, at: int, mark: int, *rest: Any) -> None:
        self._clear(at)
        self.written += 1
        self._where[self.written] = at
        self._slots[at] = _Slot(self.written, mark, *rest)

    def _clear(self, at: int) -> None:
        old, self._slots[at] = self._slots[at], None
        if old is not None:
            self._where.pop(old.number, None)

    def _slot(self, number: int) -> _Slot | None:
        at = self._where.get(number)
        return None if at is None else self._slots[at]

    def outcome(self, number: int, values: Mapping[str, Any]) -> None:
        """Add host arrays of what verification decided to the step with this number."""
        slot = self._slot(number)
        if slot is None or self.on_device:
            return
        for path, value in values.items():
            array = _host(value)
            if array is not None and array.size <= self.places[path][1]:
                kinds = self._copy(self._where[number], path, array)
                slot.kinds = {**slot.kinds, path: kinds}

    def committed(self, number: int, tokens: Sequence[Sequence[int]]) -> None:
        """Add the tokens that the step with this number committed, per request."""
        slot = self._slot(number)
        if slot is not None:
            slot.tokens = tuple(map(tuple, tokens))

    def snapshot(self) -> list[Step]:
        """Copies of the steps that are whole, oldest first."""
        found = self._fetched() if self.on_device else self._copied()
        found.sort(key=lambda pair: pair[0].number)
        return [self._step(slot, words) for slot, words in found]

    def drain(self) -> None:
        """Keep what a device's ring holds now. It happens again and again beside a serving thread
        that needs the interpreter: what the copy is worth is found out when somebody asks.
        """
        slots, kept = self._slots, self._kept
        if not self.on_device or (kept is not None and kept.written == self.written):
            return
        copied = self._copy_of_device(self._spare)
        if copied is not None:
            self._spare, self._kept = None if kept is None else kept.block, copied
            if self._slots is not slots:  # a restart: it may have come before this one was kept
                self._kept = None

    def _copied(self) -> list[tuple[_Slot, Any]]:
        found = []
        # Newest first: the oldest are overwritten while this thread waits for its turn.
        for at in sorted(range(self.steps), key=self._age):
            slot = self._slots[at]
            if slot is not None and self.block[at, 0] == slot.mark:
                words = self.block[at].copy()
                if self._slots[at] is slot and self.block[at, 0] == slot.mark:
                    found.append((slot, words))
        return found

    def _age(self, at: int) -> int:
        slot = self._slots[at]
        return 0 if slot is None else -slot.number

    def _fetched(self) -> list[tuple[_Slot, Any]]:
        """Slots and words of the device; what was kept last where it does not answer."""
        copied = self._copy_of_device()
        if copied is not None:
            return self._whole(copied)
        while (kept := self._kept) is not None:
            found = [(slot, words.copy()) for slot, words in self._whole(kept)]
            if self._kept is kept:  # nobody has begun to write to its words
                return found
        return []

    def _copy_of_device(self, into: Any = None) -> _Copy | None:
        """What lies on the device; None where it does not answer."""
        written, before = self.written, list(self._slots)
        try:
            block = None if self.fetch is None else self.fetch(into)
        except RuntimeError:  # CUDA has failed
            block = None
        if block is None:
            return None
        return _Copy(block, written, before, list(self._slots), self._newest)

    def _whole(self, copied: _Copy) -> list[tuple[_Slot, Any]]:
        """Slots and words of a copy: those whose words were there before it began, and are not
        overwritten.
        """
        block = copied.block
        written = int(block[:, 0].max(initial=0))  # nobody may have waited for these steps
        return [
            (slot, block[at])
            for at, slot in enumerate(copied.before)
            if slot is not None
            and copied.after[at] is slot
            and block[at, 0] == slot.mark
            and not self._torn(slot.mark, copied.newest, written)
        ]

    def _torn(self, mark: int, newest: int, written: int) -> bool:
        """Whether the slot of this mark may have been overwritten while it was copied: by a step
        around the newest one, whose words come before its own mark.
        """
        first = max(newest, written) - AHEAD
        last = max(newest + AHEAD, written + MEANWHILE)
        other = last - (last - mark) % self.steps  # the last of them that has this slot
        return other > max(mark, first)

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
    cells, places = _host(step.mask.cells), _tree_cells(step)
    if cells is None or cells.ndim != 1 or not len(cells) or places is None:
        return None
    at, inside = places
    inside = inside & (at < len(cells))
    read = (cells[np.where(inside, at, 0)] != 0) & inside
    return np.packbits(read, axis=2, bitorder="little")


def with_bits(step: Step, kept: Step) -> Any:
    """The step's mask cells with the tree columns of `kept`, which holds bits; None without."""
    cells, bits, places = _host(step.mask.cells), kept.mask.tree_bits, _tree_cells(kept)
    if cells is None or cells.ndim != 1 or bits is None or places is None:
        return None
    at, inside = places
    inside = inside & (at < len(cells))
    read = np.unpackbits(bits, axis=2, bitorder="little")[:, :, : kept.w]
    cells = cells.copy()
    cells[at[inside]] = read[inside]
    return cells


def _tree_cells(step: Step) -> tuple[Any, Any] | None:
    """(bs, w, w) places of the tree columns in the mask, and which of them are any; None where the
    offsets are not in this step.
    """
    layout, w = step.layout, step.w
    arrays = [_host(a) for a in (layout.mask_indptr, layout.qo_indptr, layout.prefix_lens)]
    if any(
        a is None or a.ndim != 1 or len(a) < step.bs or a.dtype.kind not in "iu" for a in arrays
    ):
        return None
    starts, rows, lens = (a.astype(np.int64) for a in arrays)
    if len(rows) < step.bs + 1:
        return None
    stride = lens[: step.bs] + np.diff(rows)[: step.bs]
    row, column = np.arange(w)[None, :, None], np.arange(w)[None, None, :]
    at = (starts[: step.bs] + lens[: step.bs])[:, None, None] + row * stride[:, None, None] + column
    return at, (at >= 0) & (column < np.diff(rows)[: step.bs, None, None])


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
