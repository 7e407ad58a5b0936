"""Memory of captured verify graphs: what SGLang's Triton backend allocates and what ours does."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree_guard.attention.backend import VerifyBytes, verify_buffer_bytes
from ddtree_guard.doctor.deployment import Deployment
from ddtree_guard.hooks.facts import Facts


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the persistent buffers for `lanes` requests of `w` rows at full context.

    `logits_known` False: the number of heads is not known and attention logits are left out.
    """

    lanes: int
    w: int
    context: int
    stock: VerifyBytes
    corrected: VerifyBytes
    logits_known: bool


def verify_memory(d: Deployment, facts: Facts | None) -> Memory | None:
    """The buffers of a deployment, or None where nothing is captured or a size is not known."""
    if facts is None or not d.graphs or None in (d.lanes, d.w, d.context, d.declared):
        return None
    assert d.lanes is not None
    assert d.w is not None
    assert d.context is not None
    heads, dim = d.heads_per_rank, d.model.head_dim
    known = heads is not None and dim is not None
    return Memory(
        lanes=d.lanes,
        w=d.w,
        context=d.context,
        stock=_stock(d, facts, heads or 0, dim or 0),
        corrected=verify_buffer_bytes(d.lanes, d.w, d.context, heads or 0, dim or 0, d.kv_splits),
        logits_known=known,
    )


def _stock(d: Deployment, facts: Facts, heads: int, dim: int) -> VerifyBytes:
    """Stock sizes everything by draft row: `lanes * D` of them."""
    assert d.lanes is not None
    assert d.context is not None
    assert d.declared is not None
    rows = d.lanes * d.declared
    logits = rows * heads * d.kv_splits * (dim + 1) * 4
    mask = d.lanes * facts.mask_cells(d.declared, d.context)
    return VerifyBytes(
        mask=mask, kv_indices=rows * d.context * 8, attn_logits=logits, rows=rows * 4
    )
