"""Faults of the width family."""

from __future__ import annotations

import numpy as np

from ddtree_guard.step import Step
from ddtree_guard.testing.faults.registry import Planted, fault


@fault("W1")
def stale_query_stride(step: Step, request: int) -> Planted:
    """Query offsets from `request` on step by w-1."""
    offsets = step.layout.qo_indptr.copy()
    offsets[request + 1 :] -= np.arange(1, step.padded_bs - request + 1, dtype=offsets.dtype)
    return Planted(step.replace(layout__qo_indptr=offsets), request, step.w - 1)


@fault("W3")
def short_mask_segment(step: Step, request: int) -> Planted:
    """The mask segment of `request` is one row too short."""
    offsets = step.layout.mask_indptr.copy()
    offsets[request + 1 :] -= int(step.layout.prefix_lens[request]) + step.w
    return Planted(step.replace(layout__mask_indptr=offsets), request, 0)
