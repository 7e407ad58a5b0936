"""The flight recorder of one process: what the last seconds were, on disk before anyone asks.

The serving thread calls `step`, `accepted` and `finding`; none of them raises, waits for the device
or for the disk, except that the first finding of a quiet time is written at once. A thread of its
own writes the dumps that signals and heuristics ask for, and the trails of requests gone idle.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from ddtree_guard.config import Config
from ddtree_guard.dump.write import DumpWriter, Notes
from ddtree_guard.recorder import signals
from ddtree_guard.recorder.heuristics import Heuristics
from ddtree_guard.recorder.ring import OUTCOME, Ring
from ddtree_guard.recorder.trail import Trails
from ddtree_guard.rule import Finding
from ddtree_guard.step import Step

__all__ = ["Recorder", "Ring", "Trails"]

log = logging.getLogger("ddtree_guard")
QUIET_S = 30.0  # after a dump, further triggers of its kind are counted only
SWEEP_S = 5.0
P = ParamSpec("P")
R = TypeVar("R")


def _harmless(
    method: Callable[Concatenate[Recorder, P], R],
) -> Callable[Concatenate[Recorder, P], R | None]:
    """Count the recorder's own faults; serving goes on."""

    @functools.wraps(method)
    def call(self: Recorder, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            self.faults += 1
            if self.faults == 1:
                log.warning("ddtree_guard: the recorder failed; serving continues", exc_info=True)
            return None

    return call


class Recorder:
    """Ring, trails and triggers of one process.

    `dumps` counts dumps written, `faults` errors of the recorder itself. `ring` is None until the
    first step, or until `open_ring`. `clock` gives seconds that never go back.
    """

    def __init__(
        self,
        config: Config,
        writer: DumpWriter,
        rank: str = "TP0",
        clock: Callable[[], float] = time.monotonic,
        quiet_s: float = QUIET_S,
    ) -> None:
        self.config, self.writer = config, writer
        self.clock, self.quiet_s = clock, quiet_s
        hide = writer.redactor.request if config.redact else None
        self.trails = Trails(writer.folder, rank, hide)
        self.heuristics = Heuristics()
        self.ring: Ring | None = None
        self.doctor: Sequence[str] = ()
        self.dumps = self.faults = 0
        self._numbers: dict[int, int] = {}  # step id to its number in the ring
        self._since: dict[str, float] = {}
        self._suppressed = 0
        self._writing = threading.RLock()
        # SimpleQueue.put may be called from a signal handler; a lock or an Event may not.
        self._asked: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._undo: Callable[[], bool] | None = None

    # --- the serving thread ---------------------------------------------------------------------
    def open_ring(self, lanes: int, w: int, pinned: bool = False) -> Ring:
        """Allocate the ring for steps of at most `lanes` requests of `w` rows."""
        self.ring = Ring(self.config.ring_steps, lanes, w, pinned=pinned)
        return self.ring

    @_harmless
    def step(self, step: Step, checked: bool = True) -> None:
        """Keep a step whose arrays are on the host."""
        if self.ring is None or (
            not self.ring.fits(step.padded_bs, step.w) and self.ring.tensor is None
        ):
            self._grow(step)
        assert self.ring is not None
        if self.ring.put(step):
            self._remember(step.who.step_id)
        self.ran(step.who.rids, step.w, checked)

    def _grow(self, step: Step) -> None:
        """A ring that holds larger steps, with those kept so far: widths change at run time."""
        old = self.ring
        kept = [] if old is None else old.snapshot()
        lanes, w = step.padded_bs, step.w
        if old is not None:
            lanes, w = max(lanes, old.lanes), max(w, old.w)
        ring = self.open_ring(lanes, w)
        ring.dropped = 0 if old is None else old.dropped
        self._numbers.clear()
        for one in kept:
            if ring.put(one):
                self._remember(one.who.step_id)

    @_harmless
    def packed(
        self, step_id: int, base: Step, kinds: dict[str, tuple[str, tuple[int, ...]]]
    ) -> None:
        """The device is about to pack a step into the ring (`device.pack`)."""
        if self.ring is not None and self.ring.steps:
            self.ring.note(base, kinds)
            self._remember(step_id)

    def _remember(self, step_id: int) -> None:
        assert self.ring is not None
        self._numbers[step_id] = self.ring.written
        if len(self._numbers) > 2 * self.ring.steps:
            oldest = self.ring.written - self.ring.steps
            self._numbers = {k: n for k, n in self._numbers.items() if n > oldest}

    def ran(self, rids: Sequence[str], w: int, checked: bool) -> None:
        """A verify step ran for these requests."""
        self.trails.ran(rids, w, checked)

    @_harmless
    def accepted(
        self, step_id: int, rids: Sequence[str], tokens: Sequence[Sequence[int]],
        outcome: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """What a step committed, per request, on the host; `outcome` are arrays for the ring."""
        if self.ring is not None and outcome:
            values = {path: v for path, v in outcome.items() if path in OUTCOME}
            self.ring.outcome(self._numbers.get(step_id, 0), values)
        told = [self.heuristics.lengths(sum(map(len, tokens)), len(tokens))]
        for rid, mine in zip(rids, tokens, strict=False):
            told.append(self.heuristics.run(rid, self.trails.accepted(rid, mine)))
        for why in filter(None, told):
            self.ask("heuristic", why)

    @_harmless
    def finding(
        self, step: Step, findings: Sequence[Finding], rids: Sequence[str] = ()
    ) -> Path | None:
        """A step with findings: dump it whole behind the ring's steps, at once.

        `rids` are the requests that the findings concern (all of the step's by default). Returns
        the dump, or None where one was written a moment ago or cannot be written.
        """
        for found in findings:
            self.trails.hit(rids or step.who.rids, found.rule)
        why = ", ".join(dict.fromkeys(found.rule for found in findings))
        return self.trigger("finding", why, step, findings)

    # --- triggers -------------------------------------------------------------------------------
    def trigger(
        self, kind: str, why: str, step: Step | None = None, findings: Sequence[Finding] = ()
    ) -> Path | None:
        """Write a dump now, in this thread, unless one of this kind and reason was just written.

        A storm yields one dump and a count, which the next dump holds. Never raises.
        """
        key = f"{kind} {why}" if kind == "finding" else kind
        with self._writing:
            now, last = self.clock(), self._since.get(key)
            if last is not None and now - last < self.quiet_s:
                self._suppressed += 1
                return None
            self._since[key] = now  # a disk that fails is not tried again in the next step
            return self._dump(kind, why, step, findings)

    @_harmless
    def _dump(
        self, kind: str, why: str, step: Step | None, findings: Sequence[Finding]
    ) -> Path | None:
        steps = [] if self.ring is None else self.ring.snapshot()
        if step is not None:
            steps = [s for s in steps if s.who.step_id != step.who.step_id] + [step]
        if not steps:
            log.warning("ddtree_guard: nothing to dump yet, no verify step has run (%s)", why)
            self._since.pop(kind, None)
            return None
        notes = Notes(
            trigger=kind,
            why=why,
            suppressed=self._suppressed,
            ring_dropped=0 if self.ring is None else self.ring.dropped,
            requests=self.trails.recent(),
            doctor=self.doctor,
        )
        path = self.writer.save(steps, [(len(steps) - 1, f) for f in findings], notes)
        if path is not None:
            self.dumps += 1
            self._suppressed = 0
            if kind != "finding":  # a finding's own log line names the dump
                log.warning("ddtree_guard dump trigger=%s why=%r dump=%s", kind, why, path)
        return path

    def ask(self, kind: str, why: str) -> None:
        """Have the recorder's thread write a dump soon. Safe in a signal handler."""
        self._asked.put((kind, why))
        if self._thread is None:
            self.start()

    @contextlib.contextmanager
    def crash_path(self) -> Iterator[None]:
        """Around a main loop: dump what the ring holds when it fails, then let it fail."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, (SystemExit, KeyboardInterrupt, GeneratorExit)):
                self.trigger("crash", f"{type(error).__name__}")
            raise

    # --- the recorder's own thread --------------------------------------------------------------
    def start(self, on_signal: bool = False) -> None:
        """Start the thread; with `on_signal`, dump on SIGUSR2 as well (main thread only)."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name="ddtree-guard-recorder", daemon=True
            )
            self._thread.start()
        if on_signal and self._undo is None:
            self._undo = signals.install(lambda: self._asked.put(("signal", "SIGUSR2")))

    def stop(self) -> None:
        """End the thread after what was asked for, write the trails, take the handler away."""
        if self._undo is not None:
            self._undo()
            self._undo = None
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(timeout=30)
            self._thread = None
        self.trails.sweep(idle_s=-1.0)

    def _work(self) -> None:
        while True:
            try:
                asked = self._asked.get(timeout=SWEEP_S)
            except queue.Empty:
                self._sweep()
                continue
            if asked is None:
                return
            self.trigger(*asked)

    @_harmless
    def _sweep(self) -> None:
        self.trails.sweep()
