"""Arming a scheduler process: hooks, self-test, configuration, and the word over all ranks."""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import os
from typing import Any

from ddtree_guard.checks import ALL
from ddtree_guard.config import Config, Mode
from ddtree_guard.errors import IncompatibleError, Violation
from ddtree_guard.evidence import ARMED, IDLE, NOT_ARMED
from ddtree_guard.hooks import boot
from ddtree_guard.hooks.adapters import adapter_for
from ddtree_guard.hooks.adapters.generic import LINKS
from ddtree_guard.hooks.checker import Checker
from ddtree_guard.hooks.configuration import read_configuration
from ddtree_guard.hooks.evidence import Evidence, counters_of, note
from ddtree_guard.hooks.facts import release
from ddtree_guard.hooks.hook import Hook
from ddtree_guard.hooks.patching import Original, Patch
from ddtree_guard.hooks.ranks import Digests
from ddtree_guard.hooks.runtime import ServerGuard
from ddtree_guard.hooks.selftest import self_test
from ddtree_guard.hooks.sites import SCHEDULER, scheduler_hooks, verify_hook, worker_hook
from ddtree_guard.hooks.statics import graph_runner
from ddtree_guard.hooks.switches import WALK, unguardable
from ddtree_guard.hooks.witness import witness_of
from ddtree_guard.hooks.words import armed_words
from ddtree_guard.metrics import metrics_for, metrics_of_process
from ddtree_guard.step import Step

log = logging.getLogger("ddtree_guard")
GUARDS: list[ServerGuard] = []  # of this process: one, except in tests


def scheduler_patch(config: Config) -> Hook:
    """The one hook that is set when the plugin loads; the rest follows in the scheduler process."""

    def wrap(original: Original) -> Any:
        @functools.wraps(original.value)
        def init_model_worker(self: Any, *args: Any, **kwargs: Any) -> Any:
            guard = start(config, self)
            result = original.value(self, *args, **kwargs)
            finish(config, guard, self)
            return result

        return init_model_worker

    why = "arms the guard in the scheduler process before its workers are built"
    return Hook("scheduler", (Patch(SCHEDULER, why, wrap, ("self",)),))


def start(config: Config, scheduler: Any) -> ServerGuard | None:
    """Hook what exists before the workers do. None where nothing is to be guarded, or on a fault.

    Raises only in mode raise.
    """
    try:
        args = scheduler.server_args
        if not args.speculative_algorithm:
            log.info("ddtree_guard idle: no speculative algorithm is active")
            note(config, rank_of(scheduler), release(), IDLE, "no speculative algorithm is active")
            return None
        rank = rank_of(scheduler)
        served = bool(getattr(args, "enable_metrics", False))
        guard = ServerGuard(
            config, rank=rank, run=f"run-{os.getppid()}", metrics=metrics_for(rank, served)
        )
        evidence = Evidence(config, f"run-{os.getppid()}", rank, release(), counters_of(guard))
        guard.evidence = evidence.begin()
        if str(getattr(args, "device", "")).startswith("cuda"):
            guard.checker = device_checker(guard)
        guard.install(scheduler_hooks(guard))
        GUARDS.append(guard)
        return guard
    except Exception:
        if config.mode is Mode.RAISE:
            raise
        log.exception("ddtree_guard internal site=start: our bug; the server is not affected")
        return None


def device_checker(guard: ServerGuard) -> Checker:
    """The checker that runs on the GPU, inside SGLang's graphs."""
    module = importlib.import_module("ddtree_guard.hooks.device_checker")
    internal = functools.partial(guard.fuses.internal, "capture", may_raise=False)
    made: Checker = module.DeviceChecker(guard.guard, guard.config.depth, internal)
    tape = importlib.import_module("ddtree_guard.hooks.tape")
    made.tape = guard.flight.tape = tape.Tape(guard.flight.recorder)
    return made


def finish(config: Config, guard: ServerGuard | None, scheduler: Any) -> None:
    """Hook the live worker, test, judge the configuration, tell the other ranks. See `start`."""
    try:
        if guard is None:
            if scheduler.server_args.speculative_algorithm:
                why = "the guard could not start; see the exception above"
                note(config, rank_of(scheduler), release(), NOT_ARMED, why)
                _report(config, None, why)
            return
        why = _arm(guard, scheduler)
        if why:
            guard.remove()
        else:
            guard.shadow.start(guard.backends())
        _report(config, guard, why)
        if not why:
            _judge(guard)
            atexit.register(guard.journal.flush)
    except (Violation, IncompatibleError):
        raise  # mode raise only
    except Exception:
        if config.mode is Mode.RAISE:
            raise
        log.exception("ddtree_guard internal site=finish: our bug; the server is not affected")


def _arm(guard: ServerGuard, scheduler: Any) -> str:
    """Why this rank is not armed; empty if it is."""
    algorithm = getattr(scheduler.server_args, "speculative_algorithm", None)
    if why := unguardable(str(algorithm or "")):
        return why
    worker = scheduler.model_worker
    guard.install([worker_hook(guard, worker), verify_hook(guard, worker)])
    observers = getattr(worker, "observers", None)
    if isinstance(observers, list):  # DDTREE of this project: its walk is no function of SGLang's
        observers.append(guard.walked)
        guard.witness = witness_of(guard, worker)
    for state in guard.hooks.values():
        if state.blocking:
            return f"site {state.hook.site} is not hooked ({state.detail})"
    if not any(state.hook.site == "build" for state in guard.hooks.values()):
        return "no attention backend of the target was seen"
    guard.checker.ready()
    return self_test(guard)


def _judge(guard: ServerGuard) -> None:
    step = configuration_of(guard)
    if step is not None:
        guard.judge(step)


def configuration_of(guard: ServerGuard) -> Step | None:
    """The configuration of the backends that the guard has seen; None without a target."""
    pairs = guard.backends()
    targets = [(runner, backend) for runner, backend in pairs if not runner.is_draft_worker]
    drafts = [(runner, backend) for runner, backend in pairs if runner.is_draft_worker]
    if not targets:
        return None
    return read_configuration(*targets[-1], drafts, guard.rank)


def _report(config: Config, guard: ServerGuard | None, why: str) -> None:
    rank, world, store = boot.world_of(importlib.import_module("torch.distributed"))
    if guard is not None and not why:
        guard.flight.start(store)
    mine = boot.RankReport(rank, why)
    reports: tuple[boot.RankReport, ...] = (mine,)
    if store is not None:
        boot.publish(store, mine)
        if rank == 0 or config.mode is Mode.RAISE:
            reports = boot.gather(store, world)
    metrics = metrics_of_process() if guard is None else guard.metrics
    whole = mine.armed and guard is not None and not guard.fuses.disarmed()
    metrics.set("armed", float(whole))
    if rank == 0:
        metrics.set("ranks", world)
        metrics.set("ranks_armed", sum(report.armed for report in reports))
    if guard is not None:
        metrics.set("rules_active", len(active_rules(guard)))
        if store is not None and config.depth.value == "full":
            guard.digests = Digests(store, rank, world)
    for report in reports if rank == 0 else (mine,):
        if not report.armed:
            log.error("%s", boot.not_guarded(report, world))
    if guard is not None:
        line = _boot_line(guard, reports)
        whose = f"rank {rank} of {world}" + (": of itself" if rank else "")
        shadow = guard.shadow.line()
        words = armed_words(guard.hooks.values(), not_checked(guard), release(), shadow)
        guard.flight.says(line, whose, *words)
        if rank == 0:
            log.warning("%s", line)
    _leave_evidence(guard, mine, reports)
    refusal = boot.refuses(config, reports)
    if refusal:
        raise IncompatibleError(refusal)


def _leave_evidence(
    guard: ServerGuard | None, mine: boot.RankReport, reports: tuple[boot.RankReport, ...]
) -> None:
    """On disk: whether this rank is armed, and the word over all ranks as far as it knows."""
    if guard is None or guard.evidence is None:
        return
    guard.evidence.state(
        ARMED if mine.armed else NOT_ARMED,
        mine.why,
        boot=_boot_line(guard, reports),
        rules=len(active_rules(guard)),
        world=len(reports),
        armed=sum(report.armed for report in reports),
        missing=[f"rank {r.rank}: {r.why}" for r in reports if not r.armed],
    )


def active_rules(guard: ServerGuard) -> list[str]:
    """Ids of the rules that can be evaluated: their fields are there and nothing exempts them."""
    if configuration_of(guard) is None:
        return []
    left_out = not_checked(guard)
    return [rule.id for rule in guard.guard.rules if rule.id not in left_out]


def not_checked(guard: ServerGuard) -> dict[str, str]:
    """Why rules that were selected cannot be evaluated in this server, by id."""
    step, pairs = configuration_of(guard), guard.backends()
    if step is None:
        return {}
    targets = [backend for runner, backend in pairs if not runner.is_draft_worker]
    supplied = {*adapter_for(type(targets[-1])).supplies, *_given(step)}
    supplied |= {*guard.shadow.supplies, *getattr(guard.witness, "supplies", ())}
    if step.contract.chain:  # no arrays say that row r follows row r-1
        supplied -= {"tree.parents", "tree.depths", "tree.sizes", *LINKS, "outcome.predict"}
    if all(graph_runner(runner) is None for runner, _ in pairs if not runner.is_draft_worker):
        supplied = {path for path in supplied if not path.startswith(("graph.", "contract."))}
    found = dict(step.contract.not_checked)
    found |= dict.fromkeys(WALK if guard.simulated else (), "the acceptance is simulated")
    for rule in guard.guard.rules:
        missing = [path for path in rule.needs if path not in supplied]
        if missing:
            found.setdefault(rule.id, f"this server gives no {', '.join(missing)}")
    known = {rule.id for rule in guard.guard.rules}
    return {rule: why for rule, why in found.items() if rule in known}


def _given(step: Step) -> set[str]:
    """The fields that the configuration step holds, for its own rules and those of each step."""
    paths = {path for rule in ALL for path in rule.needs if path.startswith(("widths.", "limits."))}
    return {path for path in paths if step.get(path) not in (None, ())}


def _boot_line(guard: ServerGuard, reports: tuple[boot.RankReport, ...]) -> str:
    step = configuration_of(guard)
    skipped: dict[str, list[str]] = {}
    if step is not None:
        triton = step.contract.backend == "triton"
        word = step.contract.algorithm.lower() if triton else step.contract.backend
        if step.contract.not_checked:
            skipped[word] = sorted(step.contract.not_checked)
    if guard.simulated:
        skipped["simulated"] = list(WALK)
    return boot.Boot(
        config=guard.config,
        release=release(),
        armed=sum(report.armed for report in reports),
        world=len(reports),
        active=len(active_rules(guard)),
        rules=len(guard.guard.rules),
        skipped=skipped,
        backend=step.who.backend_kind if step is not None else "unknown",
        ring=guard.flight.size,
    ).line()


def rank_of(scheduler: Any) -> str:
    """The rank as SGLang writes it in its log: TP3, with DP and PP where there are several."""
    held = getattr(scheduler, "ps", scheduler)
    parts = [f"TP{int(getattr(held, 'tp_rank', 0) or 0)}"]
    for name in ("dp", "pp"):
        value = getattr(held, f"{name}_rank", None)
        if value is not None and int(getattr(held, f"{name}_size", 1) or 1) > 1:
            parts.append(f"{name.upper()}{int(value)}")
    return "_".join(reversed(parts))
