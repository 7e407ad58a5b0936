"""Lengths that SGLang keeps for a request on the host, before and after a step."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddtree_guard.hooks.record import Record
from ddtree_guard.step import Step, Who, Widths


def kv_length(req: Any) -> int | None:
    """Committed KV length that SGLang keeps for a request, or None where it keeps none."""
    value = getattr(req, "kv_committed_len", None)
    if value is None:  # 0.5.18 on
        value = getattr(getattr(req, "kv", None), "kv_committed_len", None)
    return None if value is None else int(value)


def kv_lengths(reqs: Sequence[Any]) -> list[int | None]:
    """`kv_length` of each request. All of one release keep it in the same place."""
    try:
        found = [req.kv_committed_len for req in reqs]
    except AttributeError:
        return [kv_length(req) for req in reqs]
    return [kv_length(req) for req in reqs] if None in found else found


def kv_slots(req: Any) -> int:
    """Slots that SGLang has recorded for a request, reserved ones included; 0 where it has none."""
    value = getattr(getattr(req, "kv", None), "kv_allocated_len", None)
    return int(value or getattr(req, "kv_allocated_len", None) or 0)


def _slots(reqs: Sequence[Any]) -> list[int]:
    """`kv_slots` of each request, which nearly all have in the same place."""
    try:
        found = [req.kv.kv_allocated_len for req in reqs]
    except AttributeError:
        found = []
    return found if found and all(found) else [kv_slots(req) for req in reqs]


def beyond_row(record: Record, rank: str) -> Step | None:
    """The step with the recorded slots where they are more than a row of the table has columns."""
    view = record.view
    if view is None or not record.reqs:
        return None
    slots = _slots(record.reqs)
    width = int(view.runner.req_to_token_pool.req_to_token.shape[1])
    if max(slots) <= width:
        return None
    step = record.step or _bare(record, rank)
    return step.replace(
        slots__allocated=np.array(slots, np.int64), slots__row_width=width, slots__page_size=1
    )


def drifted(record: Record, tokens: Sequence[Any], rank: str) -> Step | None:
    """The step with its length changes where they are not the kept tokens; None where they are.

    `record.kv_before` holds the lengths before SGLang committed; `tokens` the tokens that it kept.
    """
    before, after = record.kv_before, kv_lengths(record.reqs)
    if not len(before) == len(after) == len(tokens) or None in before or None in after:
        return None
    kept = list(map(len, tokens))
    if list(map(operator.sub, after, before)) == kept:
        return None  # nearly always, and then nobody need be asked whether it is gone
    grown = [
        now - was if now is not None and was is not None and not _gone(req) else count
        for req, now, was, count in zip(record.reqs, after, before, kept, strict=True)
    ]
    if grown == kept:
        return None
    step = record.step or _bare(record, rank)
    return step.replace(
        outcome__accept_lens=np.array(kept, np.int64), outcome__delta_kv=np.array(grown, np.int64)
    )


def prompt_left(reqs: Sequence[Any]) -> Any:
    """Prompt tokens of each request that have no KV yet, or None where SGLang does not tell."""
    known = [(len(req.origin_input_ids), kv_length(req)) for req in reqs]
    if any(length is None for _, length in known):
        return None
    return np.array([max(0, total - (length or 0)) for total, length in known], np.int64)


def _gone(req: Any) -> bool:
    """Whether SGLang settles nothing for the request any more."""
    return bool(req.is_retracted or req.finished())


def _bare(record: Record, rank: str) -> Step:
    """A step of which only the requests are known: it was not read from the device."""
    view, bs = record.view, len(record.reqs)
    args = None if view is None else view.runner.server_args
    return Step(
        bs=bs,
        padded_bs=bs if view is None else len(view.batch.req_pool_indices),
        widths=Widths(w=int(getattr(args, "speculative_num_draft_tokens", 0) or 0)),
        who=Who(
            rids=record.rids,
            step_id=record.step_id,
            rank=rank,
            algorithm=str(getattr(args, "speculative_algorithm", "") or ""),
            path="eager" if view is None else view.path,
        ),
    )
