"""Steps of a device into the recorder's ring: packed inside SGLang's graphs, noted by the host.

Per step the host leaves a note (the step without its arrays) and, where no graph does it, launches
the pack kernel. Nothing waits: at `settled` SGLang has waited for the step, and its words are there
or were lost.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ddtree_guard.device.pack import Pack, Packer
from ddtree_guard.errors import UsageError
from ddtree_guard.hooks.facts import facts_of
from ddtree_guard.hooks.flight import quietly
from ddtree_guard.hooks.observe import verify_width
from ddtree_guard.hooks.record import Record
from ddtree_guard.hooks.view import View
from ddtree_guard.recorder import Recorder
from ddtree_guard.recorder.ring import MAX_BYTES, bare, slot_words
from ddtree_guard.step import Step

LEAST = 8  # steps that the ring must hold; lanes are given up for them
FRAMES = 512  # kinds of steps remembered


@dataclass(slots=True)
class Bound:
    """The pack launch of one captured batch size, or of one eager step; None where it does not
    fit. `recorded`: the graph holds it.
    """

    pack: Pack | None
    recorded: bool = False


class Tape:
    """Feeds `recorder` from one device. Called by the device checker, for its own launches."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.packer: Packer | None = None
        self._stale = True  # warm-up and captures have counted steps of their own
        self._waits = -1  # the newest step, if a graph is to pack it
        self._models: dict[tuple[str, str], Step] = {}  # by state and path, without arrays
        self._frames: dict[Any, tuple[Step, Any]] = {}

    def open(self, view: View) -> Packer:
        """The ring for this server's batches, made once: graphs keep its address."""
        if self.packer is None:
            runner, lanes = view.runner, len(view.batch.req_pool_indices)
            facts = facts_of(type(view.backend))
            w = verify_width(view.backend, runner, facts, view.batch.spec_info)
            stated = getattr(runner.server_args, "speculative_num_draft_tokens", None) or 0
            w = max(w, int(stated))
            most = max(lanes, int(runner.req_to_token_pool.req_to_token.shape[0]))
            most = lanes_for(lanes, most, w, self.recorder.config.ring_steps)
            ring = self.recorder.open_ring(most, w, pinned=True)
            self.packer = Packer(ring, view.batch.seq_lens.device)
        return self.packer

    @quietly
    def prepare(self, launch: Any, view: View) -> None:
        """A batch size is about to be captured: bind and compile its pack launch."""
        self._stale = True
        launch.tape = self._bind(launch, view)
        if launch.tape.pack is not None:
            launch.tape.pack.launch()

    @quietly
    def capture(self, launch: Any) -> None:
        """Inside the captured region, and in the warm-up runs before it."""
        bound = launch.tape
        if bound is not None and bound.pack is not None:
            bound.pack.launch()
            bound.recorded = self._stale = True

    @quietly
    def step(self, launch: Any, record: Record, view: View) -> None:
        """A step is about to run."""
        record.w = launch.shape.w
        if launch.tape is None:
            launch.tape = self._bind(launch, view)
        if self._waits == record.step_id:  # built anew: the graph noted for it does not run
            self.recorder.unpacked(record.step_id)
        if self._stale and self.packer is not None:
            self.packer.realign()
            self._stale = False
        if record.step is not None:
            self._models[view.state, view.path] = bare(record.step)
        pack = launch.tape.pack
        noted = None if pack is None else self._note(launch, pack, view)
        if pack is None or noted is None:
            self.recorder.drop()
            self._stale |= launch.tape.recorded  # it runs all the same
            return
        self.recorder.packed(*noted, (record.step_id, record.rids))
        self._waits = record.step_id
        if not launch.tape.recorded:
            pack.launch()
            self._waits = -1

    @quietly
    def settled(self, record: Record) -> None:
        """SGLang has waited for the step: a step whose words are not there was lost."""
        if not self.recorder.arrived(record.step_id):
            self.recorder.drop()
            self._stale = True

    def _bind(self, launch: Any, view: View) -> Bound:
        buffers, shape = launch.buffers, launch.shape
        if shape.contract.chain:  # its rows follow each other; no array says so
            buffers = dataclasses.replace(buffers, parents=None, sizes=None)
        rows = shape.lanes * shape.w
        if buffers.positions is not None and buffers.positions.numel() != rows:  # mRoPE
            buffers = dataclasses.replace(buffers, positions=None)
        try:
            return Bound(self.open(view).bind(buffers, shape.lanes, shape.w))
        except UsageError:
            return Bound(None)

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
            held = self._frames[key] = (_frame(model, launch, view), pack.kinds(bs))
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
        layout__rows=dict(shape.rows),
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
    while lanes > least and MAX_BYTES // (slot_words(lanes, w) * 8) < min(LEAST, steps):
        lanes = max(least, lanes // 2)
    return lanes
