"""Shadow mode while it is off, and the choice: `shadow` loads torch and Triton, this does not."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from ddtree_guard.config import Capture, Config
from ddtree_guard.hooks.fuses import Fuses
from ddtree_guard.hooks.record import Record
from ddtree_guard.hooks.view import View
from ddtree_guard.rule import Finding, Rule
from ddtree_guard.step import Step


class ShadowSites(Protocol):
    """What the runtime asks of shadow mode. No method raises or waits; see `shadow`."""

    on: bool
    supplies: tuple[str, ...]
    compared: int
    skipped: Counter[str]

    def prepare(self, view: View) -> None:
        """A batch size is about to be captured."""

    def begin(self, record: Record, view: View) -> None:
        """The metadata of a verify step stands."""

    def attend(
        self, backend: Any, q: Any, k: Any, layer: Any, batch: Any, out: Any, given: dict[str, Any]
    ) -> None:
        """A layer's attention was launched for a verify batch."""

    def ran(self, runner: Any) -> None:
        """A forward pass was queued."""

    def end(self) -> None:
        """The worker's step is over."""

    def settle(self, record: Record) -> list[Finding]:
        """Findings of the step, as far as its comparison has arrived."""

    def late(self) -> list[tuple[Record, list[Finding]]]:
        """Findings of earlier steps that have arrived since."""

    def evidence(self, record: Record, step: Step, finding: Finding) -> list[Step]:
        """The steps that a finding's dump holds: its own first, with the rows that were kept."""

    def start(self, backends: list[tuple[Any, Any]]) -> None:
        """The server is built: test the comparison, and say what is compared."""

    def line(self) -> str:
        """What is compared, in one line of the log; empty where nothing is."""


class NoShadow:
    """Nothing is compared or kept."""

    on = False
    supplies: tuple[str, ...] = ()
    compared = 0

    def __init__(self) -> None:
        self.skipped: Counter[str] = Counter()

    def prepare(self, view: View) -> None:
        """Nothing to do."""

    def begin(self, record: Record, view: View) -> None:
        """Nothing to do."""

    def attend(
        self, backend: Any, q: Any, k: Any, layer: Any, batch: Any, out: Any, given: dict[str, Any]
    ) -> None:
        """Nothing to do."""

    def ran(self, runner: Any) -> None:
        """Nothing to do."""

    def end(self) -> None:
        """Nothing to do."""

    def settle(self, record: Record) -> list[Finding]:
        """There is no comparison."""
        return []

    def late(self) -> list[tuple[Record, list[Finding]]]:
        """There is no comparison."""
        return []

    def evidence(self, record: Record, step: Step, finding: Finding) -> list[Step]:
        """No rows are kept."""
        return [step]

    def start(self, backends: list[tuple[Any, Any]]) -> None:
        """Nothing to say."""

    def line(self) -> str:
        """Nothing is compared."""
        return ""


def shadow_for(
    config: Config, fuses: Fuses, target: Callable[[Any], Any], rules: tuple[Rule, ...]
) -> ShadowSites:
    """Shadow mode as the configuration asks for it."""
    if not config.shadow_every and config.capture is not Capture.QKV:
        return NoShadow()
    module = importlib.import_module("ddtree_guard.hooks.shadow")
    made: ShadowSites = module.ShadowMode(config, fuses, target, rules)
    return made
