"""Any other backend: what the batch and its spec info say, nothing of the backend's own plan."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_guard.hooks.contracts import contract_elsewhere
from ddtree_guard.hooks.facts import BUDGET, release
from ddtree_guard.hooks.links import with_parents
from ddtree_guard.hooks.observe import host, tree_of
from ddtree_guard.hooks.rope import rope_rows
from ddtree_guard.hooks.view import View
from ddtree_guard.step import Layout, Limits, Positions, Slots, Step, Who, Widths

TREE = ("tree.tokens", "tree.parents", "tree.depths", "tree.sizes")
LINKS = ("tree.retrieve_index", "tree.retrieve_next_token", "tree.retrieve_next_sibling")
OUTCOME = (  # from the hooks of the walk and of the commit
    "outcome.predict", "outcome.accept_index", "outcome.accept_lens", "outcome.delta_kv",
)  # fmt: skip
SUPPLIES = (
    *TREE, *LINKS, *OUTCOME, "layout.prefix_lens", "positions.values", "slots.out_cache_loc",
    "slots.req_to_token", "slots.pools", "slots.row_width", "limits.context", "limits.vocab",
    "who.rids",
)  # fmt: skip
_STATED = ("num_tokens_per_req", "draft_token_num")


def read_step(view: View) -> Step:
    """Widths, tree, positions and slots. Raises ValueError where the batch states no width."""
    batch, runner = view.batch, view.runner
    args, w = runner.server_args, stated(batch.spec_info)
    algorithm = str(args.speculative_algorithm or "")
    budget = getattr(args, BUDGET, None)
    step = Step(
        bs=view.bs,
        padded_bs=len(batch.req_pool_indices),
        widths=Widths(w=w, budget=int(budget) if budget else None),
        layout=Layout(prefix_lens=host(batch.seq_lens)),
        tree=tree_of(batch.spec_info, view.bs, w),
        positions=Positions(values=host(batch.positions)),
        slots=_slots(view, w),
        limits=Limits(context=int(runner.model_config.context_len)),
        who=Who(
            rids=view.rids,
            step_id=view.step_id,
            worker="draft" if runner.is_draft_worker else "target",
            algorithm=algorithm,
            backend=type(view.backend).__name__,
            release=release(),
            path=view.path,
        ),
        contract=contract_elsewhere(algorithm, type(view.backend).__name__, view.path),
    )
    return finish(step, view)


def stated(spec: Any) -> int:
    """Rows per request that the spec info states. Raises ValueError where it states none."""
    if getattr(spec, "ragged_verify_layout", None) is None:
        for name in _STATED:
            value = getattr(spec, name, None)
            if value is not None and int(value) > 0:
                return int(value)
    raise ValueError(f"{type(spec).__name__} states no single width")


def finish(step: Step, view: View) -> Step:
    """What every adapter adds: parents from links, the vocabulary, the rotary table, the rank, the
    runtime state.
    """
    tree = step.tree if step.contract.chain else with_parents(step.tree)
    vocab = getattr(view.runner.model_config, "vocab_size", None)
    graph = step.graph
    if view.replay is not None and graph.num_tokens is not None:
        graph = view.replay.graph(graph.num_tokens)
    return step.replace(
        tree=tree,
        graph=graph,
        limits__vocab=None if vocab is None else int(vocab),
        limits__rope_rows=rope_rows(view.runner),
        who__rank=view.rank,
        widths__state=view.state,
    )


def _slots(view: View, w: int) -> Slots:
    runner, batch = view.runner, view.batch
    pool = runner.req_to_token_pool.req_to_token
    page = int(runner.page_size)
    return Slots(
        out_cache_loc=host(batch.out_cache_loc),
        req_to_token=host(pool[batch.req_pool_indices[: view.bs].long()], np.int64),
        pools={"full": int(runner.token_to_kv_pool_allocator.size) + page},
        page_size=page,
        row_width=int(pool.shape[1]),
        reserve=w,
    )
