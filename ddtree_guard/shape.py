"""Declarations of arrays, and whether an array has the shape and the type of its declaration."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import field
from typing import Any, TypeAlias

# Any, because a field is a torch tensor while hot, a NumPy array on the host, or None.
Array: TypeAlias = Any
Int: TypeAlias = Any  # int, or None when unknown

WHOLE, BYTES, REAL = "whole numbers", "one byte per cell (bool or uint8)", "numbers"
_LARGEST = (1 << 63) - 1
_DTYPE_KINDS = {WHOLE: "biu", BYTES: "biu", REAL: "biuf"}  # as NumPy names them


def array(*shape: str, kind: str = WHOLE) -> Any:
    """Declare an array field. Rule W5 compares `shape` with the live sizes ("*" is any size), and
    the type of its elements with `kind`.
    """
    return field(default=None, metadata={"shape": shape, "kind": kind})


def misfit(
    value: Any, declared: tuple[str, ...], kind: str, sizes: Mapping[str, int]
) -> str | None:
    """How an array departs from its declaration, as a phrase, or None if it fits.

    `declared` names its sizes; a name that is not in `sizes` is any size.
    """
    actual, wanted = tuple(value.shape), tuple(map(sizes.get, declared))
    fits = actual == wanted or (
        len(actual) == len(wanted)
        and all(want in (None, size) for want, size in zip(wanted, actual, strict=True))
    )
    if not fits:
        text = " x ".join(declared)
        return f"has shape {_shape(actual)}, expected {text} = {_shape(wanted)}"
    of_kind, unsigned = _is_of(kind, value.dtype)
    if not of_kind:
        return f"holds {value.dtype}, expected {kind}"
    if unsigned and (value > _LARGEST).any():  # would read as -1
        return f"holds {int(value.max())}, expected at most {_LARGEST}"
    return None


@functools.cache
def _is_of(kind: str, dtype: Any) -> tuple[bool, bool]:
    """Whether elements are of the declared kind, and whether they are of 64 bits without a sign.
    A tensor's dtype is judged on the host.
    """
    found = getattr(dtype, "kind", None)
    byte = kind != BYTES or found is None or dtype.itemsize == 1
    known = found is None or found in _DTYPE_KINDS[kind]
    return byte and known, str(dtype) == "uint64"


def _shape(wanted: tuple[int | None, ...]) -> str:
    return "(" + ", ".join("any" if n is None else str(n) for n in wanted) + ")"
