"""Dense attention for one request of a running step, on the device: what its rows must have been.

One launch compares the rows that the verify kernel wrote with three answers over the same q, k, v:

    dense   every node sees the prefix and its ancestors, by a visibility matrix     (rule D4)
    chain   the node is the end of the plain chain of its ancestors                  (rule D1)
    decode  the root sees the prefix and itself: plain decoding, without a tree      (rule D3)

Keys and values come from the KV pool, by slots that the caller took from `req_to_token` and
`out_cache_loc`; visibility comes from the parents. No offset, index list or mask of a backend is
read. Sums are kept in fp32 (three tf32 products a term on tensor cores).

The error of a row is its largest `|o - answer| / sum(p * |v|)` over heads and channels. The divisor
is what rounding of p, v and o can scale with, so one bound per dtype serves every length and model;
a fault below it is invisible here, and below the rounding of the kernel itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ddtree_guard.attention.reference import verify_attention

RING = 8  # comparisons whose result may not have been read yet
TILE = 16  # query vectors of a program
PROGRAMS = 264  # two for each multiprocessor of an H200
DENSE, CHAIN, DECODE, HEAD = range(4)  # rows of a result; HEAD holds (s, launches)
NOT_COMPARED = -1.0  # a padding row, or a row that this launch did not reach
_TINY = tl.constexpr(1e-30)
_LOW = tl.constexpr(-1e38)

# Rounding of p, v and o each costs half a unit of the dtype: 2**-9 for bfloat16. Eight times that.
TOLERANCE = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
# Kernels take float32 to tensor cores as tf32 on a GPU, where scores lose ten bits as well.
TOLERANCE_F32 = {"cpu": 2.0**-13, "cuda": 2.0**-5}


def tolerance(dtype: torch.dtype, device: str) -> float | None:
    """The largest error of a right row of this dtype; None for a dtype that is not compared."""
    if dtype is torch.float32:
        return TOLERANCE_F32.get(device)
    return TOLERANCE.get(dtype)


@triton.jit
def _merge(
    x: tl.tensor, seen: tl.tensor, v: tl.tensor, top: tl.tensor, total: tl.tensor,
    acc: tl.tensor, size: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Add a tile of keys: scores x and seen (M, C), values v (C, D)."""
    x = tl.where(seen, x, _LOW)
    high = tl.maximum(top, tl.max(x, axis=1))
    keep = tl.exp(top - high)
    p = tl.where(seen, tl.exp(x - high[:, None]), 0.0)
    total = total * keep + tl.sum(p, axis=1)
    acc = acc * keep[:, None] + tl.dot(p, v, input_precision="tf32x3")
    size = size * keep[:, None] + tl.dot(p, tl.abs(v), input_precision="tf32x3")
    return high, total, acc, size


@triton.jit
def _merge_one(
    x: tl.tensor, seen: tl.tensor, v: tl.tensor, top: tl.tensor, total: tl.tensor,
    acc: tl.tensor, size: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Add one key for each row: x and seen (M,), v (M, D)."""
    high = tl.where(seen, tl.maximum(top, x), top)
    keep = tl.exp(top - high)
    p = tl.where(seen, tl.exp(tl.minimum(x - high, 0.0)), 0.0)
    total = total * keep + p
    acc = acc * keep[:, None] + p[:, None] * v
    size = size * keep[:, None] + p[:, None] * tl.abs(v)
    return high, total, acc, size


@triton.jit
def _judge(
    out: tl.tensor, total: tl.tensor, acc: tl.tensor, size: tl.tensor, held: tl.tensor,
    errors: tl.tensor, row: tl.tensor, compared: tl.tensor,
) -> None:  # fmt: skip
    """Raise each compared row's error to that of these heads. A row that holds NaN or infinity is
    infinitely wrong, unless the answer holds one there too: then attention is not at fault.
    """
    total = tl.where(total == 0.0, 1.0, total)  # lanes beyond the rows have seen nothing
    right = acc / total[:, None]
    scale = tl.maximum(size / total[:, None], _TINY)
    away = tl.abs(out - right)
    error = tl.where(away < float("inf"), away / scale, float("inf"))
    sound = tl.abs(right) < float("inf")
    error = tl.where(sound | (tl.abs(out) < float("inf")), error, 0.0)
    worst = tl.max(tl.where(held[None, :], error, 0.0), axis=1)
    # floats that are not negative order as their bits do
    tl.atomic_max(errors + row, worst.to(tl.int32, bitcast=True), mask=compared)


@triton.jit
def _gather(
    base: tl.tensor, slot: tl.tensor, inside: tl.tensor, stride: tl.tensor, pool: tl.tensor,
    d: tl.tensor, held: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Rows of the pool as float32; zeros for slots that it lacks, which a fault may name."""
    known = inside & (slot >= 0) & (slot < pool)
    cells = known[:, None] & held[None, :]
    rows = tl.load(base + slot.to(tl.int64)[:, None] * stride + d[None, :], mask=cells, other=0.0)
    return rows.to(tl.float32)


@triton.jit
def _queries(
    base: tl.tensor, row: tl.tensor, query: tl.tensor, by_row: tl.tensor, by_head: tl.tensor,
    live: tl.tensor, d: tl.tensor, held: tl.tensor,
) -> tl.tensor:  # fmt: skip
    place = row.to(tl.int64)[:, None] * by_row + query.to(tl.int64)[:, None] * by_head + d[None, :]
    return tl.load(base + place, mask=live[:, None] & held[None, :], other=0.0).to(tl.float32)


# What changes from step to step must not bring a new compilation while tokens wait.
_LIVE = ["w", "group", "room", "pool", "splits", "stride"]
_SMALL = ["slots_ptr", "loc_ptr", "parents_ptr", "length_ptr", "errors_ptr"]


@triton.jit(do_not_specialize=_LIVE, do_not_specialize_on_alignment=_SMALL)
def prefix_kernel(
    q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, slots_ptr: tl.tensor,
    length_ptr: tl.tensor, parts_ptr: tl.tensor, q_row: tl.int32, q_head: tl.int32,
    k_slot: tl.int32, k_head: tl.int32, v_slot: tl.int32, v_head: tl.int32,
    w: tl.int32, group: tl.int32, dim: tl.int32, room: tl.int32, pool: tl.int32,
    scale: tl.float32, M: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (KV heads, tiles of M query vectors, splits): sums over a split of the prefix."""
    head, splits = tl.program_id(0), tl.num_programs(2)
    at = tl.program_id(1) * M + tl.arange(0, M)
    row, live = at // group, at < w * group
    d = tl.arange(0, D)
    held = d < dim
    q = _queries(q_ptr, row, head * group + at % group, q_row, q_head, live, d, held)
    k_ptr += head.to(tl.int64) * k_head
    v_ptr += head.to(tl.int64) * v_head
    s = tl.load(length_ptr).to(tl.int32)
    reach = tl.minimum(tl.maximum(s, 0), room)
    part = tl.cdiv(tl.cdiv(reach, splits), C) * C
    begin = tl.program_id(2) * part
    end = tl.minimum(begin + part, reach)

    top = tl.full([M], _LOW, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    size = tl.zeros([M, D], tl.float32)
    for start in range(begin, end, C):
        column = start + tl.arange(0, C)
        inside = column < end
        slot = tl.load(slots_ptr + column, mask=inside, other=0)
        k = _gather(k_ptr, slot, inside, k_slot, pool, d, held)
        v = _gather(v_ptr, slot, inside, v_slot, pool, d, held)
        x = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
        top, total, acc, size = _merge(x, live[:, None] & inside[None, :], v, top, total, acc, size)
    # parts: (KV heads, tiles, splits, M, 2 D + 2)
    place = (head * tl.num_programs(1) + tl.program_id(1)) * splits + tl.program_id(2)
    lane = parts_ptr + (place * M + tl.arange(0, M)).to(tl.int64) * (2 * D + 2)
    tl.store(lane[:, None] + d[None, :], acc)
    tl.store(lane[:, None] + D + d[None, :], size)
    tl.store(lane + 2 * D, top)
    tl.store(lane + 2 * D + 1, total)


@triton.jit(do_not_specialize=_LIVE, do_not_specialize_on_alignment=_SMALL)
def shadow_kernel(
    q_ptr: tl.tensor, o_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, loc_ptr: tl.tensor,
    parents_ptr: tl.tensor, length_ptr: tl.tensor, parts_ptr: tl.tensor, errors_ptr: tl.tensor,
    q_row: tl.int32, q_head: tl.int32, o_row: tl.int32, o_head: tl.int32,
    k_slot: tl.int32, k_head: tl.int32, v_slot: tl.int32, v_head: tl.int32,
    w: tl.int32, group: tl.int32, dim: tl.int32, stride: tl.int32, pool: tl.int32,
    splits: tl.int32, scale: tl.float32, M: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (KV heads, tiles of M query vectors). q and o start at the request's first row."""
    head = tl.program_id(0)
    at = tl.program_id(1) * M + tl.arange(0, M)
    row, live = at // group, at < w * group
    query = head * group + at % group
    d = tl.arange(0, D)
    held = d < dim
    q = _queries(q_ptr, row, query, q_row, q_head, live, d, held)
    out = _queries(o_ptr, row, query, o_row, o_head, live, d, held)
    k_ptr += head.to(tl.int64) * k_head
    v_ptr += head.to(tl.int64) * v_head

    top = tl.full([M], _LOW, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    size = tl.zeros([M, D], tl.float32)
    first = (head * tl.num_programs(1) + tl.program_id(1)) * splits
    for split in range(splits):
        lane = parts_ptr + ((first + split) * M + tl.arange(0, M)).to(tl.int64) * (2 * D + 2)
        high = tl.load(lane + 2 * D)
        best = tl.maximum(top, high)
        old, new = tl.exp(top - best), tl.exp(high - best)
        total = total * old + tl.load(lane + 2 * D + 1) * new
        acc = acc * old[:, None] + tl.load(lane[:, None] + d[None, :]) * new[:, None]
        size = size * old[:, None] + tl.load(lane[:, None] + D + d[None, :]) * new[:, None]
        top = best

    above = tl.load(parents_ptr + row, mask=live, other=-1).to(tl.int32)
    compared = live & ((row == 0) | (above >= 0))  # a node without a parent is padding

    # chain: up from the node to the root, one key at a time. At most w steps: a cycle must end.
    top1, total1, acc1, size1 = top, total, acc, size
    node = tl.where(live, row, -1)
    steps = 0
    while (tl.max(node, axis=0) >= 0) & (steps < w):
        here = node >= 0
        slot = tl.load(loc_ptr + node, mask=here, other=0)
        k = _gather(k_ptr, slot, here, k_slot, pool, d, held)
        v = _gather(v_ptr, slot, here, v_slot, pool, d, held)
        x = tl.sum(q * k, axis=1) * scale
        top1, total1, acc1, size1 = _merge_one(x, here, v, top1, total1, acc1, size1)
        if steps == 0:  # so far the row has seen the prefix and itself: the root's plain decoding
            root = live & (row == 0)
            _judge(out, total1, acc1, size1, held, errors_ptr + 2 * stride, row, root)
        node = tl.load(parents_ptr + node, mask=here, other=-1).to(tl.int32)
        node = tl.where(here & (node < w), node, -1)
        steps += 1
    _judge(out, total1, acc1, size1, held, errors_ptr + stride, row, compared)

    # dense: all w columns, by the visibility matrix
    for start in range(0, w, C):
        column = start + tl.arange(0, C)
        inside = column < w
        slot = tl.load(loc_ptr + column, mask=inside, other=0)
        k = _gather(k_ptr, slot, inside, k_slot, pool, d, held)
        v = _gather(v_ptr, slot, inside, v_slot, pool, d, held)
        seen = (row[:, None] == column[None, :]) & live[:, None]
        node = above
        steps = 0
        while (tl.max(node, axis=0) >= 0) & (steps < w):
            seen = seen | ((node[:, None] == column[None, :]) & live[:, None])
            node = tl.load(parents_ptr + node, mask=(node >= 0) & (node < w), other=-1)
            node = node.to(tl.int32)
            steps += 1
        x = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
        top, total, acc, size = _merge(x, seen, v, top, total, acc, size)
    _judge(out, total, acc, size, held, errors_ptr, row, compared)
    if (head == 0) & (tl.program_id(1) == 0):
        tl.store(errors_ptr + 3 * stride, tl.load(length_ptr).to(tl.int32))


@dataclass(frozen=True, slots=True)
class Rows:
    """One request of a launch, on the device.

    `q` and `output` (rows, heads, dim) are its query and result rows, `k` and `v` the pool's
    (slots, kv_heads, dim) of the layer. `slots` (at least s) are its prefix's, `loc` (w) its rows';
    `parents` (w) its tree; `length` (1) holds s.
    """

    q: Any
    output: Any
    k: Any
    v: Any
    slots: Any
    loc: Any
    parents: Any
    length: Any
    scale: float


@dataclass(frozen=True, slots=True)
class Errors:
    """What a comparison found: errors per row, NOT_COMPARED for padding; s as the device had it."""

    dense: Any
    chain: Any
    decode: float
    length: int


class ShadowCheck:
    """Launches comparisons on one device and reads their results without waiting."""

    def __init__(self, device: str | torch.device, width: int) -> None:
        """`width` is the largest w. What depends on the model is allocated at the first launch."""
        self.device, self.width = torch.device(device), width
        self._cuda = self.device.type == "cuda"
        shape = (RING, HEAD + 1, width)
        self._found = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=self._cuda)
        self._arrived = [torch.cuda.Event() for _ in range(RING)] if self._cuda else []
        self._blank = int(np.float32(NOT_COMPARED).view(np.int32))
        self._parts: Any = None
        self.launched = 0

    def launch(self, rows: Rows) -> int:
        """Queue a comparison and the copy of its result. Returns its number. Never waits."""
        number, w = self.launched, len(rows.loc)
        found = self._found[number % RING]
        found.fill_(self._blank)
        heads, dim = rows.q.shape[1:]
        pool, kv_heads = rows.k.shape[:2]
        group = heads // kv_heads
        meta = {"M": TILE, "C": 32, "D": max(16, triton.next_power_of_2(dim)), "num_warps": 4}
        tiles = triton.cdiv(w * group, TILE)
        parts, splits = self._room(kv_heads * tiles, meta["D"])
        q, o, k, v = (x.stride()[:2] for x in (rows.q, rows.output, rows.k, rows.v))
        with np.errstate(all="ignore"):  # where Triton interprets: what overflows is wanted
            prefix_kernel[(kv_heads, tiles, splits)](
                rows.q, rows.k, rows.v, rows.slots, rows.length, parts, *q, *k, *v, w, group, dim,
                len(rows.slots), pool, rows.scale, **meta,
            )  # fmt: skip
            shadow_kernel[(kv_heads, tiles)](
                rows.q, rows.output, rows.k, rows.v, rows.loc, rows.parents, rows.length, parts,
                found, *q, *o, *k, *v, w, group, dim, self.width, pool, splits, rows.scale, **meta,
            )  # fmt: skip
        self._host[number % RING].copy_(found, non_blocking=True)
        if self._cuda:
            self._arrived[number % RING].record()
        self.launched += 1
        return number

    def _room(self, programs: int, dim: int) -> tuple[Any, int]:
        """Where the sums over parts of the prefix go, and how many parts there are: enough to
        fill the device. Mostly below 5 MB.
        """
        splits = min(16, max(1, PROGRAMS // programs)) if self._cuda else 2
        need = programs * splits * TILE * (2 * dim + 2)
        if self._parts is None or len(self._parts) < need:
            with torch.inference_mode(False):
                self._parts = torch.empty(need, dtype=torch.float32, device=self.device)
        return self._parts, splits

    def arrived(self, number: int) -> bool:
        """Whether a comparison's result is on the host."""
        return not self._cuda or bool(self._arrived[number % RING].query())

    def lost(self, number: int) -> bool:
        """Whether a later comparison has taken the place of this result."""
        return self.launched - number > RING

    def result(self, number: int, w: int) -> Errors:
        """The result of a comparison that has arrived."""
        words = self._host[number % RING].numpy().copy()
        errors = words.view(np.float32)
        return Errors(
            dense=errors[DENSE, :w],
            chain=errors[CHAIN, :w],
            decode=float(errors[DECODE, 0]),
            length=int(words[HEAD, 0]),
        )


def self_test(device: str | torch.device) -> str:
    """What is wrong with the comparison on this device; empty if nothing is. Waits for it.

    A sound request of 24 committed tokens and 8 nodes must pass, and must fail with one prefix slot
    swapped, with one node's parent changed, and with a row that was never written.
    """
    check, rows = ShadowCheck(device, 16), _example(torch.device(device))
    allowed = tolerance(torch.float32, "cuda") or 0.0
    right = replace(rows, output=_dense(rows))
    unwritten = right.output.clone()
    unwritten[5] = float("nan")
    slots, parents = rows.slots.clone(), rows.parents.clone()
    slots[3], parents[6] = slots[4], 0
    cases = {
        "sound rows alarmed": (right, False),
        "a swapped slot was not seen": (replace(right, slots=slots), True),
        "a wrong ancestor was not seen": (replace(right, parents=parents), True),
        "an unwritten row was not seen": (replace(right, output=unwritten), True),
    }
    for what, (given, bad) in cases.items():
        number = check.launch(given)
        if check.device.type == "cuda":
            torch.cuda.synchronize(check.device)
        found = check.result(number, len(rows.loc))
        for name, worst in (("dense", found.dense.max()), ("chain", found.chain.max())):
            if (not worst <= allowed) is not bad:
                return f"self-test of shadow mode: {what} ({name} error {worst:.2g})"
    return ""


def _example(device: torch.device) -> Rows:
    """A request of 24 tokens and 8 nodes, its slots shuffled. The same on every device."""
    rng = np.random.default_rng(5)

    def put(*shape: int) -> Any:
        return torch.from_numpy(rng.normal(size=shape).astype(np.float32)).to(device)

    slots = torch.from_numpy(rng.permutation(40)).to(device)
    parents = torch.tensor([-1, 0, 0, 1, 1, 2, 3, 6], dtype=torch.int32, device=device)
    q = put(8, 4, 32)
    return Rows(
        q, q, put(40, 2, 32), put(40, 2, 32), slots[:24].to(torch.int32), slots[24:32], parents,
        torch.tensor([24], device=device), 32**-0.5,
    )  # fmt: skip


def _dense(rows: Rows) -> Any:
    """The oracle's rows, from `reference`."""
    k, v = (part.cpu().numpy() for part in (rows.k, rows.v))
    slots, loc = rows.slots.cpu().numpy(), rows.loc.cpu().numpy()
    right = verify_attention(
        rows.q.cpu().numpy(), k[slots], v[slots], k[loc], v[loc], rows.parents.tolist(), rows.scale
    )
    return torch.from_numpy(right).to(rows.q.dtype).to(rows.q.device)
