"""The static input buffers of SGLang's decode graph runner: what a captured graph reads.

The view that SGLang hands to the backend before a replay (`build_replay_fb_view`, 0.5.13 to
0.5.23) holds the runner's padded buffers, except `out_cache_loc`, which is the live batch's own,
one entry per live row. The graph reads the padded one.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

RUNNERS = ("decode_cuda_graph_runner", "graph_runner")  # 0.5.13 on; 0.5.12


def graph_runner(runner: Any) -> Any:
    """The decode graph runner of a model runner, or None. Adaptive speculation swaps it."""
    for name in RUNNERS:
        found = getattr(runner, name, None)
        if found is not None:
            return found
    return None


def replayed(batch: Any, runner: Any) -> Any:
    """The replay view `batch` with every input as the graph reads it. The view is not changed."""
    buffers = getattr(graph_runner(runner), "buffers", None)
    static = getattr(buffers, "out_cache_loc", None)
    if static is None:
        return batch
    rows = batch.input_ids.shape[0]  # `len` of a tensor takes five times as long
    if static.shape[0] < rows:
        return batch
    # SGLang's view is a namespace, which `copy` takes apart and puts together again
    plain = type(batch) is SimpleNamespace
    whole = SimpleNamespace(**vars(batch)) if plain else copy.copy(batch)
    whole.out_cache_loc = static[:rows]
    return whole


def handed_over(given: dict[str, Any], runner: Any) -> SimpleNamespace:
    """The replay view of 0.5.12, whose backend gets its fields one by one."""
    buffers, lanes, spec = runner.graph_runner.buffers, given["bs"], given["spec_info"]
    rows = lanes * int(getattr(spec, "draft_token_num", 0) or 0)
    return SimpleNamespace(
        forward_mode=given["forward_mode"],
        spec_info=spec,
        batch_size=lanes,
        req_pool_indices=given["req_pool_indices"][:lanes],
        seq_lens=given["seq_lens"][:lanes],
        seq_lens_cpu=given["seq_lens_cpu"],
        input_ids=buffers.input_ids[:rows],
        positions=buffers.positions[:rows],
        out_cache_loc=buffers.out_cache_loc[:rows],
    )
