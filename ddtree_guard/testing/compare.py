"""Exact comparison of Steps, for round trips."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


def differences(a: Any, b: Any, path: str = "step") -> list[str]:
    """Dotted paths at which two records differ in type, dtype, shape or any bit."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if type(a) is not type(b) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return [path]
        return [] if a.tobytes() == b.tobytes() else [path]
    if type(a) is not type(b):
        return [path]
    if dataclasses.is_dataclass(a):
        names = [field.name for field in dataclasses.fields(a)]
        pairs = [(name, getattr(a, name), getattr(b, name)) for name in names]
    elif isinstance(a, dict):
        if list(a) != list(b):
            return [path]
        pairs = [(key, a[key], b[key]) for key in a]
    elif isinstance(a, (tuple, list)):
        if len(a) != len(b):
            return [path]
        pairs = [(str(i), x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        return [] if repr(a) == repr(b) else [path]
    return [p for name, x, y in pairs for p in differences(x, y, f"{path}.{name}")]
