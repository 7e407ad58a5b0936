"""Which requests hold KV that a faulty step wrote, and which later requests reuse it.

A finding about a step makes the keys and values from its committed length on suspect. They end up
in the prefix cache; a later request whose cached prefix reaches into them is tainted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from ddtree_guard.hooks.record import Record
from ddtree_guard.rule import Finding, Scope

KEPT = 256  # tainted requests remembered, oldest forgotten first


@dataclass(frozen=True, slots=True)
class _Source:
    """`parts` are SGLang's own lists of token ids, which grow as the request does."""

    start: int  # first suspect position
    parts: tuple[Sequence[int], ...]


class Taints:
    """Sources of suspect KV in this process, and the requests already reported."""

    def __init__(self, keep: int = KEPT) -> None:
        self.keep = keep
        self._sources: OrderedDict[str, _Source] = OrderedDict()
        self._told: OrderedDict[str, None] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._sources)

    def mark(self, record: Record, finding: Finding) -> None:
        """The step of this record had a finding: what it wrote for these requests is suspect."""
        if record.step is None or record.step.layout.prefix_lens is None:
            return
        hit = list(range(len(record.reqs)))
        if finding.scope is Scope.REQUEST and finding.request is not None:
            hit = [i for i in (finding.request, *finding.victims) if i < len(record.reqs)]
        for i in hit:
            self.add(record.reqs[i], int(record.step.layout.prefix_lens[i]))

    def add(self, req: Any, start: int) -> None:
        """Remember that `req` (SGLang's Req) holds suspect KV from position `start` on."""
        rid = str(req.rid)
        if rid not in self._sources:
            parts = (req.origin_input_ids, req.output_ids)
            self._sources[rid] = _Source(start, parts)
            _trim(self._sources, self.keep)

    def reuse(self, req: Any) -> str | None:
        """The rid whose suspect KV the request's cached prefix holds; None if clean or told."""
        rid, cached = str(req.rid), len(req.prefix_indices)
        if rid in self._told or rid in self._sources:
            return None
        for source, held in self._sources.items():
            if cached > held.start and _shares(req.origin_input_ids, held, held.start + 1):
                self._told[rid] = None
                _trim(self._told, self.keep)
                # what it computes on top is suspect as well
                self.add(req, held.start)
                return source
        return None


def _shares(tokens: Sequence[int], held: _Source, count: int) -> bool:
    """Whether the first `count` tokens are those of the source."""
    mine = list(islice(iter(tokens), count))
    theirs = list(islice(chain(*held.parts), count))
    return len(mine) == count and mine == theirs


def _trim(kept: OrderedDict[str, Any], most: int) -> None:
    while len(kept) > most:
        kept.popitem(last=False)
