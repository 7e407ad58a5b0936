"""What a report says of each request of a step, and which request it looks at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddtree_guard.rule import Finding
from ddtree_guard.step import Step

COLUMNS = ("request", "rid", "s", "nodes", "depth", "accepted", "query rows", "mask cells")


def request_rows(step: Step) -> list[dict[str, Any]]:
    """The values of COLUMNS, one mapping per live request."""
    return [
        {
            "request": i,
            "rid": step.who.rid(i) or "-",
            "s": _item(step.layout.prefix_lens, i),
            "nodes": _item(step.tree.sizes, i),
            "depth": _largest(step.tree.depths, i),
            "accepted": _item(step.outcome.accept_lens, i),
            "query rows": _against(step.w, _gap(step.layout.qo_indptr, i)),
            "mask cells": _against(_cells(step, i), _gap(step.layout.mask_indptr, i)),
        }
        for i in range(step.bs)
    ]


def offender(findings: Iterable[Finding], step: Step) -> int:
    """The request to look at: a victim, the offender, or else the last one."""
    for finding in findings:
        for request in (*finding.victims, finding.request):
            if request is not None and 0 <= request < step.bs:
                return request
    return step.bs - 1


def _item(array: Any, at: int) -> Any:
    whole = array is not None and array.ndim == 1 and at < len(array)
    return array[at].item() if whole else "-"


def _largest(array: Any, at: int) -> Any:
    whole = array is not None and array.ndim == 2 and at < len(array) and array.shape[1]
    return array[at].max().item() if whole else "-"


def _gap(offsets: Any, at: int) -> Any:
    end, begin = _item(offsets, at + 1), _item(offsets, at)
    return "-" if "-" in (end, begin) else end - begin


def _cells(step: Step, at: int) -> Any:
    s = _item(step.layout.prefix_lens, at)
    return "-" if s == "-" else step.w * (s + step.w)


def _against(right: Any, found: Any) -> str:
    return str(found) if right == found or "-" in (right, found) else f"{right} -> {found}"
