"""Whether a Step has the form of its declaration: one that is filled by hand may hold anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from numbers import Integral, Real

from ddtree_guard.step import PARTS, Step

# Types of a field by the first word of its annotation, and words for a person.
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "int": ((Integral,), "a whole number"),
    "Int": ((Integral, type(None)), "a whole number"),
    "str": ((str,), "text"),
    "float": ((Real,), "a number"),
    "Mapping": ((Mapping, type(None)), "a mapping"),  # None: not in this step
    "tuple": ((tuple, list, type(None)), "a tuple"),
}
_REQUIRED = "contract.not_checked"  # None would exempt no rule, or every one


def _declared() -> dict[str, tuple[tuple[type, ...], str]]:
    """Dotted path of every field that is no array to the types that it may have."""
    found = {"bs": _KINDS["int"], "padded_bs": _KINDS["int"]}
    for part, kind in PARTS.items():
        for field in dataclasses.fields(kind):
            annotation = str(field.type)
            types, words = _KINDS.get(annotation.split("[")[0].split()[0], (None, ""))
            if types is None:
                continue
            if annotation.endswith("| None"):
                types = (*types, type(None))
            found[f"{part}.{field.name}"] = types, words
    return found | {_REQUIRED: ((Mapping,), "a mapping")}


_DECLARED = _declared()


def fault(step: Step) -> str | None:
    """What of the step is not of its declared type, as `<path> to be <kind>, found <value>`."""
    for part, kind in PARTS.items():
        value = getattr(step, part)
        if not isinstance(value, kind):
            return f"{part} to be a {kind.__name__}, found {_shown(value)}"
    for path, (types, words) in _DECLARED.items():
        value = step.get(path)
        if not isinstance(value, types):
            return f"{path} to be {words}, found {_shown(value)}"
    return None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
