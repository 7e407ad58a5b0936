"""`Step`: the one record that flows from a hook through the rules, the recorder and a dump.

A hook fills a Step from SGLang's live objects; rules read it and nothing else; a dump is a Step on
disk. Arrays are device tensors while the step is hot and NumPy arrays once taken to the host. A
field that the hook could not supply is None, and rules that need it are "not checked".

Symbols: bs live requests, BS padded requests, w rows per request in this launch, s_i committed
prefix length of request i, b draft block size, B tree budget (DDTree: w = B + 1).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtree_guard.results import Attention, Device, Outcome, Peers, Shadow
from ddtree_guard.shape import BYTES, REAL, WHOLE, Array, Int, misfit
from ddtree_guard.shape import array as _array

__all__ = [
    "ARRAY_KINDS", "ARRAY_SHAPES", "BYTES", "PARTS", "REAL", "WHOLE", "Array", "Attention",
    "Contract", "Device", "Graph", "Int", "Layout", "Limits", "Mask", "Outcome", "Peers",
    "Positions", "Shadow", "Slots", "Static", "Step", "Tree", "Who", "Widths",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Contract:
    """What one (algorithm, backend, release range) passes to its kernel and what the kernel reads.

    `reads_prefix_mask`: the kernel reads mask columns [0, s); Triton skips them.
    `mask_length`: "exact" (sum of w*(s+w)) or "capacity" (a whole captured buffer).
    `mask_unit`: cells per stored element, 1 or 8 (packed bits).
    `kv_includes_draft`: kv_indptr counts s+w per request instead of s.
    `pad_rows`: what rows >= tree size look like: "self", "masked" or "none" (no such rows).
    `pad_lanes`: value that lanes >= bs hold, per Step field (dotted path).
    `causal_with_mask`: the kernel applies causality by row on top of the mask.
    `depth_major`: nodes must be sorted by depth with siblings side by side.
    `chain`: the tree is always a chain and no parent array exists.
    `not_checked`: rule id to the reason why it does not apply.
    """

    name: str = "generic"
    algorithm: str = "DDTREE"
    backend: str = "triton"
    reads_prefix_mask: bool = False
    mask_length: str = "exact"
    mask_unit: int = 1
    kv_includes_draft: bool = False
    pad_rows: str = "self"
    pad_lanes: Mapping[str, int] = field(default_factory=dict)
    causal_with_mask: bool = False
    depth_major: bool = False
    chain: bool = False
    not_checked: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Widths:
    """Every copy of "rows per request", and what the width follows from.

    `w` is the canonical width: what the batch's spec info states. `holders` maps each other holder
    (backend, graph runner, server arguments, logits buffer...) to its copy. `draft_width` and
    `draft_rows` are the draft backend's width and the rows that its proposer emits per request.
    """

    w: int
    holders: Mapping[str, int] = field(default_factory=dict)
    block: Int = None
    budget: Int = None
    depth_max: Int = None
    draft_width: Int = None
    draft_rows: Int = None
    num_draft_tokens: Int = None  # D, the server argument
    num_steps: Int = None
    topk: Int = None
    state: str = "default"  # runtime state: adaptive speculation swaps widths


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets handed to the attention kernel. Integer arrays; lengths in rows, tokens or cells.

    `rows` maps each per-row operand (q, out_cache_loc, positions, input_ids) to its length.
    `grids` maps a launch to (grid extent, extent its operands need).
    `prefix_lens` is s per request from the device; `prefix_lens_cpu` the scheduler's mirror.
    """

    qo_indptr: Array = _array("BS+1")
    kv_indptr: Array = _array("BS+1")
    mask_indptr: Array = _array("BS+1")
    kv_indices: Array = _array("*")
    prefix_lens: Array = _array("BS")
    prefix_lens_cpu: Array = _array("bs")
    max_extend_len: Int = None
    offset_bits: Int = None  # width of the integer type that indexes the mask
    rows: Mapping[str, int] = field(default_factory=dict)
    grids: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mask:
    """The flattened visibility mask, one element per cell (bool or uint8), requests end to end.

    Rows of request i start at mask_indptr[i]; each row holds s_i prefix columns, then w tree
    columns. `present` False means the kernel got no mask. `rids` are the request ids that the
    builder used. `row_stride` is the builder's row length per request.
    `window` (tokens) and `window_start` (first kept column) describe a sliding window.
    `tree_bits` are the tree columns alone, at the offsets that the kernel uses, eight to a byte,
    lowest bit first: what the ring keeps of a mask.
    """

    cells: Array = _array("*", kind=BYTES)
    present: bool | None = None
    capacity: Int = None
    row_stride: Array = _array("bs")
    rids: tuple[str, ...] | None = None
    window: Int = None
    window_start: Array = _array("bs")
    tree_bits: Array = _array("bs", "w", "*", kind=BYTES)


@dataclass(frozen=True, slots=True)
class Tree:
    """The draft tree of each live request: row r is node r, node 0 the root (last committed token).

    `sizes` counts the real nodes, 1..w; rows beyond are padding. `retrieve_*` are SGLang's
    left-child right-sibling arrays. `top1` holds the drafter's most probable token per depth
    (column 0 is depth 1), with -1 where the drafter gave none. `columns` are the drafter's
    concatenated logit columns that the tokens came from (tensor parallel shards).
    """

    tokens: Array = _array("bs", "w")
    parents: Array = _array("bs", "w")
    depths: Array = _array("bs", "w")
    sizes: Array = _array("bs")
    retrieve_index: Array = _array("bs", "w")
    retrieve_next_token: Array = _array("bs", "w")
    retrieve_next_sibling: Array = _array("bs", "w")
    top1: Array = _array("bs", "*")
    columns: Array = _array("bs", "w")


@dataclass(frozen=True, slots=True)
class Positions:
    """Rotary positions, one per row, or `sections` stacked runs of them (3 for mRoPE)."""

    values: Array = _array("*")
    sections: int = 1


@dataclass(frozen=True, slots=True)
class Slots:
    """Where keys and values live. Slot ids index a KV pool of `pools[name]` slots.

    `req_to_token` holds the rows of the live requests, one column per position. `refcounts` and
    `owners` (request index, -1 for nobody) follow `out_cache_loc`. `reserved` is the slot that
    padding may write. `capacity` maps a buffer to (needed, available). `ids` maps further index
    arrays to the pool they are declared for.
    """

    out_cache_loc: Array = _array("*")
    req_to_token: Array = _array("bs", "*")
    refcounts: Array = _array("*")
    owners: Array = _array("*")
    allocated: Array = _array("bs")  # slots recorded per request
    owned_pages: Array = _array("bs")  # pages really held per request
    page_table: Array = _array("bs", "*")
    pools: Mapping[str, int] = field(default_factory=dict)
    pool: str = "full"
    ids: Mapping[str, tuple[str, int, int]] = field(default_factory=dict)  # name: pool, min, max
    reserved: int = 0
    page_size: Int = None
    kernel_page_size: Int = None
    token_stride: Int = None  # elements from one slot to the next
    index_bits: Int = None  # integer type of slot * stride
    row_width: Int = None  # columns of a req_to_token row in the pool
    reserve: Int = None  # columns that must fit beyond s
    capacity: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    kept: Int = None
    freed: Int = None
    idle_owned: Int = None
    idle_free: Int = None


@dataclass(frozen=True, slots=True)
class Static:
    """One buffer that a captured graph reads: address in bytes, dtype, sizes in elements."""

    pointer: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    capacity: int = 0
    generation: int = -1  # step that last wrote it; -1 is "declared constant"


@dataclass(frozen=True, slots=True)
class Graph:
    """A CUDA graph's birth certificate (`born_*`) beside what is true at this replay (`live_*`).

    `prompt_left` counts each request's prompt tokens not yet processed. `output_marks` maps an
    output to its fingerprint right after the replay and before its last use.
    """

    born_key: Mapping[str, Any] | None = None
    live_key: Mapping[str, Any] | None = None
    born: Mapping[str, Static] = field(default_factory=dict)
    live: Mapping[str, Static] = field(default_factory=dict)
    num_tokens: Int = None
    batch_sizes: tuple[int, ...] = ()  # captured bucket sizes
    generation: Int = None  # this step's generation number
    prompt_left: Array = _array("bs")
    output_marks: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the deployment can hold, in tokens, rows or ids; and what the backend supports."""

    vocab: Int = None  # ids the tokenizer knows
    vocab_padded: Int = None  # rows of the lm head
    vocab_per_rank: Int = None
    vocab_per_rank_padded: Int = None
    context: Int = None
    draft_context: Int = None
    rope_rows: Int = None
    draft_rope_rows: Int = None
    kernel_rows: Mapping[str, int] = field(default_factory=dict)  # kernel: largest w it handles
    supports: tuple[str, ...] | None = None
    needs: tuple[str, ...] = ()
    ring: Int = None
    window: Int = None
    write_pad: Int = None


@dataclass(frozen=True, slots=True)
class Who:
    """Whose step this is."""

    rids: tuple[str, ...] = ()
    step_id: int = 0
    rank: str = "TP0"
    worker: str = "target"
    algorithm: str = "DDTREE"
    backend: str = "triton"
    backend_kind: str = "stock"
    release: str = ""
    path: str = "eager"  # or "graph"

    def rid(self, request: int | None) -> str | None:
        """The request id of a request index, where known."""
        known = request is not None and 0 <= request < len(self.rids or ())
        return self.rids[request] if known and request is not None else None


@dataclass(frozen=True, slots=True)
class Step:
    """One verify step of one worker. See the module docstring."""

    bs: int
    padded_bs: int
    widths: Widths
    layout: Layout = field(default_factory=Layout)
    mask: Mask = field(default_factory=Mask)
    tree: Tree = field(default_factory=Tree)
    positions: Positions = field(default_factory=Positions)
    slots: Slots = field(default_factory=Slots)
    graph: Graph = field(default_factory=Graph)
    outcome: Outcome = field(default_factory=Outcome)
    attention: Attention = field(default_factory=Attention)
    shadow: Shadow = field(default_factory=Shadow)
    limits: Limits = field(default_factory=Limits)
    device: Device = field(default_factory=Device)
    peers: Peers = field(default_factory=Peers)
    who: Who = field(default_factory=Who)
    contract: Contract = field(default_factory=Contract)

    @property
    def w(self) -> int:
        """Rows per request in this launch."""
        return self.widths.w

    def get(self, path: str) -> Any:
        """The value at a dotted path such as `layout.qo_indptr`."""
        return _getter(path)(self)

    def replace(self, **changes: Any) -> Step:
        """A copy with fields changed, by dotted path with `__`: `layout__qo_indptr=...`."""
        whole: dict[str, Any] = {}
        parts: dict[str, dict[str, Any]] = {}
        for path, value in changes.items():
            part, _, name = path.partition("__")
            if name:
                parts.setdefault(part, {})[name] = value
            else:
                whole[part] = value
        for part, values in parts.items():
            whole[part] = dataclasses.replace(getattr(self, part), **values)
        return dataclasses.replace(self, **whole)

    def arrays(self) -> Iterator[tuple[str, Array, tuple[str, ...]]]:
        """Every array that is present: dotted path, value, declared shape."""
        for part, name, path, declared in _PLACES:
            value = getattr(getattr(self, part), name)
            if value is not None:
                yield path, value, declared

    def misfit(self, path: str) -> str | None:
        """How the array at a dotted path departs from what is declared, or None if it fits."""
        value = self.get(path)
        return None if value is None else self._misfit(path, value, self._sizes())

    def misfits(self) -> dict[str, str]:
        """Arrays of another shape or type than declared: dotted path to a phrase with both."""
        sizes = self._sizes()
        found = {path: self._misfit(path, value, sizes) for path, value, _ in self.arrays()}
        return {path: text for path, text in found.items() if text is not None}

    @staticmethod
    def _misfit(path: str, value: Array, sizes: Mapping[str, int]) -> str | None:
        return misfit(value, ARRAY_SHAPES[path], ARRAY_KINDS[path], sizes)

    def _sizes(self) -> dict[str, int]:
        """What the names in the declared shapes stand for; any other name is any size."""
        return {"bs": self.bs, "BS": self.padded_bs, "BS+1": self.padded_bs + 1, "w": self.w}


@functools.cache
def _getter(path: str) -> Callable[[Any], Any]:
    return operator.attrgetter(path)


PARTS: Mapping[str, type] = {
    "widths": Widths, "layout": Layout, "mask": Mask, "tree": Tree, "positions": Positions,
    "slots": Slots, "graph": Graph, "outcome": Outcome, "attention": Attention, "shadow": Shadow,
    "limits": Limits, "device": Device, "peers": Peers, "who": Who, "contract": Contract,
}  # fmt: skip

_ARRAYS = {
    f"{part}.{f.name}": f.metadata
    for part, kind in PARTS.items()
    for f in dataclasses.fields(kind)
    if "shape" in f.metadata
}
ARRAY_SHAPES: Mapping[str, tuple[str, ...]] = {path: m["shape"] for path, m in _ARRAYS.items()}
ARRAY_KINDS: Mapping[str, str] = {path: m["kind"] for path, m in _ARRAYS.items()}

_PLACES: tuple[tuple[str, str, str, tuple[str, ...]], ...] = tuple(
    (*path.split(".", 1), path, shape)  # type: ignore[misc]
    for path, shape in ARRAY_SHAPES.items()
)
