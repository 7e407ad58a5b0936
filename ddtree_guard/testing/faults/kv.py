"""Faults of the kv family."""

from __future__ import annotations

from ddtree_guard.step import Step
from ddtree_guard.testing.faults.registry import Planted, fault


@fault("K1")
def slot_behind_pool(step: Step, request: int) -> Planted:
    """The last row of `request` writes the first slot behind the pool."""
    out = step.slots.out_cache_loc.copy()
    out[request * step.w + step.w - 1] = step.slots.pools[step.slots.pool]
    return Planted(step.replace(slots__out_cache_loc=out), request, step.w - 1)


@fault("K2")
def stolen_slot(step: Step, request: int) -> Planted:
    """The last row of `request` writes the slot of the batch's first row."""
    out = step.slots.out_cache_loc.copy()
    out[request * step.w + step.w - 1] = out[0]
    return Planted(step.replace(slots__out_cache_loc=out), request, step.w - 1)


@fault("K3")
def table_not_written(step: Step, request: int) -> Planted:
    """The table row of `request` does not hold the slot of its last row."""
    table = step.slots.req_to_token.copy()
    table[request, int(step.layout.prefix_lens[request]) + step.w - 1] = step.slots.reserved
    return Planted(step.replace(slots__req_to_token=table), request, step.w - 1)


@fault("K4")
def stale_key(step: Step, request: int) -> Planted:
    """The last key of `request` is the reserved slot."""
    indices = step.layout.kv_indices.copy()
    indices[int(step.layout.kv_indptr[request + 1]) - 1] = step.slots.reserved
    return Planted(step.replace(layout__kv_indices=indices), request)


@fault("K5")
def short_buffer(step: Step, request: int) -> Planted:
    """A buffer is one element too short. Concerns the batch, not `request`."""
    capacity = {**step.slots.capacity, "kv_indices": (100, 99)}
    return Planted(step.replace(slots__capacity=capacity), None)


@fault("K6")
def unrecorded_slot(step: Step, request: int) -> Planted:
    """One slot more is recorded for `request` than its pages hold."""
    allocated = step.slots.allocated.copy()
    allocated[request] += 1
    return Planted(step.replace(slots__allocated=allocated), request)


@fault("K9")
def foreign_page(step: Step, request: int) -> Planted:
    """The first page of `request` is counted in half pages."""
    table = step.slots.page_table.copy()
    table[request, 0] *= 2
    return Planted(step.replace(slots__page_table=table), request)


@fault("K10")
def short_ring(step: Step, request: int) -> Planted:
    """The ring is one key too short. Concerns the server, not `request`."""
    return Planted(step.replace(limits__ring=step.w + step.limits.window - 3), None)


@fault("K11")
def overflowing_offset(step: Step, request: int) -> Planted:
    """Offsets are kept in 32 bits, and the prefix of `request` is too long for that."""
    lens = step.layout.prefix_lens.copy()
    lens[request] = 2**31
    return Planted(step.replace(layout__prefix_lens=lens, layout__offset_bits=32), request)
