"""The flight recorder of one process: what the last seconds were, on disk before anyone asks.

The serving thread calls `put` or `packed`, `ran`, `accepted` and `finding`; none of them raises,
waits for the device or for the disk, except that a finding's dump is written at once. A thread of
its own writes the dumps that signals and heuristics ask for, and the trails of requests gone idle.
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
from ddtree_guard.dump.trail import Trail
from ddtree_guard.dump.write import DumpWriter, Notes
from ddtree_guard.errors import Violation
from ddtree_guard.recorder import signals
from ddtree_guard.recorder.heuristics import Heuristics
from ddtree_guard.recorder.ring import OUTCOME, Kinds, Ring
from ddtree_guard.recorder.trail import IDLE_S, Trails
from ddtree_guard.render import known, quote
from ddtree_guard.rule import Finding, Scope
from ddtree_guard.step import Step

__all__ = ["Recorder", "Ring", "Trails"]

log = logging.getLogger("ddtree_guard")
QUIET_S = 30.0  # after a dump, further triggers of its kind are counted only
LONGEST_S = 3600.0  # the quiet time doubles with each dump of a rule or heuristic, up to this
SWEEP_S = 5.0
DRAIN_S = 0.5  # what a device keeps is of this age at most when CUDA fails
P = ParamSpec("P")
R = TypeVar("R")


def harmless(
    method: Callable[Concatenate[Recorder, P], R],
) -> Callable[Concatenate[Recorder, P], R | None]:
    """Count the recorder's own faults; serving goes on."""

    @functools.wraps(method)
    def call(self: Recorder, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            self.failed()
            return None

    return call


class Recorder:
    """Ring, trails and triggers of one process.

    `dumps` counts dumps written, `faults` errors of the recorder itself. `ring` is None until the
    first step, or until `open_ring`. `clock` gives seconds that never go back; `count` adds to a
    metric by name.
    """

    def __init__(
        self,
        config: Config,
        writer: DumpWriter,
        rank: str = "TP0",
        clock: Callable[[], float] = time.monotonic,
        quiet_s: float = QUIET_S,
        count: Callable[[str, float], None] = lambda name, amount: None,
    ) -> None:
        self.config, self.writer = config, writer
        self.clock, self.quiet_s, self.count = clock, quiet_s, count
        # looked up anew: the key of the job is known only when its ranks have met
        hide = (lambda request: writer.redactor.request(request)) if config.redact else None
        self.trails = Trails(writer.folder, rank, hide)
        self.heuristics = Heuristics()
        self.ring: Ring | None = None
        self.doctor: Sequence[str] = ()
        self.dumps = self.faults = 0
        self._numbers: dict[int, int] = {}  # step id to its number in the ring
        self._quiet: dict[str, tuple[float, float]] = {}  # kind or rule to its end and length
        self._suppressed = 0
        self._writing = threading.RLock()
        # SimpleQueue.put may be called from a signal handler; a lock or an Event may not.
        self._asked: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._undo: Callable[[], bool] | None = None

    def failed(self) -> None:
        """Count the fault that is being handled, and say so the first time."""
        self.faults += 1
        if self.faults == 1:
            log.warning("ddtree_guard: the recorder failed; serving continues", exc_info=True)

    # --- the serving thread ---------------------------------------------------------------------
    def open_ring(self, lanes: int, w: int, on_device: bool = False) -> Ring:
        """Make the ring for steps of at most `lanes` requests of `w` rows."""
        self.ring = Ring(self.config.ring_steps, lanes, w, on_device=on_device)
        return self.ring

    @harmless
    def step(self, step: Step, checked: bool = True) -> None:
        """`put` and `ran` in one."""
        self._put(step)
        self.ran(step.who.rids, step.w, checked)

    @harmless
    def put(self, step: Step) -> None:
        """Keep a step whose arrays are on the host."""
        self._put(step)

    def _put(self, step: Step) -> None:
        if self.ring is None or (
            not self.ring.fits(step.padded_bs, step.w) and not self.ring.on_device
        ):
            self._grow(step)
        assert self.ring is not None
        if self.ring.put(step):
            self._remember(step.who.step_id)
        else:
            self.count("ring_dropped_total", 1)

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

    @harmless
    def packed(self, mark: int, base: Step, kinds: Kinds, who: tuple[int, tuple[str, ...]]) -> None:
        """The host has waited for a step that the device packed into the ring under this mark
        (`device.pack`). `who` are the step's id and rids.
        """
        if self.ring is not None and self.ring.steps:
            self.ring.place(mark, base, kinds, who)
            self._remember(who[0])

    def kept(self, step_id: int) -> Step | None:
        """The step with this id as the ring holds it; None where it does not."""
        steps = [] if self.ring is None else self.ring.snapshot()
        return next((step for step in steps if step.who.step_id == step_id), None)

    def drop(self) -> None:
        """Count a step that could not be kept."""
        if self.ring is not None:
            self.ring.dropped += 1
        self.count("ring_dropped_total", 1)

    def _remember(self, step_id: int) -> None:
        assert self.ring is not None
        self._numbers[step_id] = self.ring.written
        if len(self._numbers) > 2 * self.ring.steps:
            oldest = self.ring.written - self.ring.steps
            self._numbers = {k: n for k, n in self._numbers.items() if n > oldest}

    @harmless
    def ran(self, rids: Sequence[str], w: int, checked: bool) -> None:
        """A verify step ran for these requests."""
        self.trails.ran(rids, w, checked)

    @harmless
    def accepted(
        self, step_id: int, rids: Sequence[str], tokens: Sequence[Sequence[int]],
        outcome: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """What a step committed, per request, on the host; `outcome` are arrays for the ring."""
        if self.ring is not None:
            number = self._numbers.get(step_id, 0)
            if outcome:
                values = {path: v for path, v in outcome.items() if path in OUTCOME}
                self.ring.outcome(number, values)
            self.ring.committed(number, tokens)
        told = [self.heuristics.lengths(sum(map(len, tokens)), len(tokens))]
        runs = self.trails.accepted(rids, tokens)
        told += self.heuristics.runs(rids, runs)
        for why in filter(None, told):
            self.ask("heuristic", why)

    @harmless
    def finding(
        self, step: Step, findings: Sequence[Finding], rids: Sequence[str] = (),
        whole: Callable[[], Sequence[Step]] | None = None,
    ) -> Path | None:  # fmt: skip
        """A step with findings: dump it whole behind the ring's steps, at once.

        `rids` are the requests that the findings concern (by default those that each finding
        names, or all of the step's). `whole` gives what the dump holds of the step, itself first;
        it is called where a dump is written. Returns the dump, or None where every rule was dumped
        a moment ago or the dump cannot be written.
        """
        if not findings:
            return None
        for found in findings:
            if not found.latent:  # nobody's answer was made from it
                self.trails.hit(rids or concerned(found, step), found.rule)
        why = ", ".join(dict.fromkeys(found.rule for found in findings))
        return self.trigger("finding", why, step, findings, whole)

    # --- triggers -------------------------------------------------------------------------------
    def trigger(
        self, kind: str, why: str, step: Step | None = None, findings: Sequence[Finding] = (),
        whole: Callable[[], Sequence[Step]] | None = None,
    ) -> Path | None:  # fmt: skip
        """Write a dump now, in this thread, unless one of this kind, or of each of these rules,
        was just written.

        A storm yields one dump and a count, which the next dump holds. Never raises.
        """
        keys = list(dict.fromkeys(found.rule for found in findings)) or [kind]
        with self._writing:
            now = self.clock()
            ends = [self._quiet.get(key, (now, 0.0))[0] for key in keys]
            if all(now < end for end in ends):
                self._suppressed += 1
                if kind == "signal":  # somebody waits for it
                    left = max(ends) - now
                    log.warning("ddtree_guard: no dump for %s, ask again in %.0f s", why, left)
                return None
            # also where the disk fails: it is not tried again in the next step
            self._quiet.update({key: self._calm(key, kind, now) for key in keys})
            return self._dump(kind, why, step, findings, whole)

    def _calm(self, key: str, kind: str, now: float) -> tuple[float, float]:
        """The quiet time that begins: longer each time, unless a person asked."""
        before = self._quiet.get(key, (0.0, 0.0))[1] if kind in ("finding", "heuristic") else 0.0
        length = min(2 * before, LONGEST_S) if before else self.quiet_s
        return now + length, length

    @harmless
    def _dump(
        self, kind: str, why: str, step: Step | None, findings: Sequence[Finding],
        whole: Callable[[], Sequence[Step]] | None,
    ) -> Path | None:  # fmt: skip
        steps = [] if self.ring is None else self.ring.snapshot()
        if step is not None:
            steps = [s for s in steps if s.who.step_id != step.who.step_id]
            steps += [step] if whole is None else whole()
        at = (
            len(steps) - 1
            if step is None
            else [s.who.step_id for s in steps].index(step.who.step_id)
        )
        if not steps:
            log.warning("ddtree_guard: nothing to dump yet, no verify step has run (%s)", why)
            self._quiet.pop(kind, None)
            return None
        notes = Notes(
            trigger=kind,
            why=why,
            suppressed=self._suppressed,
            ring_dropped=0 if self.ring is None else self.ring.dropped,
            requests=self.trails.recent(),
            doctor=self.doctor,
        )
        path = self.writer.save(steps, [(at, f) for f in findings], notes)
        self.count("dumps_failed_total" if path is None else "dumps_total", 1)
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
            # a Violation was dumped as a finding
            ended = (SystemExit, KeyboardInterrupt, GeneratorExit, Violation)
            if not isinstance(error, ended):
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

    @property
    def started(self) -> bool:
        """Whether the thread runs: also after `ask`, which starts it."""
        return self._thread is not None

    def stop(self) -> None:
        """End the thread after what was asked for, write the trails, take the handler away."""
        if self._undo is not None:
            with contextlib.suppress(ValueError):  # handlers can be changed in the main thread only
                self._undo()
            self._undo = None
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(timeout=30)
            self._thread = None
        self._sweep(-1.0)

    def _work(self) -> None:
        signals.mark()
        swept, due = self.clock(), time.monotonic() + DRAIN_S
        while True:
            if time.monotonic() >= due:  # also where somebody asks all the time
                self._drain()
                if self.clock() - swept >= SWEEP_S:
                    self._sweep()
                    swept = self.clock()
                due = time.monotonic() + DRAIN_S
            try:
                asked = self._asked.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                continue
            if asked is None:
                return
            self.trigger(*asked)

    @harmless
    def _drain(self) -> None:
        """Have the last steps here when the device fails; a copy beside what runs there."""
        if self.ring is not None:
            self.ring.drain()

    @harmless
    def _sweep(self, idle_s: float = IDLE_S) -> None:
        for trail in self.trails.sweep(idle_s):
            self._tell(trail)

    def _tell(self, trail: Trail) -> None:
        """One line a request, once it has ended: the answer, and its name in dumps."""
        level = logging.INFO if trail.clean else logging.WARNING
        if trail.clean and "TP0" not in self.trails.name:
            return  # the other ranks would say the same
        words = map(known, (trail.rid, self.name(trail.rid), trail.verdict, trail.run))
        text = "ddtree_guard request rid=%s name=%s verdict=%s run=%s"
        log.log(level, text, *map(quote, words))

    def name(self, rid: str | None) -> str | None:
        """The name under which dumps and trails hold a request; None where that is its id."""
        hidden = self.config.redact and rid is not None
        return self.writer.redactor.rid(str(rid)) if hidden else None


def concerned(found: Finding, step: Step) -> tuple[str, ...]:
    """The rids that a finding is about: offender and victims, or everybody in the step."""
    rids = step.who.rids
    if found.scope is not Scope.REQUEST or found.request is None:
        return rids
    return tuple(rids[i] for i in (found.request, *found.victims) if 0 <= i < len(rids))
