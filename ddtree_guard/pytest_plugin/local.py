"""This process as one that leaves evidence: backends that a test builds and launches itself.

Nothing of SGLang is imported here. Its Triton backend is hooked when the suite imports it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ddtree_guard import render
from ddtree_guard.config import Config
from ddtree_guard.evidence import ARMED, IDLE, Hit, Process
from ddtree_guard.rule import Finding
from ddtree_guard.step import Step

TRITON = "sglang.srt.layers.attention.triton_backend"
TEXTS = 64  # findings of a test that are kept in words


class Local:
    """The guard of this process, and what it found, in the form of `evidence.Process`."""

    def __init__(self) -> None:
        self.process = Process(
            Path("this process") / "backends", pid=os.getpid(), rank="test", state=IDLE,
            began=time.time(), why="no attention backend of SGLang was imported",
        )  # fmt: skip
        self.guard: Any = None
        self._config = Config()
        self._active = True
        self._number = 0
        self._late: _Finder | None = None

    def start(self) -> None:
        """Hook the Triton backend, now or when it is imported."""
        if TRITON in sys.modules:
            self._hook()
        else:
            self._late = _Finder(TRITON, self._hook)
            sys.meta_path.insert(0, self._late)

    def stop(self) -> None:
        """Take every hook away."""
        if self._late in sys.meta_path:
            sys.meta_path.remove(self._late)
        if self.guard is not None:
            self.guard.remove()
            self.guard = None

    def use(self, config: Config, active: bool) -> None:
        """Judge by this configuration from now on."""
        self._config, self._active = config, active
        if self.guard is not None:
            self.guard.use(config)
            self.guard.active = active

    def made(self) -> Any:
        """The `hooks.backends.BackendGuard` of this process."""
        if self.guard is None:
            module = importlib.import_module("ddtree_guard.hooks.backends")
            self.guard = module.BackendGuard(self._config, self)
            self.guard.active = self._active
            self.process.state, self.process.why = ARMED, ""
            self.process.rules = len(self.guard.guard.rules)
        return self.guard

    def _hook(self) -> None:
        self.made().hook()
        facts = importlib.import_module("ddtree_guard.hooks.facts")
        self.process.release = facts.release()

    # --- what the guard tells ---------------------------------------------------------------------
    def finding(self, finding: Finding, step: Step, dump: Path | None, text: str) -> None:
        """Count a finding and keep its words."""
        process = self.process
        (process.latent if finding.latent else process.found)[finding.rule] += 1
        self._number += 1
        hit = Hit(
            rule=finding.rule, step=step.who.step_id, latent=finding.latent,
            headline=render.headline(finding), text=text,
            line=render.line(finding, step, dump=dump),
            dump=None if dump is None else str(dump.absolute()), at=time.time(),
            number=self._number,
        )  # fmt: skip
        process.hits[:] = [*process.hits[1 - TEXTS :], hit]

    def close(self) -> None:
        """The guard has gone."""

    def current(self) -> Process:
        """The process with its counters as they are now."""
        if self.guard is not None:
            coverage, process = self.guard.coverage, self.process
            process.verify_steps, process.steps_checked = (
                coverage.verify_steps, coverage.steps_checked,
            )  # fmt: skip
            process.steps = self.guard.begun
            process.skipped = coverage.skipped.copy()
            process.faults = self.guard.fuses.faults.copy()
        return self.process


class _Finder(MetaPathFinder):
    """Calls back after a module was imported for the first time."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        """The spec that the other finders give, its loader wrapped."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.then)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self.loader, self.then = loader, then

    def create_module(self, spec: Any) -> ModuleType | None:
        made: ModuleType | None = self.loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.then()
