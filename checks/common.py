"""Small helpers that several rule families share."""

from __future__ import annotations

from typing import Any

import numpy as np


def first(wrong: Any) -> int | None:
    """Index of the first True of a boolean vector, or None."""
    return int(np.argmax(wrong)) if wrong.any() else None


def first_cell(wrong: Any) -> tuple[int, int] | None:
    """(request, row) of the first True of a (bs, w) matrix, lowest request first, or None."""
    at = first(wrong.reshape(-1))
    return None if at is None else divmod(at, wrong.shape[1])


def lens_text(w: int, s: int) -> str:
    """The factors of a request's mask length, with numbers."""
    return f"{w}*({s}+{w})"
