"""A plugin for tests in a real server: reports the guard's counters, and plants one fault.

Loaded by SGLang through an entry point of its own (group `sglang.srt.plugins`), only where a test
or a benchmark puts one on the path; it is no part of an installed guard. It reads

    DDTREE_GUARD_PROBE=FILE          where the scheduler's counters are written, twice a second;
                                     without a guard only the GPU memory that it holds
    DDTREE_GUARD_PROBE_ASKED=on      ... and only while there is no FILE: delete it to ask
    DDTREE_GUARD_PROBE_PLANT=W3@50   the fault of W3 in the first verify step from the 50th on that
                                     can hold it: bs >= 2, on the last request; W3@50+ in all
                                     steps from then on
    DDTREE_GUARD_PROBE_TIMES=on      measure the host time of the guard's part of every site
    DDTREE_GUARD_PROBE_TURNS=on      measure steps with the guard's sites and without, in turns
    DDTREE_GUARD_PROBE_REPLAYS=on    time verify replays of an NGRAM engine, also without a guard;
                                     with ASKED those since it was last asked
    DDTREE_GUARD_PROBE_IN_LINE=on    keep the check in line with the forward pass, see `places`
    DDTREE_GUARD_PROBE_EARLY=on      launch the check where its branch begins, not where it ends

Further faults: each line added to the file that is named like FILE, ending in .plant, is a rule,
planted at once.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ddtree_guard.config import setting
from ddtree_guard.hooks import arm
from ddtree_guard.testing import places, replays
from ddtree_guard.testing.live import plant_at

PERIOD_S = 0.5
KEPT = 4000  # newest times of a site and batch size


def load() -> None:
    """Start the probe's thread in this process; it waits until the process has a guard. Where the
    check stands is settled before: graphs may be captured by the time that the thread looks.
    """
    if setting("DDTREE_GUARD_PROBE"):
        places.place()
        threading.Thread(target=_run, name="ddtree-guard-probe", daemon=True).start()


def _run() -> None:
    target = Path(setting("DDTREE_GUARD_PROBE"))
    rule, _, step = setting("DDTREE_GUARD_PROBE_PLANT").partition("@")
    always = step.endswith("+")
    first = [(rule, int(step.rstrip("+") or 1))] if rule else []
    plans: list[dict[str, Any]] = []
    asked = bool(setting("DDTREE_GUARD_PROBE_ASKED"))
    watch: Stopwatch | None = None
    turns: Turns | None = None
    timer: replays.Replays | None = None
    while True:
        time.sleep(PERIOD_S)
        if timer is None and setting("DDTREE_GUARD_PROBE_REPLAYS"):
            timer = replays.arm()
        if arm.GUARDS and watch is None and setting("DDTREE_GUARD_PROBE_TIMES"):
            watch = Stopwatch(arm.GUARDS[-1])
        if arm.GUARDS and turns is None and setting("DDTREE_GUARD_PROBE_TURNS"):
            turns = Turns(arm.GUARDS[-1])
        if asked and target.exists():
            continue
        if not arm.GUARDS:
            if gpu_bytes():  # a scheduler without a guard
                held = {"gpu_bytes": gpu_bytes(), "gpu_allocated": gpu_allocated()}
                _write(target, held | _replayed(timer, asked))
            continue
        guard = arm.GUARDS[-1]
        for rule, step_id in [*first, *((name, 1) for name in _asked(target))][len(plans) :]:
            plans.append({"rule": rule, "from": step_id, "at": None})
            plans[-1] |= {"always": True} if always and len(plans) == 1 else {}
            plant_at(guard, plans[-1])
        times: dict[str, Any] = {} if watch is None else {"host_us": watch.table()}
        times |= {} if turns is None else {"turns": turns.table()}
        times |= _replayed(timer, asked)
        first_plan = plans[0] if plans else None
        _write(target, {**counters(guard), "planted": first_plan, "plants": plans, **times})


def _replayed(timer: replays.Replays | None, asked: bool) -> dict[str, Any]:
    """What the replays of this process took; nothing where they are not timed."""
    if timer is None:
        return {}
    return {"replays": timer.table(forget=asked), "replays_lost": timer.lost}


def _asked(target: Path) -> list[str]:
    """Rules that were asked for while the server runs."""
    path = target.with_suffix(".plant")
    return path.read_text().split() if path.exists() else []


class Stopwatch:
    """Host time of a guard's own code, by site and number of requests, and of whole steps: from
    one `begin` to the next. Its own calls of the clock are in the steps, not in the sites.

    The host waits for the GPU once a step: its longest wait. What the guard does between the end of
    that and the moment at which the target's forward pass is queued is paid in full. What it does
    behind that is hidden by the GPU's own work, as long as the host has to wait at all: `wait` is
    for how long. A step of SLACK_US or less of it pays for everything.
    """

    SITES = ("begin", "built", "accepted", "end", "resolve", "commit")
    SLACK_US = 30.0

    def __init__(self, guard: Any) -> None:
        self._times: dict[tuple[int, str], deque[float]] = {}
        self._bs, self._last = 0, 0
        self._behind = self._before = 0.0  # in sites since the pass was queued, since the wait
        self._wait = 0.0  # the longest one since the pass was queued
        self._thread = threading.main_thread().ident
        for name in self.SITES:
            setattr(guard, name, self._timed(name, getattr(guard, name)))
        told = guard.flight.accepted
        guard.flight.accepted = self._timed("told", told)
        torch = sys.modules["torch"]
        for owner, name in ((torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize"),
                            (torch.Tensor, "cpu")):  # fmt: skip
            setattr(owner, name, self._waits(getattr(owner, name)))
        self._guard, self._watched = guard, False

    def _watch(self) -> None:
        """See the target's forward passes, once there is a target."""
        self._watched = True
        for runner, _ in self._guard.backends():
            if not runner.is_draft_worker:
                runner.forward = self._queued(runner.forward)
                break

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any) -> Any:
            begun = time.perf_counter_ns()
            if name == "begin":
                if not self._watched:
                    self._watch()
                self._step(begun, len(getattr(args[0], "reqs", None) or ()))
            begun = time.perf_counter_ns()
            try:
                return call(*args)
            finally:
                took = time.perf_counter_ns() - begun
                self._before += took / 1000
                self._keep(name, took)

        return timed

    def _waits(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def waits(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return call(*args, **kwargs)
            begun = time.perf_counter_ns()
            result = call(*args, **kwargs)
            took = (time.perf_counter_ns() - begun) / 1000
            if took > self._wait:
                self._wait = took
                self._behind, self._before = self._behind + self._before, 0.0
            return result

        return waits

    def _queued(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The target's forward pass, after which the GPU has something to do."""

        @functools.wraps(call)
        def queued(batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = call(batch, *args, **kwargs)
            if batch.forward_mode.is_target_verify():
                hides = self._wait > self.SLACK_US
                self._keep("paid", 1000 * (self._before + (0.0 if hides else self._behind)))
                self._keep("hidden", 1000 * (self._behind if hides else 0.0))
                self._keep("wait", 1000 * self._wait)
            self._behind = self._before = self._wait = 0.0
            return result

        return queued

    def _step(self, now: int, bs: int) -> None:
        if bs == self._bs:
            self._keep("step", now - self._last)
        self._bs, self._last = bs, now

    def _keep(self, name: str, ns: float) -> None:
        key = (self._bs, name)
        if key not in self._times:
            self._times[key] = deque(maxlen=KEPT)
        self._times[key].append(ns / 1000)

    def table(self) -> dict[str, dict[str, Any]]:
        """By number of requests and site: how many times, median, mean and 99th percentile; and so
        for `step`, and for `wait`, `paid` and `hidden` of a step.
        """
        found: dict[str, dict[str, Any]] = {}
        for (bs, name), times in list(self._times.items()):
            held = sorted(times)
            found.setdefault(str(bs), {})[name] = {
                "n": len(held),
                "median": round(statistics.median(held), 2),
                "mean": round(statistics.fmean(held), 2),
                "p99": round(held[len(held) * 99 // 100], 2),
            }
        return found


class Turns:
    """Steps of one engine with the guard's sites and without them, in turns of TURN steps: what the
    guard adds to a step, with nothing between the two but the guard. `all` has every site, `front`
    those before the replay, `none` has none. What stays in all three are the wrappers, the check
    inside the graph and the guard's threads.

    SGLang's own steps get longer with the text: by more, in one turn, than the guard takes. So the
    states move on by one from block to block (each time the batch begins anew), and any three
    blocks in a row have each state once at each place.
    """

    STATES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "all": (),
        "none": ("begin", "built", "accepted", "end"),
        "front": ("accepted", "end"),
    }
    TURN, SKIPPED = 12, 4  # steps, and those of them that still feel the turn before

    def __init__(self, guard: Any) -> None:
        self._guard = guard
        self._own = {name: getattr(guard, name) for name in self.STATES["none"]}
        self._muted = frozenset[str]()
        self._steps, self._bs, self._last = 0, 0, 0
        self._block, self._place = 0, 0
        self._turn: list[float] = []
        self._found: list[tuple[int, int, int, str, float]] = []
        guard.begin = self._begin

    @property
    def _state(self) -> str:
        names = list(self.STATES)
        return names[(self._block + self._place) % len(names)]

    def _begin(self, batch: Any) -> None:
        mode = batch.forward_mode
        self._time(len(batch.reqs) if mode is not None and mode.is_decode() else 0)
        if "begin" not in self._muted:
            self._own["begin"](batch)

    def _time(self, bs: int) -> None:
        """A step of so many requests begins; 0 is another batch."""
        now, last = time.perf_counter_ns(), self._last
        self._steps, self._last = self._steps + 1, now
        if not bs or bs != self._bs:
            self._bs, self._block = bs, self._block + (self._place > 0)
            self._begin_turn(0)
        elif self._steps > self.SKIPPED:
            self._turn.append((now - last) / 1000)
        if self._steps >= self.TURN:
            took = round(statistics.fmean(self._turn), 2)
            self._found.append((bs, self._block, self._place, self._state, took))
            self._begin_turn(self._place + 1)

    def _begin_turn(self, place: int) -> None:
        """Other sites, from the step that begins now."""
        self._place, self._steps, self._turn = place, 0, []
        muted = frozenset(self.STATES[self._state])
        if muted == self._muted:
            return
        self._muted = muted
        for name, own in self._own.items():
            if name != "begin":
                setattr(self._guard, name, _nothing if name in muted else own)
        self._guard.running.set(None)
        self._guard.checker._changed()  # what was checked meanwhile is nobody's

    def table(self) -> dict[str, list[list[Any]]]:
        """By number of requests: block, place in it, state and mean step in us of each turn."""
        found: dict[str, list[list[Any]]] = {}
        for bs, *turn in list(self._found):
            found.setdefault(str(bs), []).append(turn)
        return found


def _nothing(*args: Any) -> None:
    """A site that is muted."""


def beside(guard: Any) -> int:
    """Captured graphs in which the check runs beside the forward pass."""
    graphs = getattr(guard.checker, "graphs", None)
    return 0 if graphs is None else int(graphs.branch.joined)


def counters(guard: Any) -> dict[str, Any]:
    """The guard's counters and state, as JSON values."""
    coverage = guard.coverage
    return {
        "verify_steps": coverage.verify_steps,
        "steps_checked": coverage.steps_checked,
        "findings": coverage.findings,
        "latent": coverage.latent,
        "skipped": dict(coverage.skipped),
        "faults": dict(guard.fuses.faults),
        "checker": guard.checker.kind,
        "beside": beside(guard),
        "ahead": getattr(guard.checker, "ahead", 0),
        "hooks": {name: state.ok for (name, _), state in guard.hooks.items()},
        "shadow": {
            "compared": guard.shadow.compared,
            "skipped": dict(guard.shadow.skipped),
            "worst": getattr(guard.shadow, "worst", None),
        },
        "pinned_bytes": pinned_bytes(guard),
        "recorder": recorder(guard.flight.recorder),
        "gpu_bytes": gpu_bytes(),
        "gpu_allocated": gpu_allocated(),
        "threads_s": thread_seconds(),
    }


def thread_seconds() -> dict[str, float]:
    """Processor time of the guard's own threads so far, by name: they need the interpreter, which
    the serving thread may have to wait for.
    """
    found = {}
    for thread in threading.enumerate():
        if thread.name.startswith("ddtree-guard-") and thread.ident is not None:
            with contextlib.suppress(OSError):
                clock = time.pthread_getcpuclockid(thread.ident)
                found[thread.name.removeprefix("ddtree-guard-")] = time.clock_gettime(clock)
    return found


def recorder(made: Any) -> dict[str, Any]:
    """The flight recorder's counters, and the process that takes SIGUSR2."""
    ring = made.ring
    held = {} if ring is None else {
        "steps": ring.steps, "written": ring.written, "dropped": ring.dropped,
        "lanes": ring.lanes, "bytes": ring.nbytes,
    }  # fmt: skip
    return {"pid": os.getpid(), "dumps": made.dumps, "faults": made.faults, "ring": held}


def gpu_bytes() -> int:
    """GPU memory that this process's allocator holds, graphs included; 0 without a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_reserved())


def gpu_allocated() -> int:
    """GPU memory of the tensors that this process holds; 0 without a GPU."""
    return int(sys.modules["torch"].cuda.memory_allocated()) if gpu_bytes() else 0


def pinned_bytes(guard: Any) -> int:
    """Host memory that is pinned: verdicts, and the copies of the shadow and of the recorder."""
    graphs = getattr(guard.checker, "graphs", None)
    held = [] if graphs is None else [*graphs.check._ring]
    held.append(getattr(getattr(guard.shadow, "_check", None), "_host", None))
    held.append(getattr(getattr(guard.flight.recorder.ring, "fetch", None), "_host", None))
    return sum(int(part.numel() * part.element_size()) for part in held if part is not None)


def _write(target: Path, value: dict[str, Any]) -> None:
    part = target.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.replace(target)
