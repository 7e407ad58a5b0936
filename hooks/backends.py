"""The guard of attention backends without a server: a test builds a backend and launches it.

No worker says where a verify step begins and ends, so a step is one build of verify metadata,
judged whole at once. It waits for the device in every step: this is for tests.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Protocol

from ddtree_guard.config import Config
from ddtree_guard.hooks.certificates import Certificates
from ddtree_guard.hooks.fuses import Fuses
from ddtree_guard.hooks.hook import Hook
from ddtree_guard.hooks.patching import Original, Patch
from ddtree_guard.hooks.record import Record
from ddtree_guard.hooks.runtime import ServerGuard
from ddtree_guard.hooks.sites import adopt
from ddtree_guard.rule import Finding
from ddtree_guard.step import Step

BACKEND = "sglang.srt.layers.attention.triton_backend"
_OF_A_CONFIG = ("config", "guard", "checker", "journal", "writer", "flight")
_NEVER = 1 << 62  # a site of a test is never disarmed: that would end in silence


class Listener(Protocol):
    """Who hears of findings (`evidence.Evidence` is one)."""

    def finding(self, finding: Finding, step: Step, dump: Any, text: str) -> None:
        """A finding, as it is logged."""

    def close(self) -> None:
        """There will be no more."""


class _NoCertificates(Certificates):
    """A test that builds graph metadata by hand captures no graph whose inputs could move."""

    def take(self, *_: Any, **__: Any) -> None:
        """Nothing was captured."""

    def replay(self, *_: Any, **__: Any) -> None:
        """Nothing is replayed."""


class BackendGuard(ServerGuard):
    """Judges every verify launch of the backends of this process. `active` False: looks away."""

    def __init__(self, config: Config, listener: Listener) -> None:
        super().__init__(config, rank="test", run=f"inprocess-{os.getpid()}")
        self.evidence = listener
        self.certificates = _NoCertificates()
        self.active = True
        self._why = ""
        self.use(config)

    def use(self, config: Config) -> None:
        """Judge by this configuration from now on, and write the first finding of a rule anew."""
        fresh = ServerGuard(config, rank=self.rank, run=f"inprocess-{os.getpid()}")
        for name in _OF_A_CONFIG:
            if hasattr(fresh, name):
                setattr(self, name, getattr(fresh, name))
        strict = self.fuses.strict
        self.fuses = Fuses(limit=_NEVER, strict=strict)

    def hook(self) -> None:
        """See the Triton backends that are built from now on. Their module is imported."""
        self.install([_constructor(self)])

    def watch(self, backend: Any, runner: Any) -> None:
        """See the launches of a backend of any class, built for this runner."""
        adopt(self, backend, runner)

    def built(self, backend: Any, batch: Any, path: str) -> None:
        """One build of verify metadata is one step."""
        if self.running.busy:  # a worker of this process is at work
            super().built(backend, batch, path)
            return
        runner = self._target(backend)
        mode = getattr(batch, "forward_mode", None)
        if not self.active or runner is None or mode is None or not mode.is_target_verify():
            return
        self.running.steps += 1
        self.coverage.verify_steps += 1
        record = Record(self.begun, (), _names(batch))
        self.running.set(record)
        try:
            with self.fuses.internal("build"):
                self._read(backend, batch, path)
            self._settle(record, tokens_left=None)
        finally:
            self.running.set(None)

    def _read(self, backend: Any, batch: Any, path: str) -> None:
        self._why = ""
        try:
            self._build(backend, batch, path)
        except Exception as error:
            self._why = f"the guard cannot read it: {type(error).__name__}: {error}"
            raise

    def _skip(self, record: Record) -> None:
        """A test is told what went wrong, not only that something did."""
        if self._why:
            self.coverage.skipped[self._why] += 1
        else:
            super()._skip(record)

    def check(self, step: Step) -> None:
        """Judge a step that the test has filled itself."""
        self.running.steps += 1
        self.coverage.verify_steps += 1
        record = Record(step.who.step_id or self.begun, (), step.who.rids, step=step)
        report = self.guard.check(step)
        record.findings = list(report.findings)
        record.checked = bool(report.checked)
        record.why = "" if record.checked else "no rule could be evaluated on this step"
        self._settle(record, tokens_left=None)


def _names(batch: Any) -> tuple[str, ...]:
    """A name for each live request. Lanes at the end that hold a graph's padding are not live."""
    lanes = len(batch.req_pool_indices)
    rows = batch.req_pool_indices.tolist()
    lens = batch.seq_lens[:lanes].tolist()
    while lanes > 1 and rows[lanes - 1] == 0 and lens[lanes - 1] <= 1:
        lanes -= 1
    return tuple(f"request-{i}" for i in range(lanes))


def _constructor(guard: BackendGuard) -> Hook:
    def wrap(original: Original) -> Any:
        @functools.wraps(original.value)
        def __init__(self: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
            original.value(self, model_runner, *args, **kwargs)
            adopt(guard, self, model_runner)

        return __init__

    why = "learns which backends a test builds, and for which runner"
    names = ("self", "model_runner")
    return Hook("init", (Patch(f"{BACKEND}.TritonAttnBackend.__init__", why, wrap, names),))
