"""What the device checks of a step: bound once for a captured graph, or for a kind of eager step.

An eager step of a kind that was there before lies elsewhere in memory and is otherwise the same:
its addresses are put into the launches of the first one.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ddtree_guard.config import Depth
from ddtree_guard.device.before import Before
from ddtree_guard.device.edges import LINKS, PARENTS, TOLD
from ddtree_guard.device.launch import DeviceCheck
from ddtree_guard.device.operands import (
    MAX_LANES,
    Buffers,
    Decision,
    Operands,
    Shape,
    moved_close,
    moved_verify,
    moving,
)
from ddtree_guard.errors import UsageError
from ddtree_guard.hooks.contracts import contract_of
from ddtree_guard.hooks.device import buffers_of_backend
from ddtree_guard.hooks.facts import Facts, facts_of
from ddtree_guard.hooks.links import links_of
from ddtree_guard.hooks.observe import verify_width
from ddtree_guard.hooks.record import Walk
from ddtree_guard.hooks.told import Told, reads_to_the_end
from ddtree_guard.hooks.view import RAGGED, View, lanes_of

EAGER = 32  # kinds of eager steps that are kept
ROWS = ("input_ids", "positions", "out_cache_loc")
_BUILT = operator.attrgetter("qo_indptr", "kv_indptr", "mask_indptr", "custom_mask", "kv_indices")


@dataclass(slots=True)
class Launch:
    """The bound launches of one captured batch size, or of one kind of eager step. `kind` is the
    runtime state and the path; `recorded`: the graph holds the check, else it is launched before
    the replay; `rewritten`: the graph changes what the check reads; `pack` is what it packs for the
    recorder, see hooks/tape.py.

    `before` is launched from here, eagerly, with the `table` that `runner` had when it was bound.
    `rebind` makes it anew for another one. `inside` is the same in the graph, for steps of which
    `told` knows everything. `owner` is a reference to the backend of eager steps. `live` is how
    many requests the device was told of last. `spec`, `mode` and `may_be_ragged`: see `told_by`.
    """

    shape: Shape
    buffers: Buffers
    verify: Operands
    before: Before
    kind: tuple[str, str]
    chain: bool
    runner: Any
    table: Any
    rebind: Callable[[Any], Before]
    told: Told
    inside: Operands | None = None
    recorded: bool = False
    rewritten: bool = False
    owner: Any = None
    live: int = 0
    spec: Any = None
    mode: Any = None
    may_be_ragged: bool = True
    pack: Any = None
    tokens: Any = None  # of this step, where they lie elsewhere in each
    closes: dict[Any, Operands] = field(default_factory=dict)

    @property
    def rules(self) -> tuple[str, ...]:
        """What the launches before the walk decide."""
        return (*self.verify.rules, *self.before.rules)

    @property
    def rows_read(self) -> list[Any]:
        """What the check reads of lanes and rows; not what grows with the context."""
        held = self.buffers
        offsets = [held.qo_indptr, held.kv_indptr, held.mask_indptr]
        rows = [held.lens, held.tokens, held.positions, held.out_cache_loc]
        return [part for part in offsets + rows if part is not None]

    def begin(self, spec: Any, bs: int) -> None:
        """Queue what comes before the check: how many requests are live, their trees, and their
        slots beside the table.
        """
        table = self.runner.req_to_token_pool.req_to_token
        if table is not self.table:
            self._move(table)
        self.live = bs
        if self.told.live:
            self.told.live = bs
        if self.chain:
            self.before(bs)
            return
        parents = getattr(spec, "parents", None)
        if parents is not None:
            if self.told.live:
                self.told.forget()  # the graph would put links in their place
            self.before(bs, PARENTS, parents, spec.depths, spec.tree_sizes)
            return
        links = child, sibling = links_of(spec)
        if self.told.live and not self.told.keeps(links):
            self.told.forget()
        self.before(bs, LINKS, child, sibling, sibling)

    def foresee(self, check: DeviceCheck, rows: Any) -> None:
        """Bind what the graph is to hold of `before`, for the first width only: the trees that are
        held are too short for a wider graph.
        """
        self.told.w = self.told.w or self.shape.w
        if self.told.w != self.shape.w:
            return
        given = (self.told.cell,) * 3
        self.inside = check.bind_table(
            self.buffers, self.shape, self.table, rows, trees=TOLD, given=given
        )

    def learn(self, spec: Any) -> None:
        """A step of it was launched: the next one may need no more than its replay."""
        if self.inside is not None and not self.rewritten and self._by_links(spec):
            self.told.learn(links_of(spec), self.live)

    def foreseen(self, spec: Any) -> bool:
        """Whether a replay for which nothing was launched has looked at this step."""
        return self._by_links(spec) and self.told.keeps(links_of(spec))

    def _by_links(self, spec: Any) -> bool:
        """Whether the trees are links, and the graph may read the slot table that it knows."""
        table = self.runner.req_to_token_pool.req_to_token
        trees = getattr(spec, "parents", None) is None
        return trees and table is self.table and reads_to_the_end(self.runner)

    def told_by(self, batch: Any) -> bool:
        """From now on a replay of this kind may be told by the class of its spec info and by its
        mode. Whether one may: its `batch_size` has to be that of the graph.
        """
        self.spec, self.mode = type(batch.spec_info), batch.forward_mode
        self.may_be_ragged = hasattr(batch.spec_info, RAGGED)
        return getattr(batch, "batch_size", None) == self.shape.lanes

    def _move(self, table: Any) -> None:
        """Somebody has given the server another slot table."""
        before, self.before = self.before, self.rebind(table)
        self.before.moved, self.table = before.moved, table
        self.inside = None  # the graph knows the old one only, and is told of nothing any more
        self.told.forget()

    def outcome(self, check: DeviceCheck, walk: Walk | None) -> Operands | None:
        """The end of the step for this walk; None where no walk was seen."""
        if walk is None or walk.index is None:
            return None
        decided = (walk.predict, walk.index, walk.lens)
        kind = (walk.index.shape[1], walk.global_rows, *[part.dtype for part in decided])
        bound = self.closes.get(kind)
        if bound is None:
            decision = Decision(*decided, greedy=_flags(check)[1], global_rows=walk.global_rows)
            bound = self.closes[kind] = check.bind_outcome(self.buffers, self.shape, decision)
        self._require(walk)
        moved_close(bound, (*decided, _flags(check)[walk.greedy]), self.tokens)
        return bound

    def _require(self, walk: Walk) -> None:
        # SGLang pads launches and never walks: a walk of any other number is not of this step
        bs, w = self.live, self.shape.w
        if (
            walk.lens.shape[0] != bs
            or walk.index.shape[0] != bs
            or walk.predict.shape[0] < bs * w
            or not all(part.is_contiguous() for part in (walk.index, walk.predict, walk.lens))
        ):
            raise UsageError(
                f"a walk of {bs} requests of {w} rows was expected, found "
                f"{walk.predict.shape[0]} tokens, {walk.lens.shape[0]} lengths and paths of shape "
                f"{tuple(walk.index.shape)}."
            )


_FLAGS: dict[Any, tuple[Any, Any]] = {}


def _flags(check: DeviceCheck) -> tuple[Any, Any]:
    """0 and 1 for every request, on the device."""
    held = _FLAGS.get(check.device)
    if held is None:
        zeros = torch.zeros(MAX_LANES, dtype=torch.int32, device=check.device)
        held = _FLAGS[check.device] = zeros, torch.ones_like(zeros)
    return held


class Binder:
    """Binds launches on one device. `tape` is the flight recorder's, where there is one."""

    def __init__(self, check: DeviceCheck, live_count: Any, depth: Depth) -> None:
        self.check, self.live_count, self.depth = check, live_count, depth
        self.told = Told(check.device)
        self.eager: dict[Any, Launch] = {}
        self._facts: dict[type, Facts] = {}  # to look at a class takes longer than the rest

    def graph(self, view: View, tape: Any) -> Launch:
        """The launches of a captured batch size."""
        return self._bind(view.complete(), tape)

    def step(self, view: View, tape: Any) -> Launch:
        """The launches of an eager step."""
        backend, batch = view.backend, view.batch
        meta = backend.forward_metadata
        qo, kv, mi, mask, kvi = _BUILT(meta)
        rows = batch.input_ids, batch.positions, batch.out_cache_loc
        arrays = (batch.seq_lens, qo, kv, mi, mask, *rows, kvi)  # by `operands.MOVING`
        key = (
            id(backend), lanes_of(batch), meta.max_extend_len, batch.req_pool_indices.dtype,
            verify_width(backend, view.runner, self._facts_of(type(backend)), batch.spec_info),
            mask is not None and mask.data_ptr() % 16, *[part.shape[-1] for part in rows],
            *[None if part is None else part.dtype for part in arrays],
        )  # fmt: skip
        held = None if self.depth is Depth.FULL else self.eager.pop(key, None)
        if held is None or held.owner() is not backend:  # an id is used again after a death
            held = self._bind(view.complete(), tape)
            held.owner = weakref.ref(backend)
        if self.depth is not Depth.FULL:
            self.eager[key] = held
            if len(self.eager) > EAGER:
                del self.eager[next(iter(self.eager))]
        spare = self.check.state
        moved_verify(held.verify, arrays, held.shape, spare)
        held.before.moved = moving(
            batch.seq_lens, kv, kvi, batch.out_cache_loc, batch.req_pool_indices, spare
        )
        held.tokens = batch.input_ids
        return held

    def _facts_of(self, backend_class: type) -> Facts:
        if backend_class not in self._facts:
            self._facts[backend_class] = facts_of(backend_class)
        return self._facts[backend_class]

    def _bind(self, view: View, tape: Any) -> Launch:
        backend, batch, runner = view.backend, view.batch, view.runner
        facts = self._facts_of(type(backend))
        metadata = view.metadata or backend.forward_metadata
        w = verify_width(backend, runner, facts, batch.spec_info)
        algorithm = str(runner.server_args.speculative_algorithm or "")
        lanes = lanes_of(batch)
        shape = Shape(
            lanes=lanes,
            w=w,
            contract=contract_of(algorithm, facts, view.path),
            context=int(backend.max_context_len),
            vocab=getattr(runner.model_config, "vocab_size", None),
            pool=int(runner.token_to_kv_pool_allocator.size) + int(runner.page_size),
            max_extend_len=int(metadata.max_extend_len),
            rows={name: int(getattr(batch, name).shape[-1]) for name in ROWS},
            window=runner.sliding_window_size is not None,
            depth=self.depth,
        )
        trees = {"tokens": batch.input_ids, **_new_trees(lanes, w, batch.seq_lens.device)}
        buffers = buffers_of_backend(metadata, batch, self.live_count, trees)
        pack = None if tape is None else tape.pack(view, buffers, shape)
        verify = self.check.bind(buffers, shape, pack=pack)
        if view.path != "graph":  # what grows with the context is given to each launch, not held
            verify, kvi = replace(verify, keep=()), buffers.kv_indices
            none = None if kvi is None else kvi.new_empty(0)
            buffers = replace(buffers, mask=None, kv_indices=none)
        table, rows = runner.req_to_token_pool.req_to_token, batch.req_pool_indices
        rebind = functools.partial(self.check.bind_before, buffers, shape, rows=rows)
        before, kind, chain = rebind(table), (view.state, view.path), shape.contract.chain
        return Launch(
            shape, buffers, verify, before, kind, chain, runner, table, rebind, self.told, pack=pack
        )


def _new_trees(lanes: int, w: int, device: Any) -> dict[str, Any]:
    """Arrays of all lanes' trees: chains, until a step brings others."""
    return {
        "parents": torch.arange(-1, w - 1, dtype=torch.int32, device=device).repeat(lanes, 1),
        "depths": torch.arange(w, dtype=torch.int32, device=device).repeat(lanes, 1),
        "sizes": torch.full((lanes,), w, dtype=torch.int32, device=device),
    }
