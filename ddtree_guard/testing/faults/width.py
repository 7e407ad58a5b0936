"""Faults of the width family."""

from __future__ import annotations

import dataclasses

import numpy as np

from ddtree_guard.step import Step
from ddtree_guard.testing.faults.registry import Planted, fault


@fault("W1")
def stale_query_stride(step: Step, request: int) -> Planted:
    """Query offsets from `request` on step by w-1."""
    offsets = step.layout.qo_indptr.copy()
    offsets[request + 1 :] -= np.arange(1, step.padded_bs - request + 1, dtype=offsets.dtype)
    return Planted(step.replace(layout__qo_indptr=offsets), request, step.w - 1)


@fault("W2")
def short_kv_range(step: Step, request: int) -> Planted:
    """The KV range of `request` misses its last token."""
    offsets = step.layout.kv_indptr.copy()
    offsets[request + 1 :] -= 1
    return Planted(step.replace(layout__kv_indptr=offsets), request, 0)


@fault("W3")
def short_mask_segment(step: Step, request: int) -> Planted:
    """The mask segment of `request` is one row too short."""
    offsets = step.layout.mask_indptr.copy()
    offsets[request + 1 :] -= int(step.layout.prefix_lens[request]) + step.w
    return Planted(step.replace(layout__mask_indptr=offsets), request, 0)


@fault("W4")
def wider_mask_rows(step: Step, request: int) -> Planted:
    """The builder wrote the mask rows of `request` one cell longer."""
    strides = step.mask.row_stride.copy()
    strides[request] += 1
    return Planted(step.replace(mask__row_stride=strides), request, min(1, step.w - 1))


@fault("W5")
def missing_column(step: Step, request: int) -> Planted:
    """The depth array has a column too few."""
    return Planted(step.replace(tree__depths=step.tree.depths[:, :-1]), None)


@fault("W6")
def relaid_static_buffer(step: Step, request: int) -> Planted:
    """A static buffer is written with twice the captured stride."""
    live = {
        name: dataclasses.replace(static, stride=tuple(2 * n for n in static.stride))
        for name, static in step.graph.live.items()
    }
    return Planted(step.replace(graph__live=live), None)


@fault("W7")
def tokens_counted_as_requests(step: Step, request: int) -> Planted:
    """The graph's token count is one row short of a batch."""
    return Planted(step.replace(graph__num_tokens=step.padded_bs * step.w - 1), None)


@fault("W8")
def short_launch(step: Step, request: int) -> Planted:
    """The launch covers w-1 rows of every request, so request 0 is named."""
    return Planted(step.replace(layout__max_extend_len=step.w - 1), 0, step.w - 1)
