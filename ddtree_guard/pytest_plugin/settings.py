"""What a session, and each of its tests, asks of the guard."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from ddtree_guard.config import PREFIX, Config, Mode, RuleSelection
from ddtree_guard.errors import UsageError
from ddtree_guard.guard import Guard, find_rule
from ddtree_guard.pytest_plugin import setting

KEEP = "1000"  # dumps of a session; the default of a server would drop those of early tests
_KNOWN = ("mode", "rules", "expect", "steps", "device")


@dataclass(frozen=True, slots=True)
class Wish:
    """What one test asks for. `expect` None: no finding is expected."""

    mode: Mode
    rules: str
    expect: frozenset[str] | None = None
    steps_required: bool = False

    @property
    def on(self) -> bool:
        """Whether the test is guarded."""
        return self.mode is not Mode.OFF


@dataclass(frozen=True, slots=True)
class Settings:
    """The session's options, resolved and checked."""

    mode: Mode
    rules: str
    folder: Path  # dumps and evidence of this session
    report: Path | None
    shadow_every: str

    def config(self, wish: Wish) -> Config:
        """The configuration of a guard in this process."""
        return dataclasses.replace(Config.from_env(self.environment(wish)), mode=wish.mode)

    def environment(self, wish: Wish) -> dict[str, str]:
        """Variables for child processes. They log; the plugin fails the test."""
        values = {
            PREFIX: Mode.LOG.value if wish.on else Mode.OFF.value,
            f"{PREFIX}_DUMP_DIR": str(self.folder),
            f"{PREFIX}_DUMP_KEEP": KEEP,
            f"{PREFIX}_RULES": wish.rules,
        }
        if self.shadow_every:
            values[f"{PREFIX}_SHADOW_EVERY"] = self.shadow_every
        return values


def settings_of(config: pytest.Config) -> Settings:
    """Resolve the options. Raises pytest.UsageError with one sentence."""
    start = Path(config.invocation_params.dir)
    report = setting(config, "ddtree-guard-report")
    found = Settings(
        mode=Mode(setting(config, "ddtree-guard").lower()),
        rules=setting(config, "ddtree-guard-rules"),
        folder=_folder(config, start),
        report=start / report if report else None,
        shadow_every=setting(config, "ddtree-guard-shadow-every"),
    )
    try:
        Guard(found.config(Wish(found.mode, found.rules)))
    except UsageError as error:
        raise pytest.UsageError(f"ddtree_guard: {error}") from None
    return found


def _folder(config: pytest.Config, start: Path) -> Path:
    """A new folder for this session; a worker of xdist has one below that of its controller."""
    worker: Mapping[str, str] = getattr(config, "workerinput", {})
    if "ddtree_guard_folder" in worker:
        return Path(worker["ddtree_guard_folder"]) / worker["workerid"]
    root = start / (setting(config, "ddtree-guard-dump-dir") or Config().dump_dir)
    return root.absolute() / f"pytest-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"


def wish_of(item: pytest.Item, settings: Settings) -> Wish:
    """The test's markers over the session's options, the closest marker first."""
    values: dict[str, Any] = {}
    for marker in item.iter_markers("ddtree_guard"):
        _check(marker, item)
        values = {**marker.kwargs, **values}
    try:
        return _wish(values, settings)
    except UsageError as error:
        raise pytest.UsageError(f"{item.nodeid}: {error}") from None


def _wish(values: Mapping[str, Any], settings: Settings) -> Wish:
    mode = str(values.get("mode", settings.mode.value))
    if mode not in [m.value for m in Mode]:
        raise UsageError(f"mode={mode!r} of its marker is not a mode. Use off, log or raise.")
    rules = values.get("rules", settings.rules)
    rules = rules if isinstance(rules, str) else ",".join(rules)
    Guard(Config(rules=RuleSelection.parse(rules)))
    expect = values.get("expect")
    if isinstance(expect, str):
        expect = [expect]
    steps = values.get("steps")
    if steps not in (None, "required"):
        raise UsageError(f"steps={steps!r} of its marker is not understood. Write 'required'.")
    return Wish(
        mode=Mode(mode),
        rules=rules,
        expect=None if expect is None else frozenset(find_rule(name).id for name in expect),
        steps_required=steps == "required",
    )


def _check(marker: pytest.Mark, item: pytest.Item) -> None:
    unknown = sorted(set(marker.kwargs) - set(_KNOWN))
    if unknown or marker.args:
        what = f"the argument {unknown[0]!r}" if unknown else "an argument without a name"
        raise pytest.UsageError(
            f"{item.nodeid}: its marker ddtree_guard has {what}; use {', '.join(_KNOWN)}."
        )


def expired(rules: str, today: date | None = None) -> list[str]:
    """The rules whose ignoring has ended, with the day."""
    day = today or date.today()
    return [
        f"{name} (until {until})"
        for name, until in RuleSelection.parse(rules).ignore
        if until is not None and until < day
    ]
