"""The configuration of a server as a Step: every holder of a width, before the first request."""

from __future__ import annotations

from typing import Any

from ddtree_guard.attention.backend import is_corrected, tree_algorithm, tree_width
from ddtree_guard.errors import IncompatibleError
from ddtree_guard.hooks.contracts import contract_elsewhere, contract_of, row_of
from ddtree_guard.hooks.facts import ALGORITHM as TREE
from ddtree_guard.hooks.facts import BUDGET, Facts, facts_of, release
from ddtree_guard.hooks.rope import rope_rows
from ddtree_guard.hooks.statics import graph_runner
from ddtree_guard.step import Contract, Limits, Step, Who, Widths

_GRAPH_WIDTHS = ("captured_req_width", "num_tokens_per_bs")


def read_configuration(
    runner: Any, backend: Any, drafts: list[tuple[Any, Any]], rank: str = "TP0"
) -> Step:
    """The Step of a target runner and its backend; `drafts` are (runner, backend) of draft models.

    It has no requests: only rules of the init site can be evaluated on it.
    """
    args, facts = runner.server_args, _facts(backend)
    algorithm = str(args.speculative_algorithm or "")
    declared = int(args.speculative_num_draft_tokens or 0)
    w = tree_width(runner) or declared
    budget = getattr(args, BUDGET, None)
    block = getattr(args, "speculative_dflash_block_size", None)
    eagle = row_of(algorithm).owns_buffer
    draft = _draft(algorithm, drafts, block or declared)
    return Step(
        bs=0,
        padded_bs=0,
        widths=Widths(
            w=w,
            holders=_holders(runner, backend, facts, w),
            block=int(block) if block else None,
            budget=int(budget) if budget and tree_algorithm(args) else None,
            depth_max=int(block) - 1 if block and row_of(algorithm).algorithm == TREE else None,
            draft_width=draft[0],
            draft_rows=draft[1],
            num_draft_tokens=declared if eagle else None,
            num_steps=args.speculative_num_steps if eagle else None,
            topk=args.speculative_eagle_topk if eagle else None,
        ),
        limits=_limits(runner, backend, facts, drafts, w, declared),
        who=Who(
            rank=rank,
            algorithm=algorithm,
            backend="triton" if facts else type(backend).__name__,
            backend_kind="corrected" if is_corrected(backend) else "stock",
            release=release(),
        ),
        contract=_contract(algorithm, backend, facts),
    )


def _facts(backend: Any) -> Facts | None:
    try:
        return facts_of(type(backend))
    except (IncompatibleError, AttributeError):
        return None


def _contract(algorithm: str, backend: Any, facts: Facts | None) -> Contract:
    if facts is None:
        return contract_elsewhere(algorithm, type(backend).__name__, "eager")
    return contract_of(algorithm, facts, "eager")


def _holders(runner: Any, backend: Any, facts: Facts | None, w: int) -> dict[str, int]:
    """Copies of the width on the target. A backend that follows the batch holds none."""
    held = {}
    if facts is not None:
        follows = facts.follows_batch or is_corrected(backend)
        held["backend"] = w if follows else int(getattr(backend, facts.widths[0]))
    graphs = graph_runner(runner)
    for name in _GRAPH_WIDTHS:
        value = getattr(graphs, name, None)
        if value is not None:
            held["graph_runner"] = int(value)
            break
    return held


def _draft(
    algorithm: str, drafts: list[tuple[Any, Any]], block: int
) -> tuple[int | None, int | None]:
    """(width of the draft backend, rows its proposer emits), for drafters of whole blocks."""
    row = row_of(algorithm)
    if not (row.algorithm == "DDTREE" or row.chain):
        return None, None
    for _, backend in drafts:
        facts = _facts(backend)
        if facts is not None:
            return int(getattr(backend, facts.widths[0])), int(block)
    return None, None


def _limits(
    runner: Any, backend: Any, facts: Facts | None, drafts: list[tuple[Any, Any]], w: int, d: int
) -> Limits:
    config = runner.model_config
    vocab = getattr(config, "vocab_size", None)
    context = [int(draft.model_config.context_len) for draft, _ in drafts]
    tables = [rows for draft, _ in drafts if (rows := rope_rows(draft)) is not None]
    supports: tuple[str, ...] | None = None
    if facts is not None:
        free = facts.follows_batch or is_corrected(backend) or w == d
        supports = ("custom_mask", "width_not_block") if free else ("custom_mask",)
    tree = tree_width(runner) is not None
    return Limits(
        vocab=None if vocab is None else int(vocab),
        context=int(config.context_len),
        draft_context=min(context) if context else None,
        rope_rows=rope_rows(runner),
        draft_rope_rows=min(tables) if tables else None,
        supports=supports,
        needs=("custom_mask", "width_not_block") if tree else (),
    )
