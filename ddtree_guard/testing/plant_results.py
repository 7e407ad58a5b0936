"""Faults in what the guard measures: attention rows (D), the device's verdict (DG1), and the
digests that ranks compare (X). The tree probe plants them in a live worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ddtree_guard.device.protocol import BITS
from ddtree_guard.hooks.ranks import PARTS

CLAIMED = "W3"  # the device claims it for DG1; the host finds nothing
_FOREIGN = {"X1": (1 + PARTS.index("tree"), "another"), "X4": (0, "graph/64")}


def measured(guard: Any) -> list[str]:
    """Rules of this family that this server can break, beside those that a Step can show."""
    device = ["DG1"] if guard.checker.kind == "device" else []
    return ["K6", *device, *(_FOREIGN if guard.digests is not None else ())]


def is_measured(rule: str) -> bool:
    """Whether the rule judges a measurement of the guard's own."""
    return rule.startswith(("D", "X"))


@contextmanager
def slots_beyond_row(record: Any) -> Iterator[None]:
    """Inside the block the last request has recorded a slot more than a row holds."""
    req = record.reqs[-1]
    holder = req if hasattr(req, "kv_allocated_len") else req.kv
    held = holder.kv_allocated_len
    holder.kv_allocated_len = record.view.runner.req_to_token_pool.req_to_token.shape[1] + 1
    try:
        yield
    finally:
        holder.kv_allocated_len = held


class Results:
    """Spoils the measurement of the step that a row of `rows` names: {rule: {"at": step, ..}}."""

    def __init__(self, guard: Any, rows: dict[str, dict[str, Any]]) -> None:
        self.guard, self.rows = guard, rows
        if guard.shadow.on:
            self._wrap_shadow(guard.shadow)
        self._wrap_checker(guard.checker)
        if guard.digests is not None and guard.digests.rank == guard.digests.world - 1:
            guard.digests.store = _Liar(guard.digests.store, self)

    def due(self, rule: str) -> bool:
        """Whether the step that is being built is measured for this rule."""
        pending = getattr(self.guard.shadow, "_pending", None)
        return rule[0] != "D" or rule == "DG1" or (pending is not None and pending.due)

    def rule_at(self, step_id: int, *rules: str) -> str:
        """Which of these rules is planted in a step; empty for none."""
        return next((r for r in rules if self.rows.get(r, {}).get("at") == step_id), "")

    def _wrap_shadow(self, shadow: Any) -> None:
        """The rows that attention wrote: in eager steps those that the model goes on with."""
        compare = shadow._compare

        def compared(now: Any, held: Any) -> None:
            rule = self.rule_at(now.record.step_id, "D1", "D3", "D4")
            if rule:
                first = now.request * now.taken.w
                held.output[first + (0 if rule == "D3" else 1)] += 1.0
                self.rows[rule] |= {"rid": now.record.rids[now.request], "layer": held.layer}
            compare(now, held)

        shadow._compare = compared

    def _wrap_checker(self, checker: Any) -> None:
        settle = checker.settle

        def settled(record: Any) -> Any:
            if self.rule_at(record.step_id, "DG1") and isinstance(record.ticket, tuple):
                self._claim(checker, record)
            return settle(record)

        checker.settle = settled

    def _claim(self, checker: Any, record: Any) -> None:
        """A bit that the kernel did not set, on the last request's first row."""
        number, last = record.ticket[0], len(record.rids) - 1
        checker._poll()
        since, verdict = checker._verdicts.get(number, (0, None))
        if verdict is not None:
            bits, first = verdict.bits | 1 << BITS[CLAIMED], {**verdict.first, CLAIMED: (last, 0)}
            checker._verdicts[number] = since, replace(verdict, bits=bits, first=first)


class _Liar:
    """The store of the last rank: what it writes of a planted step is not what it saw."""

    def __init__(self, store: Any, results: Results) -> None:
        self._store, self._results = store, results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: str) -> None:
        """Write a digest, with the planted part replaced."""
        rule = self._results.rule_at(int(key.split("/")[-2]), *_FOREIGN)
        if rule:
            parts, (at, foreign) = value.split(" "), _FOREIGN[rule]
            value = " ".join([*parts[:at], foreign, *parts[at + 1 :]])
        self._store.set(key, value)
