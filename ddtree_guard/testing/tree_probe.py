"""A plugin for benchmarks: what a live DDTREE worker does, and every fault planted into its steps.

Loaded by SGLang through an entry point of its own, only where a benchmark puts one on the path;
it is no part of an installed guard. It reads

    DDTREE_LIVE=FILE        where counters and, per step, chain and tree lengths are written
    DDTREE_LIVE_TIME=on     time the target's forwards
    DDTREE_LIVE_READ=4      read every 4th step to the host, for the rules without a device bit
    DDTREE_LIVE_PLANT=on    plant the fault of every rule that is active, one after another
    DDTREE_LIVE_PLANT=X1,X4 plant these only
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ddtree_guard.config import PREFIX, Mode, setting
from ddtree_guard.guard import find_rule
from ddtree_guard.hooks import arm, device_checker
from ddtree_guard.hooks.checker import with_outcome
from ddtree_guard.hooks.patching import Original, Patch, apply
from ddtree_guard.hooks.record import Record, Walk
from ddtree_guard.hooks.sites import SCHEDULER
from ddtree_guard.hooks.view import View
from ddtree_guard.rule import Site
from ddtree_guard.step import Step
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.plant import LIVE, TABLE, kept, write
from ddtree_guard.testing.plant_results import Results, is_measured, measured, slots_beyond_row
from ddtree_guard.testing.probe import PERIOD_S, counters
from ddtree_guard.testing.worker_plants import (
    EARLY,
    LATE,
    SAMPLES,
    WorkerPlants,
    ask_to_sample,
)

MOST = 20_000  # steps whose lengths are kept
GAP = 16  # steps between two faults: after a hit the guard reads 8 steps to the host
SAMPLED = 64  # at depth full every 64th step is judged by the rules that have no device bit
WALK = ("outcome.predict", "outcome.accept_index", "outcome.accept_lens")
# Put into the record: lengths of 2**31, tokens behind the vocabulary and slots behind the pool end
# the server in SGLang's own kernels; M7, M9 and W5 take away a mask, a cell, a column: no values.
NOT_LIVE = ("K11", "T6", "K1", "M7", "W5", "M9")


def load() -> None:
    """Look at the scheduler's worker once it is built: where a guard runs, when it is armed."""
    if not setting("DDTREE_LIVE"):
        return
    if setting(PREFIX).lower() in ("", Mode.OFF.value):
        why = "benchmarks look at the live worker"
        apply((Patch(SCHEDULER, why, _after_workers, ("self",)),)).require()
    elif not hasattr(arm.finish, "watched"):
        arm.finish = _after_arming(arm.finish)


def _after_workers(original: Original) -> Any:
    def init_model_worker(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original.value(self, *args, **kwargs)
        watch(self.model_worker, None)
        return result

    return init_model_worker


def _after_arming(original: Callable[..., None]) -> Callable[..., None]:
    def finish(config: Any, guard: Any, scheduler: Any) -> None:
        original(config, guard, scheduler)
        watch(scheduler.model_worker, guard)

    finish.watched = True  # type: ignore[attr-defined]
    return finish


def watch(worker: Any, guard: Any) -> None:
    """Meter the worker's steps, plant what is asked for, write a file twice a second."""
    parts: list[Any] = []
    if guard is not None and (every := setting("DDTREE_LIVE_READ")):
        read_every(guard, int(every))
    if guard is not None:
        parts.append(SimpleNamespace(values=lambda: counters(guard)))
        if isinstance(getattr(worker, "observers", None), list):
            parts.append(Meter())
            worker.observers.append(parts[-1])
    if guard is not None and guard.digests is not None:
        parts.append(Comparisons(guard.digests))
    if guard is not None and (asked := setting("DDTREE_LIVE_PLANT")):
        rules = [*arm.active_rules(guard), *measured(guard)]
        parts.append(Planter(guard, rules if asked == "on" else asked.split(","), worker))
    if setting("DDTREE_LIVE_TIME"):
        parts.append(Stopwatch(getattr(worker, "target_worker", None) or worker))
    target = file_of(Path(setting("DDTREE_LIVE")), guard)

    def run() -> None:
        while True:
            time.sleep(PERIOD_S)
            value: dict[str, Any] = {}
            for part in parts:
                value |= part.values()
            spare = target.with_suffix(".part")
            spare.write_text(json.dumps(value))
            spare.replace(target)

    threading.Thread(target=run, name="ddtree-live", daemon=True).start()


def read_every(guard: Any, steps: int) -> None:
    """Let the guard read more steps to the host than it does by itself."""
    device_checker.SAMPLE[guard.config.depth] = steps
    if guard.witness is not None:
        guard.witness.every = steps


def file_of(target: Path, guard: Any) -> Path:
    """One file per rank: the first one's is `target`."""
    rank = getattr(guard, "rank", "TP0")
    return target if rank == "TP0" else target.with_suffix(f".{rank}{target.suffix}")


class Comparisons:
    """Counts the steps whose digests all ranks have given."""

    def __init__(self, digests: Any) -> None:
        self.count, exchange = 0, digests.exchange

        def counted(step: Step) -> list[Step]:
            known: list[Step] = exchange(step)
            self.count += len(known)
            return known

        digests.exchange = counted

    def values(self) -> dict[str, Any]:
        """How many so far."""
        return {"ranks_compared": self.count}


class Stopwatch:
    """GPU time of the target's forward in every decode or verify step, by CUDA events."""

    def __init__(self, worker: Any) -> None:
        self.taken: list[tuple[int, Any, Any]] = []
        original = worker.forward_batch_generation

        def forward_batch_generation(*args: Any, **kwargs: Any) -> Any:
            batch = kwargs.get("forward_batch") or kwargs.get("batch") or args[0]
            mode = batch.forward_mode
            if len(self.taken) >= MOST or not (mode.is_decode() or mode.is_target_verify()):
                return original(*args, **kwargs)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = original(*args, **kwargs)
            end.record()
            self.taken.append((len(batch.seq_lens), begin, end))
            return result

        worker.forward_batch_generation = forward_batch_generation

    def values(self) -> dict[str, Any]:
        """[requests, milliseconds] of every finished step, in order."""
        done = [(bs, b, e) for bs, b, e in list(self.taken) if e.query()]
        return {"forward_ms": [[bs, b.elapsed_time(e)] for bs, b, e in done]}


@dataclass
class Meter:
    """An observer of tree steps: tokens that the chain alone would have committed, and the tree's.

    The spine of a tree is DFLASH's chain, drafted from the same state and verified in the same
    forward, so both are compared on one state. Nothing here waits for the device.
    """

    lengths: list[Any] = field(default_factory=list)

    def __call__(self, step: Any) -> None:
        if len(self.lengths) < MOST:
            block = step.accepted.accept_index.shape[1]
            chain = chain_lengths(step.trees, step.predict, block)
            self.lengths.append(torch.stack([chain, step.accepted.lens.to(chain.dtype)]))

    def values(self) -> dict[str, Any]:
        """Lengths of all requests and steps so far, chain and tree, in order."""
        taken = list(self.lengths)
        if taken and taken[-1].is_cuda:
            torch.cuda.synchronize()  # the newest were queued on the scheduler's stream
        both = torch.cat(taken, 1).cpu().tolist() if taken else [[], []]
        return {"tree_steps": len(taken), "chain": both[0], "tree": both[1]}


def chain_lengths(trees: Any, predict: Any, block: int) -> Any:
    """(bs,) tokens that the tree's spine alone commits: drafts that match, and the bonus token."""
    depth = min(block, trees.width) - 1
    same = trees.tokens[:, 1 : depth + 1] == predict.view(trees.tokens.shape)[:, :depth]
    return same.to(torch.int64).cumprod(1).sum(1) + 1


class Planter:
    """Plants the fault of one rule after another, each in the last request of a step.

    How a fault gets in is kept beside it: `tensors` (what attention, or the check inside the graph,
    reads), `walk` (the acceptance that the worker reports), `commit` (lengths that the scheduler
    keeps), `record` (a value of the host, put into the Step that the guard reads), `result` (what
    the guard measures, see plant_results), `worker` (what the worker goes on with, see
    worker_plants), or `start` (a configuration that the guard judges before it serves).
    """

    def __init__(self, guard: Any, rules: list[str], worker: Any = None) -> None:
        self.guard, self.checker = guard, guard.checker
        self.host = getattr(self.checker, "host", self.checker)
        known = [name for name in rules if name in FAULTS]
        known.sort(key=lambda name: not _on_device(name))
        self.todo, self.rows = known, dict[str, dict[str, Any]]()
        self._next, self._walk, self._undo = 0, "", list[Callable[[], None]]()
        self.active, self._undo_build = list(rules), list[Callable[[], None]]()
        self.results = Results(guard, self.rows)
        witnessed = worker is not None and guard.witness is not None
        self.worker = WorkerPlants(guard, worker, self._claim) if witnessed else None
        self._wrap()

    def _claim(self, rule: str) -> bool:
        """Whether the step that has begun is to have this fault, before it was built."""
        record = self.guard.current
        if rule not in self.todo or record is None or len(record.reqs) < 2:
            return False
        if record.step_id < self._next or record.step_id % SAMPLED:
            return False
        self._take(rule, record.step_id, str(record.reqs[-1].rid), "")["how"] = "worker"
        return True

    def _take(self, rule: str, step_id: int, rid: str, path: str) -> dict[str, Any]:
        self.todo.remove(rule)
        self._next = step_id + GAP
        self.rows[rule] = row = {
            "at": step_id, "path": path, "device": _on_device(rule), "rid": rid, "found": [],
        }  # fmt: skip
        return row

    def values(self) -> dict[str, Any]:
        """What was planted and found so far, and what is left to plant."""
        return {"planted": dict(self.rows), "left": list(self.todo), "active": self.active}

    def _wrap(self) -> None:
        build, walked, verify = self.checker.build, self.checker.walked, self.checker.verify
        act, commit = self.guard._apply, self.guard.commit

        def built(record: Record, view: View) -> None:
            self._before_build(record, view)
            build(record, view)
            while self._undo_build:
                self._undo_build.pop()()

        def walk(record: Record) -> None:
            self._before_walk(record)
            walked(record)

        def verified(record: Record) -> None:
            verify(record)
            while self._undo:
                self._undo.pop()()

        def applied(record: Record, found: list[Any], tokens_left: Any) -> None:
            self._seen(record, found, tokens_left)
            act(record, found, tokens_left)

        def committed(record: Record, tokens: list[Any]) -> None:
            row = self.rows.get("A4")
            if row is not None and row["at"] == record.step_id and record.kv_before:
                record.kv_before[-1] = (record.kv_before[-1] or 0) - 1
            row = self.rows.get("K6")
            beyond = row is not None and row["at"] == record.step_id
            with slots_beyond_row(record) if beyond else nullcontext():
                commit(record, tokens)

        self.checker.build, self.checker.walked, self.checker.verify = built, walk, verified
        self.guard._apply, self.guard.commit = applied, committed

    def _before_build(self, record: Record, view: View) -> None:
        for row in self.rows.values():
            row["path"] = row["path"] or view.path  # of the one that came before the build
        due = [r for r in self.todo if self._can(r, record, view)]
        if not due or view.bs < 2 or record.step_id < self._next:
            return
        rule, step = due[0], self.host.read(view)
        row = self._take(rule, record.step_id, view.rids[-1], view.path)
        try:
            self._plant(rule, step, record, view, row)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"

    def _can(self, rule: str, record: Record, view: View) -> bool:
        early = self.worker is not None and rule in EARLY
        return not early and _due(rule, record, view) and self.results.due(rule)

    def _plant(
        self, rule: str, step: Step, record: Record, view: View, row: dict[str, Any]
    ) -> None:
        if find_rule(rule).site is Site.INIT:
            row |= {"how": "start", "at": 0}
            whole = arm.configuration_of(self.guard)  # with the draft's widths
            self.guard.judge(FAULTS[rule](whole or step, step.bs - 1).step)
            return
        if is_measured(rule):
            row["how"] = "result"
            return
        if self.worker is not None and rule in LATE:
            row["how"], self.worker.late = "worker", rule
            return
        if self.worker is not None and rule == SAMPLES:
            row["how"] = "worker"
            self._undo.append(ask_to_sample(record.reqs[-1]))
            return
        if find_rule(rule).family in "AL" or rule == "K6":
            late = rule in ("A4", "K6")
            row["how"], self._walk = ("commit", "") if late else ("walk", rule)
            return
        if rule == "G6" and view.path == "graph":
            row["how"] = "record"
            self._pretend_prefill(record)
            return
        why = [n.why for n in self.guard.guard.check(step).not_checked if n.rule == rule]
        if why:
            row["not_checked"] = why[0]
            return
        planted = FAULTS[rule](step, step.bs - 1).step
        paths = changed(step, planted)
        if rule not in NOT_LIVE and paths and all(path in (*LIVE, TABLE) for path in paths):
            if TABLE in paths:
                self._keep_table(view)
            if rule == "P2":  # a model that looks it up reads foreign memory
                self._undo_build += kept(view, paths)
            row["how"], row["changed"] = "tensors", list(write(step, planted, view, rule))
            return
        row["how"] = "record"
        self._replace_read(planted)

    def _pretend_prefill(self, record: Record) -> None:
        """The last request seems to have prompt tokens left while the guard reads the step."""
        held = record.reqs
        more = SimpleNamespace(origin_input_ids=range(1 << 20), kv_committed_len=1)
        record.reqs = (*held[:-1], more)
        self.checker._alert = max(getattr(self.checker, "_alert", 0), 1)
        self._undo_build.append(lambda: setattr(record, "reqs", held))

    def _keep_table(self, view: View) -> None:
        """A table that stays wrong would be found, rightly, in every later step."""
        table = view.runner.req_to_token_pool.req_to_token
        rows = view.batch.req_pool_indices[: view.bs].long().clone()
        held = table[rows].clone()
        self._undo.append(lambda: table.__setitem__(rows, held))

    def _replace_read(self, planted: Step) -> None:
        host, read = self.host, self.host.read
        host.read = lambda view: planted
        self.checker._alert = max(getattr(self.checker, "_alert", 0), 1)
        self._undo.append(lambda: setattr(host, "read", read))

    def _before_walk(self, record: Record) -> None:
        rule, self._walk = self._walk, ""
        walk = record.outcome
        if not rule or walk is None or record.view is None:
            return
        row, step = self.rows[rule], with_outcome(self.host.read(record.view), walk)
        try:
            planted = FAULTS[rule](step, step.bs - 1).step
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"
            return
        row["changed"] = paths = changed(step, planted)
        if not paths or any(path not in WALK for path in paths):
            row["error"] = f"no fault of the walk: {paths}"
            return
        record.outcome = altered(walk, planted)

    def _seen(self, record: Record, found: list[Any], tokens_left: Any) -> None:
        for row in self.rows.values():
            if row["at"] == record.step_id:
                row["found"] += [
                    {"rule": f.rule, "rid": f.rid, "tokens_left": tokens_left,
                     "headline": f.headline}
                    for f in found
                ]  # fmt: skip


def _on_device(rule: str) -> bool:
    """Whether the device check sees the rule's fault in every step of DDTREE. It is given parents,
    not links (T3), and compares slots within a request only (K2).
    """
    return find_rule(rule).bit is not None and rule not in ("T3", "K2")


def _due(rule: str, record: Record, view: View) -> bool:
    """Whether this step can hold the rule's fault and will be looked at for it."""
    if rule in ("G4", "G5") and view.bs == len(view.batch.req_pool_indices):
        return False  # faults of padded lanes
    return _on_device(rule) or record.step_id % SAMPLED == 0


def changed(step: Step, planted: Step) -> list[str]:
    """Paths of the arrays in which two steps differ."""
    before: dict[str, Any] = {path: value for path, value, _ in step.arrays()}
    return [
        path
        for path, value, _ in planted.arrays()
        if path not in before or not np.array_equal(value, before[path])
    ]


def altered(walk: Walk, planted: Step) -> Walk:
    """The walk with the planted step's acceptance, on the walk's device and in its types."""

    def like(live: Any, value: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(value)).to(live).reshape(live.shape)

    outcome = planted.outcome
    return Walk(
        lens=like(walk.lens, outcome.accept_lens),
        predict=like(walk.predict, outcome.predict),
        index=like(walk.index, outcome.accept_index),
        greedy=walk.greedy,
        global_rows=False,
    )
