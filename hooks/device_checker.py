"""The device checker in a server: captured inside the graphs, read back without waiting.

Per step the host queues, on the forward stream: the table check and the trees before a replay,
the acceptance and the copy of the verdict after it. Words are made on the host only when a bit is
set; a few steps are also read to the host, which evaluates the rules that have no bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ddtree_guard.config import Depth
from ddtree_guard.device import selftest
from ddtree_guard.device.launch import DeviceCheck
from ddtree_guard.device.operands import Decision, Operands, Shape
from ddtree_guard.device.tree import ParentsOf
from ddtree_guard.device.verdict import PARTIAL, Verdict, explain
from ddtree_guard.errors import IncompatibleError
from ddtree_guard.guard import Guard, find_rule
from ddtree_guard.hooks.checker import HostChecker
from ddtree_guard.hooks.contracts import contract_of
from ddtree_guard.hooks.device import GraphChecks, buffers_of_backend
from ddtree_guard.hooks.facts import facts_of
from ddtree_guard.hooks.observe import verify_width
from ddtree_guard.hooks.record import Record, Walk
from ddtree_guard.hooks.view import View, lanes_of
from ddtree_guard.rule import Finding, Rule

ALERT = 8  # steps read to the host after a hit, so that a fault that stays gets its numbers
# every n-th step is read to the host as well; each costs some milliseconds
SAMPLE = {Depth.FAST: 16_384, Depth.FULL: 64}
EAGER = 32  # sizes of eager steps whose arrays are kept
FIRST = 2  # so are the first ones of each runtime state and path


@dataclass(slots=True)
class Launch:
    """What one captured batch size (or one eager step) checks, bound once."""

    shape: Shape
    buffers: Any
    trees: dict[str, Any]
    verify: Operands
    table: Operands
    recorded: bool = False  # the graph holds the check; else it is launched before the replay
    pack: Any = None  # what it packs for the recorder, see hooks/tape.py
    # by path length and by how rows are counted
    outcome: dict[tuple[int, bool], tuple[Decision, Operands]] = field(default_factory=dict)
    decisions: dict[tuple[int, bool], Decision] = field(default_factory=dict)
    # where an outcome is copied to, by its kind and number of requests
    targets: dict[tuple[tuple[int, bool], int], list[Any]] = field(default_factory=dict)


class DeviceChecker:
    """Implements `checker.Checker` with the fused kernel. Owns one verdict buffer."""

    kind = "device"
    tape: Any = None  # the flight recorder's, where there is one

    def __init__(self, guard: Guard, depth: Depth = Depth.FAST) -> None:
        self.guard, self.depth = guard, depth
        self.host = HostChecker(guard)
        self.graphs: GraphChecks | None = None
        self._launches: dict[Any, Launch] = {}
        self._eager: dict[Any, tuple[dict[str, Any], dict[Any, Decision]]] = {}
        self._stale = False  # captures have left bits of dummy batches
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
        self._stale = True
        if not hasattr(view.batch, "positions"):
            # 0.5.12 has no place inside the graph: bound at the first replay, launched before each
            self._launches.pop(_key(view), None)
            return
        launch = self._bind(view)
        self._launches[_key(view)] = launch
        parts = {"BS": launch.shape.lanes, "w": launch.shape.w, "mask": launch.buffers.mask is None}
        self._checks(view).before_capture(
            _key(view), parts, launch.buffers, launch.shape, pack=launch.pack
        )
        launch.table.launch()

    def capture(self, view: View) -> None:
        """Record the check. Nothing is bound, allocated or read here."""
        self._checks(view).in_graph(_key(view))
        self._launches[_key(view)].recorded = True
        self._stale = True

    # --- one step -------------------------------------------------------------------------------
    def build(self, record: Record, view: View) -> None:
        """Tell the device what is live; launch the check itself where no graph holds it."""
        if self._stale:
            self.ready()
        key = _key(view) if view.path == "graph" else None
        launch = None if key is None else self._launches.get(key)
        if launch is None:
            launch = self._bind(view)
            if key is not None:
                self._launches[key] = launch
        checks = self._checks(view)
        checks.before_replay(None, view.bs)
        _fill(launch.trees, view)
        launch.table.launch()
        if not launch.recorded:
            checks.check.check(launch.verify)
        record.ticket = launch
        if self._samples(record, view):
            self.host.build(record, view)
            record.checked = False  # that is the device's word
        if self.tape is not None:
            self.tape.step(launch, record, view)

    def walked(self, record: Record) -> None:
        """Queue the acceptance rules, before a draft forward reuses the input buffers."""
        if self.graphs is not None and isinstance(record.ticket, Launch):
            self.graphs.check.close(self._outcome(record.ticket, record.outcome))
            self._closed += 1
            record.ticket = (self._closed, record.ticket)

    def verify(self, record: Record) -> None:
        """Close the step where no walk did, and queue the copy of the verdict."""
        self.walked(record)
        if self.graphs is None:
            return
        if record.ticket is None:  # what a graph checked of it must not pass to the next step
            self.graphs.check.close()
            self._closed += 1
            return
        self.graphs.check.collect()
        if record.step is not None:
            self.host.verify(record)

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
        record.checked = verdict.launches > (self._runs[1] if since == self._runs[0] else 0)
        self._runs, record.mark = (since, verdict.launches), verdict.step
        if self.tape is not None and since == self._since:
            self.tape.settled(record)
        return self._words(record, verdict, launch) if verdict.bits else record.findings

    def _poll(self) -> None:
        """Keep the verdicts that have arrived, but for those of warm-up batches."""
        if self.graphs is not None:
            for new in self.graphs.check.poll():
                if self._since + new.close <= self._closed:
                    self._verdicts[self._since + new.close] = (self._since, new)

    def _words(self, record: Record, verdict: Verdict, launch: Launch) -> list[Finding]:
        self._alert = ALERT
        sampled = record.step is not None
        if record.step is None and record.view is not None:
            record.step = self.host.read(record.view)  # cold: waits for the device
            self.host.add_outcome(record)
        assert record.step is not None
        # where the buffers were reused since, only what the device saw is sure
        own = sampled or not record.reused
        if not own and self.tape is not None:
            record.step = self.tape.as_it_was(record.step) or record.step
        covered = (*launch.verify.rules, *launch.table.rules)
        report = explain(
            verdict, record.step, self.guard.check, covered, full=self.depth is Depth.FULL
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

    def _samples(self, record: Record, view: View) -> bool:
        kind = view.state, view.path
        seen = self._seen[kind] = self._seen.get(kind, 0) + 1
        alert, self._alert = self._alert > 0, max(0, self._alert - 1)
        return record.doubt or alert or seen <= FIRST or record.step_id % SAMPLE[self.depth] == 0

    # --- operands -------------------------------------------------------------------------------
    def _checks(self, view: View) -> GraphChecks:
        if self.graphs is None:
            self.graphs = GraphChecks(DeviceCheck(view.batch.seq_lens.device))
        return self.graphs

    def _eager_trees(self, lanes: int, w: int, batch: Any, chain: bool) -> Any:
        """Arrays for eager steps of a size, and outcomes by kind: of the last sizes, as requests
        choose among many.
        """
        held = self._eager.pop((lanes, w, chain), None) or (_trees(lanes, w, batch, chain), {})
        self._eager[lanes, w, chain] = held
        if len(self._eager) > EAGER:
            del self._eager[next(iter(self._eager))]
        return held

    def _bind(self, view: View) -> Launch:
        backend, batch, runner = view.backend, view.batch, view.runner
        facts = facts_of(type(backend))
        metadata = view.metadata or backend.forward_metadata
        w = verify_width(backend, runner, facts, batch.spec_info)
        algorithm = str(runner.server_args.speculative_algorithm or "")
        contract = contract_of(algorithm, facts, view.path)
        lanes = lanes_of(batch)
        if view.path == "graph":
            trees = _trees(lanes, w, batch, contract.chain)
            decisions: dict[Any, Decision] = {}
        else:  # arrays of our own outlive the step: steps follow each other on one stream
            trees, decisions = self._eager_trees(lanes, w, batch, contract.chain)
            trees["tokens"] = batch.input_ids
        shape = Shape(
            lanes=lanes,
            w=w,
            contract=contract,
            context=int(backend.max_context_len),
            vocab=getattr(runner.model_config, "vocab_size", None),
            pool=int(runner.token_to_kv_pool_allocator.size) + int(runner.page_size),
            max_extend_len=int(metadata.max_extend_len),
            rows={
                name: int(getattr(batch, name).shape[-1])
                for name in ("positions", "out_cache_loc", "input_ids")
            },
            window=runner.sliding_window_size is not None,
            depth=self.depth,
        )
        live = self._checks(view).live_count
        buffers = buffers_of_backend(metadata, batch, live, trees)
        check = self._checks(view).check
        table = check.bind_table(
            buffers, shape, runner.req_to_token_pool.req_to_token, batch.req_pool_indices
        )
        pack = None if self.tape is None else self.tape.pack(view, buffers, shape)
        launch = Launch(
            shape, buffers, trees, check.bind(buffers, shape, pack=pack), table, pack=pack
        )
        launch.decisions = decisions
        return launch

    def _outcome(self, launch: Launch, walk: Walk | None) -> Operands | None:
        """The acceptance in static buffers, so that its operands are bound once."""
        if walk is None or walk.index is None or self.graphs is None:
            return None
        kind = (walk.index.shape[1], walk.global_rows)
        if kind not in launch.outcome:
            if kind not in launch.decisions:
                launch.decisions[kind] = _decision(launch.shape, walk)
            decision = launch.decisions[kind]
            bound = self.graphs.check.bind_outcome(launch.buffers, launch.shape, decision)
            launch.outcome[kind] = (decision, bound)
        decision, bound = launch.outcome[kind]
        bs = walk.lens.shape[0]
        rows, predict = bs * launch.shape.w, walk.predict
        targets = launch.targets.get((kind, bs))
        if targets is None:
            flat = decision.predict.view(-1)
            targets = [flat[:rows], decision.accept[:bs], decision.lens[:bs]]
            launch.targets[kind, bs] = targets
        if predict.shape[0] != rows:
            predict = predict[:rows]
        torch._foreach_copy_(targets, [predict, walk.index, walk.lens])
        filled = launch.trees.setdefault("greedy", {})  # what the array of each kind holds
        if walk.greedy != filled.get(kind, False):
            decision.greedy.fill_(int(walk.greedy))
            filled[kind] = walk.greedy
        return bound


def _decision(shape: Shape, walk: Walk) -> Decision:
    """Static arrays for the acceptance of one path length."""
    lanes, device = shape.lanes, walk.index.device
    return Decision(
        predict=torch.zeros((lanes, shape.w), dtype=torch.int32, device=device),
        accept=torch.full((lanes, walk.index.shape[1]), -1, dtype=torch.int32, device=device),
        lens=torch.ones(lanes, dtype=torch.int32, device=device),
        greedy=torch.zeros(lanes, dtype=torch.int32, device=device),
        global_rows=walk.global_rows,
    )


def _key(view: View) -> tuple[int, int]:
    return id(view.backend), lanes_of(view.batch)


def _trees(lanes: int, w: int, batch: Any, chain: bool) -> dict[str, Any]:
    """Static tree arrays of all lanes. A chain's never change."""
    device = batch.seq_lens.device
    parents = torch.arange(-1, w - 1, dtype=torch.int32, device=device).repeat(lanes, 1)
    depths = torch.arange(w, dtype=torch.int32, device=device).repeat(lanes, 1)
    return {
        "tokens": batch.input_ids,
        "parents": parents,
        "depths": depths,
        "sizes": torch.full((lanes,), w, dtype=torch.int32, device=device),
        "chain": chain,
        "parents_of": ParentsOf(parents, depths),
        "live": {},  # the rows of live requests, by their number
    }


def _fill(trees: dict[str, Any], view: View) -> None:
    """Write the live trees of this step: given as parents, or derived from links."""
    if trees["chain"]:
        return
    spec, bs = view.batch.spec_info, view.bs
    if getattr(spec, "parents", None) is not None:
        targets = trees["live"].get(bs)
        if targets is None:
            targets = [trees[name][:bs] for name in ("parents", "depths", "sizes")]
            trees["live"][bs] = targets
        given = (spec.parents, spec.depths, spec.tree_sizes)
        torch._foreach_copy_(
            targets,
            [
                tensor if tensor.shape == target.shape else tensor.view(target.shape)
                for tensor, target in zip(given, targets, strict=True)
            ],
        )
        return
    child, sibling = spec.retrieve_next_token, spec.retrieve_next_sibling
    if child is None or sibling is None:
        raise IncompatibleError(
            f"expected {type(spec).__name__} to hold parents or links, found neither; "
            "register an adapter for it."
        )
    trees["parents_of"](child, sibling, bs)


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
