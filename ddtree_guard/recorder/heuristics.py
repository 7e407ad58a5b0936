"""Signs of garbled output that are not proof: they write a dump and do nothing else.

Acceptance length is not a correctness signal (a broken verifier can raise it), so a jump counts in
either direction.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

RUN = 32  # tokens of one kind in a row
STUCK = 64  # steps in a row in which nobody accepted a draft token
MIN_REQUEST_STEPS = 256  # and so many requests' steps in them
WINDOW = 32  # steps of the short mean
SETTLED = 256  # steps before a jump can be told
JUMP = 2.0
TOLD = 1024  # requests remembered as reported


class Heuristics:
    """Watches accepted lengths and runs of one token; `step` returns what it noticed, in words."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, None] = OrderedDict()
        self._stuck = self._stuck_requests = 0
        self._steps = 0
        self._long = self._short = 0.0

    def run(self, rid: str, length: int) -> str | None:
        """A request is in a run of `length` equal tokens. Told once per request."""
        if length < RUN or rid in self._told:
            return None
        self._told[rid] = None
        if len(self._told) > TOLD:
            self._told.popitem(last=False)
        return f"a request produced one token {length} times in a row"

    def runs(self, rids: Sequence[str], lengths: Sequence[int]) -> list[str]:
        """These requests are in runs of so many equal tokens."""
        if max(lengths, default=0) < RUN:
            return []
        told = (self.run(rid, length) for rid, length in zip(rids, lengths, strict=False))
        return [why for why in told if why]

    def lengths(self, total: int, count: int) -> str | None:
        """A step committed `total` tokens for `count` requests."""
        if count <= 0:
            return None
        self._steps += 1
        return self._stuck_at_one(total, count) or self._jump(total / count)

    def _stuck_at_one(self, total: int, count: int) -> str | None:
        if total > count:
            self._stuck = self._stuck_requests = 0
            return None
        before = self._stuck >= STUCK and self._stuck_requests >= MIN_REQUEST_STEPS
        self._stuck += 1
        self._stuck_requests += count
        now = self._stuck >= STUCK and self._stuck_requests >= MIN_REQUEST_STEPS
        if before or not now:
            return None
        return f"accept length 1.00 for {self._stuck} steps, {self._stuck_requests} request steps"

    def _jump(self, mean: float) -> str | None:
        if self._steps == 1:
            self._long = self._short = mean
        was = self._apart()
        self._short += (mean - self._short) / WINDOW
        self._long += (mean - self._long) / (WINDOW * 16)
        if was or self._steps < SETTLED or not self._apart():
            return None
        return f"accept length went from {self._long:.2f} to {self._short:.2f}"

    def _apart(self) -> bool:
        low, high = sorted((self._long, self._short))
        return low > 0 and high / low >= JUMP
