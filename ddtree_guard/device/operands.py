"""Operands of the device kernels, built once per captured graph or eager batch.

Everything that Python must decide is decided here: which operands there are, what the host can
already see is wrong, and the argument tuple, so that a launch is one call.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import triton

from ddtree_guard.config import Depth
from ddtree_guard.device.call import Call, bind
from ddtree_guard.device.edges import CLOSE_ARGS, LINKS, NO_TREES, before_kernel, close_kernel
from ddtree_guard.device.kernel import VERIFY_ARGS, verify_kernel
from ddtree_guard.device.protocol import BITS, HAS_BITS
from ddtree_guard.device.ring_program import programs_of
from ddtree_guard.device.tree import sizes_for
from ddtree_guard.errors import UsageError
from ddtree_guard.step import Contract

if TYPE_CHECKING:
    from ddtree_guard.device.pack import Pack

Tensor: TypeAlias = Any
MAX_W, MAX_LANES = 1025, 256
_FAR = 2**31 - 1
_PAD_ROWS = {"none": 0, "self": 1, "masked": 2}
# Rules whose operands must be there; others come free with them.
_NEEDS = {
    "W1": ("qo_indptr",), "W2": ("kv_indptr",), "W3": ("mask_indptr",), "W4": ("row_stride",),
    "M1": ("mask",), "M2": ("mask",), "M3": ("mask", "full"), "M4": ("mask",), "M6": ("mask",),
    "T1": ("tree",), "T2": ("tree",), "T3": ("links",), "T4": ("tree",), "T6": ("tree",),
    "P1": ("positions", "tree"), "K1": ("out_cache_loc",), "K2": ("out_cache_loc",),
}  # fmt: skip
_TREES = ("sizes", "parents", "depths")
_ARGS = {name: at for at, name in enumerate(VERIFY_ARGS)}
# what lies elsewhere in each eager step, of `Buffers`
MOVING = ("lens", "qo_indptr", "kv_indptr", "mask_indptr", "mask", "tokens", "positions",
          "out_cache_loc", "kv_indices")  # fmt: skip
_MASK_RULES = frozenset({"M1", "M2", "M3", "M4", "M6"})


@dataclass(frozen=True, slots=True)
class Buffers:
    """The device arrays that one launch reads: exactly those that attention reads. Integers.

    `live_count` is one integer, bs; in a graph it is written before each replay. `lens` (BS,) is s;
    `qo_indptr`, `kv_indptr`, `mask_indptr` (BS+1,); `row_stride` (BS,); `mask` one byte per cell;
    tree and retrieve arrays and `out_cache_loc` (BS, w) or flat; `sizes` (BS,); `positions`
    (sections, BS, w) or flat; `kv_indices` any length. A missing array is None.
    """

    live_count: Tensor
    lens: Tensor
    qo_indptr: Tensor = None
    kv_indptr: Tensor = None
    mask_indptr: Tensor = None
    row_stride: Tensor = None
    mask: Tensor = None
    tokens: Tensor = None
    parents: Tensor = None
    depths: Tensor = None
    sizes: Tensor = None
    retrieve_index: Tensor = None
    retrieve_next_token: Tensor = None
    retrieve_next_sibling: Tensor = None
    positions: Tensor = None
    out_cache_loc: Tensor = None
    kv_indices: Tensor = None


@dataclass(frozen=True, slots=True)
class Shape:
    """What the host knows of a launch: sizes, limits and the contract. None: no limit known."""

    lanes: int
    w: int
    contract: Contract = field(default_factory=Contract)
    sections: int = 1
    depth_max: int | None = None
    context: int | None = None
    vocab: int | None = None
    pool: int | None = None
    reserved: int = 0
    max_extend_len: int | None = None
    rows: Mapping[str, int] = field(default_factory=dict)
    window: bool = False
    depth: Depth = Depth.FAST

    @property
    def longest(self) -> int | None:
        """Most committed tokens that a step starts from: one that runs ahead may be beyond C."""
        return None if self.context is None else self.context + self.w


@dataclass(frozen=True, slots=True)
class Tile:
    """Per program: mask rows, and words of sixteen cells of each that a pass reads; rows and
    columns a thread of the pair programs; warps, and most registers a thread (0: as many as the
    compiler likes).
    """

    rows: int = 64
    words: int = 16
    deep: int = 4
    cols: int = 4
    warps: int = 4
    registers: int = 0


# Whether kernels are compiled for NVIDIA GPUs: not in the interpreter, nor for others.
_NVIDIA = torch.version.cuda is not None and not triton.knobs.runtime.interpret
WIDE = 1024  # words of eight prefix cells, or KV slots, a pass
SMALL, BIG, BIG_WITH_RING = Tile(64, 4), Tile(registers=96), Tile(registers=80)


def tile_for(w: int, ring: bool = False) -> Tile:
    """The fastest tile on an H200, by `benchmarks/device_check.py --tune`."""
    if w <= 65:
        return SMALL
    return BIG_WITH_RING if ring else BIG


def pack_of(w: int, tile: Tile) -> int:
    """Keys a thread that meet in shared memory, two for each row but the root; 0 if they do not."""
    least = next((n for n in (2, 4, 8) if w - 1 <= 16 * tile.warps * n), 0)
    return least if tile.warps == 4 and _NVIDIA else 0


@functools.cache
def waits(device: torch.device) -> bool:
    """Whether a launch may begin to start while the one before it ends, and wait itself."""
    return _NVIDIA and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def programs_per_lane(w: int, lanes: int, tile: Tile, cells: int) -> int:
    """Second grid dimension; `cells` of prefix, 0 at depth `fast`, are shared out in pieces."""
    block = 32 * tile.warps
    rows = 2 * _ceil(w, block) + _ceil(w - 1, block) + _ceil(w - 1, tile.rows)
    pairs = 1
    if not pack_of(w, tile):
        pairs = _ceil(w - 1, tile.deep * tile.warps) * _ceil(w - 1, tile.cols * 32)
    return 2 + rows + pairs + min(_ceil(cells, 8 * WIDE * lanes), max(1, 2048 // lanes))


def _ceil(count: int, share: int) -> int:
    return -(-count // share)


@dataclass(frozen=True, slots=True)
class Operands:
    """One bound launch. `rules` are the ids that it covers; `launch()` queues it."""

    rules: tuple[str, ...]
    launch: Call
    keep: tuple[Any, ...] = ()
    bytes_read: int = 0


def verify_operands(
    state: Tensor, slots: Tensor, buffers: Buffers, shape: Shape, tile: Tile | None = None,
    ring: Pack | None = None,
) -> Operands:  # fmt: skip
    """Bind `verify_kernel`, which also packs the step where a `ring` is given. Raises UsageError
    for arrays too short for the launch.
    """
    _require_sizes(buffers, shape)
    has = _present(buffers, shape)
    rules = covered_rules(has, shape)
    if not _MASK_RULES.intersection(rules):  # it is laid out for other rules, or by none
        has -= {"mask", "words"}
        buffers = buffers if ring is not None else replace(buffers, mask=None)
    tile = tile or tile_for(shape.w, ring is not None)
    seen = _seen_by_host(shape)
    contract, pads = shape.contract, shape.contract.pad_lanes
    pack = pack_of(shape.w, tile)
    has |= {name for name, there in (("shared", pack), ("wait", waits(state.device))) if there}
    mask, kvi = buffers.mask, buffers.kv_indices
    tensors = _tensors(buffers, state)
    numbers = (
        shape.lanes, shape.w, shape.sections, _limit(shape.depth_max),
        shape.w if contract.kv_includes_draft else 0, _PAD_ROWS[contract.pad_rows],
        bit_set(rules), *seen, _limit(shape.longest), _limit(shape.vocab, 2**62),
        _limit(shape.pool, 2**62), shape.reserved, 0 if mask is None else mask.numel(),
        0 if kvi is None else kvi.numel(), pads.get("layout.prefix_lens", 0),
        pads.get("positions.values", 0), pads.get("slots.out_cache_loc", shape.reserved),
        *((state, 0, 0, 0) if ring is None else ring.place),
    )  # fmt: skip
    whole = max(1, numbers[15], 8 * numbers[16]) if "full" in has else 0
    programs = programs_per_lane(shape.w, shape.lanes, tile, whole)
    grid = (shape.lanes, programs + (0 if ring is None else programs_of(shape.w, ring.has)))
    launch = bind(
        verify_kernel, grid, (state, slots, *tensors, *numbers), tile.warps, tile.registers,
        HAS=sum(HAS_BITS[name] for name in has),
        LANES=32 if shape.lanes <= 32 else MAX_LANES, BITS=8 if shape.w <= 257 else 32,
        ROWS=tile.rows, WORDS=tile.words, DEEP=tile.deep, COLS=tile.cols, PACK=pack,
        WARPS=tile.warps, WIDE=WIDE, RING=0 if ring is None else ring.has,
    )  # fmt: skip
    return Operands(rules, launch, (state, slots, *tensors), bytes_read(buffers, shape))


def moved_verify(
    operands: Operands, arrays: tuple[Tensor, ...], shape: Shape, spare: Tensor
) -> None:
    """The same launch for `arrays`, by MOVING, of the same kinds that lie elsewhere. The caller
    keeps them alive. Raises UsageError for arrays too short for the launch.
    """
    least = _least(shape.lanes, shape.w, shape.sections)
    for name, array in zip(MOVING, arrays, strict=True):
        if array is not None and (array.numel() < least[name] or not array.is_contiguous()):
            raise _unfit(name, array, least[name], shape)
    lens, qo, kv, mi, mask, tokens, positions, out, kvi = (
        spare if array is None else array for array in arrays
    )
    operands.launch.put(_ARGS["lens"], (lens, qo, kv, mi))
    operands.launch.put(_ARGS["mask"], (mask, tokens))
    operands.launch.put(_ARGS["positions"], (positions, out, kvi))
    sizes = (0 if array is None else array.numel() for array in (arrays[4], arrays[8]))
    operands.launch.put(_ARGS["mask_numel"], tuple(sizes))


def table_operands(
    state: Tensor, slots: Tensor, buffers: Buffers, shape: Shape, table: Tensor, rows: Tensor,
    row_width: int | None = None, reserve: int | None = None, trees: int = NO_TREES,
    given: tuple[Tensor, ...] = (),
) -> Operands:  # fmt: skip
    """Bind `before_kernel`: K3, and K4 where kv_indices are there; with `trees` (LINKS, PARENTS or
    TOLD) it fills the trees from the three tensors `given`.

    `table` is req_to_token (rows, columns); `rows` (BS,) its row per lane. The first arguments are
    those that a step may change: `given`, bs (-1: read from `live_count`), and `moving`.
    """
    _require_sizes(buffers, shape)
    has, kvi = _present(buffers, shape), buffers.kv_indices
    rules = ("K3", "K4") if "kv_indices" in has else ("K3",)
    room = _FAR if row_width is None or reserve is None else row_width - reserve
    chunks = max(1, min(64, triton.cdiv(table.shape[1], 2048)))
    args = (
        *(given or (state,) * 3), -1,
        *moving(buffers.lens, buffers.kv_indptr, kvi, buffers.out_cache_loc, rows, state),
        state, slots, buffers.live_count, *(_or(getattr(buffers, n), state) for n in _TREES),
        table, shape.w, shape.w if shape.contract.kv_includes_draft else 0, bit_set(rules),
        512 * triton.cdiv(table.shape[1], 512 * chunks), *table.shape, table.stride(0), room,
        shape.reserved,
    )  # fmt: skip
    has_bits = sum(HAS_BITS[name] for name in has & {"tree", "kv_indices"})
    sizes = sizes_for(shape.w) if trees & LINKS else {"W": 1, "ROUNDS": 1}
    grid = (shape.lanes, chunks + (trees != NO_TREES))
    launch = bind(before_kernel, grid, args, 4, HAS=has_bits, COLS=512, TREES=trees, **sizes)
    return Operands(rules, launch, args)


def moving(
    lens: Tensor, kv_indptr: Tensor, kv_indices: Tensor, out: Tensor, rows: Tensor, spare: Tensor
) -> tuple[Any, ...]:
    """The arguments of `before_kernel` that lie elsewhere in each eager step."""
    count = 0 if kv_indices is None else kv_indices.numel()
    return lens, _or(kv_indptr, spare), _or(kv_indices, spare), out, rows, count


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of verification on the device.

    `predict` (BS, w); `accept` (BS, path): rows within the request, or over the batch with
    `global_rows`, -1 beyond the path; `lens` (BS,) committed tokens; `cut` (BS,) tokens cut behind
    a stop, None for none; `greedy` (BS,) nonzero where the walk was greedy, None for everywhere.
    """

    predict: Tensor
    accept: Tensor
    lens: Tensor
    cut: Tensor = None
    greedy: Tensor = None
    global_rows: bool = False


def close_operands(
    state: Tensor, slots: Tensor, buffers: Buffers, shape: Shape, decision: Decision | None = None
) -> Operands:
    """Bind `close_kernel`, with rules A1 to A3 where a decision is given."""
    most = shape.w if shape.depth_max is None else shape.depth_max + 1
    if decision is None or buffers.tokens is None:
        args = (*(state,) * 4, state, slots, *(state,) * 5, shape.w, 1, most, 0, 0)
        launch = bind(close_kernel, (1, 1), args, 1, HAS=0, PATH=1, COLS=128)
        return Operands((), launch, args)
    rules = ("A1", "A2", "A3")
    zeros = torch.zeros(shape.lanes, dtype=torch.int64, device=state.device)
    path = decision.accept.shape[-1]
    args = (
        decision.predict, decision.accept, decision.lens, _or(decision.greedy, zeros + 1), state,
        slots, buffers.live_count, buffers.tokens, buffers.parents, buffers.sizes,
        _or(decision.cut, zeros), shape.w, path, most,
        shape.w if decision.global_rows else 0, bit_set(rules),
    )  # fmt: skip
    launch = bind(
        close_kernel, (shape.lanes, 1), args, 1, HAS=HAS_BITS["outcome"],
        PATH=triton.next_power_of_2(path), COLS=128,
    )  # fmt: skip
    return Operands(rules, launch, args)


def moved_close(operands: Operands, decided: tuple[Tensor, ...], tokens: Tensor) -> None:
    """The same end of a step for another `predict`, `accept`, `lens` and `greedy` of the same
    kinds; and for other `tokens`, unless None. The caller keeps them alive.
    """
    operands.launch.put(0, decided)
    if tokens is not None:
        operands.launch.put(CLOSE_ARGS.index("tokens"), (tokens,))


def bit_set(rules: tuple[str, ...]) -> int:
    """The verdict bits of these rules."""
    return sum(1 << BITS[name] for name in rules)


def bytes_read(buffers: Buffers, shape: Shape) -> int:
    """Bytes that a clean launch must read at least once."""
    total = 0
    for f in fields(Buffers):
        value = getattr(buffers, f.name)
        if value is not None and f.name not in ("mask", "kv_indices"):
            total += value.numel() * value.element_size()
    if buffers.mask is not None:
        whole = shape.depth is Depth.FULL
        total += buffers.mask.numel() if whole else shape.lanes * shape.w * (shape.w + 2)
    return total


def covered_rules(has: set[str], shape: Shape) -> tuple[str, ...]:
    """Ids of the rules that a launch with these operands decides."""
    skipped = set(shape.contract.not_checked)
    if shape.window:  # the mask and the KV range are then laid out for clipped keys
        skipped |= {"W2", "W3", "W4", "M1", "M2", "M3", "M4", "M6"}
    if not shape.contract.causal_with_mask:
        skipped.add("M6")
    for name, limit in (("T6", shape.vocab), ("K1", shape.pool), ("W8", shape.max_extend_len)):
        if limit is None:
            skipped.add(name)
    rules = [name for name, needs in _NEEDS.items() if has.issuperset(needs)]
    if has & {"pad_len", "pad_slot", "pad_position"}:
        rules.append("G4")
    return tuple(name for name in (*rules, "W8") if name not in skipped)


def _present(buffers: Buffers, shape: Shape) -> set[str]:
    """Names of HAS_BITS that hold for this launch."""
    names = ("qo_indptr", "kv_indptr", "mask_indptr", "positions", "out_cache_loc")
    has = {name for name in names if getattr(buffers, name) is not None}
    tree = (buffers.tokens, buffers.parents, buffers.depths, buffers.sizes)
    links = (
        buffers.retrieve_index, buffers.retrieve_next_token, buffers.retrieve_next_sibling
    )  # fmt: skip
    if all(part is not None for part in tree):
        has.add("tree")
        if buffers.mask is not None and buffers.mask_indptr is not None:
            has.add("mask")
            if buffers.mask.data_ptr() % 16 == 0:
                has.add("words")
        if all(part is not None for part in links):
            has.add("links")
    if buffers.kv_indptr is not None and buffers.kv_indices is not None:
        has.add("kv_indices")
    if buffers.row_stride is not None and has.issuperset(("qo_indptr", "kv_indptr")):
        has.add("row_stride")
    for name, path, operand in (
        ("pad_len", "layout.prefix_lens", "lens"),
        ("pad_slot", "slots.out_cache_loc", "out_cache_loc"),
        ("pad_position", "positions.values", "positions"),
    ):
        if path in shape.contract.pad_lanes and getattr(buffers, operand) is not None:
            has.add(name)
    if shape.contract.depth_major:
        has.add("depth_major")
    if shape.depth is Depth.FULL:
        has.add("full")
    return has


def _tensors(buffers: Buffers, spare: Tensor) -> tuple[Tensor, ...]:
    """The pointers of `verify_kernel`, in its order; absent ones get any valid address."""
    values = []
    for f in fields(Buffers):
        value = getattr(buffers, f.name)
        if value is not None and value.dtype == torch.bool:
            value = value.view(torch.uint8)
        values.append(_or(value, spare))
    return tuple(values)


def _or(value: Tensor, spare: Tensor) -> Tensor:
    return spare if value is None else value


def _limit(value: int | None, otherwise: int = _FAR) -> int:
    return otherwise if value is None else min(value, otherwise)


def _seen_by_host(shape: Shape) -> tuple[int, int, int, int]:
    """Bits that need no device; the request and row that W1 names, and the row that W8 names."""
    bits, at, extent = 0, 0, 0
    for _, rows in sorted(shape.rows.items()):
        if rows != shape.lanes * shape.w:
            bits |= 1 << BITS["W1"]
            at = min(max(rows, 0), shape.lanes * shape.w - 1)
            break
    if shape.max_extend_len is not None and shape.max_extend_len != shape.w:
        bits |= 1 << BITS["W8"]
        extent = min(max(shape.max_extend_len, 0), shape.w - 1)
    return (bits, *divmod(at, shape.w), extent)


def _require_sizes(buffers: Buffers, shape: Shape) -> None:
    """Every array indexed by lane or row must hold all of them, contiguously."""
    lanes, w = shape.lanes, shape.w
    if not (1 <= w <= MAX_W and 1 <= lanes <= MAX_LANES):
        raise UsageError(
            f"the device check handles 1 to {MAX_LANES} requests of 1 to {MAX_W} rows; this launch "
            f"has {lanes} of {w}. Turn the guard off for it or check it on the host."
        )
    for name, least in _least(lanes, w, shape.sections).items():
        value = getattr(buffers, name)
        if value is None:
            continue
        if value.numel() < least or not value.is_contiguous():
            raise _unfit(name, value, least, shape)
        if value.is_floating_point():
            raise UsageError(f"{name} must hold integers; it holds {value.dtype}.")


def _unfit(name: str, value: Tensor, least: int, shape: Shape) -> UsageError:
    return UsageError(
        f"{name} must be contiguous and hold at least {least} elements for {shape.lanes} requests "
        f"of {shape.w} rows; it has shape {tuple(value.shape)}. Check it on the host."
    )


@functools.lru_cache(256)
def _least(lanes: int, w: int, sections: int) -> dict[str, int]:
    """Fewest elements of each of `Buffers`."""
    needed = dict.fromkeys((f.name for f in fields(Buffers)), lanes * w)
    needed |= {"live_count": 1, "lens": lanes, "sizes": lanes, "row_stride": lanes}
    needed |= dict.fromkeys(("qo_indptr", "kv_indptr", "mask_indptr"), lanes + 1)
    return needed | {"mask": 0, "kv_indices": 0, "positions": sections * lanes * w}
