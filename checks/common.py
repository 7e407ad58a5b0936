"""Small helpers that several rule families share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ddtree_guard.rule import NotApplicable, NotEvaluable
from ddtree_guard.step import Step

MAX_WIDTH = 1 << 13  # kernels stop at 1025; an ancestor matrix of this width is 64 MiB
MAX_LEN = (1 << 31) - 1  # longer lengths are garbage, and their sums could leave 64 bits

SERVER_WIDTH = (
    "the attention backend took num_draft_tokens from the server argument (the draft block size) "
    "instead of from the batch; use the corrected backend"
)


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


def ints(step: Step, path: str) -> Any:
    """An integer or bool array of the step as int64. Raises NotEvaluable if there is none."""
    found = optional_ints(step, path)
    if found is None:
        raise NotApplicable(f"{path} is not in this step")
    return found


def optional_ints(step: Step, path: str) -> Any:
    """The same, or None if it is absent. Raises NotEvaluable for one that W5 reports: a rule must
    not pass because a part of what it reads cannot be read.
    """
    value = numbers(step, path)
    return None if value is None else value.astype(np.int64)


def numbers(step: Step, path: str) -> Any:
    """The array at `path`, or None if it is absent. Raises NotEvaluable for one that W5 reports."""
    value = step.get(path)
    misfit = None if value is None else step.misfit(path)
    if misfit:
        raise NotEvaluable(f"{path} {misfit} (see W5)")
    return value


def hint(step: Step, path: str) -> Any:
    """An integer array for the words of a finding: None where it is absent or unusable."""
    try:
        return optional_ints(step, path)
    except NotEvaluable:
        return None


def sizes_of_batch(step: Step) -> tuple[int, int]:
    """(w, BS). Raises NotEvaluable for sizes that no launch can have; W5 reports those."""
    if not 1 <= step.w <= MAX_WIDTH:
        raise NotEvaluable(f"w = {step.w} is not a verify width (see W5)")
    if not 0 <= step.bs <= step.padded_bs:
        raise NotEvaluable(f"bs = {step.bs} requests in BS = {step.padded_bs} lanes (see W5)")
    return step.w, step.padded_bs


def lens_of(step: Step) -> Any:
    """Prefix lengths of all BS lanes. Raises NotEvaluable for lengths that W2 reports."""
    lens = ints(step, "layout.prefix_lens")
    at = first((lens < 0) | (lens > MAX_LEN))
    if at is not None:
        raise NotEvaluable(f"the prefix length of request {at} is {int(lens[at])} (see W2)")
    return lens


def mask_columns(step: Step) -> Any:
    """Prefix columns of each lane's mask rows: s, or fewer where a window's mask was re-laid."""
    columns = lens_of(step)
    stride = None if step.mask.window is None else optional_ints(step, "mask.row_stride")
    if stride is not None:
        kept = stride - step.w
        at = first((kept < 0) | (kept > columns[: step.bs]))
        if at is not None:
            raise NotEvaluable(f"mask rows of request {at} have {int(stride[at])} columns (see W4)")
        columns[: step.bs] = kept
    return columns


def mask_offsets(step: Step) -> Any:
    """The BS+1 mask offsets that the lengths and w ask for, in cells."""
    w, _ = sizes_of_batch(step)
    return np.concatenate([[0], np.cumsum(w * (mask_columns(step) + w))])


def width_from_cells(cells: int, s: int) -> int | None:
    """The width x for which x*(s+x) is this many mask cells, or None if there is none."""
    if cells <= 0 or s < 0:
        return None
    x = (math.isqrt(s * s + 4 * cells) - s) // 2
    return x if x * (s + x) == cells else None


def width_cause(step: Step, other: int | None) -> tuple[str, str]:
    """Likely cause and confidence when an offset follows the width `other` instead of w."""
    if other is not None and other != step.w:
        if other == step.widths.block:
            return SERVER_WIDTH, "very likely"
        for name, held in sorted(step.widths.holders.items()):
            if held == other:
                return f"the offset follows the width {other} that {name} holds", "very likely"
    return SERVER_WIDTH, "possible"
