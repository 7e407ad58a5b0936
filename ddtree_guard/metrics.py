"""Prometheus metrics, only where SGLang serves metrics; without prometheus_client there are none.

SGLang collects them from files that every process of the server writes (the client's multiprocess
mode), so each scheduler process exports its own, told apart by the label `rank`. Gauges take the
newest value that a process of the same rank wrote, as SGLang's own do.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

from ddtree_guard.rule import Finding

log = logging.getLogger("ddtree_guard")
PREFIX = "sglang:ddtree_guard"
GAUGES = {
    "armed": "1 while the guard checks the verify steps of this rank; 0 if it was not armed, or "
    "a site was disarmed since",
    "ranks": "Ranks of the job; on rank 0 only",
    "ranks_armed": "Ranks that reported to be armed when the server started; on rank 0 only",
    "rules_active": "Rules that are checked on this rank",
}
COUNTERS = {
    "steps_checked_total": "Verify steps that were checked",
    "verify_steps_total": "Verify steps that ran",
    "shadow_steps_total": "Verify steps of which one request's attention was computed again",
    "violations_total": "Findings, by rule and scope; latent: the kernel does not read the cell",
    "tainted_total": "Requests that reuse KV of a step that had a finding",
    "dumps_total": "Dumps written",
    "dumps_failed_total": "Dumps that could not be written",
    "ring_dropped_total": "Steps that the flight recorder dropped",
    "internal_faults_total": "Exceptions inside the guard, by site",
}
LABELS: Mapping[str, tuple[str, ...]] = {
    "violations_total": ("rule", "scope", "latent"),
    "internal_faults_total": ("site",),
}  # beside `rank`, which every metric has


def exported() -> dict[str, tuple[str, ...]]:
    """Every metric by its full name, with its labels."""
    return {f"{PREFIX}_{name}": ("rank", *LABELS.get(name, ())) for name in (*GAUGES, *COUNTERS)}


class Metrics:
    """The guard's metrics of one rank. Without `client` every call does nothing.

    No call raises: when the client fails (a full disk under its files), the metrics end with a
    warning, and checking goes on.
    """

    def __init__(self, rank: str, client: Any = None, registry: Any = None) -> None:
        self.rank = rank
        self._made: dict[str, Any] = {}
        self._one: dict[str, Any] = {}  # those whose only label is the rank, labelled
        if client is not None:
            try:
                self._make(client, {} if registry is None else {"registry": registry})
            except Exception as error:
                self._end(error)

    def _make(self, client: Any, extra: Mapping[str, Any]) -> None:
        for name, text in GAUGES.items():
            self._made[name] = client.Gauge(
                f"{PREFIX}_{name}", text, ["rank"], multiprocess_mode="mostrecent", **extra
            )
        for name, text in COUNTERS.items():
            labels = ["rank", *LABELS.get(name, ())]
            self._made[name] = client.Counter(f"{PREFIX}_{name}", text, labels, **extra)
            if name not in LABELS:  # 0 from the start: a rate needs a first sample
                self._one[name] = self._made[name].labels(rank=self.rank)

    @property
    def active(self) -> bool:
        """Whether anything is exported."""
        return bool(self._made)

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        try:
            if name in self._made:
                self._child(name, {}).set(value)
        except Exception as error:
            self._end(error)

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        try:
            if name in self._made and amount:
                self._child(name, labels).inc(amount)
        except Exception as error:
            self._end(error)

    def finding(self, finding: Finding) -> None:
        """Count a finding."""
        latent = "yes" if finding.latent else "no"
        scope = finding.scope.value
        self.add("violations_total", rule=finding.rule, scope=scope, latent=latent)

    def fault(self, site: str, disarmed: bool) -> None:
        """Count an exception inside the guard; a rank with a disarmed site is not armed."""
        self.add("internal_faults_total", site=site)
        if disarmed:
            self.set("armed", 0)

    def _child(self, name: str, labels: Mapping[str, str]) -> Any:
        if name in LABELS:
            return self._made[name].labels(rank=self.rank, **labels)
        if name not in self._one:
            self._one[name] = self._made[name].labels(rank=self.rank)
        return self._one[name]

    def _end(self, error: Exception) -> None:
        self._made.clear()
        self._one.clear()
        log.warning("ddtree_guard: metrics of rank %s end here: %s", self.rank, error)


_OF_PROCESS: dict[str, Metrics] = {}  # the client knows each name once


def metrics_for(rank: str, served: bool) -> Metrics:
    """Metrics of this rank: real ones if SGLang serves metrics and the client is installed.

    Call it in the scheduler process only: the client reads where to write when it is imported.
    """
    if not served:
        return Metrics(rank)
    if rank not in _OF_PROCESS:
        try:
            client = importlib.import_module("prometheus_client")
        except ImportError:
            return Metrics(rank)
        _OF_PROCESS[rank] = Metrics(rank, client)
    return _OF_PROCESS[rank]


def metrics_of_process() -> Metrics:
    """What `metrics_for` made here, also where the guard then could not start; else nothing."""
    return next(iter(_OF_PROCESS.values()), Metrics("unknown"))
