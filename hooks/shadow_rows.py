"""What shadow mode takes of a step: which layers can be compared, who is where, and the rows.

Slots come from `req_to_token` and `out_cache_loc`, visibility from the tree's parents or links.
They are copied before the launch, on its stream: SGLang may write `req_to_token` for the next step
while this one runs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ddtree_guard.attention.shadow import tolerance
from ddtree_guard.device.tree import fill_parents
from ddtree_guard.errors import IncompatibleError
from ddtree_guard.hooks.contracts import row_of
from ddtree_guard.hooks.facts import facts_of
from ddtree_guard.hooks.links import links_of
from ddtree_guard.hooks.observe import verify_width
from ddtree_guard.hooks.view import View
from ddtree_guard.step import Attention, Step

MAX_ROWS = 32 << 20  # bytes of captured keys and values in a dump, before only one request is kept
MAX_ONE = 256 << 20


@functools.cache
def _is_triton(backend_class: type) -> bool:
    try:
        facts_of(backend_class)
    except (IncompatibleError, AttributeError):
        return False
    return True


def unfit(runner: Any, backend: Any, q: Any, k: Any, layer: Any, given: dict[str, Any]) -> str:
    """Why the rows of this layer cannot be compared; empty if they can. Reads no device memory."""
    made: Any = type(backend)
    if not _is_triton(made):
        return f"{made.__name__} is not a Triton backend that is known here"
    more = [name for name in ("sinks", "score_mod", "aux_tensors") if given.get(name) is not None]
    if more:
        return f"the layer uses {more[0]}"
    if layer.qk_head_dim != layer.v_head_dim or getattr(backend, "use_mla", False):
        return "keys and values differ in size (MLA)"
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        return "sliding window"
    if layer.logit_cap:
        return "logit cap"
    if layer.is_cross_attention or getattr(layer.attn_type, "value", "decoder") != "decoder":
        return "not causal self-attention"
    if getattr(layer, "xai_temperature_len", -1) > 0:
        return "temperature by position"
    if getattr(backend, "dcp_size", 1) > 1:
        return "decode context parallelism"
    return _unfit_pool(runner, q, k, layer, given)


def _unfit_pool(runner: Any, q: Any, k: Any, layer: Any, given: dict[str, Any]) -> str:
    if k is None or not given.get("save_kv_cache", True):
        return "the layer writes no keys of its own"
    if getattr(runner, "sliding_window_size", None) is not None:
        return "a KV pool with windows"
    held = runner.token_to_kv_pool.get_key_buffer(layer.layer_id)
    if layer.k_scale is not None or held.dtype is not q.dtype:
        return f"KV cache of {str(held.dtype).removeprefix('torch.')} beside {q.dtype} queries"
    if held.dim() != 3 or held.stride(2) != 1:
        return "a KV pool that does not hold (slots, heads, dim)"
    if tolerance(q.dtype, q.device.type) is None:
        return f"no tolerance is stated for {q.dtype}"
    return ""


def heads_of(rows: Any, layer: Any) -> Any:
    """Query or output rows as (rows, heads, dim), without a copy."""
    return rows.view(rows.shape[0], layer.tp_q_head_num, layer.v_head_dim)


@dataclass(frozen=True, slots=True)
class Taken:
    """Requests of a step, on the device: `slots` (n, R), `loc` (n, w), `parents` (n, w), `lens`
    (n). They are requests `first`, `first` + 1, ...
    """

    first: int
    w: int
    slots: Any
    loc: Any
    parents: Any
    lens: Any


class Snapshots:
    """Takes one request of a step into buffers of its own, a few steps deep; or all of them."""

    DEPTH = 4

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], Taken] = {}
        self._depths: dict[int, tuple[Any, Any]] = {}  # beside parents, and not looked at
        self._next = 0

    def take(self, view: View, request: int | None) -> Taken | None:
        """Queue the copies of a request, or of all requests in fresh memory (request None).

        Returns None for a batch that has fewer slots than bs * w: the width is not what it states.
        """
        w = verify_width(
            view.backend, view.runner, facts_of(type(view.backend)), view.batch.spec_info
        )
        if len(view.batch.out_cache_loc) < view.bs * w:
            return None
        first, count = (0, view.bs) if request is None else (request, 1)
        table = view.runner.req_to_token_pool.req_to_token
        taken = self.fresh(count, w, table) if request is None else self._reused(w, table)
        batch, live = view.batch, slice(first, first + count)
        torch.index_select(table, 0, batch.req_pool_indices[live], out=taken.slots)
        taken.loc.copy_(batch.out_cache_loc[first * w : (first + count) * w].view(count, w))
        taken.lens.copy_(batch.seq_lens[live])
        self._parents(view, taken.parents, first)
        return Taken(first, w, taken.slots, taken.loc, taken.parents, taken.lens)

    def _reused(self, w: int, table: Any) -> Taken:
        self._next = (self._next + 1) % self.DEPTH
        key = (w, self._next)
        if key not in self._held:
            self._held[key] = self.fresh(1, w, table)
        return self._held[key]

    @staticmethod
    def fresh(count: int, w: int, table: Any) -> Taken:
        """Room for `count` requests of w rows: no prefix, slot 0, chains."""
        device = table.device
        with torch.inference_mode(False):  # they are written outside of inference mode as well
            return Taken(
                0,
                w,
                torch.zeros((count, table.shape[1]), dtype=table.dtype, device=device),
                torch.zeros((count, w), dtype=torch.int64, device=device),
                torch.arange(-1, w - 1, dtype=torch.int32, device=device).repeat(count, 1),
                torch.zeros(count, dtype=torch.int64, device=device),
            )

    def _parents(self, view: View, parents: Any, first: int) -> None:
        """Parents where the spec info has them, or from SGLang's links; a chain's never change."""
        spec, (count, w) = view.batch.spec_info, parents.shape
        if row_of(str(view.runner.server_args.speculative_algorithm or "")).chain:
            return
        part = slice(first * w, (first + count) * w)
        if getattr(spec, "parents", None) is not None:
            parents.copy_(spec.parents.reshape(-1)[part].view(count, w))
            return
        child, sibling = links_of(spec)
        known, depths = self._depths.get(id(parents), (None, None))
        if known is not parents:
            depths = torch.zeros_like(parents)
            if count == 1:
                self._depths[id(parents)] = parents, depths
        fill_parents(parents, depths, child.reshape(-1)[part], sibling.reshape(-1)[part], count)


@dataclass(frozen=True, slots=True)
class Held:
    """All rows of one layer of a step, on the device, until the step has settled (capture `qkv`).

    `k` and `v` are copies of the tree's rows; the prefix is read from `pools` when it is needed.
    """

    taken: Taken
    layer: int
    scale: float
    q: Any
    output: Any
    k: Any
    v: Any
    pools: tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class Kept:
    """Rows on the host, with the lengths (bs) and parents (bs, w) that they belong to."""

    attention: Attention
    lens: Any
    parents: Any

    def fits(self, step: Step) -> bool:
        """Whether a Step, which may have been read late, is of the same step."""
        held, tree = step.layout.prefix_lens, step.tree.parents
        if held is not None and not np.array_equal(held[: step.bs], self.lens):
            return False
        return tree is None or np.array_equal(np.maximum(tree, -1), np.maximum(self.parents, -1))

    def put(self, step: Step) -> Step:
        """The step with the rows, and with lengths and parents where it has none."""
        changes: dict[str, Any] = {"attention": self.attention}
        if step.layout.prefix_lens is None:
            whole = np.ones(step.padded_bs, np.int64)
            whole[: step.bs] = self.lens
            changes["layout__prefix_lens"] = whole
        if step.tree.parents is None and not step.contract.chain:
            changes["tree__parents"] = self.parents
        return step.replace(**changes)


def kept_rows(held: Held, wanted: int | None, gone: frozenset[int]) -> Kept | str:
    """The rows that were held; or why they cannot be had. Waits for the device.

    All requests where they fit, else the one that is `wanted`. `gone` are requests that have
    ended: their prefix may be somebody else's by now.
    """
    taken = held.taken
    lens = taken.lens.cpu().numpy()
    cell = 2 * held.k.shape[1] * held.k.shape[2] * 4
    some = [i for i in range(len(lens)) if i not in gone]
    if sum(int(lens[i]) + taken.w for i in some) * cell > MAX_ROWS:
        some = [i for i in some if i == wanted] or some[:1]
    if not some:
        return "the requests of the step have ended, and their slots may be in use again"
    if sum(int(lens[i]) + taken.w for i in some) * cell > MAX_ONE:
        return f"{sum(int(lens[i]) for i in some)} prefix rows are too many for a dump"
    parents = taken.parents.cpu().numpy().astype(np.int64)
    return Kept(_rows(held, some, lens), lens, parents)


def _rows(held: Held, some: list[int], lens: Any) -> Attention:
    w, taken = held.taken.w, held.taken
    rows = torch.cat([torch.arange(i * w, (i + 1) * w) for i in some]).to(held.q.device)
    prefix = torch.cat([taken.slots[i, : int(lens[i])] for i in some]).long()

    def host(tensor: Any, at: Any) -> Any:
        picked = tensor[at]
        return (picked.float() if picked.dtype is torch.bfloat16 else picked).cpu().numpy()

    keys, values = held.pools
    return Attention(
        q=host(held.q, rows),
        k=host(held.k, rows),
        v=host(held.v, rows),
        k_prefix=host(keys, prefix),
        v_prefix=host(values, prefix),
        output=host(held.output, rows),
        requests=np.array(some, np.int64),
        scale=held.scale,
        layer=held.layer,
    )
