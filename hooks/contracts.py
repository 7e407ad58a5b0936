"""What each algorithm passes to the Triton verify kernel, and what that kernel reads: one table.

Read off the releases of `facts.MATRIX`. Without it rules would alarm on sound steps: a kernel that
never reads the prefix columns of a mask, a captured buffer that is longer than the batch needs,
lanes that SGLang leaves stale on purpose.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from ddtree_guard.hooks.facts import ALGORITHM as TREE
from ddtree_guard.hooks.facts import Facts
from ddtree_guard.step import Contract

# The extend kernel of every release of the matrix:
#   skips mask columns [0, s) (skip_prefix_custom_mask defaults to True),
#   ends each block of rows at that block's last column (is_causal with a mask), so a node that
#   comes before its parent would not be seen,
#   reads s keys through kv_indices and the w tree keys from the launch's own k and v.
KERNEL = {"reads_prefix_mask": False, "causal_with_mask": True, "kv_includes_draft": False}

# Lanes >= bs of a captured batch. 0.5.12 leaves the tail of positions as the last replay left it.
_PADS: Mapping[str, int] = {"layout.prefix_lens": 1, "slots.out_cache_loc": 0}
PAD_LANES: Mapping[str, Mapping[str, int]] = {
    "capture-replay": _PADS,
    "out-graph": {**_PADS, "positions.values": 0},
    "spec-info": {**_PADS, "positions.values": 0},
    "runner-width": {**_PADS, "positions.values": 0},
}

_NO_MASK = "this algorithm passes no mask on this backend: the kernel applies causality by row"
_NO_PARENTS = "this algorithm keeps no parent array"
_MASK_RULES = ("M1", "M2", "M3", "M4", "M5", "M6", "M8", "M9", "W4")


@dataclass(frozen=True, slots=True)
class Row:
    """One algorithm. `owns_buffer`: its builder passes a whole buffer, in eager steps too: the
    captured one once there is one, or one for the full context where the host does not know the
    lengths (overlap schedule; seen on 0.5.16 with EAGLE, topk 4). `redrafts`: the worker runs the
    drafter again after the walk, in the same step; it shares the target's input buffers.
    """

    algorithm: str
    chain: bool = False
    masked: bool = True
    owns_buffer: bool = False
    redrafts: bool = False
    pad_rows: str = "none"
    not_checked: tuple[tuple[str, str], ...] = ()


ROWS = (
    Row("DDTREE", pad_rows="self"),
    # skips the mask by type name (dflash_utils), so a renamed backend class would change it
    Row("DFLASH", chain=True, masked=False),
    *(
        Row(name, owns_buffer=True, redrafts=True, not_checked=(("T5", _NO_PARENTS),))
        for name in ("EAGLE", "EAGLE3", "STANDALONE")
    ),
    # DFLASH's verify with a confidence head; ragged batches state no width and are not checked
    Row("DSPARK", chain=True, masked=False),
    Row("NGRAM", pad_rows="self", not_checked=(("T5", _NO_PARENTS), ("T4", "pads are nodes"))),
)


def contract_of(algorithm: str, facts: Facts, path: str) -> Contract:
    """The contract of an algorithm's verify step on the Triton backend.

    `path` is "eager" or "graph". An algorithm that has no row gets the most permissive contract,
    named "unknown".
    """
    row = row_of(algorithm)
    graph = path == "graph"
    capacity = graph or row.owns_buffer
    skipped = dict(row.not_checked)
    if not row.masked:
        skipped |= dict.fromkeys(_MASK_RULES, _NO_MASK)
    return Contract(
        name=f"{row.algorithm.lower()}-triton-{path}-{facts.name}",
        algorithm=row.algorithm,
        backend="triton",
        mask_length="capacity" if capacity else "exact",
        pad_rows=row.pad_rows,
        pad_lanes=PAD_LANES[facts.name] if graph else {},
        chain=row.chain,
        not_checked=skipped,
        **KERNEL,
    )


@functools.lru_cache(64)  # asked in every step
def row_of(algorithm: str) -> Row:
    """The row of an algorithm. A fork's `MY_DDTREE` is a DDTREE; others get a permissive row."""
    name = algorithm.upper()
    for row in ROWS:
        if row.algorithm == name or (row.algorithm == TREE and TREE in name):
            return row
    return Row(name, pad_rows="self", not_checked=(("M9", _unknown(name)),))


# Backends whose plan is not read: flashinfer, fa3 and others hold offsets in objects of their own.
_OWN_PLAN = ("W1", "W2", "W3", "W4", "W6", "W7", "W8", "K4")


def contract_elsewhere(algorithm: str, backend: str, path: str) -> Contract:
    """The contract on any other backend: configuration, positions, slots, tree and acceptance."""
    row = row_of(algorithm)
    why = f"{backend} keeps its offsets in a plan that this version does not read"
    mask = f"{backend} holds its mask in a plan that this version does not read"
    skipped = dict.fromkeys(_OWN_PLAN, why) | dict.fromkeys(_MASK_RULES, mask)
    return Contract(
        name=f"{row.algorithm.lower()}-{backend}-{path}",
        algorithm=row.algorithm,
        backend=backend,
        pad_rows=row.pad_rows,
        chain=row.chain,
        not_checked={**dict(row.not_checked), **skipped},
    )


def _unknown(name: str) -> str:
    return f"{name} has no row in the contract table, so its mask length is not known"
