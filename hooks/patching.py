"""Our own patcher: patches are data, applying returns a report, restoring checks ownership.

SGLang's HookRegistry cannot restore and rewrites every module global that holds an original, ours
included; so originals live inside a container here, and wrappers reach them only through it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ddtree_guard.errors import IncompatibleError
from ddtree_guard.hooks.facts import SUPPORTED, release

_MISSING: Any = object()
_ITEM = re.compile(r"(.+)\[(.+)\]")


class Original:
    """Holds what a patch replaced. Wrappers call `original.value(...)`."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True, slots=True)
class Patch:
    """One replacement. `target` is `package.module.attribute`, `package.module.Class.attribute`
    or `package.module.mapping[key]`. `why` is one sentence. `wrap` gets the Original and returns
    the replacement. `expects` names the first parameters that the original must have.
    """

    target: str
    why: str
    wrap: Callable[[Original], Any]
    expects: tuple[str, ...] = ()
    required: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a patch: `applied`, `absent`, `signature-changed` or `already`; from `examine`
    `matched` in the place of `applied`.
    """

    patch: Patch
    status: str
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the wrapper is in place."""
        return self.status in ("applied", "already", "matched")


@dataclass(slots=True)
class _Place:
    """Where a patch was applied, and how to undo it."""

    patch: Patch
    owner: Any
    key: str
    before: Any  # the raw attribute; _MISSING where it was inherited
    ours: Any

    def read(self) -> Any:
        return _read(self.owner, self.key)

    def undo(self) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.key] = self.before
        elif self.before is _MISSING:
            delattr(self.owner, self.key)
        else:
            setattr(self.owner, self.key, self.before)


_PLACES: list[_Place] = []  # every patch in force, in the order of application


@dataclass(frozen=True, slots=True)
class PatchReport:
    """The outcomes of one `apply`, and the way back."""

    outcomes: tuple[Outcome, ...]
    _places: list[_Place] = field(default_factory=list)

    def require(self) -> PatchReport:
        """Self, or IncompatibleError if a required patch is not in place."""
        for outcome in self.outcomes:
            if outcome.patch.required and not outcome.ok:
                raise IncompatibleError(
                    f"expected {outcome.patch.target} as in sglang{SUPPORTED}, found it "
                    f"{outcome.status}{outcome.detail and ' (' + outcome.detail + ')'} in SGLang "
                    f"{release()}; install a supported SGLang or uninstall ddtree-guard."
                )
        return self

    def restore(self) -> tuple[str, ...]:
        """Put every original back that is still under our wrapper, newest first.

        Returns one sentence for each that somebody else has wrapped since and that stays.
        """
        kept: list[str] = []
        stay: list[_Place] = []
        for place in reversed(self._places):
            now = place.read()
            if now is place.ours:
                place.undo()
                _PLACES.remove(place)
            else:
                stay.insert(0, place)
                kept.append(f"{place.patch.target} stays: {_describe(now)} has replaced our patch")
        self._places[:] = stay
        return tuple(kept)

    @property
    def in_force(self) -> bool:
        """Whether a patch of this report is still to be restored."""
        return bool(self._places)


def apply(patches: Iterable[Patch]) -> PatchReport:
    """Apply patches in order. Never raises for what SGLang looks like: see `PatchReport`."""
    outcomes, places = [], []
    for patch in patches:
        outcome, place = _apply(patch)
        outcomes.append(outcome)
        if place is not None:
            places.append(place)
            _PLACES.append(place)
    return PatchReport(tuple(outcomes), places)


def examine(patch: Patch) -> Outcome:
    """What `apply` would find, changing nothing. Raises ImportError as the target's module does."""
    found = _locate(patch.target)
    if found is None:
        return Outcome(patch, "absent")
    raw = _read(*found)
    problem = signature_problem(getattr(raw, "__func__", raw), patch.expects)
    return Outcome(patch, "signature-changed" if problem else "matched", problem)


def _apply(patch: Patch) -> tuple[Outcome, _Place | None]:
    found = _locate(patch.target)
    if found is None:
        return Outcome(patch, "absent"), None
    owner, key = found
    raw = _read(owner, key)
    mine = next((p for p in _PLACES if p.owner is owner and p.key == key), None)
    if mine is not None and raw is mine.before:  # somebody took our patch away
        _PLACES.remove(mine)
    elif mine is not None:  # a second layer under somebody's wrapper would run twice
        over = "" if raw is mine.ours else f"now under {_describe(raw)}"
        return Outcome(patch, "already", over), None
    function = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
    problem = signature_problem(function, patch.expects)
    if problem:
        return Outcome(patch, "signature-changed", problem), None
    ours = patch.wrap(Original(function))
    if isinstance(function, type) and not isinstance(ours, type):
        raise TypeError(f"{patch.target} is a class; a function in its place breaks isinstance")
    if isinstance(raw, (staticmethod, classmethod)):
        ours = type(raw)(ours)
    own = isinstance(owner, dict) or key in vars(owner)
    place = _Place(patch, owner, key, raw if own else _MISSING, ours)
    if isinstance(owner, dict):
        owner[key] = ours
    else:
        setattr(owner, key, ours)
    return Outcome(patch, "applied"), place


def _locate(target: str) -> tuple[Any, str] | None:
    """(owner, key) of a target, or None where the module, a class or the key is absent."""
    item = _ITEM.fullmatch(target)
    if item:
        owner = _resolve(item[1])
        return (owner, item[2]) if isinstance(owner, dict) and item[2] in owner else None
    path, _, key = target.rpartition(".")
    owner = _resolve(path)
    return (owner, key) if owner is not _MISSING and hasattr(owner, key) else None


def _resolve(path: str) -> Any:
    """The object at a dotted path: the longest importable module, then attributes."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        name = ".".join(parts[:count])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name + ".").startswith(error.name + "."):
                continue  # the path itself ends here; anything else is a broken installation
            raise
        for part in parts[count:]:
            found = getattr(found, part, _MISSING)
        return found
    return _MISSING


def _read(owner: Any, key: str) -> Any:
    """The raw value, without binding: static and class methods stay what they are."""
    if isinstance(owner, dict):
        return owner.get(key, _MISSING)
    return inspect.getattr_static(owner, key, _MISSING)


def signature_problem(function: Any, expects: tuple[str, ...]) -> str:
    """How the first parameters of a function differ from those expected; empty if they do not."""
    if not expects:
        return ""
    if not callable(function):
        return f"it is a {type(function).__name__}"
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return f"{_describe(function)} has no signature to compare"
    names = tuple(parameters)
    kinds = [parameter.kind for parameter in parameters.values()]
    if names[: len(expects)] == expects or kinds[:1] == [inspect.Parameter.VAR_POSITIONAL]:
        return ""  # *args: a wrapper that passes on whatever it is given
    return (
        f"{_describe(function)} has parameters ({', '.join(names)}), "
        f"expected ({', '.join(expects)}, ...)"
    )


def _describe(value: Any) -> str:
    if value is _MISSING:
        return "nothing"
    value = getattr(value, "__func__", value)
    module = getattr(value, "__module__", type(value).__module__)
    return f"{module}.{getattr(value, '__qualname__', type(value).__qualname__)}"
