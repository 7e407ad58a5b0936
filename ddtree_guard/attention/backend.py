"""SGLang's Triton attention backend with the width of the active tree.

Stock takes rows per request from the server argument, which for DDTree is the draft block size.
The subclass made here holds w = budget + 1 on the target from `__init__` on, follows the batch
where its spec info states a width, and sizes what a captured graph reads for w. Everything else
is SGLang's own code. Importing this module loads no torch and no SGLang.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ddtree_guard.config import Backend
from ddtree_guard.errors import IncompatibleError
from ddtree_guard.hooks.facts import (
    ALGORITHM,
    BUDGET,
    CLASS,
    ROW_BUFFERS,
    VARIES,
    Facts,
    facts_of,
    release,
    stated_width,
    unknown_buffers,
)
from ddtree_guard.hooks.patching import Original, Patch, PatchReport, apply


@dataclass(frozen=True, slots=True)
class VerifyBytes:
    """Bytes of the persistent buffers of captured verify graphs."""

    mask: int
    kv_indices: int
    attn_logits: int
    rows: int

    @property
    def total(self) -> int:
        """All of them together."""
        return self.mask + self.kv_indices + self.attn_logits + self.rows


def verify_buffer_bytes(
    batch: int, w: int, context: int, heads: int, head_dim: int, kv_splits: int = 8
) -> VerifyBytes:
    """What the corrected backend allocates for graphs of up to `batch` requests of w rows.

    The mask holds batch*w*(reach+w) bytes; verify reads at most batch*reach KV indices of 8 bytes,
    and needs no attention logits per draft row, only decode's one per request.
    """
    lanes = _decode_lanes(batch, w, context)
    logits = lanes * heads * kv_splits * (head_dim + 1) * 4  # float32 partial rows and their sums
    return VerifyBytes(
        mask=batch * w * (reach(context, w) + w),
        kv_indices=lanes * context * 8,
        attn_logits=logits,
        rows=batch * w * 4,
    )


def reach(context: int, w: int) -> int:
    """Most committed tokens that a verify step starts from. One that runs ahead of the host, behind
    a step that ends the request at the context limit, starts up to w tokens beyond that limit.
    """
    return context + w


def _decode_lanes(batch: int, w: int, context: int) -> int:
    """Requests whose KV indices at full context hold `batch` of them at full reach."""
    return -(-batch * reach(context, w) // context)


def require_fit(need: VerifyBytes, free: int, batch: int, w: int, context: int) -> None:
    """Raise IncompatibleError when the verify buffers do not fit into `free` bytes."""
    if need.total <= free:
        return
    raise IncompatibleError(
        f"expected {_gib(need.total)} of free device memory for verify graphs of {batch} requests "
        f"x {w} rows at context {context} (mask {_gib(need.mask)}, KV indices "
        f"{_gib(need.kv_indices)}), found {_gib(free)}; lower the tree budget, "
        "--cuda-graph-max-bs or --context-length, or lower --mem-fraction-static."
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def tree_width(model_runner: Any) -> int | None:
    """Rows per request that the active tree needs on this runner; None without a tree.

    None on the draft runner, whose rows are the draft block. Raises IncompatibleError for a
    budget that is not a positive whole number.
    """
    args = model_runner.server_args
    budget = getattr(args, BUDGET, None)
    if model_runner.is_draft_worker or budget is None or not tree_algorithm(args):
        return None
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise IncompatibleError(
            f"expected {BUDGET} to be a whole number of at least 1, found {budget!r}; "
            "set the tree budget to the number of draft nodes to verify."
        )
    return budget + 1


def tree_algorithm(server_args: Any) -> bool:
    """Whether the server runs a DDTree algorithm."""
    return ALGORITHM in str(getattr(server_args, "speculative_algorithm", None) or "").upper()


def needs_correction(model_runner: Any, facts: Facts) -> bool:
    """Whether stock would get this runner's tree width wrong, or capture too small a mask."""
    w = tree_width(model_runner)
    if w is None:
        return False
    args = model_runner.server_args
    stock = int(args.speculative_num_draft_tokens or 0)
    if not facts.follows_batch and (stock != w or getattr(args, VARIES, False)):
        return True
    context = int(model_runner.model_config.context_len)
    longest = reach(context, w) if getattr(args, VARIES, False) else context
    graphs = not getattr(args, "disable_cuda_graph", False)
    return graphs and facts.mask_cells(stock, context) < w * (longest + w)


# Keyed by the stock class. A container, because SGLang's HookRegistry rewrites module globals
# that hold a class it replaces.
_CLASSES: dict[type, type] = {}


def corrected_class(stock: type) -> type:
    """The corrected subclass of a Triton backend class, made once per class.

    Raises IncompatibleError if the class fits no known generation.
    """
    if stock not in _CLASSES:
        _CLASSES[stock] = _make_class(stock, facts_of(stock))
    return _CLASSES[stock]


def is_corrected(backend: Any) -> bool:
    """Whether a backend object is of the corrected class."""
    return type(backend) in _CLASSES.values()


def _make_class(stock: Any, facts: Facts) -> type:
    # The name stays: SGLang picks DFLASH's mask policy by type(backend).__name__.
    class TritonAttnBackend(stock):  # type: ignore[misc]
        """SGLang's backend, holding the width of the active tree."""

        def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(model_runner, *args, **kwargs)
            self.ddtree_width = tree_width(model_runner)
            if self.ddtree_width is not None:
                for name in facts.widths:
                    setattr(self, name, self.ddtree_width)

        def init_forward_metadata(self, forward_batch: Any) -> Any:
            with _batch_width(self, facts, forward_batch.forward_mode, forward_batch.spec_info):
                return super().init_forward_metadata(forward_batch)

        def init_cuda_graph_state(
            self, max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any
        ) -> None:
            w = self.ddtree_width
            if w is None:
                super().init_cuda_graph_state(max_bs, max_num_tokens, *args, **kwargs)
                return
            _check_memory(self, max_bs, w)
            # About one "token" per request: KV indices for BS * reach and one row of decode's
            # logits. What stock sizes by row is widened below. A buffer that we do not know may
            # hold rows, so a class that has one gets all of stock's sizes, at the cost of memory.
            rows = max(max_num_tokens, max_bs * w)
            few = min(rows, _decode_lanes(max_bs, w, self.max_context_len))
            tokens = rows if unknown_buffers(stock) else few
            super().init_cuda_graph_state(max_bs, tokens, *args, **kwargs)
            _widen(self, facts, max_bs, rows)

        if hasattr(stock, "init_forward_metadata_out_graph"):

            def init_forward_metadata_out_graph(
                self, forward_batch: Any, in_capture: bool = False
            ) -> Any:
                mode, spec = forward_batch.forward_mode, forward_batch.spec_info
                with _batch_width(self, facts, mode, spec):
                    result = super().init_forward_metadata_out_graph(forward_batch, in_capture)
                _clear_tail(self, facts, mode, spec, forward_batch.batch_size)
                return result

        else:  # 0.5.12 hands the fields over one by one

            def init_forward_metadata_capture_cuda_graph(self, *args: Any, **kwargs: Any) -> Any:
                stock_call = super().init_forward_metadata_capture_cuda_graph
                mode, spec, _ = _fields(stock_call, args, kwargs)
                with _batch_width(self, facts, mode, spec):
                    return stock_call(*args, **kwargs)

            def init_forward_metadata_replay_cuda_graph(self, *args: Any, **kwargs: Any) -> Any:
                stock_call = super().init_forward_metadata_replay_cuda_graph
                mode, spec, bs = _fields(stock_call, args, kwargs)
                with _batch_width(self, facts, mode, spec):
                    result = stock_call(*args, **kwargs)
                _clear_tail(self, facts, mode, spec, bs)
                return result

    TritonAttnBackend.__qualname__ = stock.__qualname__
    TritonAttnBackend.__module__ = __name__
    return TritonAttnBackend


def _fields(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, int]:
    """Forward mode, spec info and batch size of a call to 0.5.12's capture or replay."""
    given = inspect.signature(call).bind(*args, **kwargs).arguments
    return given["forward_mode"], given["spec_info"], given["bs"]


@contextmanager
def _batch_width(backend: Any, facts: Facts, mode: Any, spec_info: Any) -> Iterator[None]:
    """Hold the width that a verify batch states for one call. Restored even if the call fails."""
    w = stated_width(facts, spec_info) if mode.is_target_verify() else None
    if w is None:
        yield
        return
    held: Mapping[str, Any] = {name: getattr(backend, name) for name in facts.widths}
    try:
        for name in held:
            setattr(backend, name, w)
        yield
    finally:
        for name, value in held.items():
            setattr(backend, name, value)


def _clear_tail(backend: Any, facts: Facts, mode: Any, spec_info: Any, lanes: int) -> None:
    """Zero the mask cells behind the live ones that padded lanes read.

    A replay copies the live cells only, and padded lanes would read what a longer step left
    there. They have committed length 1, so lanes*w*(1+w) cells are enough.
    """
    w, mask = backend.ddtree_width, getattr(spec_info, "custom_mask", None)
    buffer = graph_mask(backend, facts)
    if w is None or mask is None or buffer is None or not mode.is_target_verify():
        return
    live = mask.shape[0]
    buffer[live : live + lanes * w * (1 + w)].zero_()


def graph_mask(backend: Any, facts: Facts) -> Any:
    """The mask buffer that captured graphs read, or None before capture."""
    held = getattr(backend, facts.mask, None)
    return getattr(held, "buffer", held)


def _check_memory(backend: Any, batch: int, w: int) -> None:
    free = free_bytes(backend.device)
    if free is None:
        return
    need = verify_buffer_bytes(
        batch,
        w,
        backend.max_context_len,
        backend.num_head,
        backend.v_head_dim,
        backend.max_kv_splits,
    )
    require_fit(need, free, batch, w, backend.max_context_len)


def free_bytes(device: Any) -> int | None:
    """Free memory of a CUDA device in bytes; None on other devices."""
    import torch

    if torch.device(device).type != "cuda":
        return None
    return int(torch.cuda.mem_get_info(device)[0])


def _widen(backend: Any, facts: Facts, batch: int, rows: int) -> None:
    """Give every per-row buffer `rows` entries, and the mask its w*(reach+w) cells per request."""
    for name in ROW_BUFFERS:
        buffer = getattr(backend, name, None)
        if buffer is not None and buffer.shape[0] < rows:
            # stock fills each of them with one value
            setattr(backend, name, buffer[:1].expand(rows, *buffer.shape[1:]).clone())
    buffer, w = graph_mask(backend, facts), backend.ddtree_width
    if buffer is not None:
        cells = batch * w * (reach(backend.max_context_len, w) + w)
        _replace_mask(backend, facts, buffer.new_zeros(cells))


def _replace_mask(backend: Any, facts: Facts, buffer: Any) -> None:
    """Where a struct holds the mask it is frozen: a new one takes its place."""
    held = getattr(backend, facts.mask)
    if hasattr(held, "buffer"):
        buffer = importlib.import_module("msgspec.structs").replace(held, buffer=buffer)
    setattr(backend, facts.mask, buffer)


REGISTRY = "sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS[triton]"


def install(choice: Backend) -> PatchReport | None:
    """Let SGLang's attention registry create the backend that `choice` asks for.

    auto: corrected where `needs_correction`, else a genuine stock instance; the registry is
    touched only if a budget can exist. corrected: always the subclass, for the target and the
    draft. stock: nothing is touched. Returns None where nothing is touched. Raises
    IncompatibleError if the registry or the backend class is not what any known release has.
    """
    if choice is Backend.STOCK or (choice is Backend.AUTO and not budget_possible()):
        return None
    return apply([registry_patch(choice)]).require()


def budget_possible() -> bool:
    """Whether this SGLang can be given a tree budget: it is a fork, or DDTREE is registered."""
    if importlib.util.find_spec("sglang") is None:
        return False
    try:
        args = importlib.import_module("sglang.srt.server_args").ServerArgs
        registry = importlib.import_module("sglang.srt.speculative.spec_registry")
    except (ImportError, AttributeError):  # older than 0.5.12: no plugins, no registered algorithms
        return False
    return hasattr(args, BUDGET) or registry.get_spec(ALGORITHM) is not None


def registry_patch(choice: Backend) -> Patch:
    """The one patch that gives the target runner its backend."""
    return Patch(
        target=REGISTRY,
        why="gives the target runner a backend whose width is the active tree's",
        wrap=lambda original: _factory(original, choice),
        expects=("runner",),
    )


def _factory(original: Original, choice: Backend) -> Any:
    def create_triton_backend(runner: Any) -> Any:
        """Create the Triton backend for a runner: stock or corrected."""
        if choice is Backend.AUTO and tree_width(runner) is None:
            return original.value(runner)
        module = importlib.import_module("sglang.srt.layers.attention.triton_backend")
        stock = getattr(module, CLASS.rpartition(".")[2], None)
        if not isinstance(stock, type):
            raise IncompatibleError(
                f"expected the class {CLASS}, found none in SGLang {release()}; install a "
                "supported SGLang, or set SGLANG_DDTREE_GUARD_BACKEND=stock to use its own."
            )
        if stock in _CLASSES.values():  # another layer of ours is further out
            return original.value(runner)
        if choice is Backend.AUTO and not needs_correction(runner, facts_of(stock)):
            return original.value(runner)
        return _create(original, module, runner)

    return create_triton_backend


def _create(original: Original, module: Any, runner: Any) -> Any:
    """Run SGLang's own factory with the corrected class in the place of the stock one.

    The factory looks the class up when it runs, so whatever else it does stays its own.
    """
    stock = module.TritonAttnBackend
    corrected = corrected_class(stock)
    module.TritonAttnBackend = corrected
    try:
        backend = original.value(runner)
    finally:
        module.TritonAttnBackend = stock
    if type(backend) is not corrected:
        raise IncompatibleError(
            f"expected SGLang's triton factory to create {CLASS}, found that it created "
            f"{type(backend).__module__}.{type(backend).__qualname__}; remove the plugin that "
            "replaced the factory, or set SGLANG_DDTREE_GUARD_BACKEND=stock."
        )
    return backend
