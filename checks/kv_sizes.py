"""KV sizes: buffers, pages, rings and integers are large enough, and no slot is lost."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_guard.checks.common import first, first_cell, ints, optional_ints
from ddtree_guard.checks.rows import inside, live_lens, lowest
from ddtree_guard.rule import Cost, Finding, NotEvaluable, Rule, Scope, Site, rule
from ddtree_guard.step import Step


@rule(
    "K5", "short-buffer", site=Site.BUILD, cost=Cost.HOST, scope=Scope.SERVER,
    needs=("slots.capacity",),
)  # fmt: skip
def short_buffer(step: Step) -> Finding | None:
    """Every index and mask buffer holds what this step puts into it.

    Holds when: `needed <= available` for each buffer.
    Breaks as: the write runs into the neighbouring allocation. Usually silent: wrong drafts inside
    the vocabulary, now and then an id outside it.
    Usual cause: the capacity was computed without a factor: topk, or the w columns of the tree.
    Seen in: I11, I28.
    """
    for name, (needed, available) in sorted(step.slots.capacity.items()):
        if needed > available:
            return Finding(
                headline=f"{name[:30]} does not hold this step",
                equation=f"{name} needs {needed} elements, but holds {available}",
                expected=f"<= {available}",
                actual=str(needed),
                cause="the capacity was computed without a factor (topk or w) that the use has",
            )
    return None


@rule(
    "K6", "unaccounted-slots", site=Site.COMMIT, cost=Cost.REQUESTS, scope=Scope.SERVER,
    needs=("slots.page_size", "slots.allocated"),
)  # fmt: skip
def unaccounted_slots(step: Step) -> Finding | None:
    """Every KV slot is either held or free, in whole pages, and held in its request's row.

    Holds when: `allocated[i] % P = 0`, `allocated[i] = owned pages * P` and `allocated[i] <= R`,
    the columns of a row; after a commit `kept + freed = bs*w`; when idle `owned + free = N`, the
    reserved page counted as owned.
    Breaks as: the pool shrinks over hours until requests are refused, or one page is freed twice
    and two requests write it. Beyond its row a request overwrites the slots of the next one, whose
    text goes wrong.
    Usual cause: a length recorded in tokens while slots are handed out in pages, rejected rows
    that are never freed, or more slots reserved near the context limit than a row has room for.
    Seen in: I21, I32, I51.
    """
    page = int(step.slots.page_size)
    if page < 1:
        raise NotEvaluable(f"slots.page_size = {page}, expected at least 1")
    allocated, owned = ints(step, "slots.allocated"), optional_ints(step, "slots.owned_pages")
    ragged = allocated % page != 0
    # Divided, not multiplied: a hostile page count must not wrap around.
    unequal = np.zeros_like(ragged) if owned is None else (allocated // page != owned)
    i = first(ragged | unequal)
    if i is None:
        return _beyond_row(step, allocated) or _unbalanced(step)
    value = int(allocated[i])
    text = "a multiple" if owned is None else f"{int(owned[i])} pages = {int(owned[i]) * page}"
    return Finding(
        headline=f"request {i}: recorded slots are not whole owned pages",
        equation=f"allocated[{i}] = {value}, expected {text} of P = {page}"
        if owned is None
        else f"allocated[{i}] = {value}, expected {text} slots (P = {page})",
        expected=f"multiple of {page}" if owned is None else str(int(owned[i]) * page),
        actual=str(value),
        request=i,
        cause="the length was recorded in tokens while slots are handed out in pages"
        if ragged[i]
        else "pages were taken or returned without recording it",
    )


def _beyond_row(step: Step, allocated: Any) -> Finding | None:
    width = step.slots.row_width
    i = None if width is None else first(allocated > int(width))
    if i is None or width is None:
        return None
    return Finding(
        headline=f"request {i} holds slots beyond its row",
        equation=f"allocated[{i}] = {int(allocated[i])}, expected at most R = {int(width)} columns",
        expected=f"<= {int(width)}",
        actual=str(int(allocated[i])),
        request=i,
        cause="near the context limit more slots are reserved than the row has columns left; the "
        "rest lies in the row of another request",
        confidence="very likely",
    )


def _unbalanced(step: Step) -> Finding | None:
    slots = step.slots
    if slots.kept is not None and slots.freed is not None:
        total, rows = slots.kept + slots.freed, step.bs * step.w
        if total != rows:
            return Finding(
                headline="the commit does not account for every row's slot",
                equation=f"kept+freed = {slots.kept}+{slots.freed} = {total}, expected bs*w = "
                f"{step.bs}*{step.w} = {rows}",
                expected=str(rows),
                actual=str(total),
                cause="slots of rejected rows are never freed" if total < rows else "freed twice",
            )
    pool = slots.pools.get(slots.pool)
    if pool is not None and slots.idle_owned is not None and slots.idle_free is not None:
        total = slots.idle_owned + slots.idle_free
        if total != pool:
            return Finding(
                headline="slots are missing from the pool at idle",
                equation=f"owned+free = {slots.idle_owned}+{slots.idle_free} = {total}, expected "
                f"N = {pool}",
                expected=str(pool),
                actual=str(total),
                cause="slots leaked in an earlier step" if total < pool else "freed twice",
            )
    return None


@rule(
    "K9", "page-unit-mismatch", site=Site.BUILD, cost=Cost.REQUESTS, scope=Scope.BATCH,
    needs=("slots.page_size", "slots.kernel_page_size"),
)  # fmt: skip
def page_unit_mismatch(step: Step) -> Finding | None:
    """The kernel counts pages in the unit in which the pool hands them out.

    Holds when: the kernel's page size is the pool's (or 1 without a page table: token slots), the
    page table covers `s_i` tokens, and each needed entry is a page of the pool, the one that holds
    the request's slots.
    Breaks as: the kernel reads pages that nobody wrote, all zero or stale; acceptance collapses.
    Usual cause: ids of 128-token pages used as ids of 64-token pages, or a table of another cache
    group.
    Seen in: I36.
    """
    page, kernel = int(step.slots.page_size), int(step.slots.kernel_page_size)
    if min(page, kernel) < 1:
        raise NotEvaluable(f"page sizes {page} and {kernel}, expected at least 1")
    table = optional_ints(step, "slots.page_table")
    if kernel != page and not (kernel == 1 and table is None):
        return Finding(
            headline="the kernel counts pages in another unit",
            equation=f"kernel page size = {kernel}, expected the pool's P = {page}",
            expected=str(page),
            actual=str(kernel),
            cause="page ids were not expanded to the kernel's page size",
        )
    if table is None or step.layout.prefix_lens is None:
        return None
    return _wrong_page(step, page, live_lens(step), table)


def _wrong_page(step: Step, page: int, lens: Any, table: Any) -> Finding | None:
    needed = -(-lens // page)
    short = needed > table.shape[1]
    columns = np.arange(table.shape[1])
    used = columns < needed[:, None]
    pool = step.slots.pools.get(step.slots.pool)
    wrong = used & ((table < 0) if pool is None else ~inside(table, int(pool) // page))
    want = _pages_of_slots(step, page, columns)
    if want is not None:
        wrong |= used & (want >= 0) & (table != want)
    i = first(short | wrong.any(axis=1))
    if i is None:
        return None
    if not wrong[i].any():
        return Finding(
            headline=f"request {i}: the page table is too short",
            equation=f"{table.shape[1]} pages of {page} = {table.shape[1] * page} tokens, expected "
            f"to cover s = {int(lens[i])}",
            expected=f">= {int(lens[i])}",
            actual=str(table.shape[1] * page),
            request=i,
            cause="the table counts pages of another size, or was built for a shorter prefix",
        )
    at = int(np.argmax(wrong[i]))
    right = None if want is None or want[i, at] < 0 else str(int(want[i, at]))
    right = right or f"a page of the pool (N/P = {'?' if pool is None else int(pool) // page})"
    return Finding(
        headline=f"request {i}: page {at} is not the one that holds its keys",
        equation=f"page_table[{i},{at}] = {int(table[i, at])}, expected {right}",
        expected=right,
        actual=str(int(table[i, at])),
        request=i,
        cause="the table counts pages of another size, or belongs to another cache group",
    )


def _pages_of_slots(step: Step, page: int, columns: Any) -> Any:
    """Page of each table column by the request's slots, -1 where unknown; None without them."""
    slots = optional_ints(step, "slots.req_to_token")
    if slots is None or slots.shape[1] == 0:
        return None
    at = columns * page
    held = slots[:, np.clip(at, 0, slots.shape[1] - 1)] // page
    return np.where(inside(at, slots.shape[1]), held, -1)


@rule(
    "K10", "short-ring", site=Site.INIT, cost=Cost.HOST, scope=Scope.SERVER,
    needs=("limits.ring", "limits.window"),
)  # fmt: skip
def short_ring(step: Step) -> Finding | None:
    """A ring of compressed keys keeps a whole window behind every row of a step.

    Holds when: `ring >= w + window - 2`, and the write pad covers w rows.
    Breaks as: no crash and no NaN: rare words and identifiers are misspelled, more often the more
    rows a step has.
    Usual cause: the pad was fixed for 4 draft tokens.
    Seen in: I34.
    """
    w, ring, window = step.w, int(step.limits.ring), int(step.limits.window)
    pad = step.limits.write_pad
    if pad is not None and pad < w:
        return Finding(
            headline="the write pad does not cover every row",
            equation=f"write_pad = {int(pad)}, expected at least w = {w}: rows "
            f"0..{w - int(pad) - 1} are never kept",
            expected=f">= {w}",
            actual=str(int(pad)),
            row=0,
            cause="the pad was fixed for a smaller number of draft tokens",
        )
    if ring >= w + window - 2:
        return None
    return Finding(
        headline="the ring drops keys that this step still reads",
        equation=f"ring = {ring}, expected at least w+window-2 = {w}+{window}-2 = {w + window - 2}",
        expected=f">= {w + window - 2}",
        actual=str(ring),
        cause=f"the ring was sized for at most w = {max(ring - window + 2, 0)} rows",
    )


@rule(
    "K11", "offset-overflow", site=Site.BUILD, cost=Cost.REQUESTS, scope=Scope.BATCH,
    needs=("layout.prefix_lens", "layout.offset_bits"),
)  # fmt: skip
def offset_overflow(step: Step) -> Finding | None:
    """Offsets fit the integers that hold them.

    Holds when: `sum of w*(s_i+w) < 2^(bits-1)` for the mask, and `slot * stride < 2^(bits-1)` for
    keys and values.
    Breaks as: the sum turns negative or wraps; silently wrong first, an illegal memory access
    later, after many requests or at one exact batch size.
    Usual cause: a running sum or a product in 32 bits.
    Seen in: I17.
    """
    return lowest(_mask_overflow(step), _slot_overflow(step))


def _mask_overflow(step: Step) -> Finding | None:
    w, bits = step.w, int(step.layout.offset_bits)
    limit, total = _limit(bits), 0
    # Python integers: the sum that is checked must not overflow itself.
    for i, s in enumerate(ints(step, "layout.prefix_lens").tolist()):
        total += w * (s + w)
        if total >= limit:
            return Finding(
                headline=f"mask offsets overflow {bits} bits at request {i}",
                equation=f"sum of w*(s+w) up to request {i} = {total}, expected below 2^{bits - 1}",
                expected=f"< {limit}",
                actual=str(total),
                request=i,
                cause=f"the running sum of mask lengths is kept in {bits} bits",
            )
    return None


def _slot_overflow(step: Step) -> Finding | None:
    stride, bits = step.slots.token_stride, step.slots.index_bits
    out, w = optional_ints(step, "slots.out_cache_loc"), step.w
    if stride is None or bits is None or out is None or int(stride) < 1:
        return None
    most = (_limit(int(bits)) - 1) // int(stride)
    if most >= np.iinfo(np.int64).max:
        return None
    at = first_cell((out > most).reshape(-1, w)) if w > 0 and out.size % w == 0 else None
    what, slot = "", 0
    if at is not None:
        what, slot = f"out_cache_loc[{at[0]},{at[1]}]", int(out[at[0] * w + at[1]])
    else:
        indices = optional_ints(step, "layout.kv_indices")
        entry = None if indices is None else first(indices > most)
        if indices is None or entry is None:
            return None
        what, slot = f"kv_indices[{entry}]", int(indices[entry])
    return Finding(
        headline=f"slot offsets overflow {int(bits)} bits",
        equation=f"{what} * stride = {slot}*{int(stride)} = {slot * int(stride)}, expected below "
        f"2^{int(bits) - 1}",
        expected=f"< {_limit(int(bits))}",
        actual=str(slot * int(stride)),
        request=at[0] if at else None,
        row=at[1] if at else None,
        cause=f"slot index times token stride is computed in {int(bits)} bits",
    )


def _limit(bits: int) -> int:
    if not 1 <= bits <= 128:
        raise NotEvaluable(f"an integer of {bits} bits is impossible")
    return 1 << (bits - 1)


RULES: tuple[Rule, ...] = (
    short_buffer,
    unaccounted_slots,
    page_unit_mismatch,
    short_ring,
    offset_overflow,
)
