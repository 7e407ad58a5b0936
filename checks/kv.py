"""KV slots: right pool, right owner, right request. Whether things fit is in `kv_sizes`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_guard.checks import kv_sizes
from ddtree_guard.checks.common import first, first_cell, hint, ints, optional_ints
from ddtree_guard.checks.rows import by_lane, gather, inside, live_lens, lowest
from ddtree_guard.rule import Cost, Finding, NotApplicable, NotEvaluable, Rule, Scope, Site, rule
from ddtree_guard.step import Step


@rule(
    "K1", "slot-outside-pool", site=Site.LAUNCH, cost=Cost.ROWS, scope=Scope.SERVER, bit=15,
    needs=("slots.out_cache_loc", "slots.pools"),
)  # fmt: skip
def slot_outside_pool(step: Step) -> Finding | None:
    """Every slot id lies inside the pool that it is declared for.

    Holds when: `0 <= id < N_pool` for out_cache_loc, for kv_indices as far as kv_indptr reaches,
    and for every further index array (sliding-window, draft, recurrent), each in its own pool.
    Breaks as: an illegal memory access, or keys read from and written to memory of other tensors.
    Usual cause: ids of the full pool used to index a smaller one.
    Seen in: I30.
    """
    pool = _pool_size(step, step.slots.pool)
    return lowest(_written_outside(step, pool), _read_outside(step, pool), _declared_outside(step))


def _pool_size(step: Step, name: str) -> int:
    if name not in step.slots.pools:
        raise NotApplicable(f"the size of pool {name!r} is not in slots.pools")
    return int(step.slots.pools[name])


def _written_outside(step: Step, pool: int) -> Finding | None:
    out = by_lane(step, "slots.out_cache_loc")
    wrong = ~inside(out, pool)
    pad = step.contract.pad_lanes.get("slots.out_cache_loc")
    if pad is not None:
        wrong[step.bs :] &= out[step.bs :] != pad
    at = first_cell(wrong)
    if at is None:
        return None
    i, r = at
    return _outside(step, f"out_cache_loc[{i},{r}]", int(out[at]), step.slots.pool, i, r)


def _read_outside(step: Step, pool: int) -> Finding | None:
    indices = optional_ints(step, "layout.kv_indices")
    if indices is None:
        return None
    indptr = optional_ints(step, "layout.kv_indptr")
    read = len(indices) if indptr is None else min(max(int(indptr[-1]), 0), len(indices))
    at = first(~inside(indices[:read], pool))
    if at is None:
        return None
    # Request of the entry: the last segment that starts at or before it.
    request = None if indptr is None else max(int((indptr[:-1] <= at).sum()) - 1, 0)
    return _outside(step, f"kv_indices[{at}]", int(indices[at]), step.slots.pool, request, None)


def _declared_outside(step: Step) -> Finding | None:
    for name, (pool, least, most) in sorted(step.slots.ids.items()):
        size = _pool_size(step, pool)
        if least < 0 or most >= size:
            value = least if least < 0 else most
            return _outside(step, f"an id in {name}", int(value), pool, None, None)
    return None


def _outside(
    step: Step, what: str, value: int, pool: str, request: int | None, row: int | None
) -> Finding:
    size = int(step.slots.pools[pool])
    homes = [name for name, n in sorted(step.slots.pools.items()) if 0 <= value < n]
    who = what.split("[")[0] if request is None else f"request {request}: {what.split('[')[0]}"
    return Finding(
        headline=f"{who[:38]} leaves its pool",
        equation=f"{what} = {value}, expected 0..{size - 1} (pool {pool!r})",
        expected=f"0..{size - 1}",
        actual=str(value),
        request=request,
        row=row,
        cause=f"the id is one of pool {homes[0]!r}, used to index pool {pool!r}"
        if homes
        else "the index array is stale, or was never written",
    )


@rule(
    "K2", "shared-write-slot", site=Site.BUILD, cost=Cost.ROWS, scope=Scope.BATCH, bit=16,
    needs=("slots.out_cache_loc",),
)  # fmt: skip
def shared_write_slot(step: Step) -> Finding | None:
    """Each row writes a KV slot of its own, and padding writes the reserved slot.

    Holds when: slots of live rows are unique in the batch, have reference count 1 and belong to
    the row's request; no live row writes the reserved slot; padded lanes write only that.
    Breaks as: two rows write one slot: the victim attends to keys of another request from then
    on, long after the step that did it. A write into a shared prefix corrupts every later hit.
    Usual cause: lengths counted one way and slots allocated another, or a padded lane that keeps
    slots of a finished request.
    Seen in: I35, I39.
    """
    out, bs = by_lane(step, "slots.out_cache_loc"), step.bs
    writes, into_reserved = _writes(step, out)
    earlier = _earlier_write(out, writes)
    stray = writes.copy()
    stray[:bs] = False
    shared = _unlike(step, "slots.refcounts", writes, 1)
    foreign = _unlike(step, "slots.owners", writes, np.arange(bs)[:, None])
    at = first_cell(into_reserved | (earlier >= 0) | stray | shared | foreign)
    if at is None:
        return None
    i, r = at
    expected, other = "a slot of its own", i
    if earlier[at] >= 0:
        other, row = divmod(int(earlier[at]), step.w)
        text = f"already written by row {row} of request {other}"
    elif into_reserved[at]:
        text = "the slot reserved for padding"
    elif stray[at]:
        text, expected = "written by a padded lane", str(_pad_slot(step))
    elif shared[at]:
        count = int(by_lane(step, "slots.refcounts")[at])
        text, expected = f"held {count} times", "reference count 1"
    else:
        other = int(by_lane(step, "slots.owners")[at])
        text, expected = f"owned by request {other}", f"owned by request {i}"
    return Finding(
        headline=f"{'lane' if i >= bs else 'request'} {i}: row {r} writes a slot not its own",
        equation=f"out_cache_loc[{i},{r}] = {int(out[at])} is {text}, expected {expected}",
        expected=expected,
        actual=str(int(out[at])),
        request=i,
        row=r,
        victims=(other,) if 0 <= other < bs and other != i else (),
        cause=_share_cause(i >= bs, bool(shared[at])),
    )


def _writes(step: Step, out: Any) -> tuple[Any, Any]:
    """Rows that need a slot of their own, and nodes that write the reserved slot. bool, (BS, w).

    Padding rows of a live request may write the reserved slot; padded lanes must write it.
    """
    bs, sizes = step.bs, optional_ints(step, "tree.sizes")
    live = np.full(bs, step.w) if sizes is None else sizes
    node = np.arange(step.w) < live[:, None]
    reserved = out == step.slots.reserved
    writes, into_reserved = np.ones_like(reserved), np.zeros_like(reserved)
    writes[:bs] = node | ~reserved[:bs]
    writes[bs:] = out[bs:] != _pad_slot(step)
    into_reserved[:bs] = reserved[:bs] & node
    return writes, into_reserved


def _unlike(step: Step, path: str, writes: Any, want: Any) -> Any:
    """Writing rows of live requests whose optional evidence is not `want`. bool, (BS, w)."""
    wrong = np.zeros_like(writes)
    if step.get(path) is not None:
        wrong[: step.bs] = writes[: step.bs] & (by_lane(step, path)[: step.bs] != want)
    return wrong


def _share_cause(padded: bool, shared: bool) -> str:
    if padded:
        return "the padded lane keeps slots of an earlier, larger batch"
    if shared:
        return "draft rows were written past the request's own slots, into a shared prefix"
    return "slots were allocated for another width or length than the one that this step writes"


def _pad_slot(step: Step) -> int:
    return int(step.contract.pad_lanes.get("slots.out_cache_loc", step.slots.reserved))


def _earlier_write(out: Any, writes: Any) -> Any:
    """Flat index of the first earlier cell that writes the same slot, or -1, per cell. (BS, w)."""
    at = np.flatnonzero(writes)
    _, firsts, inverse = np.unique(out.reshape(-1)[at], return_index=True, return_inverse=True)
    origin = at[firsts[inverse]]
    earlier = np.full(out.size, -1)
    earlier[at] = np.where(origin < at, origin, -1)
    return earlier.reshape(out.shape)


@rule(
    "K3", "write-slot-off-table", site=Site.BUILD, cost=Cost.ROWS, scope=Scope.REQUEST, bit=21,
    needs=("slots.out_cache_loc", "slots.req_to_token", "layout.prefix_lens"),
)  # fmt: skip
def write_slot_off_table(step: Step) -> Finding | None:
    """The slots that a request writes are those that its table row holds after the prefix.

    Holds when: `req_to_token[i, s_i : s_i+w] = out_cache_loc[i]`, and `s_i + reserve` columns fit
    in a table row.
    Breaks as: the keys of this step are never found again: the next step reads stale keys at the
    positions just committed. Past the row's end it is the next request's row that is written.
    Usual cause: the table was written with another length (the optimistic mirror) or another
    width than the slots.
    Seen in: I21, I32, I35.
    """
    lens, table = live_lens(step), ints(step, "slots.req_to_token")
    out = by_lane(step, "slots.out_cache_loc")[: step.bs]
    sizes, rows = optional_ints(step, "tree.sizes"), np.arange(step.w)
    if table.shape[1] == 0:
        raise NotEvaluable("slots.req_to_token has no columns")
    columns = lens[:, None] + rows
    exists = inside(columns, table.shape[1])
    wrong = ~exists | (gather(table, columns) != out)
    if sizes is not None:
        wrong &= (rows < sizes[:, None]) | (out != step.slots.reserved)
    return lowest(_reserve_overflow(step, lens), _off_table(step, lens, table, out, wrong, exists))


def _reserve_overflow(step: Step, lens: Any) -> Finding | None:
    width, reserve = step.slots.row_width, step.slots.reserve
    if width is None or reserve is None:
        return None
    i = first(lens > int(width) - int(reserve))
    if i is None:
        return None
    s, need = int(lens[i]), int(lens[i]) + int(reserve)
    return Finding(
        headline=f"request {i}: the table row is too short for this step",
        equation=f"s+reserve = {s}+{int(reserve)} = {need}, expected at most R = {int(width)}",
        expected=f"<= {int(width)}",
        actual=str(need),
        request=i,
        cause="the context limit was not reduced by the columns that speculation reserves",
    )


def _off_table(
    step: Step, lens: Any, table: Any, out: Any, wrong: Any, exists: Any
) -> Finding | None:
    at = first_cell(wrong)
    if at is None:
        return None
    i, r = at
    s = int(lens[i])
    held = str(int(table[i, s + r])) if exists[at] else f"absent (the row has {table.shape[1]})"
    mirror = hint(step, "layout.prefix_lens_cpu")
    start = s if mirror is None else int(mirror[i])
    moved = start != s and 0 <= start <= table.shape[1] - step.w
    moved = moved and np.array_equal(table[i, start : start + step.w], out[i])
    return Finding(
        headline=f"request {i}: row {r} writes a slot not in its table",
        equation=f"out_cache_loc[{i},{r}] = {int(out[at])}, expected req_to_token[{i},s+{r}] = "
        f"req_to_token[{i},{s + r}] = {held}",
        expected=held,
        actual=str(int(out[at])),
        request=i,
        row=r,
        cause=f"the table was written at the scheduler's mirror, {start}, not at the length on the "
        f"device, {s}"
        if moved
        else "slots and table row were written for different lengths or widths",
        confidence="certain" if moved else "likely",
    )


@rule(
    "K4", "kv-index-off-table", site=Site.BUILD, cost=Cost.MASK, scope=Scope.REQUEST, bit=22,
    needs=("layout.kv_indices", "layout.kv_indptr", "layout.prefix_lens", "slots.req_to_token"),
)  # fmt: skip
def kv_index_off_table(step: Step) -> Finding | None:
    """Each request reads the keys that its own table row lists.

    Holds when: `kv_indices` from `kv_indptr[i]` on equals `req_to_token[i, :s_i]` (up to `s_i+w`
    where the contract includes the draft rows).
    Breaks as: a request attends to keys of another request or of its own past under wrong
    positions. Output is fluent and about something else.
    Usual cause: indices of an earlier batch in a captured buffer, or page ids used as slot ids.
    Seen in: I28, I36.
    """
    lens, table = live_lens(step), ints(step, "slots.req_to_token")
    indices, indptr = ints(step, "layout.kv_indices"), ints(step, "layout.kv_indptr")
    extra = step.w if step.contract.kv_includes_draft else 0
    for i in range(step.bs):
        n, start = int(lens[i]) + extra, int(indptr[i])
        if not 0 <= n <= table.shape[1]:
            raise NotEvaluable(
                f"request {i} would read {n} keys, but its table row has {table.shape[1]} columns"
            )
        if not 0 <= start <= len(indices) - n:
            return Finding(
                headline=f"request {i}: kv_indices does not cover its prefix",
                equation=f"kv_indptr[{i}]+{n} = {start}+{n} = {start + n}, expected at most "
                f"{len(indices)} entries",
                expected=f"<= {len(indices)}",
                actual=str(start + n),
                request=i,
                cause="kv_indices was built for other lengths than kv_indptr",
            )
        at = first(indices[start : start + n] != table[i, :n])
        if at is not None:
            # Columns behind a request's own tokens hold nothing to be confused with.
            held = np.where(lens + step.w > at, table[:, at], step.slots.reserved)
            return _off_row(held, i, at, start, int(indices[start + at]), step.slots.reserved)
    return None


def _off_row(
    held: Any, request: int, column: int, start: int, actual: int, reserved: int
) -> Finding:
    """`held` is this column of every request's table row."""
    expected = int(held[request])
    holders = np.flatnonzero((held == actual) & (held != reserved))
    cause = "kv_indices is left over from an earlier batch, or holds page ids instead of slot ids"
    if len(holders):
        cause = f"the entry is that of request {int(holders[0])} at the same position"
    return Finding(
        headline=f"request {request} reads a key that is not in its table",
        equation=f"kv_indices[{start + column}] = {actual}, expected req_to_token[{request},"
        f"{column}] = {expected}",
        expected=str(expected),
        actual=str(actual),
        request=request,
        cause=cause,
    )


RULES: tuple[Rule, ...] = (
    slot_outside_pool,
    shared_write_slot,
    write_slot_off_table,
    kv_index_off_table,
    *kv_sizes.RULES,
)
