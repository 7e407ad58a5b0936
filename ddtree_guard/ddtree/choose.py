"""The target's token for every row of a verified tree: greedy, or drawn as plain decoding draws.

Rows of a request use that request's temperature, top-k, top-p, min-p and seed, so a batch may mix
greedy and sampled requests. Drawing goes through SGLang's own sampler, which makes a row's token
what plain decoding would draw after the same prefix; with a seed, noise depends on the seed and
the position only, and so does the text.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

ROWS_AT_ONCE = 2048  # rows of probabilities held at a time


def choose(logits: Any, info: Any, width: int, positions: Any, sampler: Any) -> Any:
    """(bs * w, V) logits to (bs, w) int64 tokens.

    `info` is SGLang's sampling info of the batch, None for greedy. `positions` are the rows'
    positions, (bs * w,). Logits are left as they are.
    """
    if info is None or info.is_all_greedy:
        return logits.argmax(dim=-1).view(-1, width)
    rows = expand(info, width)
    plain = not (info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling)
    parts = []
    for start in range(0, logits.shape[0], ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        part = _slice(rows, some)
        probs = torch.softmax(logits[some].float() / part.temperatures, dim=-1)
        drawn = sampler._sample_from_probs(probs, part, positions[some], plain)
        parts.append(drawn.view(-1).to(torch.int64))
    return torch.cat(parts).view(-1, width)


_PER_REQUEST = ("temperatures", "top_ks", "top_ps", "min_ps", "sampling_seed")


def expand(info: Any, width: int) -> SimpleNamespace:
    """Sampling parameters per row instead of per request."""
    rows = SimpleNamespace(need_min_p_sampling=info.need_min_p_sampling)
    for name in _PER_REQUEST:
        value = getattr(info, name)
        repeated = None if value is None else value.repeat_interleave(width, dim=0)
        setattr(rows, name, repeated)
    return rows


def _slice(rows: SimpleNamespace, some: slice) -> SimpleNamespace:
    part = SimpleNamespace(need_min_p_sampling=rows.need_min_p_sampling)
    for name in _PER_REQUEST:
        value = getattr(rows, name)
        setattr(part, name, None if value is None else value[some])
    return part
