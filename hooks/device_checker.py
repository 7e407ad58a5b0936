"""The device checker in a server: captured inside the graphs, read back without waiting.

Per step the host queues, on the forward stream: the table check and the trees before a replay,
the acceptance and the copy of the verdict after it. Words are made on the host only when a bit is
set; a few steps are also read to the host, which evaluates the rules that have no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from ddtree_guard.config import Depth
from ddtree_guard.device import selftest
from ddtree_guard.device.edges import LINKS
from ddtree_guard.device.launch import DeviceCheck
from ddtree_guard.device.operands import Operands
from ddtree_guard.device.verdict import PARTIAL, Verdict, explain
from ddtree_guard.guard import Guard, find_rule
from ddtree_guard.hooks.checker import HostChecker
from ddtree_guard.hooks.device import GraphChecks
from ddtree_guard.hooks.launches import Binder, Launch
from ddtree_guard.hooks.record import Record
from ddtree_guard.hooks.view import View, lanes_of, ragged
from ddtree_guard.rule import Finding, Rule, Site

ALERT = 8  # steps read to the host after a hit, so that a fault that stays gets its numbers
# every n-th step is read to the host as well; each costs some milliseconds
SAMPLE = {Depth.FAST: 16_384, Depth.FULL: 64}
FIRST = 2  # so are the first ones of each runtime state and path


class DeviceChecker:
    """Implements `checker.Checker` with the fused kernel. Owns one verdict buffer."""

    kind = "device"
    tape: Any = None  # the flight recorder's, where there is one

    def __init__(
        self, guard: Guard, depth: Depth = Depth.FAST, internal: Callable[[], Any] = nullcontext
    ) -> None:
        """`internal` holds back what goes wrong where a captured pass ends: SGLang calls there."""
        self.guard, self.depth, self.internal = guard, depth, internal
        self.host = HostChecker(guard)
        self.graphs: GraphChecks | None = None
        self._launches: dict[Any, Launch] = {}  # of captured graphs
        # those of which a replay needs no more than their `begin`: nothing is read to the host
        self.ready_made: dict[Any, Launch] = {}
        self._binder: Binder | None = None
        self._stale = False  # captures have left bits of dummy batches
        self.ahead = 0  # steps for which nothing was launched before their replay
        self._closed = 0  # steps closed; the number of the newest
        self._since = 0  # those before the last reset, from which `Verdict.close` counts
        self._verdicts: dict[int, tuple[int, Verdict]] = {}  # by number; with `_since`
        self._runs = (0, 0)  # `_since`, and launches until the newest verdict
        self._alert = 0
        self._seen: dict[tuple[str, str], int] = {}

    # --- start ----------------------------------------------------------------------------------
    def ready(self) -> None:
        """Forget what warm-up and capture checked."""
        self._stale = False
        if self.graphs is not None:
            self._poll()  # a step may be in flight
            self.graphs.captured()
            self._since = self._closed
            if self.tape is not None:
                self.tape.restart()

    def self_test(self) -> str:
        """One bad step per device rule, eagerly and in a graph, on this device."""
        device = self.graphs.check.device if self.graphs is not None else None
        results = selftest.run(None if device is None else str(device))
        failed = [result for result in results if not result.passed]
        return f"self-test on the device: {failed[0].text}" if failed else ""

    def prepare(self, view: View) -> None:
        """A batch size is about to be captured: bind, compile, warm."""
        self._changed()
        if not hasattr(view.batch, "positions"):
            # 0.5.12 has no place inside the graph: bound at the first replay, launched before each
            self._launches.pop(_key(view), None)
            return
        checks = self._checks(view)
        launch = self._launches[_key(view)] = self._bound.graph(view, self.tape)
        launch.told.forget()  # what follows tells of no requests
        if launch.chain or hasattr(view.batch.spec_info, "parents"):
            launch.before(0)
        else:  # compiled now, for links as SGLang makes them
            launch.before(0, LINKS, *(checks.check.state,) * 3)
            launch.foresee(checks.check, view.batch.req_pool_indices)
        parts = {"BS": launch.shape.lanes, "w": launch.shape.w, "mask": launch.buffers.mask is None}
        checks.before_capture(
            _key(view), parts, launch.buffers, launch.shape, pack=launch.pack, inside=launch.inside
        )

    def capture(self, view: View) -> None:
        """Record the check, here or at the end of the pass. Nothing is bound, allocated or read."""
        key = _key(view)
        checks, launch = self._checks(view), self._launches[key]
        launch.recorded, launch.rewritten = False, checks.branch.rewritten

        def record() -> None:
            checks.in_graph(key)
            launch.recorded = True  # else it is launched before each replay

        checks.branch.beside(view.runner, record, launch.rows_read)
        self._changed()

    def _changed(self) -> None:
        """A capture leaves bits of dummy batches, and another graph."""
        self._stale = True
        self.ready_made.clear()
        if self.tape is not None:
            self.tape.pause()

    # --- one step -------------------------------------------------------------------------------
    def build(self, record: Record, view: View) -> None:
        """Tell the device what is live; launch the check itself where no graph holds it."""
        if self._stale:
            self.ready()
        launch = self._launch(view)
        launch.begin(view.batch.spec_info, view.bs)
        if not launch.recorded:
            self._checks(view).check.check(launch.verify)
        record.ticket = launch
        if self._samples(record, launch):
            self._read(record, view)
        elif launch.recorded and launch.told_by(view.batch):
            self.ready_made[_key(view)] = launch

    def study(self, record: Record, view: View) -> None:
        """The step is queued: what need not be known before."""
        ticket = record.ticket
        launch = ticket[1] if isinstance(ticket, tuple) else ticket
        if launch is None:
            return
        if launch.recorded and lanes_of(view.batch) != launch.shape.lanes:
            self._mistold(record, "its batch size is not that of its graph")
        if launch.recorded and ragged(view.batch):
            self._mistold(record, "a ragged batch has no single width")
            return
        record.reused |= launch.rewritten  # its replay is queued already
        asked = record.doubt or record.step_id % SAMPLE[self.depth] == 0
        if asked and record.step is None and not record.reused:
            self._read(record, view)
        elif record.doubt and record.step is None:  # its addresses are what is left of it
            record.step = self.host.read(view)
            record.findings = list(self.guard.check(record.step, (Site.REPLAY,)).findings)
        if self.tape is not None:
            self.tape.step(launch, record, view)

    def _mistold(self, record: Record, why: str) -> None:
        """Another graph runs than the one that was told: what the device finds is of no step."""
        self.ready_made.clear()
        if isinstance(record.ticket, Launch):
            self._close(None)
            record.ticket = (self._closed, record.ticket)
        record.ticket, record.why = (record.ticket[0], None), why

    def _read(self, record: Record, view: View) -> None:
        self.host.build(record, view)
        record.checked = False  # that is the device's word

    def _launch(self, view: View) -> Launch:
        """What is launched for this step, bound where it is the first of its kind."""
        if self.graphs is None:
            self._checks(view)
        if view.path != "graph":
            return self._bound.step(view, self.tape)
        key = _key(view)
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = self._bound.graph(view, self.tape)
        return launch

    def walked(self, record: Record) -> None:
        """Queue the acceptance rules, before a draft forward reuses the input buffers."""
        if self.graphs is not None and isinstance(record.ticket, Launch):
            launch, outcome = record.ticket, None
            seen = None if record.ahead else launch  # what the graph has found may be of no step
            try:
                self._catch_up(record, launch)
                seen = launch
                outcome = launch.outcome(self.graphs.check, record.outcome)
            except Exception:
                record.why = "its walk could not be judged"
                if seen is None:
                    record.why = "its trees could not be looked at"
                raise
            finally:  # a step whose walk cannot be judged must not pass to the next one
                self._close(outcome)
                record.ticket = (self._closed, seen)

    def _catch_up(self, record: Record, launch: Launch) -> None:
        """A replay for which nothing was launched has looked at the last step's bs and at trees in
        the same place. Where it should have looked elsewhere, the step is checked again.
        """
        assert self.graphs is not None
        assert record.view is not None
        spec = record.view.batch.spec_info
        if record.ahead:
            if launch.foreseen(spec):
                self.ahead += 1
                return
            launch.told.forget()
            self._close(None)
            launch.begin(spec, record.view.bs)
            self.graphs.check.check(launch.verify)
        launch.learn(spec)

    def verify(self, record: Record) -> None:
        """Close the step where no walk did, and queue the copy of the verdict."""
        self.walked(record)
        if self.graphs is None:
            return
        if record.ticket is None:
            self.stray()
            return
        self.graphs.check.collect()
        if record.step is not None:
            self.host.verify(record)

    def stray(self) -> None:
        """Close what a graph has opened for nobody: it must not pass to the next step."""
        if self.graphs is not None:
            self._close(None)

    def _close(self, outcome: Operands | None) -> None:
        assert self.graphs is not None
        self.graphs.check.close(outcome)
        self._closed += 1

    def settle(self, record: Record) -> list[Finding]:
        """The verdict of the step, in words where it is bad."""
        if self.graphs is None or not isinstance(record.ticket, tuple):
            return record.findings
        number, launch = record.ticket
        self._poll()
        since, verdict = self._verdicts.pop(number, (0, None))
        if self._verdicts:
            self._verdicts = {n: held for n, held in self._verdicts.items() if n > number}
        if verdict is None:
            return record.findings
        ran = verdict.launches > (self._runs[1] if since == self._runs[0] else 0)
        record.checked = ran and not record.why
        self._runs, record.mark = (since, verdict.launches), verdict.step
        if self.tape is not None and since == self._since:
            self.tape.settled(record)
        told = launch is not None and verdict.bits
        return self._words(record, verdict, launch) if told else record.findings

    def _poll(self) -> None:
        """Keep the verdicts that have arrived, but for those of warm-up batches."""
        if self.graphs is not None:
            for new in self.graphs.check.poll():
                if self._since + new.close <= self._closed:
                    self._verdicts[self._since + new.close] = (self._since, new)

    def _words(self, record: Record, verdict: Verdict, launch: Launch) -> list[Finding]:
        self._alert = ALERT
        self.ready_made.clear()
        sampled = record.step is not None
        if record.step is None and record.view is not None:
            record.step = self.host.read(record.view)  # cold: waits for the device
            self.host.add_outcome(record)
        assert record.step is not None
        # where the buffers were reused since, only what the device saw is sure
        own = sampled or not record.reused
        if not own and self.tape is not None:
            record.step = self.tape.as_it_was(record.step) or record.step
        report = explain(
            verdict, record.step, self.guard.check, launch.rules, full=self.depth is Depth.FULL
        )
        found = {f.rule: f for f in record.findings}
        for finding in report.findings:
            if finding.rule == "DG1":
                sure = own
            else:
                seen = finding.rule in verdict.rules
                sure = (
                    (seen or finding.rule in PARTIAL)
                    if own
                    else seen and _same_place(finding, verdict)
                )
            if sure:
                found.setdefault(finding.rule, finding)
        for name in verdict.rules:
            if name not in found and any(rule.id == name for rule in self.guard.rules):
                found[name] = _unseen(find_rule(name), verdict, record)
        return list(found.values())

    def _samples(self, record: Record, launch: Launch) -> bool:
        seen = self._seen[launch.kind] = self._seen.get(launch.kind, 0) + 1
        alert, self._alert = self._alert > 0, max(0, self._alert - 1)
        return alert or seen <= FIRST or record.step_id % SAMPLE[self.depth] == 0

    def _checks(self, view: View) -> GraphChecks:
        if self.graphs is None:
            self.graphs = GraphChecks(DeviceCheck(view.batch.seq_lens.device))
            self.graphs.branch.internal = self.internal
        return self.graphs

    @property
    def _bound(self) -> Binder:
        assert self.graphs is not None
        if self._binder is None:
            self._binder = Binder(self.graphs.check, self.graphs.live_count, self.depth)
        return self._binder


def _key(view: View) -> tuple[int, int]:
    return id(view.backend), lanes_of(view.batch)


def _same_place(finding: Finding, verdict: Verdict) -> bool:
    """Whether the host found the request that the device named."""
    request, _ = verdict.first.get(finding.rule, (None, None))
    return finding.request in (None, request)


def _unseen(rule: Rule, verdict: Verdict, record: Record) -> Finding:
    """A finding of which the device kept the place, and the numbers are gone."""
    request, row = verdict.first.get(rule.id, (None, None))
    return Finding(
        headline=f"the device check found {rule.name}",
        equation=rule.statement,
        expected="-",
        actual="-",
        request=request,
        row=row,
        cause="not known: the buffers were reused before the host could read them",
        confidence="possible",
        rule=rule.id,
        name=rule.name,
        scope=rule.scope,
        site=rule.site,
        rid=record.rids[request] if request is not None and request < len(record.rids) else None,
        next_step=f"ddtree-guard explain {rule.id}",
    )
