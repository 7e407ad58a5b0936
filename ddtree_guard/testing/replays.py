"""Verify replays of an NGRAM engine, guarded or not: GPU time, and the host's time around them.

Part of the probe. Two events a replay, made once, and a few calls of the clock a step; they are
in every engine alike. The device is asked for nothing while a block runs: times are read when the
engine has rested, by the serving thread as the next batch comes in, or by the probe's thread.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

WORKER = "sglang.srt.speculative.ngram_worker"
PARTS = ("graph_us", "gap_us", "launch_us", "forward_us", "step_us")


class Replay(NamedTuple):
    """One replay as the host saw it, in ns. `run`: steps between two batches of another kind."""

    run: int
    requests: int
    prepared: int  # the end of SGLang's draft preparation
    called: int
    launched: int  # the begin of the launch itself, behind our first event
    returned: int


class Run(NamedTuple):
    """Steady steps in a row, of one number of requests: microseconds, by PARTS."""

    requests: int
    times: dict[str, list[float]]


class Replays:
    """The timer of one process. `graph_us` is GPU time from just before a replay to just behind
    it, `gap_us` from there to just before the next one, `launch_us` host time of the launch,
    `forward_us` from the end of SGLang's draft preparation to the replay, `step_us` from one
    replay to the next.
    """

    RING = 4096  # replays without a rest; those behind them are not timed
    SKIPPED = 8  # first steps of a run
    LEAST = 16  # steps behind them without which a run is not counted: a few tokens to warm up
    KEPT = 4000  # newest runs
    REST_S = 0.03

    def __init__(self, worker: type[Any]) -> None:
        torch = sys.modules["torch"]
        self._event = functools.partial(torch.cuda.Event, enable_timing=True)
        self._lock = threading.Lock()  # whoever holds it may touch the ring
        self._ring: list[tuple[Any, Any]] = []
        self._held: list[Replay] = []  # as many as slots of the ring are in use
        self._runs: deque[Run] = deque(maxlen=self.KEPT)
        self._run = self._last = self.lost = 0
        self._prepared: tuple[int, int] | None = None  # requests and when, of a verify step
        name, graph = "_prepare_for_speculative_decoding", torch.cuda.CUDAGraph
        setattr(worker, name, self._prepares(getattr(worker, name)))
        graph.replay = self._replays(graph.replay)

    # --- the serving thread ---
    def _prepares(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def prepare(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not batch.forward_mode.is_decode():
                self._begin_run()
            result = own(worker, batch, *args, **kwargs)
            verifies = batch.forward_mode.is_target_verify()
            self._prepared = (len(batch.reqs), time.perf_counter_ns()) if verifies else None
            return result

        return prepare

    def _begin_run(self) -> None:
        """A batch of another kind. A step of many rows alone takes longer than a rest, so that
        only here is it known that none is under way.
        """
        with self._lock:
            self._run += 1
            if time.perf_counter_ns() - self._last >= self.REST_S * 1e9 and self._finished():
                self._read()

    def _replays(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def replay(graph: Any) -> Any:
            prepared, self._prepared = self._prepared, None
            if prepared is None:
                return own(graph)  # of a draft, or of no step
            with self._lock:
                return self._time(own, graph, *prepared)

        return replay

    def _time(self, own: Callable[..., Any], graph: Any, requests: int, prepared: int) -> Any:
        if len(self._held) == self.RING:
            self.lost += 1
            return own(graph)
        if not self._ring:
            self._make()
        begin, end = self._ring[len(self._held)]
        called = time.perf_counter_ns()
        begin.record()
        launched = time.perf_counter_ns()
        result = own(graph)
        returned = self._last = time.perf_counter_ns()
        end.record()
        self._held.append(Replay(self._run, requests, prepared, called, launched, returned))
        return result

    def _make(self) -> None:
        """All events, and what CUDA makes of them when they are first recorded."""
        self._ring = [(self._event(), self._event()) for _ in range(self.RING)]
        for event in itertools.chain(*self._ring):
            event.record()

    # --- with the lock, by either thread ---
    def _finished(self) -> bool:
        """Whether there is something to read, and all of it is there."""
        return bool(self._held) and bool(self._ring[len(self._held) - 1][1].query())

    def _read(self) -> None:
        self._runs.extend(self._steady())
        self._held.clear()

    def _steady(self) -> Iterator[Run]:
        """What is held as runs, without the first steps of each, and its last: no step follows.
        What is left of a run when requests have ended has longer texts, and is no block's.
        """
        slots = zip(self._held, self._ring, strict=False)
        for _, steps in itertools.groupby(slots, lambda slot: slot[0].run):
            run = list(steps)
            most = max(step.requests for step, _ in run)
            whole = [slot for slot in run if slot[0].requests == most][self.SKIPPED :]
            rows = [_times(*pair) for pair in itertools.pairwise(whole)]
            if len(rows) >= self.LEAST:
                yield Run(most, dict(zip(PARTS, map(list, zip(*rows, strict=True)), strict=True)))

    # --- the probe's thread ---
    def table(self, forget: bool = False) -> dict[str, dict[str, Any]]:
        """By number of requests: how many steps and, of each part, the median and the mean of the
        middle 80 %, in us; `runs` has the steps and the median GPU time of each run. What is not
        at rest is not in it. With `forget`, of what was replayed since the last call.
        """
        self._read_at_rest()
        with self._lock:
            runs = list(self._runs)
            if forget:
                self._runs.clear()
        held: dict[int, list[Run]] = {}
        for run in runs:
            held.setdefault(run.requests, []).append(run)
        return {str(requests): _table(held[requests]) for requests in sorted(held)}

    def _read_at_rest(self) -> None:
        """Read the times if the GPU is done and nothing has been queued for a while since."""
        with self._lock:
            last, finished = self._last, self._finished()
        if finished:
            time.sleep(self.REST_S)
            with self._lock:
                if self._last == last and self._finished():
                    self._read()


def arm() -> Replays | None:
    """Time the replays of this process; None as long as it has no NGRAM worker."""
    worker = getattr(sys.modules.get(WORKER), "NGRAMWorker", None)
    return None if worker is None else Replays(worker)


def _times(slot: tuple[Replay, Any], following: tuple[Replay, Any]) -> tuple[float, ...]:
    """PARTS of one step."""
    (step, (begin, end)), (after, (begin_after, _)) = slot, following
    return (
        1000 * begin.elapsed_time(end),
        1000 * end.elapsed_time(begin_after),
        (step.returned - step.launched) / 1000,
        (step.called - step.prepared) / 1000,
        (after.called - step.called) / 1000,
    )


def _table(runs: Sequence[Run]) -> dict[str, Any]:
    """One number of requests."""
    parts = {name: [us for run in runs for us in run.times[name]] for name in PARTS}
    graphs = [run.times["graph_us"] for run in runs]
    return {
        "n": len(parts["graph_us"]),
        **{name: summary(times) for name, times in parts.items()},
        "runs": [[len(times), round(statistics.median(times), 2)] for times in graphs],
    }


def summary(times: Sequence[float]) -> dict[str, float]:
    """The median, and the mean of the middle 80 %."""
    held, cut = sorted(times), len(times) // 10
    middle = held[cut : len(held) - cut]
    return {
        "median": round(statistics.median(held), 2),
        "mean80": round(statistics.fmean(middle), 2),
    }
