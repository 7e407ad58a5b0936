"""Checkers: how a launch is judged. This one reads the whole step to the host and runs the rules.

On a CPU that is the only way; on a GPU it waits for the device in every step, so it is used there
only to explain what the device checker found.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ddtree_guard.guard import Guard
from ddtree_guard.hooks.adapters import adapter_for
from ddtree_guard.hooks.lengths import prompt_left
from ddtree_guard.hooks.links import local_rows
from ddtree_guard.hooks.observe import host
from ddtree_guard.hooks.record import Record, Walk
from ddtree_guard.hooks.view import View
from ddtree_guard.rule import Finding, Site
from ddtree_guard.step import Step

BUILD_SITES = (Site.BUILD, Site.LAUNCH, Site.CAPTURE, Site.REPLAY)


class Checker(Protocol):
    """What the runtime asks of a checker. Every method may fail; that is counted per site."""

    kind: str
    tape: Any
    # by id of a backend and batch size: an object whose `begin(spec_info, bs)` is all that a replay
    # needs; it becomes the record's ticket
    ready_made: dict[Any, Any]

    def ready(self) -> None:
        """Workers and graphs are built; the first request comes next."""

    def self_test(self) -> str:
        """What failed in a test of this checker, or an empty string."""

    def prepare(self, view: View) -> None:
        """A batch size is about to be captured: compile and allocate here."""

    def capture(self, view: View) -> None:
        """Inside the captured region, and in the warm-up runs before it."""

    def build(self, record: Record, view: View) -> None:
        """Metadata was built; attention comes next."""

    def study(self, record: Record, view: View) -> None:
        """The step is queued; its view is complete. What need not be known before."""

    def walked(self, record: Record) -> None:
        """The acceptance is known, and the launch's inputs still hold this step."""

    def verify(self, record: Record) -> None:
        """The worker's step ends; `record.outcome` is there if the acceptance was seen."""

    def stray(self) -> None:
        """A graph was replayed for no step: what it checked must not pass to the next one."""

    def settle(self, record: Record) -> list[Finding]:
        """SGLang has waited for the step: its findings. Must not wait for the device."""


class HostChecker:
    """Reads each step to the host and judges it with the NumPy rules."""

    kind = "host"
    tape = None

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.ready_made: dict[Any, Any] = {}
        self._states: set[str] = set()

    def ready(self) -> None:
        """Nothing to do."""

    def self_test(self) -> str:
        """The rules were tested already."""
        return ""

    def prepare(self, view: View) -> None:
        """Nothing to do."""

    def capture(self, view: View) -> None:
        """A capture leaves nothing to read: replays are checked before they run."""

    def build(self, record: Record, view: View) -> None:
        """Take the step and judge what was built."""
        record.step = self.read(view)
        if view.path == "graph" and len(record.reqs) == record.step.bs:
            record.step = record.step.replace(graph__prompt_left=prompt_left(record.reqs))
        record.findings = list(self.guard.check(record.step, self._sites(record.step)).findings)
        record.checked = True

    def read(self, view: View) -> Step:
        """The Step of a launch, through the adapter of its backend."""
        return adapter_for(type(view.backend)).read_step(view.complete())

    def add_outcome(self, record: Record) -> None:
        """Put the acceptance into the record's step, without judging it."""
        if record.step is not None and record.outcome is not None:
            record.step = with_outcome(record.step, record.outcome)

    def _sites(self, step: Step) -> tuple[Site, ...]:
        """The configuration is judged once per runtime state: adaptive speculation swaps widths."""
        new = step.widths.state not in self._states
        self._states.add(step.widths.state)
        return (Site.INIT, *BUILD_SITES) if new else BUILD_SITES

    def study(self, record: Record, view: View) -> None:
        """Nothing to do."""

    def walked(self, record: Record) -> None:
        """Nothing to do: the step was read when it was built."""

    def verify(self, record: Record) -> None:
        """Judge what the acceptance made of the step."""
        if record.step is None or record.outcome is None:
            return
        self.add_outcome(record)
        record.findings += self.guard.check(record.step, (Site.VERIFY,)).findings

    def stray(self) -> None:
        """Nothing to do: replays check nothing."""

    def settle(self, record: Record) -> list[Finding]:
        """Everything is known already."""
        return record.findings


def with_outcome(step: Step, walk: Walk) -> Step:
    """The step with its acceptance, read to the host."""
    lens = host(walk.lens, np.int64)[: step.bs]
    if walk.index is None:
        return step.replace(outcome__accept_index=_chain(lens, step.w), outcome__accept_lens=lens)
    index = host(walk.index)[: step.bs]
    predict = host(walk.predict, np.int64)[: step.bs * step.w]
    return step.replace(
        outcome__predict=predict.reshape(step.bs, step.w),
        outcome__accept_index=local_rows(index, step.w) if walk.global_rows else index,
        outcome__accept_lens=lens,
        outcome__walk="tree",
        outcome__greedy_kernel=True if walk.greedy else None,
    )


def _chain(lens: Any, w: int) -> Any:
    """The accepted rows of a chain: 0, 1, .. up to each request's length."""
    rows = np.arange(w, dtype=np.int64)
    return np.where(rows < lens[:, None], rows, -1)
