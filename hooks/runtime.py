"""`ServerGuard`: the guard of one scheduler process. Hooks call it; it never raises into SGLang
outside mode `raise`, never changes what SGLang returns, and never waits for the device.

A step: `begin` (worker entry), `built` (metadata; a replay and the GPU wait for it), `accepted`
(tree walk), `study` (what could wait: who is in it), `end` (worker exit), `resolve` (SGLang has
waited for the tokens, none has left), `commit`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec

from ddtree_guard import render
from ddtree_guard.config import Config, Mode
from ddtree_guard.errors import Violation
from ddtree_guard.guard import Guard
from ddtree_guard.hooks.adapters import adapter_for
from ddtree_guard.hooks.certificates import Certificates, wrong_choice
from ddtree_guard.hooks.checker import Checker, HostChecker
from ddtree_guard.hooks.counting import count
from ddtree_guard.hooks.flight import Flight
from ddtree_guard.hooks.fuses import Fuses
from ddtree_guard.hooks.hook import Hook, HookStatus, status
from ddtree_guard.hooks.journal import Journal
from ddtree_guard.hooks.lengths import beyond_row, drifted, kv_lengths
from ddtree_guard.hooks.no_shadow import shadow_for
from ddtree_guard.hooks.patching import PatchReport, apply
from ddtree_guard.hooks.ranks import Digests
from ddtree_guard.hooks.record import Coverage, Record, Walk
from ddtree_guard.hooks.running import Running
from ddtree_guard.hooks.statics import handed_over, replayed
from ddtree_guard.hooks.switches import simulated_walk
from ddtree_guard.hooks.taint import Taints
from ddtree_guard.hooks.view import View, lanes_of, ragged, state_of
from ddtree_guard.metrics import Metrics
from ddtree_guard.rule import Finding, Site
from ddtree_guard.step import Step

log = logging.getLogger("ddtree_guard")
OPEN = 8  # steps that may be between their worker's exit and the arrival of their tokens

P = ParamSpec("P")
Method = Callable[Concatenate["ServerGuard", P], None]


def site(name: str, may_raise: bool = True) -> Callable[[Method[P]], Method[P]]:
    """A method as hook code of a site: its faults are ours, counted, and may disarm the site."""

    def decorate(method: Method[P]) -> Method[P]:
        @functools.wraps(method)
        def guarded(self: ServerGuard, /, *args: P.args, **kwargs: P.kwargs) -> None:
            if self.fuses.intact(name):
                try:  # not `fuses.internal`: a context manager costs more than most sites do
                    method(self, *args, **kwargs)
                except Exception as error:
                    if self.fuses.passes(name, error, may_raise):
                        raise

        return guarded

    return decorate


class ServerGuard:
    """Judges every verify step of one scheduler process and applies the mode."""

    def __init__(
        self,
        config: Config,
        *,
        rank: str = "TP0",
        run: str = "run",
        checker: Checker | None = None,
        metrics: Metrics | None = None,
        journal: Journal | None = None,
        digests: Digests | None = None,
    ) -> None:
        self.config = config
        self.rank = rank
        self.guard = Guard(config)
        self.checker: Checker = checker or HostChecker(self.guard)
        self.metrics = metrics or Metrics(rank)
        self.journal = journal or Journal(config.log)
        self.digests = digests
        self.fuses = Fuses(strict=config.mode is Mode.RAISE, told=self.metrics.fault)
        self.taints = Taints()
        self.certificates = Certificates()
        self.witness: Any = None  # `witness.Witness`: a DDTREE worker's own outputs
        self.simulated = simulated_walk()
        self.coverage = Coverage()
        self.flight = Flight(config, run, rank, self.metrics)
        self.evidence: Any = None  # `evidence.Evidence`: hears of every finding
        self.running = Running(self._view, self.fuses.faults)
        self._runners: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._captured: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
        self._open: dict[int, tuple[Any, Record]] = {}
        self._reports: list[PatchReport] = []
        self.hooks: dict[tuple[str, str], HookStatus] = {}
        self.shadow = shadow_for(config, self.fuses, self._target, self.guard.rules)
        self.running.quick = not self.shadow.on  # it sees a step before attention
        self.depth = 0  # nested builds: a backend that calls its parent's, or wraps another

    # --- hooks -----------------------------------------------------------------------------------
    def install(self, hooks: Iterable[Hook]) -> tuple[HookStatus, ...]:
        """Apply the hooks that are not in place yet. Returns the state of those."""
        states = tuple(self._hook(hook) for hook in hooks if hook.key not in self.hooks)
        self.hooks.update({state.hook.key: state for state in states})
        return states

    def _hook(self, hook: Hook) -> HookStatus:
        try:
            self._reports.append(report := apply(hook.patches))
        except ImportError as error:  # SGLang's own module does not import here
            return HookStatus(hook, False, f"{type(error).__name__}: {error}")
        return status(hook, report)

    def remove(self) -> tuple[str, ...]:
        """Put every original back. A sentence for each that somebody else has replaced since."""
        kept: list[str] = []
        while self._reports:
            kept += self._reports.pop().restore()
        self.hooks.clear()
        self.flight.stop()
        self.journal.flush()
        if self.evidence is not None:
            self.evidence.close()
        return tuple(kept)

    # --- init -----------------------------------------------------------------------------------
    @site("init")
    def adopt(self, backend: Any, runner: Any) -> None:
        """Remember which runner a backend works for."""
        self._runners[backend] = runner

    @site("init")
    def judge(self, step: Step) -> None:
        """Check the configuration that a runner was built with, before it serves."""
        found = list(self.guard.check(step, (Site.INIT,)).findings)
        self._apply(Record(0, (), (), step=step), found, tokens_left=False)

    def backends(self) -> list[tuple[Any, Any]]:
        """(runner, backend) of every backend that is alive, oldest first."""
        return [(runner, backend) for backend, runner in self._runners.items()]

    @property
    def begun(self) -> int:
        """Verify steps that the worker has begun; the id of the newest."""
        return self.running.steps

    @property
    def current(self) -> Record | None:
        """The step that the worker runs; made when somebody asks, in the serving thread only."""
        return self.running.record()

    # --- one step -------------------------------------------------------------------------------
    def begin(self, batch: Any) -> None:
        """The worker takes a batch: its requests, without asking the device."""
        running = self.running
        running.queued = running.known = running.batch = None
        try:
            mode = batch.forward_mode
            if mode is not None and mode.is_decode():
                running.steps += 1
                running.batch = batch
            elif self.taints:
                self._look_for_reuse(batch)
        except Exception as error:
            if self.fuses.passes("begin", error):
                raise

    @site("capture", may_raise=False)
    def captured(self, backend: Any, batch: Any) -> None:
        """The metadata of a captured batch size exists; every replay reads this object again."""
        runner = self._target(backend)
        if runner is None or not batch.forward_mode.is_target_verify() or ragged(batch):
            return
        lanes, metadata = lanes_of(batch), backend.forward_metadata
        self._captured.setdefault(backend, {})[lanes] = metadata
        self.certificates.take(backend, batch, runner, metadata)
        view = View(
            backend, batch, runner, rank=self.rank, path="graph", metadata=metadata,
            state=state_of(runner),
        )  # fmt: skip
        self.shadow.prepare(view)
        self.checker.prepare(view)

    @site("capture", may_raise=False)
    def in_graph(self, backend: Any, batch: Any) -> None:
        """Inside the captured region: what is queued here runs in every replay."""
        runner = self._target(backend)
        if runner is not None and batch.forward_mode.is_target_verify() and not ragged(batch):
            metadata = self._captured.get(backend, {}).get(lanes_of(batch))
            self.checker.capture(
                View(backend, batch, runner, rank=self.rank, path="graph", metadata=metadata)
            )

    def built(self, backend: Any, batch: Any, path: str) -> None:
        """The metadata of a verify launch stands in the buffers that attention will read. A replay
        waits for this, and the GPU for it: what is not for the device is left to `study`.
        """
        try:
            if path == "graph" and self.running.queue(self.checker, backend, batch):
                return
        except Exception as error:
            if self.fuses.passes("build", error):
                raise
            return
        self._built(backend, batch, path)

    def _build(self, backend: Any, batch: Any, path: str) -> None:
        runner, running = self._target(backend), self.running
        drafts = runner is None or not batch.forward_mode.is_target_verify()
        if drafts and running.known is None and running.queued is None:
            return  # before the launch
        record = self.current
        if record is None:
            running.stray |= path == "graph"
            return
        if drafts:
            record.reused = record.built  # a drafter's forward after the walk, as EAGLE has one
            return
        if ragged(batch):
            record.why = "a ragged batch has no single width"
            return
        view = record.view = self._view(record, backend, batch, path)
        if self.shadow.on:
            self.shadow.begin(record, view.complete())
        self.checker.build(record, view)
        if record.step is not None:
            self.flight.built(record)

    _built = site("build")(_build)

    def _view(self, record: Record, backend: Any, batch: Any, path: str) -> View:
        return View(
            backend, batch, self._target(backend), record.rids, record.step_id, self.rank, path,
            live=len(record.reqs), late=functools.partial(self._complete, record),
        )  # fmt: skip

    def _complete(self, record: Record, view: View) -> None:
        """What the view of a step that was built lacks: a replay should not wait for it."""
        backend, runner = view.backend, view.runner
        view.rids, view.state = self.running.names(record), state_of(runner)
        if view.path == "graph":
            view.metadata = self._captured.get(backend, {}).get(lanes_of(view.batch))
            view.batch = replayed(view.batch, runner)
            view.replay = self.certificates.replay(backend, view.batch, runner)
            record.doubt = view.replay is not None and not view.replay.same

    @site("build")
    def study(self, record: Record) -> None:
        """The step's replay is queued, and its buffers are as they were: what could wait."""
        if record.view is not None and not record.studied:
            record.studied = True
            self.checker.study(record, record.view.complete())

    @site("build")
    def replayed(self, backend: Any, given: dict[str, Any]) -> None:
        """A replay of 0.5.12, which hands its fields over one by one."""
        runner = self._target(backend)
        if runner is None or self.current is None:
            return
        self._build(backend, handed_over(given, runner), "graph")

    @site("verify")
    def accepted(self, batch: Any, predict: Any, lens: Any, index: Any) -> None:
        """The tree walk of the current step: device tensors, rows counted over the batch."""
        if self.current is not None and not self.simulated:
            info = getattr(batch, "sampling_info", None)
            greedy = bool(getattr(info, "is_all_greedy", False))
            self.current.outcome = Walk(lens, predict, index, greedy)
            self.checker.walked(self.current)
            self.study(self.current)

    @site("verify")
    def walked(self, step: Any) -> None:
        """The walk of a DDTREE worker of this project (`ddtree.worker.TreeStep`)."""
        if self.current is not None:
            done = step.accepted
            predict = step.predict.reshape(-1)
            self.current.outcome = Walk(done.lens, predict, done.accept_index, True, False)
            self.checker.walked(self.current)
            self.study(self.current)

    def end(self, result: Any) -> None:
        """The worker returns its result; its tokens are still on their way to the host."""
        count(self, self.running.busy, result)
        try:
            self._end(result)
        finally:
            self.running.set(None)

    @site("verify")
    def _end(self, result: Any) -> None:
        for _, held in self._open.values():
            held.reused = True
        record = self.current
        self.shadow.end()
        if record is None:
            self.running.leave(self.checker)
            return
        record.reused |= record.redrafts
        self.study(record)
        self.running.names(record)
        while len(self._open) >= OPEN:  # results that were never processed
            _, stale = self._open.pop(next(iter(self._open)))
            self._settle(stale, tokens_left=None)
        self._open[id(result)] = (result, record)
        if record.outcome is None and getattr(result, "accept_lens", None) is not None:
            record.outcome = Walk(result.accept_lens)
        if record.outcome is not None and record.outcome.index is None and not record.is_chain:
            record.outcome = None  # a tree whose walk was not seen
        self.checker.verify(record)
        self._judge_choice(record)

    def _judge_choice(self, record: Record) -> None:
        """The graph that was replayed, where it is another batch size's."""
        key = None if record.view is None else wrong_choice(record.view)
        if record.view is None or key is None:
            return
        step = record.step or adapter_for(type(record.view.backend)).read_step(record.view)
        record.step = step.replace(graph__born_key=key)
        known = {finding.rule for finding in record.findings}
        found = self.guard.check(record.step, (Site.REPLAY,)).findings
        record.findings += [finding for finding in found if finding.rule not in known]

    def resolve(self, result: Any) -> Record | None:
        """SGLang has waited for the step's tokens and has sent none. Returns the step's record."""
        _, record = self._open.pop(id(result), (None, None))
        if record is not None:
            self._resolve(record)
        return record

    @site("resolve")
    def _resolve(self, record: Record) -> None:
        record.kv_before = kv_lengths(record.reqs)
        self._settle(record, tokens_left=False)

    @site("commit")
    def commit(self, record: Record, tokens: list[Any]) -> None:
        """Lengths after the step against the tokens that were kept. All numbers are on the host."""
        for step in (drifted(record, tokens, self.rank), beyond_row(record, self.rank)):
            found = () if step is None else self.guard.check(step, (Site.COMMIT,)).findings
            if found:
                late = copy.copy(record)
                late.step = step
                self._apply(late, list(found), tokens_left=False)

    # --- what is done about it ------------------------------------------------------------------
    def _settle(self, record: Record, tokens_left: bool | None) -> None:
        try:
            self._settle_now(record, tokens_left)
        finally:
            self.coverage.settled += 1

    def _settle_now(self, record: Record, tokens_left: bool | None) -> None:
        for late, bad in self.shadow.late():
            self._apply(late, bad, tokens_left=True)
        known = self.shadow.compared
        found = self.checker.settle(record) + self.shadow.settle(record)
        if self.witness is not None:
            found += self.witness.settle(record)
        self.metrics.add("shadow_steps_total", self.shadow.compared - known)
        record.settled = True
        if record.checked:
            self.coverage.steps_checked += 1
            self.metrics.add("steps_checked_total")
        else:
            self._skip(record)
        self.flight.settled(record)
        if found:
            self._apply(record, found, tokens_left)
        if self.digests is not None and record.step is not None:
            self._compare_ranks(self.digests.exchange(record.step))

    def _compare_ranks(self, steps: list[Step]) -> None:
        rules = [rule for rule in self.guard.rules if rule.family == "X"]
        for step in steps:
            found = [f for f in (rule.check(step) for rule in rules) if f is not None]
            if found:
                self._apply(Record(step.who.step_id, (), (), step=step), found, tokens_left=None)

    def _skip(self, record: Record) -> None:
        why = record.why or ("the check failed" if record.built else "no hook saw its metadata")
        if not self.coverage.skipped[why]:
            log.warning("ddtree_guard step=%d was not checked: %s", record.step_id, why)
        self.coverage.skipped[why] += 1

    def _apply(self, record: Record, found: list[Finding], tokens_left: bool | None) -> None:
        strict = self.config.mode is Mode.RAISE
        found = [
            dataclasses.replace(
                finding,
                tokens_left=tokens_left,
                action="server stopped" if strict and not finding.latent else "logged",
            )
            for finding in found
        ]
        dump = self.flight.found(record, found, self.shadow.evidence)
        texts = [self._report(record, finding, dump) for finding in found]
        broken = [n for n, finding in enumerate(found) if not finding.latent]
        if strict and broken:
            self.journal.flush()
            raise Violation(texts[broken[0]])
        for n in broken:
            self.taints.mark(record, found[n])

    def _report(self, record: Record, finding: Finding, dump: object | None) -> str:
        """Count and log a finding. Returns the readable block."""
        step = record.step
        assert step is not None  # a finding is made from a step
        if finding.latent:
            self.coverage.latent += 1
        else:
            self.coverage.findings += 1
        self.metrics.finding(finding)
        if not finding.latent or self.journal.is_new(finding.rule):
            self.journal.write(finding, step, dump, self.flight.name(finding.rid))
        text = render.block(finding, step, dump)
        if self.evidence is not None:
            self.evidence.finding(finding, step, dump, text)
        return text

    def _look_for_reuse(self, batch: Any) -> None:
        for req in getattr(batch, "reqs", None) or ():
            source = self.taints.reuse(req)
            if source is not None:
                self.flight.tainted(str(req.rid))
                self.metrics.add("tainted_total")
                name = self.flight.name(str(req.rid))
                log.error(
                    "ddtree_guard tainted rid=%s source=%s cached=%d name=%s: it reuses KV of a "
                    "step that had a finding",
                    render.quote(req.rid), render.quote(source), len(req.prefix_indices),
                    render.known(name),
                )  # fmt: skip

    def _target(self, backend: Any) -> Any:
        """The runner of a backend that serves the target model, or None."""
        runner = self._runners.get(backend)
        return None if runner is None or runner.is_draft_worker else runner
