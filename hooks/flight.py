"""The flight recorder of a scheduler process: what `ServerGuard` tells it, step by step.

Nothing here reaches SGLang or disarms a check: the recorder's own faults are counted, and after
LIMIT of them it is left alone. `Tape` (hooks/tape.py) packs steps on a device; without one the
step that the host checker has read is copied.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ddtree_guard.config import Config
from ddtree_guard.dump.redact import KeyStore, Redactor, job_key
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.hooks.record import Record
from ddtree_guard.metrics import Metrics
from ddtree_guard.recorder import Recorder
from ddtree_guard.recorder.ring import MAX_BYTES, OUTCOME
from ddtree_guard.rule import Finding
from ddtree_guard.step import Step

log = logging.getLogger("ddtree_guard")
LIMIT = 8  # faults after which nothing is recorded any more
Evidence = Callable[[Record, Step, Finding], Sequence[Step]]
P = ParamSpec("P")
R = TypeVar("R")


class Recording(Protocol):
    """What records."""

    recorder: Recorder


S = TypeVar("S", bound=Recording)


def quietly(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R | None]:
    """A fault of the recorder is counted and None returned; after LIMIT nothing is done at all."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self.recorder.faults >= LIMIT:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception:
            self.recorder.failed()
            if self.recorder.faults >= LIMIT:
                log.error("ddtree_guard: the flight recorder is left alone; checks go on")
            return None

    return call


class Flight:
    """Recorder, tape and redaction key of one process. Every method is safe to call at any time."""

    def __init__(self, config: Config, run: str, rank: str, metrics: Metrics) -> None:
        self.writer = DumpWriter(run, config)
        self.recorder = Recorder(config, self.writer, rank, count=metrics.add)
        self.tape: Any = None
        self._running = False

    @property
    def size(self) -> str:
        """The ring's bound for the boot line, or "off"."""
        return f"{MAX_BYTES >> 20}MiB" if self._running else "off"

    # --- start and end --------------------------------------------------------------------------
    @quietly
    def start(self, store: KeyStore | None = None) -> None:
        """The rank is armed: share the job's key, start the thread, handle SIGUSR2.

        For scheduler processes only: call it in their main thread.
        """
        self._share_key(store)
        self.recorder.start()
        self._running = True
        try:
            self.recorder.start(on_signal=True)
        except ValueError:  # a fork that builds its scheduler in another thread
            log.warning("ddtree_guard: not in the main thread, so SIGUSR2 asks for no dump here")

    @quietly
    def _share_key(self, store: KeyStore | None) -> None:
        if store is not None:
            self.writer.redactor = Redactor(job_key(store))

    @quietly
    def says(self, *lines: str) -> None:
        """What the process said of itself when it was armed, for the dumps."""
        self.recorder.doctor = lines

    def stop(self) -> None:
        """Take the handler away, end the thread, write the trails."""
        if self._running or self.recorder.started:
            self._running = False
            self.recorder.stop()

    def crash_path(self) -> AbstractContextManager[None]:
        """See `Recorder.crash_path`."""
        return self.recorder.crash_path()

    # --- one step -------------------------------------------------------------------------------
    @quietly
    def built(self, record: Record) -> None:
        """The checker has seen the step's metadata; attention comes next."""
        if record.step is not None:
            record.w = record.step.w
        if self.tape is None and record.step is not None:
            self.recorder.put(record.step)

    @quietly
    def settled(self, record: Record) -> None:
        """SGLang has waited for the step; it is known whether it was checked."""
        self.recorder.ran(record.rids, record.w, record.checked)
        if self.tape is not None and not record.kept:
            self.recorder.drop()

    @quietly
    def accepted(self, record: Record, tokens: Sequence[Sequence[int]]) -> None:
        """The tokens of the step, per request, on the host."""
        outcome = None
        if self.tape is None and record.step is not None:
            outcome = {path: record.step.get(path) for path in OUTCOME}
        self.recorder.accepted(record.step_id, record.rids, tokens, outcome)

    @quietly
    def found(
        self, record: Record, findings: Sequence[Finding], evidence: Evidence | None = None
    ) -> Path | None:
        """The step's findings: their dump, where one is due. `evidence` gives the steps that it
        holds of this one, its own first.
        """
        step = record.step
        assert step is not None  # a finding is made from a step
        if evidence is None or not findings:
            return self.recorder.finding(step, findings)
        one = next((f for f in findings if f.request is not None), findings[0])
        return self.recorder.finding(step, findings, whole=lambda: evidence(record, step, one))

    @quietly
    def tainted(self, rid: str) -> None:
        """A request reuses KV of a step with a finding."""
        self.recorder.trails.taint(rid)

    @quietly
    def name(self, rid: str | None) -> str | None:
        """The request's name in dumps, for the log."""
        return self.recorder.name(rid)
