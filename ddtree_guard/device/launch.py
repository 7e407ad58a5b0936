"""`DeviceCheck`: owns the verdict buffer, launches bound operands, and reads verdicts back.

One step: `check(operands)` (or a graph replay that captured it), `close(outcome)`, `collect()`;
later `poll()`, where the host has already waited for the step. `check` and `close` may be captured:
they neither allocate nor synchronise. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch

from ddtree_guard.device.before import Before
from ddtree_guard.device.operands import (
    Buffers,
    Decision,
    Operands,
    Shape,
    Tensor,
    Tile,
    close_operands,
    table_operands,
    verify_operands,
)
from ddtree_guard.device.pack import Pack
from ddtree_guard.device.protocol import BITS, NO_OFFENDER, SLOTS, WORDS
from ddtree_guard.device.verdict import Verdict, decode

RING = 4
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # of builds with CUDA


class DeviceCheck:
    """The device checker of one worker on one device.

    `collected` counts steps read back, `checked` those of them whose build check ran, `lost` those
    whose verdict was overwritten before it was polled; `checked < collected` is an alarm.
    """

    def __init__(self, device: str | torch.device = "cuda") -> None:
        self.device = torch.device(device)
        self.state = torch.zeros(8, dtype=torch.int64, device=self.device)
        self.slots = torch.zeros((SLOTS, WORDS), dtype=torch.int64, device=self.device)
        self.launched = self.collected = self.checked = self.lost = 0
        self._cuda = self.device.type == "cuda"
        self._index = self.state.device.index or 0
        self._raw: int | None = None  # address and object of the stream of the newest collect
        self._stream: Any = None
        self._ring = [
            torch.zeros((SLOTS, WORDS), dtype=torch.int64, pin_memory=self._cuda)
            for _ in range(RING)
        ]
        # an element of a view of bytes is a plain integer; of an array, an object to be made
        self._words = [memoryview(rows.view(-1).numpy()) for rows in self._ring]
        self._arrived = [torch.cuda.Event() for _ in range(RING)] if self._cuda else []
        self._polled = 0  # collects looked at
        self._last = 0  # step counter of the newest verdict returned
        self._runs = 0  # its launches of the build check
        self._no_outcome = self._closing()
        self.reset()

    def reset(self) -> None:
        """Forget open bits, after warm-up and capture on dummy batches. Not capturable."""
        self.slots.zero_()
        self.slots[:, 8 : 8 + len(BITS)] = NO_OFFENDER
        self.state.zero_()
        self._last = self._runs = 0
        self._polled = self.collected

    def bind(
        self, buffers: Buffers, shape: Shape, tile: Tile | None = None, pack: Pack | None = None
    ) -> Operands:
        """Operands of the build check, which also packs the step where a `pack` is given. Compiles
        on first use of a kind: call before capture.
        """
        return verify_operands(self.state, self.slots, buffers, shape, tile, pack)

    def bind_table(
        self, buffers: Buffers, shape: Shape, table: Tensor, rows: Tensor, **more: Any
    ) -> Operands:
        """Operands of K3 and K4 for the eager pre-replay hook."""
        return table_operands(self.state, self.slots, buffers, shape, table, rows, **more)

    def bind_before(self, buffers: Buffers, shape: Shape, table: Tensor, rows: Tensor) -> Before:
        """What writes bs and the trees as well, in the same launch."""

        def operands(trees: int, given: tuple[Tensor, ...]) -> Operands:
            return self.bind_table(buffers, shape, table, rows, trees=trees, given=given)

        return Before(operands, shape.w)

    def bind_outcome(self, buffers: Buffers, shape: Shape, decision: Decision) -> Operands:
        """Operands that close a step with rules A1 to A3."""
        return close_operands(self.state, self.slots, buffers, shape, decision)

    def check(self, operands: Operands) -> None:
        """Queue a check on the current stream."""
        self.launched += 1
        operands.launch()

    def close(self, outcome: Operands | None = None) -> None:
        """Queue the end of the step, with the acceptance rules where their operands are given."""
        (outcome or self._no_outcome).launch()

    def collect(self) -> None:
        """Queue the copy of the verdict slots to the host on the current stream. Not capturable."""
        at = self.collected % RING
        self._ring[at].copy_(self.slots, non_blocking=True)
        if self._cuda:
            raw = _raw_stream(self._index)
            if raw != self._raw:  # making the object takes longer than recording the event
                self._raw, self._stream = raw, torch.cuda.current_stream(self.device)
            self._arrived[at].record(self._stream)
        self.collected += 1

    def poll(self) -> list[Verdict]:
        """Verdicts that have arrived since the last poll, oldest first. Never waits.

        A collect that brought no new step adds to `collected` only.
        """
        found: list[Verdict] = []
        overwritten = self.collected - RING - self._polled
        self._polled += max(0, overwritten)
        while self._polled < self.collected:
            at = self._polled % RING
            if self._cuda and not self._arrived[at].query():
                break
            self._polled += 1
            found += self._fresh(self._words[at])
        return found

    @property
    def coverage(self) -> float:
        """Steps checked over steps collected and polled; 1.0 when nothing was."""
        return self.checked / self._polled if self._polled else 1.0

    def _fresh(self, words: Any) -> list[Verdict]:
        """The verdicts in a copy of the slots that are newer than the last one returned."""
        fresh = self._next(words) or self._newer(words)
        for verdict in fresh:
            self.lost += verdict.step - self._last - 1
            self.checked += verdict.launches > self._runs
            self._last, self._runs = verdict.step, verdict.launches
        return fresh

    def _next(self, words: Any) -> list[Verdict]:
        """The verdicts of the steps that follow the last one, each where it has to be: nearly
        always one, and nothing else is looked at.
        """
        found: list[Verdict] = []
        step = self._last + 1
        while len(found) < SLOTS:
            at = (step - 1) % SLOTS * WORDS
            verdict = decode(words[at : at + WORDS]) if words[at + 1] == step else None
            if verdict is None:
                break
            found.append(verdict)
            step += 1
        return found

    def _newer(self, words: Any) -> list[Verdict]:
        """All verdicts that are newer than the last one, where some were lost."""
        signed = [decode(words[at : at + WORDS]) for at in range(0, SLOTS * WORDS, WORDS)]
        newer = [v for v in signed if v is not None and v.step > self._last]
        return sorted(newer, key=lambda verdict: verdict.step)

    def _closing(self) -> Operands:
        empty = Buffers(live_count=self.state, lens=self.state)
        return close_operands(self.state, self.slots, empty, Shape(1, 1))
