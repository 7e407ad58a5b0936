"""The step that the worker runs just now. Its record is made when somebody asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddtree_guard.hooks.checker import Checker
from ddtree_guard.hooks.record import Record
from ddtree_guard.hooks.view import View, ragged


class Running:
    """`batch` is the step's, while one runs; `queued` the backend, batch and launch of a replay of
    which nothing else is known yet, and whether it went `ahead`, with nothing launched before it;
    `steps` counts steps, and is the id of the newest. `stray`: a verify graph is replayed while
    none runs, as an idle rank of DP attention does.

    `view` makes the view of a launch. `quick`: a replay may wait for a launch alone, as long as the
    guard has had no `faults`. Other threads may ask `busy` only.
    """

    def __init__(
        self, view: Callable[[Record, Any, Any, str], View], faults: Mapping[str, int]
    ) -> None:
        self.view, self.faults = view, faults
        self.quick = True
        self.batch: Any = None
        self.queued: tuple[Any, Any, Any, bool] | None = None
        self.known: Record | None = None
        self.steps = 0
        self.stray = False
        self._named: tuple[list[Any], tuple[str, ...]] = ([], ())  # the newest ids, as text

    @property
    def busy(self) -> bool:
        """Whether a step runs."""
        return self.batch is not None or self.known is not None

    def queue(self, checker: Checker, backend: Any, batch: Any) -> bool:
        """Launch what the replay of a graph needs, where that is all it needs. Whether it is."""
        # a replay waits for this, and no cache is warm: each line is a microsecond
        begun = self.batch
        if begun is None or self.known is not None or self.faults or not self.quick:
            return False
        launch = checker.ready_made.get((id(backend), getattr(batch, "batch_size", None)))
        if launch is None:
            return False
        spec = batch.spec_info
        if (
            spec.__class__ is not launch.spec
            or batch.forward_mode is not launch.mode
            or (launch.may_be_ragged and ragged(batch))
        ):
            return False
        requests = len(begun.reqs)
        if launch.inside is not None and 0 < requests == launch.told.live:
            launch.live = requests
            self.queued = backend, batch, launch, True
            return True
        try:
            launch.begin(spec, requests)
        except Exception:
            self.queued = backend, batch, None, False
            raise
        self.queued = backend, batch, launch, False
        return True

    def record(self) -> Record | None:
        """The record of the step that runs; None where none does."""
        if self.known is None and self.batch is not None:
            made = self.known = Record(self.steps, tuple(getattr(self.batch, "reqs", None) or ()))
            if self.queued is not None:
                backend, batch, made.ticket, made.ahead = self.queued
                made.view = self.view(made, backend, batch, "graph")
        return self.known

    def leave(self, checker: Checker) -> None:
        """The worker returns without a step: a graph that it replayed all the same has checked
        something, and nobody asks for the verdict.
        """
        if self.stray:
            checker.stray()

    def set(self, record: Record | None) -> None:
        """Another step runs than the worker has begun, or none any more."""
        self.queued = self.batch = None
        self.known, self.stray = record, False

    def names(self, record: Record) -> tuple[str, ...]:
        """The ids of the step's requests, as text: the last step's where they are the same."""
        if not record.rids:
            ids = [req.rid for req in record.reqs]  # no requests: finished ones would live on
            if ids != self._named[0]:
                self._named = ids, tuple(map(str, ids))
            record.rids = self._named[1]
        return record.rids
