"""A host Step as device operands, for tests, the self-test and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ddtree_guard.config import Depth
from ddtree_guard.device.launch import DeviceCheck
from ddtree_guard.device.operands import Buffers, Decision, Operands, Shape
from ddtree_guard.step import Layout, Limits, Mask, Positions, Slots, Step, Tree, Widths

_TREE = (
    "tokens", "parents", "depths", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling"
)  # fmt: skip
_LAYOUT = ("qo_indptr", "kv_indptr", "mask_indptr", "kv_indices")


@dataclass(frozen=True, slots=True)
class StepOperands:
    """Every launch of one step. `table` and `outcome` are None without their arrays."""

    buffers: Buffers
    shape: Shape
    verify: Operands
    table: Operands | None
    outcome: Operands | None

    @property
    def rules(self) -> tuple[str, ...]:
        """Ids that these launches decide."""
        parts = (self.verify, self.table, self.outcome)
        return tuple(name for part in parts if part is not None for name in part.rules)


def shape_of(step: Step, depth: Depth = Depth.FAST) -> Shape:
    """What the host knows of a Step's launch."""
    widths, limits, slots = step.widths, step.limits, step.slots
    block = widths.block
    return Shape(
        lanes=step.padded_bs,
        w=step.w,
        contract=step.contract,
        sections=step.positions.sections,
        depth_max=block - 1 if widths.depth_max is None and block else widths.depth_max,
        context=limits.context,
        vocab=limits.vocab,
        pool=slots.pools.get(slots.pool),
        reserved=slots.reserved,
        max_extend_len=step.layout.max_extend_len,
        rows=step.layout.rows,
        window=step.mask.window is not None,
        depth=depth,
    )


def buffers_of(step: Step, device: torch.device | str, **put: Any) -> Buffers:
    """A Step's arrays on the device, per-request ones padded to BS lanes with zeros (-1 links)."""
    misfits = step.misfits()

    def load(path: str, pad: int | None = None) -> Any:
        value = step.get(path)
        if value is None or path in misfits:
            return None
        value = np.ascontiguousarray(value)
        if pad is not None and len(value) < step.padded_bs:
            extra = np.full((step.padded_bs - len(value), *value.shape[1:]), pad, value.dtype)
            value = np.concatenate([value, extra])
        return torch.from_numpy(value.copy()).to(device)

    live = torch.tensor([step.bs], dtype=torch.int32, device=device)
    links = {name: load(f"tree.{name}", 0 if name in _TREE[:1] else -1) for name in _TREE}
    return Buffers(
        live_count=live,
        lens=load("layout.prefix_lens"),
        row_stride=load("mask.row_stride", 0),
        mask=load("mask.cells"),
        sizes=load("tree.sizes", 0),
        positions=load("positions.values"),
        out_cache_loc=load("slots.out_cache_loc"),
        **{name: load(f"layout.{name}") for name in _LAYOUT},
        **links,
    )


def operands_from_step(check: DeviceCheck, step: Step, depth: Depth = Depth.FAST) -> StepOperands:
    """Bind every launch of a host Step. Raises UsageError where an array is too short."""
    buffers, shape = buffers_of(step, check.device), shape_of(step, depth)
    return StepOperands(
        buffers,
        shape,
        check.bind(buffers, shape),
        _table(check, step, buffers, shape),
        _outcome(check, step, buffers, shape),
    )


def _table(check: DeviceCheck, step: Step, buffers: Buffers, shape: Shape) -> Operands | None:
    table = step.slots.req_to_token
    if table is None or "slots.req_to_token" in step.misfits() or buffers.out_cache_loc is None:
        return None
    rows = torch.arange(step.padded_bs, dtype=torch.int64, device=check.device)
    held = torch.from_numpy(np.ascontiguousarray(table).copy()).to(check.device)
    limits = {"row_width": step.slots.row_width, "reserve": step.slots.reserve}
    return check.bind_table(buffers, shape, held, rows, **limits)


def _outcome(check: DeviceCheck, step: Step, buffers: Buffers, shape: Shape) -> Operands | None:
    paths = [f"outcome.{name}" for name in ("predict", "accept_index", "accept_lens")]
    misfits = step.misfits()
    if buffers.tokens is None or any(step.get(p) is None or p in misfits for p in paths):
        return None
    outcome = step.outcome
    greedy = outcome.greedy
    if greedy is None:
        greedy = np.full(step.bs, bool(outcome.greedy_kernel))
    if outcome.masked_walk is not None:
        greedy = np.asarray(greedy, bool) & (np.asarray(outcome.masked_walk) != 0)

    def load(value: Any) -> Any:
        value = np.asarray(value)
        extra = np.zeros((step.padded_bs - step.bs, *value.shape[1:]), value.dtype)
        return torch.from_numpy(np.concatenate([value, extra])).to(check.device)

    predict, accept, lens = (load(step.get(path)) for path in paths)
    cut = None if outcome.truncated is None else load(outcome.truncated)
    decision = Decision(predict, accept, lens, cut, load(np.asarray(greedy).astype(np.int32)))
    return check.bind_outcome(buffers, shape, decision)


def run_step(check: DeviceCheck, operands: StepOperands) -> None:
    """Queue all launches of a step, close it and collect its verdict."""
    if operands.table is not None:
        operands.table.launch()
    check.check(operands.verify)
    check.close(operands.outcome)
    check.collect()


def step_of(buffers: Buffers, shape: Shape, bs: int, **more: Any) -> Step:
    """The way back: device buffers as a host Step. Waits for the device.

    `more` are changes by path, as `Step.replace` takes them.
    """

    def host(name: str, lanes: int | None = None) -> Any:
        value = getattr(buffers, name)
        value = None if value is None else value.detach().cpu().numpy().copy()
        return value if value is None or lanes is None else value[:lanes]

    step = Step(
        bs=bs,
        padded_bs=shape.lanes,
        widths=Widths(w=shape.w, depth_max=shape.depth_max),
        layout=Layout(
            **{name: host(name) for name in _LAYOUT},
            prefix_lens=host("lens"),
            max_extend_len=shape.max_extend_len,
            rows=shape.rows,
        ),
        mask=Mask(cells=host("mask"), row_stride=host("row_stride", bs)),
        tree=Tree(**{name: host(name, bs) for name in (*_TREE, "sizes")}),
        positions=Positions(values=host("positions"), sections=shape.sections),
        slots=Slots(
            out_cache_loc=host("out_cache_loc"),
            pools={} if shape.pool is None else {"full": shape.pool},
            reserved=shape.reserved,
        ),
        limits=Limits(vocab=shape.vocab, context=shape.context),
        contract=shape.contract,
    )
    return step.replace(**more)
