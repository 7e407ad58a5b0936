"""What each SGLang release's Triton backend does: one table, chosen by what the class looks like.

The version string only labels a row and never chooses it, so a fork that calls itself
`0.5.17+corp.42` gets the row that its code fits. Importing this module loads nothing of SGLang.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddtree_guard.errors import IncompatibleError

BUDGET = "speculative_ddtree_budget"
VARIES = "speculative_ddtree_varies"  # true where a step may verify fewer rows than budget + 1
ALGORITHM = "DDTREE"
SUPPORTED = ">=0.5.12,<0.6"
CLASS = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"


@dataclass(frozen=True, slots=True)
class Release:
    """A release of the test matrix, what its overlay must hold beside it, and its oldest Python."""

    version: str
    pins: tuple[str, ...]
    python: tuple[int, int] = (3, 10)


# transformers wants its own tokenizers and, before 5.19, a huggingface_hub below 2
_HUB = "huggingface_hub==1.33.0"
MATRIX = (
    Release("0.5.12", ("transformers==5.6.0", "tokenizers==0.22.2", _HUB)),
    Release("0.5.16", ("transformers==5.12.1", "tokenizers==0.22.2", _HUB)),
    Release("0.5.17", ("transformers==5.12.1", "tokenizers==0.22.2", _HUB)),
    Release("0.5.20", ("transformers==5.12.1", "tokenizers==0.22.2", _HUB)),
    Release("0.5.23", ("transformers==5.19.0", "tokenizers==0.23.2"), (3, 11)),
)


@dataclass(frozen=True, slots=True)
class Facts:
    """How one generation of the backend finds its width and sizes what a graph reads.

    `has` and `lacks` are attributes of the class; `build` a method and `reads` a name that its
    code mentions (None: must mention no width of the batch). `stated` lists the spec info fields
    that hold the batch's width, in the order in which this generation reads them. `widths` are
    the backend's own copies. `mask` is where the captured mask lives; `mask_cells(D, C)` the
    cells per request that stock allocates for it when the server argument is D.
    """

    name: str
    releases: str
    has: tuple[str, ...]
    lacks: tuple[str, ...]
    build: str
    reads: str | None
    stated: tuple[str, ...]
    widths: tuple[str, ...]
    mask: str
    mask_cells: Callable[[int, int], int]

    @property
    def follows_batch(self) -> bool:
        """Whether stock builds the verify offsets from the batch's width."""
        return self.reads is not None


def _without_tree(width: int, context: int) -> int:
    return width * context


def _with_tree(width: int, context: int) -> int:
    return width * (context + width)


GENERATIONS = (
    Facts(
        name="capture-replay",
        releases="0.5.12",
        has=("init_forward_metadata_capture_cuda_graph", "init_forward_metadata_replay_cuda_graph"),
        lacks=("init_forward_metadata_out_graph",),
        build="init_forward_metadata",
        reads=None,
        stated=("draft_token_num", "num_tokens_per_req", "num_tokens_per_batch"),
        widths=("num_draft_tokens",),
        mask="cuda_graph_custom_mask",
        mask_cells=_without_tree,
    ),
    Facts(
        name="out-graph",
        releases="0.5.13 to 0.5.16",
        has=("init_forward_metadata_out_graph", "get_verify_buffers_to_fill_after_draft"),
        lacks=("init_forward_metadata_capture_cuda_graph", "verify_mask"),
        build="init_forward_metadata",
        reads=None,
        stated=("draft_token_num", "num_tokens_per_req"),
        widths=("num_draft_tokens",),
        mask="cuda_graph_custom_mask",
        mask_cells=_without_tree,
    ),
    Facts(
        name="spec-info",
        releases="0.5.17 to 0.5.20",
        has=("init_forward_metadata_out_graph", "verify_mask"),
        lacks=("_target_verify_num_tokens_per_req",),
        build="init_forward_metadata",
        reads="draft_token_num",
        stated=("draft_token_num", "num_tokens_per_req"),
        widths=("num_draft_tokens",),
        mask="_verify_mask",
        mask_cells=_with_tree,
    ),
    Facts(
        name="runner-width",
        releases="0.5.21 to 0.5.23",
        has=("init_forward_metadata_out_graph", "verify_mask", "_target_verify_num_tokens_per_req"),
        lacks=(),
        build="_target_verify_num_tokens_per_req",
        reads="num_tokens_per_req",
        stated=("num_tokens_per_req", "draft_token_num"),
        widths=("num_draft_tokens", "target_verify_num_tokens_per_req"),
        mask="_verify_mask",
        mask_cells=_with_tree,
    ),
)


# What `init_cuda_graph_state` is known to allocate. Ours can ask for one row per request only where
# it knows every buffer, because it must give those that hold one entry per draft row their rows.
ROW_BUFFERS = (
    "cuda_graph_num_kv_splits",
    "cuda_graph_window_num_kv_splits",
    "cuda_graph_swa_out_cache_loc",
    "cuda_graph_out_cache_loc_full_physical",
)
_OTHER_BUFFERS = (
    "cuda_graph_attn_logits", "cuda_graph_attn_lse", "cuda_graph_swa_attn_logits",
    "cuda_graph_kv_indices", "cuda_graph_window_kv_indices", "cuda_graph_window_kv_offsets",
    "cuda_graph_custom_mask", "cuda_graph_uneven_batch", "cuda_graph_lean_Lp",
    "cuda_graph_lean_Mp", "cuda_graph_lean_Op", "cuda_graph_lean_locks",
)  # fmt: skip


def unknown_buffers(backend_class: type) -> frozenset[str]:
    """Graph buffers that this class allocates and that no release of the matrix has."""
    named = _names(backend_class, "init_cuda_graph_state")
    found = {name for name in named if name.startswith("cuda_graph_")}
    return frozenset(found.difference(ROW_BUFFERS, _OTHER_BUFFERS))


def facts_of(backend_class: type) -> Facts:
    """The row that this Triton backend class fits. Raises IncompatibleError if none does."""
    for facts in GENERATIONS:
        if _fits(facts, backend_class):
            return facts
    raise IncompatibleError(
        f"expected {CLASS} to build its verify metadata as in one of {SUPPORTED} "
        f"({', '.join(f.releases for f in GENERATIONS)}), found SGLang {release()} with a class "
        "that fits none of them; install a supported SGLang, or set "
        "SGLANG_DDTREE_GUARD_BACKEND=stock to leave its backend alone."
    )


def generation_of(version: str) -> Facts | None:
    """The row whose releases hold this version by its label, for a server that cannot be looked at.

    A fork or a release that no row names gives None.
    """
    number = numbers(version)
    for facts in GENERATIONS:
        low, _, high = facts.releases.partition(" to ")
        if number is not None and numbers(low) <= number <= numbers(high or low):  # type: ignore[operator]
            return facts
    return None


def numbers(version: str) -> tuple[int, int, int] | None:
    """(0, 5, 16) of `0.5.16`, `0.5.16.post1` or `0.5.16+cu130`; None for other strings."""
    found = re.match(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})(?![\d])", version)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))


def _fits(facts: Facts, backend_class: type) -> bool:
    if not all(hasattr(backend_class, name) for name in facts.has):
        return False
    if any(hasattr(backend_class, name) for name in facts.lacks):
        return False
    held = _names(backend_class, "__init__")
    if not held.issuperset(facts.widths):  # renamed: what we would set, nobody would read
        return False
    if facts.mask not in _names(backend_class, "init_cuda_graph_state"):
        return False
    mentioned = _names(backend_class, facts.build)
    if facts.reads is None:
        return not mentioned.intersection(facts.stated)
    return facts.reads in mentioned


def _names(backend_class: type, method: str) -> frozenset[str]:
    """Attribute names and string constants in a method's code, in every class that defines it.

    All of them, because a subclass (ours, or a plugin's) may only wrap what its base does.
    """
    names: set[str] = set()
    for owner in backend_class.__mro__:
        code = getattr(inspect.unwrap(vars(owner).get(method, len)), "__code__", None)
        if code is not None:
            names.update(code.co_names, (c for c in code.co_consts if isinstance(c, str)))
    return frozenset(names)


def stated_width(facts: Facts, spec_info: Any) -> int | None:
    """Rows per request that a batch's spec info states, or None.

    A ragged verify has no single width; such batches are left to SGLang.
    """
    if spec_info is None or getattr(spec_info, "ragged_verify_layout", None) is not None:
        return None
    for name in facts.stated:
        value = getattr(spec_info, name, None)
        if value is not None and int(value) > 0:
            return int(value)
    return None


def release() -> str:
    """The installed SGLang's version string, or "unknown"."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
