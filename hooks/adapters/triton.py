"""SGLang's Triton backend, and forks of it that build their metadata alike."""

from __future__ import annotations

from ddtree_guard.errors import IncompatibleError
from ddtree_guard.hooks import observe
from ddtree_guard.hooks.adapters import generic
from ddtree_guard.hooks.adapters.generic import finish
from ddtree_guard.hooks.facts import facts_of
from ddtree_guard.hooks.view import View
from ddtree_guard.step import Step

SUPPLIES = (
    *generic.SUPPLIES, "widths.holders", "layout.qo_indptr", "layout.kv_indptr",
    "layout.mask_indptr", "layout.kv_indices", "layout.max_extend_len", "layout.rows",
    "mask.cells", "mask.present", "mask.capacity", "mask.rids", "slots.page_size",
    "slots.kernel_page_size", "slots.capacity", "layout.offset_bits", "limits.supports",
    "graph.num_tokens", "graph.born_key", "graph.live_key", "graph.born", "graph.live",
    "graph.prompt_left", "contract.pad_lanes",
)  # fmt: skip


def match(backend_class: type) -> bool:
    """Whether the class builds its metadata like the Triton backend of a known release."""
    try:
        facts_of(backend_class)
    except (IncompatibleError, AttributeError):
        return False
    return True


def read_step(view: View) -> Step:
    """The whole Step: offsets, mask, tree, positions and slots."""
    step = observe.read_step(
        view.backend,
        view.batch,
        view.runner,
        path=view.path,
        bs=view.bs,
        rids=view.rids,
        step_id=view.step_id,
        metadata=view.metadata,
    )
    return finish(step, view)
