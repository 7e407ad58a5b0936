"""Shadow mode: now and then one request's attention is computed again, densely, and compared.

`SGLANG_DDTREE_GUARD_SHADOW_EVERY=N` takes every N-th verify step; request and layer follow from the
step's number, so all ranks take the same ones. Eager: the comparison is launched right behind the
layer's kernel. Graphs: Python does not run in a replay, so each captured batch size also copies the
queries and rows of one layer into buffers of the guard's, another layer for every size, and the
comparison is launched behind the replay, before anything is committed. Nothing waits: results
come back through pinned memory and are looked at where the step's tokens have arrived.

With `SGLANG_DDTREE_GUARD_CAPTURE=qkv` the rows of that layer are kept in every step until it has
settled, so that a finding's dump can be recomputed.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from ddtree_guard.attention.backend import tree_width
from ddtree_guard.attention.shadow import Errors, Rows, ShadowCheck, self_test, tolerance
from ddtree_guard.config import Capture, Config
from ddtree_guard.hooks.adapters import adapter_for
from ddtree_guard.hooks.contracts import contract_of
from ddtree_guard.hooks.facts import facts_of, release
from ddtree_guard.hooks.fuses import Fuses
from ddtree_guard.hooks.record import Record
from ddtree_guard.hooks.shadow_rows import Held, Snapshots, Taken, heads_of, kept_rows, unfit
from ddtree_guard.hooks.view import View
from ddtree_guard.rule import Finding, Rule
from ddtree_guard.step import Shadow, Step, Who, Widths

log = logging.getLogger("ddtree_guard")
SITE = "shadow"
SUPPLIES = (
    "shadow.dense", "shadow.chain", "shadow.decode", "shadow.request", "shadow.tolerance",
)  # fmt: skip
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64
_WORD = (1 << 64) - 1

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate["ShadowMode", P], T]


def pick(step: int, count: int, salt: int) -> int:
    """A number below `count` that follows from the step's number: the same on every rank.

    Each salt gives a sequence of its own, so that no layer keeps meeting the same request.
    """
    value = (step + salt * _MIX[0]) & _WORD
    for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
        value = ((value ^ value >> shift) * factor) & _WORD
    return (value ^ value >> 31) % count


def safe(default: Any) -> Callable[[Method[P, T]], Method[P, T]]:
    """A method whose faults only disarm shadow mode; it gives `default` then, and when off."""

    def decorate(method: Method[P, T]) -> Method[P, T]:
        @functools.wraps(method)
        def guarded(self: ShadowMode, /, *args: P.args, **kwargs: P.kwargs) -> T:
            found: T = default
            if self.on and self.fuses.intact(SITE):
                with self.fuses.internal(SITE, may_raise=False):
                    found = method(self, *args, **kwargs)
            return found

        return guarded

    return decorate


@dataclass(slots=True)
class Recording:
    """What a captured batch size copies in every replay: q and output rows of one layer."""

    layer: int
    scale: float
    q: Any  # (lanes * w, heads, dim)
    output: Any
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class Ticket:
    """A comparison that was launched for a step."""

    number: int
    request: int
    w: int
    layer: int
    dtype: str
    allowed: float


@dataclass(slots=True)
class Pending:
    """The verify step that is running: what was taken of it, and the layer to compare."""

    record: Record
    view: View
    taken: Taken
    request: int
    due: bool
    layer: int | None  # None: the first one that can be compared


class ShadowMode:
    """Shadow comparisons of one scheduler process. Off: every method returns at once.

    `target` gives the runner of a backend that serves the target model; `rules` are the guard's.
    `compared` counts steps whose comparison was read, `skipped` those not compared, by reason.
    """

    def __init__(
        self, config: Config, fuses: Fuses, target: Callable[[Any], Any], rules: tuple[Rule, ...]
    ) -> None:
        self.every, self.rows = config.shadow_every, config.capture is Capture.QKV
        self.fuses, self.target = fuses, target
        self.rules = tuple(rule for rule in rules if rule.family == "D")
        self.layers: dict[int, str] = {}  # by layer id: why it is not compared
        self.recordings: dict[tuple[int, int], Recording] = {}
        self.compared = 0
        self.worst = 0.0  # largest error of a step that was clean, over its tolerance
        self.supplies = SUPPLIES if self.every else ()
        self.skipped: Counter[str] = Counter()
        self._expected: set[tuple[int, int]] = set()
        self._buffers: dict[Any, list[Any]] = {}
        self._snapshots = Snapshots()
        self._check: ShadowCheck | None = None
        self._pending: Pending | None = None
        self._newest: Record | None = None  # whose metadata was built last
        self._late: list[Record] = []

    @property
    def on(self) -> bool:
        """Whether anything is to be compared or kept."""
        return self.every > 0 or self.rows

    # --- capture --------------------------------------------------------------------------------
    @safe(None)
    def prepare(self, view: View) -> None:
        """A batch size is about to be captured."""
        self._expected.add(_key(view.backend, view.batch))

    def _record(self, backend: Any, q: Any, out: Any, layer: Any, batch: Any) -> None:
        """In a warm-up run and in the capture itself: copy this size's layer."""
        key = _key(backend, batch)
        capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
        held = self.recordings.get(key)
        if held is None:
            if capturing:
                self._skip("a graph was captured without a warm-up run", 0)
                return
            held = self.recordings[key] = self._recording(q, layer)
        if held.layer == layer.layer_id and len(held.q) == len(q):
            held.q.copy_(heads_of(q, layer))
            held.output.copy_(heads_of(out, layer))
            held.recorded = capturing or not q.is_cuda

    def _recording(self, q: Any, layer: Any) -> Recording:
        """Buffers for a size: the beginning of the largest ones, since graphs run one by one."""
        fit = self._fit()
        chosen = fit[len(self.recordings) % len(fit)] if len(fit) > 1 else layer.layer_id
        shape = (len(q), layer.tp_q_head_num, layer.v_head_dim)
        kind = (q.dtype, shape[1:])
        held = self._buffers.get(kind, [])
        if not held or len(held[0]) < shape[0]:
            with torch.inference_mode(False):
                held = [torch.zeros(shape, dtype=q.dtype, device=q.device) for _ in range(2)]
            self._buffers[kind] = held
        return Recording(chosen, float(layer.scaling), *(part[: shape[0]] for part in held))

    # --- one step -------------------------------------------------------------------------------
    @safe(None)
    def begin(self, record: Record, view: View) -> None:
        """The metadata of a verify step stands: take who is where, before it runs."""
        self._pending, self._newest = None, record
        due = self.every > 0 and record.step_id % self.every == 0
        if not due and not self.rows:
            return
        request, fit = pick(record.step_id, view.bs, 1), self._fit()
        layer = fit[pick(record.step_id, len(fit), 2)] if fit else None
        taken = self._snapshots.take(view, None if self.rows else request)
        if taken is None:
            self._skip("its slots are fewer than its rows", record.step_id)
        else:
            self._pending = Pending(record, view, taken, request, due, layer)

    @safe(None)
    def attend(
        self, backend: Any, q: Any, k: Any, layer: Any, batch: Any, out: Any, given: dict[str, Any]
    ) -> None:
        """A layer's attention was launched: eager, in a warm-up run, or inside a capture."""
        now, known = self._pending, layer.layer_id in self.layers
        wanted = now is not None and now.view.path == "eager"
        if wanted and now is not None and known:
            wanted = now.layer in (None, layer.layer_id)
        elif now is None:
            wanted = _key(backend, batch) in self._expected
        runner = self.target(backend) if wanted or not known else None
        if runner is None:
            return
        why = unfit(runner, backend, q, k, layer, given)
        self._learn(layer.layer_id, why)
        if why or not wanted:
            return
        if now is None:
            self._record(backend, q, out, layer, batch)
        elif now.layer in (None, layer.layer_id):
            self._pending = None
            rows = heads_of(q, layer), heads_of(out, layer)
            self._compare(now, Recording(layer.layer_id, float(layer.scaling), *rows))

    @safe(None)
    def ran(self, runner: Any) -> None:
        """The target's forward pass has been queued: after a replay its recording is compared."""
        now = self._pending
        if now is None or now.view.runner is not runner or now.view.path != "graph":
            return
        self._pending = None
        held = self.recordings.get(_key(now.view.backend, now.view.batch))
        rows = len(now.view.batch.req_pool_indices) * now.taken.w
        if held is None or not held.recorded or len(held.q) != rows:
            self._skip("its graph records no layer", now.record.step_id)
        else:
            self._compare(now, held)

    @safe(None)
    def end(self) -> None:
        """The worker's step is over."""
        now, self._pending = self._pending, None
        if now is not None and now.due:
            whys = sorted({why for why in self.layers.values() if why})
            self._skip("; ".join(whys) or "no layer was seen", now.record.step_id)

    def _compare(self, now: Pending, held: Recording) -> None:
        pool, taken = now.view.runner.token_to_kv_pool, now.taken
        if len(held.q) < now.view.bs * taken.w:
            self._skip("its queries are fewer than its rows", now.record.step_id)
            return
        k, v = pool.get_key_buffer(held.layer), pool.get_value_buffer(held.layer)
        if now.due:
            at = now.request - taken.first
            rows = slice(now.request * taken.w, (now.request + 1) * taken.w)
            allowed = tolerance(held.q.dtype, held.q.device.type)
            assert allowed is not None  # such layers are unfit
            number = self._checks(held.q.device, taken.w).launch(
                Rows(held.q[rows], held.output[rows], k, v, taken.slots[at], taken.loc[at],
                     taken.parents[at], taken.lens[at : at + 1], held.scale)
            )  # fmt: skip
            kind = str(held.q.dtype).removeprefix("torch.")
            now.record.shadow = Ticket(number, now.request, taken.w, held.layer, kind, allowed)
        if self.rows:
            count, loc = now.view.bs * taken.w, taken.loc.view(-1)
            now.record.rows = Held(
                taken, held.layer, held.scale, held.q[:count].clone(), held.output[:count].clone(),
                k[loc], v[loc], (k, v),
            )  # fmt: skip

    def _checks(self, device: Any, w: int) -> ShadowCheck:
        if self._check is None or self._check.width < w:
            with torch.inference_mode(False):
                self._check = ShadowCheck(device, max(w, 64))
        return self._check

    # --- results --------------------------------------------------------------------------------
    @safe([])
    def settle(self, record: Record) -> list[Finding]:
        """What the step's comparison found; later, if it has not arrived. Never waits."""
        ticket, check = record.shadow, self._check
        if ticket is None or check is None:
            return []
        if check.lost(ticket.number):
            record.shadow = None
            self._skip("its result was overwritten before it was read", record.step_id)
            return []
        if not check.arrived(ticket.number):
            if all(other is not record for other in self._late):
                self._late.append(record)
            return []
        record.shadow = None
        self.compared += 1
        return self._judge(record, ticket, check.result(ticket.number, ticket.w))

    @safe([])
    def late(self) -> list[tuple[Record, list[Finding]]]:
        """Findings of steps whose comparison arrived after their tokens had."""
        if not self._late:
            return []
        waiting, self._late = self._late, []
        return [(record, found) for record in waiting if (found := self.settle(record))]

    def _judge(self, record: Record, ticket: Ticket, errors: Errors) -> list[Finding]:
        worst = (errors.dense.max(), errors.chain.max(), errors.decode)
        clean = all(error <= ticket.allowed for error in worst)
        if clean:
            self.worst = max(self.worst, float(max(worst)) / ticket.allowed)
        if clean and record.step is None:
            return []
        if record.step is None:
            record.step = self._step_of(record, ticket.w)
        record.step = record.step.replace(shadow=_as_part(ticket, errors))
        if clean:
            return []
        step = record.step
        found = [
            rule.check(step) for rule in self.rules if rule.id not in step.contract.not_checked
        ]
        return [finding for finding in found if finding is not None]

    def _step_of(self, record: Record, w: int) -> Step:
        """The whole step while nothing has reused its buffers, else the bare facts."""
        view = record.view
        assert view is not None
        if self._newest is record:
            return adapter_for(type(view.backend)).read_step(view)
        return _bare(view, w)

    def evidence(self, record: Record, step: Step, finding: Finding) -> list[Step]:
        """What the dump of a finding holds: the step, with its attention rows where they were kept
        (capture `qkv`). Where the step was read after a later one had reused its buffers, the rows
        follow as a step of their own. May wait.
        """
        return self._evidence(record, step, finding) or [step]

    @safe(None)
    def _evidence(self, record: Record, step: Step, finding: Finding) -> list[Step] | None:
        if not self.rows or record.view is None or step.attention.q is not None:
            return None
        if record.rows is None:
            self._skip("its rows were not kept", record.step_id)
            return None
        gone = frozenset(i for i, req in enumerate(record.reqs) if req.finished())
        found = kept_rows(record.rows, finding.request, gone)
        if isinstance(found, str):
            self._skip(f"no rows in the dump: {found}", record.step_id)
            return None
        if found.fits(step):
            return [found.put(step)]
        return [step, found.put(_bare(record.view, record.rows.taken.w))]

    # --- words ----------------------------------------------------------------------------------
    @safe(None)
    def start(self, backends: list[tuple[Any, Any]]) -> None:
        """Test the comparison where it will run, compile it for this model, say what is compared.

        `backends` are (runner, backend) of all that were built.
        """
        targets = [pair for pair in backends if not pair[0].is_draft_worker]
        if not targets:
            return
        runner, backend = targets[-1]
        table = runner.req_to_token_pool.req_to_token
        why = self_test(table.device)
        if why:
            self.every, self.rows, self.supplies = 0, False, ()
            log.error("ddtree_guard shadow is off: %s; the other rules are not affected", why)
            return
        log.warning("%s", self.line())
        w = tree_width(runner) or int(runner.server_args.speculative_num_draft_tokens or 1)
        pool = runner.token_to_kv_pool
        k, v = (get(pool.start_layer) for get in (pool.get_key_buffer, pool.get_value_buffer))
        if k.dim() == 3 and tolerance(k.dtype, k.device.type) is not None:
            none = Snapshots.fresh(1, w, table)  # length 0: nothing of the pool but slot 0 is read
            q = torch.zeros((w, backend.num_head, k.shape[2]), dtype=k.dtype, device=k.device)
            rows = none.slots[0], none.loc[0], none.parents[0], none.lens
            self._checks(k.device, w).launch(Rows(q, q, k, v, *rows, 1.0))

    def line(self) -> str:
        """What is compared, in one line: which layers, in which graphs, and which not and why."""
        sizes = {key[1]: held.layer for key, held in self.recordings.items() if held.recorded}
        graphs = ",".join(f"{lanes}:{layer}" for lanes, layer in sorted(sizes.items()))
        whys = sorted({why for why in self.layers.values() if why})
        return (
            f"ddtree_guard shadow every={self.every} capture={'qkv' if self.rows else 'meta'} "
            f"layers={len(self._fit())}/{len(self.layers) or 'unknown'} "
            f"graph_layers={graphs or 'none'} buffers={self._bytes() >> 20}MiB "
            f'not_checked="{"; ".join(whys) or "none"}"'
        )

    def _bytes(self) -> int:
        """Device memory of the recordings."""
        parts = [part for held in self._buffers.values() for part in held]
        return sum(part.numel() * part.element_size() for part in parts)

    def _fit(self) -> list[int]:
        return sorted(layer for layer, why in self.layers.items() if not why)

    def _learn(self, layer: int, why: str) -> None:
        if why and why not in self.layers.values():
            log.warning("ddtree_guard shadow does not compare layer %d: %s", layer, why)
        self.layers[layer] = why

    def _skip(self, why: str, step: int) -> None:
        if not self.skipped[why]:
            log.warning("ddtree_guard shadow step=%d not compared: %s", step, why)
        self.skipped[why] += 1


def _key(backend: Any, batch: Any) -> tuple[int, int]:
    return id(backend), len(batch.req_pool_indices)


def _bare(view: View, w: int) -> Step:
    """A step of which only the host's knowledge is left."""
    algorithm = str(view.runner.server_args.speculative_algorithm or "")
    who = Who(
        rids=view.rids, step_id=view.step_id, rank=view.rank, algorithm=algorithm,
        release=release(), path=view.path,
    )  # fmt: skip
    return Step(
        bs=view.bs,
        padded_bs=len(view.batch.req_pool_indices),
        widths=Widths(w=w, state=view.state),
        who=who,
        contract=contract_of(algorithm, facts_of(type(view.backend)), view.path),
    )


def _as_part(ticket: Ticket, errors: Errors) -> Shadow:
    return Shadow(
        dense=np.asarray(errors.dense),
        chain=np.asarray(errors.chain),
        decode=errors.decode,
        tolerance=ticket.allowed,
        request=ticket.request,
        layer=ticket.layer,
        length=errors.length,
        dtype=ticket.dtype,
    )
