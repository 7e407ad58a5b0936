"""Plant a rule's fault in a running step: in the live tensors that attention reads.

The fault comes from `testing.faults`; what it changes in the Step is written back to the tensors
that the Step was read from. Nothing of SGLang's code is edited.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from ddtree_guard.errors import UsageError
from ddtree_guard.hooks.adapters import adapter_for
from ddtree_guard.hooks.view import View
from ddtree_guard.step import Step
from ddtree_guard.testing.faults import FAULTS

Places = Callable[[View], tuple[Any, ...]]


def _meta(name: str) -> Places:
    return lambda view: (getattr(view.metadata or view.backend.forward_metadata, name),)


def _batch(name: str) -> Places:
    return lambda view: (getattr(view.batch, name),)


def _spec(name: str) -> Places:
    return lambda view: (getattr(view.batch.spec_info, name),)


def _input(name: str, source: str) -> Places:
    """An input of the model. A planned replay copies positions and tokens once more, from the spec
    info that they came from, so a fault goes there too.
    """
    return lambda view: (getattr(view.batch, name), getattr(view.batch.spec_info, source, None))


# Where each field of a Step lives while a launch is prepared.
LIVE: dict[str, Places] = {
    "layout.qo_indptr": _meta("qo_indptr"),
    "layout.kv_indptr": _meta("kv_indptr"),
    "layout.mask_indptr": _meta("mask_indptr"),
    "layout.kv_indices": _meta("kv_indices"),
    "layout.prefix_lens": _batch("seq_lens"),
    "mask.cells": _meta("custom_mask"),
    "positions.values": _input("positions", "positions"),
    "slots.out_cache_loc": _batch("out_cache_loc"),
    "tree.tokens": _input("input_ids", "draft_token"),
    "tree.parents": _spec("parents"),
    "tree.depths": _spec("depths"),
    "tree.sizes": _spec("tree_sizes"),
    "tree.top1": lambda view: (view.batch.spec_info.drafted[: view.bs, :, 0],),
    "tree.retrieve_index": _spec("retrieve_index"),
    "tree.retrieve_next_token": _spec("retrieve_next_token"),
    "tree.retrieve_next_sibling": _spec("retrieve_next_sibling"),
}


TABLE = "slots.req_to_token"  # rows of the pool's table, picked by the batch


def plant(rule: str, view: View, request: int | None = None) -> tuple[str, ...]:
    """Write the rule's fault into the live tensors of a launch; the paths that were changed.

    `request` defaults to the last one. Raises UsageError where the fault changes something that
    is not a tensor of this launch.
    """
    step = adapter_for(type(view.backend)).read_step(view.complete())
    target = step.bs - 1 if request is None else request
    return write(step, FAULTS[rule](step, target).step, view, rule)


def write(step: Step, planted: Step, view: View, rule: str) -> tuple[str, ...]:
    """Write every array in which `planted` differs from `step` to where it lives."""
    before: dict[str, Any] = {path: value for path, value, _ in step.arrays()}
    changed = {
        path: value
        for path, value, _ in planted.arrays()
        if path not in before or not np.array_equal(value, before[path])
    }
    if not changed or any(path not in (*LIVE, TABLE) for path in changed):
        raise UsageError(
            f"the fault of {rule} changes {', '.join(changed) or 'no array'}, which is no tensor "
            f"of this launch; plant one of a rule that reads {', '.join((*LIVE, TABLE))}."
        )
    for path, value in changed.items():
        if path == TABLE:
            rows = view.batch.req_pool_indices[: len(value)].long()
            table = view.runner.req_to_token_pool.req_to_token
            table[rows] = torch.from_numpy(value).to(table)
        else:
            for live in LIVE[path](view):
                _copy(live, value)
    return tuple(changed)


def _copy(live: Any, value: Any) -> None:
    """Overwrite the start of a tensor. One that holds live rows only takes as many."""
    if live is None:
        return
    flat = torch.from_numpy(np.ascontiguousarray(value)).reshape(-1)[: live.numel()]
    with torch.inference_mode():  # drafts are made in it, and can be written there only
        if live.is_contiguous():
            live.reshape(-1)[: len(flat)].copy_(flat.to(live))
        else:
            live.copy_(flat.view(live.shape).to(live))


def kept(view: View, paths: Iterable[str]) -> list[Callable[[], None]]:
    """What puts the tensors at these paths back to what they hold now."""
    live = [part for path in paths for part in LIVE[path](view) if part is not None]
    return [functools.partial(part.copy_, part.clone()) for part in live]
