"""Configuration. This is the only file that touches the environment."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from enum import Enum
from pathlib import Path
from typing import TypeVar

from ddtree_guard.errors import UsageError

PREFIX = "SGLANG_DDTREE_GUARD"
TREE_PREFIX = "SGLANG_DDTREE"
_DIGITS = 12


class Mode(str, Enum):
    """What happens when a rule is broken. `contain` is reserved."""

    OFF = "off"
    LOG = "log"
    RAISE = "raise"


class Backend(str, Enum):
    """Which Triton attention backend the target runner gets."""

    AUTO = "auto"
    STOCK = "stock"
    CORRECTED = "corrected"


class Depth(str, Enum):
    """How much of each step the device check reads."""

    FAST = "fast"
    FULL = "full"


class Capture(str, Enum):
    """What a dump holds: metadata only, or q, k and v rows as well."""

    META = "meta"
    QKV = "qkv"


class LogStyle(str, Enum):
    """One `key=value` line per finding, or the line and the readable block."""

    LINE = "line"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class RuleSelection:
    """Which rules run, written `W,T4,-P1@2026-12-31`.

    A bare id or family selects, a leading `-` ignores, and `@YYYY-MM-DD` ends the ignoring after
    that day. Without any selected name every rule is selected. Ids are checked against the
    catalogue by `Guard`, which knows it.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[tuple[str, date | None], ...] = ()

    @classmethod
    def parse(cls, text: str) -> RuleSelection:
        """Parse the text form. Raises UsageError naming the first part that is malformed."""
        select: list[str] = []
        ignore: list[tuple[str, date | None]] = []
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, _, until = part.removeprefix("-").partition("@")
            if not name.isalnum() or (until and not part.startswith("-")):
                raise UsageError(
                    f"rule selection {part!r} is not understood. Write a rule id or family to "
                    "select it, -ID to ignore it, -ID@YYYY-MM-DD to ignore it until a day."
                )
            if part.startswith("-"):
                ignore.append((name.upper(), _day(part, until)))
            else:
                select.append(name.upper())
        return cls(tuple(select), tuple(ignore))

    def names(self) -> tuple[str, ...]:
        """Every id or family that is mentioned."""
        return self.select + tuple(name for name, _ in self.ignore)

    def wants(self, rule_id: str, today: date) -> bool:
        """Whether the rule with this id runs on this day."""
        family = rule_id.rstrip("0123456789")
        selected = not self.select or rule_id in self.select or family in self.select
        ignored = any(
            name in (rule_id, family) and (until is None or today <= until)
            for name, until in self.ignore
        )
        return selected and not ignored


def _day(part: str, until: str) -> date | None:
    if not until:
        return None
    try:
        return date.fromisoformat(until)
    except ValueError:
        raise UsageError(
            f"rule selection {part!r} ends on {until!r}, which is not a day. Write YYYY-MM-DD."
        ) from None


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a user can set, resolved once. `warnings` holds sentences to print at boot."""

    mode: Mode = Mode.OFF
    backend: Backend = Backend.AUTO
    depth: Depth = Depth.FAST
    capture: Capture = Capture.META
    dump_dir: Path = Path("ddtree-guard-dumps")
    dump_max_mb: int = 512
    dump_keep: int = 20
    ring_steps: int = 64
    redact: bool = True
    shadow_every: int = 0
    rules: RuleSelection = field(default_factory=RuleSelection)
    log: LogStyle = LogStyle.LINE
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Config:
        """Read `SGLANG_DDTREE_GUARD*` from a mapping.

        Raises UsageError for a value that is not one of the right ones, naming those. An unknown
        variable under the prefix becomes a warning with the nearest known name.
        """
        redact = _switch(env, "REDACT", True)
        capture = _choice(env, "CAPTURE", Capture, Capture.META)
        if capture is Capture.QKV and redact:
            raise UsageError(
                f"{PREFIX}_CAPTURE=qkv is refused while {PREFIX}_REDACT is on, because prompts "
                f"can be rebuilt from captured KV. Set {PREFIX}_REDACT=off to allow it."
            )
        return cls(
            mode=_choice(env, "", Mode, Mode.OFF),
            backend=_choice(env, "BACKEND", Backend, Backend.AUTO),
            depth=_choice(env, "DEPTH", Depth, Depth.FAST),
            capture=capture,
            dump_dir=Path(env.get(f"{PREFIX}_DUMP_DIR") or "ddtree-guard-dumps"),
            dump_max_mb=_number(env, "DUMP_MAX_MB", 512, 1),
            dump_keep=_number(env, "DUMP_KEEP", 20, 1),
            ring_steps=_number(env, "RING_STEPS", 64, 1),
            redact=redact,
            shadow_every=_number(env, "SHADOW_EVERY", 0, 0),
            rules=RuleSelection.parse(env.get(f"{PREFIX}_RULES", "")),
            log=_choice(env, "LOG", LogStyle, LogStyle.LINE),
            warnings=_unknown(env),
        )


def setting(name: str, env: Mapping[str, str] = os.environ) -> str:
    """A variable that is not the guard's own, such as SGLANG_PLUGINS; empty if it is not set."""
    return env.get(name, "").strip()


VARIABLES = (
    "BACKEND", "DEPTH", "CAPTURE", "DUMP_DIR", "DUMP_MAX_MB", "DUMP_KEEP", "RING_STEPS",
    "REDACT", "SHADOW_EVERY", "RULES", "LOG",
)  # fmt: skip

E_ = TypeVar("E_", bound=Enum)


def _name(suffix: str, prefix: str = PREFIX) -> str:
    return f"{prefix}_{suffix}" if suffix else prefix


def _words(kind: type[Enum]) -> str:
    """`log style` for LogStyle."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower()


def _choice(env: Mapping[str, str], suffix: str, kind: type[E_], default: E_) -> E_:
    value = env.get(_name(suffix), "").strip().lower()
    if not value:
        return default
    try:
        return kind(value)
    except ValueError:
        right = ", ".join(str(member.value) for member in kind)
        shown = f"{_name(suffix)}={_clipped(value)}"
        raise UsageError(f"{shown} is not a {_words(kind)}. Use one of: {right}.") from None


def _switch(env: Mapping[str, str], suffix: str, default: bool, prefix: str = PREFIX) -> bool:
    value = env.get(_name(suffix, prefix), "").strip().lower()
    if value in ("", "on", "1", "true", "off", "0", "false"):
        return value in ("on", "1", "true") if value else default
    shown = f"{_name(suffix, prefix)}={_clipped(value)}"
    raise UsageError(f"{shown} is not a switch. Use one of: on, off.")


def _number(
    env: Mapping[str, str], suffix: str, default: int, least: int, prefix: str = PREFIX
) -> int:
    name = _name(suffix, prefix)
    value = env.get(name, "").strip()
    if not value:
        return default
    short = len(value) <= _DIGITS  # Python refuses to read thousands of them
    if not (short and value.isascii() and value.isdigit() and int(value) >= least):
        wanted = f"at least {least}" if short else f"at most {_DIGITS} digits"
        raise UsageError(f"{name}={_clipped(value)} is not a whole number of {wanted}.")
    return int(value)


def _clipped(value: str) -> str:
    return value if len(value) <= 60 else f"{value[:57]}..."


def _unknown(env: Mapping[str, str]) -> tuple[str, ...]:
    known = [_name(suffix) for suffix in VARIABLES]
    warnings = []
    for name in sorted(env):
        if name.startswith(f"{PREFIX}_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            warnings.append(f"{name} is not a variable of the guard; did you mean {near[0]}?")
    return tuple(warnings)


def unset() -> None:
    """Take every variable of the guard out of this process's environment."""
    for name in [n for n in os.environ if n == PREFIX or n.startswith(f"{PREFIX}_")]:
        del os.environ[name]


def guards_variables() -> dict[str, str]:
    """Every variable of the guard that is set in this process."""
    return {n: v for n, v in os.environ.items() if n == PREFIX or n.startswith(f"{PREFIX}_")}


def export(**values: str) -> None:
    """Set environment variables of this process, for what it imports and starts from now on."""
    os.environ.update(values)


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """What the environment says about DDTREE. None and False mean "not set".

    `budget` is the number of draft nodes to verify, `top_k` the candidates per position.
    `incident` shows the draft block size to the target's attention backend, as the broken
    deployment did: for demonstrations, never for serving.
    """

    budget: int | None = None
    top_k: int | None = None
    incident: bool = False

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> TreeConfig:
        """Read `SGLANG_DDTREE_BUDGET`, `_TOPK` and `_INCIDENT`. Raises UsageError."""
        return cls(
            budget=_number(env, "BUDGET", 0, 1, TREE_PREFIX) or None,
            top_k=_number(env, "TOPK", 0, 1, TREE_PREFIX) or None,
            incident=_switch(env, "INCIDENT", False, TREE_PREFIX),
        )
