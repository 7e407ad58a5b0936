"""Steps of a device into the recorder's ring: packed by the check's launch, inside SGLang's graphs.

Per step the host leaves a note on the record: the step without its arrays. Once SGLang has waited
for the step, its verdict tells the slot.
"""

from __future__ import annotations

from typing import Any

from ddtree_guard.device.operands import Buffers, Shape
from ddtree_guard.device.pack import Pack, Packer
from ddtree_guard.device.ring_program import PACKED
from ddtree_guard.errors import UsageError
from ddtree_guard.hooks.facts import facts_of
from ddtree_guard.hooks.flight import quietly
from ddtree_guard.hooks.observe import verify_width
from ddtree_guard.hooks.record import Record
from ddtree_guard.hooks.view import View
from ddtree_guard.recorder import Recorder
from ddtree_guard.recorder.ring import (
    BITS,
    FIELDS,
    MAX_BYTES,
    OUTCOME,
    bare,
    slot_words,
    with_bits,
)
from ddtree_guard.step import Step

REUSED = (  # what a later step has overwritten and the ring does not hold
    "layout.kv_indices", "layout.prefix_lens_cpu", "slots.req_to_token", "tree.retrieve_index",
    "tree.retrieve_next_token", "tree.retrieve_next_sibling",
)  # fmt: skip
LATE = "the mask's prefix was read when a later step had begun; its tree columns are this step's"
LEAST = 8  # steps that the ring must hold; lanes are given up for them
FRAMES = 512  # kinds of steps remembered
# A chain's rows follow each other; no array says so.
NOT_IN_CHAINS = PACKED["parents"] | PACKED["depths"] | PACKED["sizes"]


class Tape:
    """Feeds `recorder` from one device. Called by the device checker, for its own launches."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.packer: Packer | None = None
        self.reader: Any = None
        self._models: dict[tuple[str, str], Step] = {}  # by state and path, without arrays
        self._frames: dict[Any, tuple[Step, Any]] = {}

    def open(self, view: View, device: Any) -> Packer:
        """The ring for this server's batches, made once: graphs keep its address."""
        if self.packer is None:
            runner, lanes = view.runner, len(view.batch.req_pool_indices)
            facts = facts_of(type(view.backend))
            w = verify_width(view.backend, runner, facts, view.batch.spec_info)
            stated = getattr(runner.server_args, "speculative_num_draft_tokens", None) or 0
            w = max(w, int(stated))
            most = max(lanes, int(runner.req_to_token_pool.req_to_token.shape[0]))
            most = lanes_for(lanes, most, w, self.recorder.config.ring_steps)
            ring = self.recorder.open_ring(most, w, on_device=True)
            self.packer = Packer(ring, device)
            self.reader = ring.fetch = self.packer.reader()
        return self.packer

    @quietly
    def pack(self, view: View, buffers: Buffers, shape: Shape) -> Pack | None:
        """What the check's launch for these buffers packs; None where a slot is too small."""
        without = NOT_IN_CHAINS if shape.contract.chain else 0
        positions = buffers.positions
        if positions is not None and positions.numel() != shape.lanes * shape.w:  # mRoPE
            without |= PACKED["positions"]
        try:
            return self.open(view, buffers.lens.device).pack(buffers, shape.lanes, shape.w, without)
        except UsageError:
            return None

    @quietly
    def restart(self) -> None:
        """The device check counts anew: warm-up and captures are over."""
        if self.packer is not None:
            self.packer.restart()
            self.reader.paused = False

    @quietly
    def pause(self) -> None:
        """A graph is about to be captured: ask nothing of the device until a step has run."""
        if self.reader is not None:
            self.reader.pause()

    @quietly
    def step(self, launch: Any, record: Record, view: View) -> None:
        """A step is about to run; an eager one has its check launched already."""
        record.w = launch.shape.w
        if record.step is not None:
            self._models[view.state, view.path] = bare(record.step)
        if launch.pack is not None:
            record.note = self._note(launch, launch.pack, view)

    @quietly
    def settled(self, record: Record) -> None:
        """The step's verdict is there: keep what its slot holds. Without one no slot is known."""
        if self.reader is not None:
            self.reader.paused = False
        if record.note is not None and record.checked:
            frame, kinds = record.note
            self.recorder.packed(record.mark, frame, kinds, (record.step_id, record.rids))
            record.kept = True
        elif self.packer is not None:
            self.packer.ring.passed(record.mark)

    @quietly
    def as_it_was(self, late: Step) -> Step | None:
        """A step that was read after its buffers had been reused, with what the device packed of
        it; None where that is gone. What neither the ring nor the step itself holds is left out.
        """
        kept = self.recorder.kept(late.who.step_id)
        if kept is None:
            return None
        changes = {path: kept.get(path) for path in FIELDS if path not in (*OUTCOME, BITS)}
        changes = {path: value for path, value in changes.items() if value is not None}
        changes["mask.cells"] = with_bits(late, kept)
        changes |= dict.fromkeys(REUSED)
        exempt = {**late.contract.not_checked, **dict.fromkeys(("M1", "M3", "M9"), LATE)}
        named = {path.replace(".", "__"): value for path, value in changes.items()}
        return late.replace(**named, contract__not_checked=exempt)

    def _note(self, launch: Any, pack: Pack, view: View) -> tuple[Step, Any] | None:
        """The step without its arrays, and what the pack leaves; None before one was read."""
        shape, bs = launch.shape, view.bs
        key = (view.state, view.path, shape.lanes, bs, shape.w, pack.has, shape.max_extend_len,
               *shape.rows.values())  # fmt: skip
        held = self._frames.get(key)
        if held is None:
            model = self._models.get((view.state, view.path))
            if model is None:
                return None
            if len(self._frames) >= FRAMES:
                self._frames.clear()
            held = self._frames[key] = (_frame(model, launch, view), pack.kinds(launch.buffers, bs))
        return held


def _frame(model: Step, launch: Any, view: View) -> Step:
    """The model with this launch's sizes. What no array and no size says is as it was there."""
    shape = launch.shape
    graph = view.path == "graph"
    return model.replace(
        bs=view.bs,
        padded_bs=shape.lanes,
        widths__w=shape.w,
        layout__max_extend_len=shape.max_extend_len,
        layout__rows={name: shape.rows.get(name, n) for name, n in model.layout.rows.items()},
        # an eager step's mask is as long as the step needs it, or lies in a buffer that may grow
        mask__capacity=model.mask.capacity if graph else None,
        mask__rids=None,
        slots__capacity={},
        graph__num_tokens=shape.rows.get("input_ids") if graph else None,
        contract=shape.contract,
    )


def lanes_for(least: int, most: int, w: int, steps: int) -> int:
    """Requests that a slot has room for: `most`, or fewer where that leaves too few steps; never
    fewer than `least`.
    """
    lanes = most
    while lanes > least and MAX_BYTES // (slot_words(lanes, w, outcome=False) * 8) < min(
        LEAST, steps
    ):
        lanes = max(least, lanes // 2)
    return lanes
