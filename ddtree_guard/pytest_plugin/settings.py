"""What a session, and each of its tests, asks of the guard."""

from __future__ import annotations

import dataclasses
import os
import tempfile
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
    found = Settings(
        mode=Mode(setting(config, "ddtree-guard").lower()),
        rules=setting(config, "ddtree-guard-rules"),
        folder=_folder(config, start),
        report=_report(config, start),
        shadow_every=setting(config, "ddtree-guard-shadow-every"),
    )
    try:
        _require_rules(Guard(found.config(Wish(found.mode, found.rules))))
    except UsageError as error:
        said = str(error).replace(f"{PREFIX}_SHADOW_EVERY", "--ddtree-guard-shadow-every")
        raise pytest.UsageError(f"ddtree_guard: {said}") from None
    _try_folder(
        found.folder, f"--ddtree-guard-dump-dir: evidence cannot be written to {found.folder}"
    )
    return found


def _try_folder(folder: Path, complaint: str) -> None:
    """Make the folder and a file in it, now: not after hours of tests."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        if isinstance(error, FileExistsError):
            why = f"{error.filename} is no folder"
        raise pytest.UsageError(f"{complaint} ({why}).") from None


def _require_rules(guard: Guard) -> None:
    """Raise UsageError for a selection by which nothing is checked."""
    if not guard.rules:
        raise UsageError(
            "no rule is left of this selection, so that nothing would be checked; to guard nothing "
            "say off."
        )


def _folder(config: pytest.Config, start: Path) -> Path:
    """A new folder for this session; a worker of xdist has one below that of its controller."""
    worker: Mapping[str, str] = getattr(config, "workerinput", {})
    if "ddtree_guard_folder" in worker:
        return Path(worker["ddtree_guard_folder"]) / worker["workerid"]
    root = start / (setting(config, "ddtree-guard-dump-dir") or Config().dump_dir)
    return root.absolute() / f"pytest-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"


def _report(config: pytest.Config, start: Path) -> Path | None:
    """Where the JSON report goes. Raises pytest.UsageError where it cannot be written."""
    text = setting(config, "ddtree-guard-report")
    if not text or hasattr(config, "workerinput"):  # xdist's controller writes it
        return None
    path = start / text
    complaint = f"--ddtree-guard-report: the report cannot be written to {path}"
    if path.is_dir():
        raise pytest.UsageError(f"{complaint} (a folder); give the name of a file.")
    _try_folder(path.parent, complaint)
    return path


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
    rules = ",".join(_names(values, "rules") or ()) if "rules" in values else settings.rules
    guard = Guard(Config(rules=RuleSelection.parse(rules)))
    expect = _names(values, "expect")
    steps = values.get("steps")
    if steps not in (None, "required"):
        raise UsageError(f"steps={steps!r} of its marker is not understood. Write 'required'.")
    device = values.get("device")
    if device not in (None, "cuda", "cpu"):
        raise UsageError(f"device={device!r} of its marker is not understood. Write 'cuda'.")
    if mode == Mode.OFF.value:
        if expect or steps:
            raise UsageError("its marker says mode='off' and yet what must be seen; drop one.")
    else:
        _require_rules_of_marker(guard)
    return Wish(
        mode=Mode(mode),
        rules=rules,
        expect=None if expect is None else frozenset(find_rule(name).id for name in expect),
        steps_required=steps == "required",
    )


def _require_rules_of_marker(guard: Guard) -> None:
    try:
        _require_rules(guard)
    except UsageError as error:
        raise UsageError(f"its marker: {error}") from None


def _names(values: Mapping[str, Any], name: str) -> list[str] | None:
    """The rules that an argument of a marker names: one word, or a list of words."""
    found = values.get(name)
    if found is None or isinstance(found, str):
        return None if found is None else [found]
    if not isinstance(found, (list, tuple, set, frozenset)) or not all(
        isinstance(word, str) for word in found
    ):
        raise UsageError(f"{name}={found!r} of its marker is no rule and no list of rules.")
    return list(found)


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
