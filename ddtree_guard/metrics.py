"""Prometheus metrics, only where SGLang serves metrics; without prometheus_client there are none.

Every metric has the label `rank`, because SGLang exports only attention-TP rank 0 by default.
"""

from __future__ import annotations

import importlib
from typing import Any

PREFIX = "sglang:ddtree_guard"
GAUGES = {
    "armed": "1 while the guard checks verify steps of this rank, else 0",
    "rules_active": "Rules that are checked on this rank",
}
COUNTERS = {
    "steps_checked_total": "Verify steps that were checked",
    "verify_steps_total": "Verify steps that ran",
    "shadow_steps_total": "Verify steps of which one request's attention was computed again",
    "violations_total": "Findings, by rule and scope",
    "dumps_total": "Dumps written",
    "ring_dropped_total": "Steps that the flight recorder dropped",
}
_EXTRA = {"violations_total": ("rule", "scope")}


class Metrics:
    """The guard's metrics of one rank. Without `client` every call does nothing."""

    def __init__(self, rank: str, client: Any = None, registry: Any = None) -> None:
        self.rank = rank
        self._made: dict[str, Any] = {}
        if client is None:
            return
        extra = {} if registry is None else {"registry": registry}
        for name, text in GAUGES.items():
            self._made[name] = client.Gauge(
                f"{PREFIX}_{name}", text, ["rank"], multiprocess_mode="mostrecent", **extra
            )
        for name, text in COUNTERS.items():
            labels = ["rank", *_EXTRA.get(name, ())]
            self._made[name] = client.Counter(f"{PREFIX}_{name}", text, labels, **extra)

    @property
    def active(self) -> bool:
        """Whether anything is exported."""
        return bool(self._made)

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        if name in self._made:
            self._made[name].labels(rank=self.rank).set(value)

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        if name in self._made and amount:
            self._made[name].labels(rank=self.rank, **labels).inc(amount)


def metrics_for(rank: str, served: bool) -> Metrics:
    """Metrics of this rank: real ones if SGLang serves metrics and the client is installed.

    Call it in the scheduler process only: the client reads where to write when it is imported.
    """
    if not served:
        return Metrics(rank)
    try:
        client = importlib.import_module("prometheus_client")
    except ImportError:
        return Metrics(rank)
    return Metrics(rank, client)
