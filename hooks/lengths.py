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


def drifted(record: Record, tokens: Sequence[Any], rank: str) -> Step | None:
    """The step with its length changes where they are not the kept tokens; None where they are.

    `record.kv_before` holds the lengths before SGLang committed; `tokens` the tokens that it kept.
    """
    before, after = record.kv_before, kv_lengths(record.reqs)
    if len(tokens) != len(after) or None in before or None in after:
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
