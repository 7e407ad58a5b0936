"""Candidates per draft position: the most probable tokens with their log-probabilities.

DFLASH keeps only the argmax of each position; a tree needs the runners-up. Runs inside the draft's
captured graph, so nothing here reads from the device or depends on data in its shape.
"""

from __future__ import annotations

from typing import Any

import torch


def best(values: Any, ids: Any, k: int) -> tuple[Any, Any]:
    """The k largest values per row and their ids. Rank 0 is the first maximum, as in argmax.

    values, ids: (n, m). `topk` leaves the order of equal values open, and half-precision logits
    do tie; with the argmax in front the tree contains DFLASH's chain, ties included.
    """
    top, at = torch.topk(values, k, dim=-1)
    first = values.argmax(dim=-1, keepdim=True)
    at = torch.where(at == first, at[:, :1], at)
    at = torch.cat([first, at[:, 1:]], dim=1)
    return top, ids.gather(1, at)


class Proposer:
    """Turns the drafter's hidden states into candidates through the target's output head.

    Each tensor-parallel rank owns the vocabulary rows [start, start + rows) of `weight`; ids are
    global before the ranks' candidates are merged.
    """

    def __init__(
        self, weight: Any, rows: int, start: int, block: int, top_k: int, group: Any = None
    ) -> None:
        self.weight, self.rows, self.start = weight, rows, start
        self.depth, self.top_k, self.group = block - 1, top_k, group
        self.captured: dict[str, Any] = {}

    def propose(self, hidden: Any) -> tuple[Any, Any]:
        """(bs * block, H) hidden rows to ids int64 and log-probabilities float32 (bs, L, K)."""
        bs = hidden.shape[0] // (self.depth + 1)
        rows = hidden.view(bs, self.depth + 1, -1)[:, 1:].reshape(bs * self.depth, -1)
        logits = torch.matmul(rows.to(self.weight.dtype), self.weight[: self.rows].T).float()
        norm = torch.logsumexp(logits, dim=-1, keepdim=True)
        ids = torch.arange(self.rows, device=logits.device).add_(self.start)
        values, tokens = best(logits, ids.expand(len(logits), -1), min(self.top_k, self.rows))
        if self.group is not None:
            values, tokens, norm = self._merge(*self._filled(values, tokens), norm)
        logp = (values - norm).clamp_(max=0.0)  # rounding may leave a certain token above zero
        shape = (bs, self.depth, -1)
        return tokens.view(shape).contiguous(), logp.view(shape).contiguous()

    def _filled(self, values: Any, tokens: Any) -> tuple[Any, Any]:
        """As many candidates as every rank gives: one that owns fewer tokens adds impossible ones,
        which no tree takes as long as there are others.
        """
        short = self.top_k - values.shape[1]
        if short <= 0:
            return values, tokens
        return (
            torch.cat([values, values.new_full((len(values), short), -torch.inf)], dim=1),
            torch.cat([tokens, tokens.new_full((len(tokens), short), self.start)], dim=1),
        )

    def _merge(self, values: Any, tokens: Any, norm: Any) -> tuple[Any, Any, Any]:
        """Best candidates over all ranks, and the log-sum over the whole vocabulary."""

        def gather(part: Any) -> Any:
            whole = part.new_empty((self.group.world_size * part.shape[0], part.shape[1]))
            self.group.all_gather_into_tensor(whole, part.contiguous())
            ranks = whole.view(self.group.world_size, *part.shape)
            return ranks.transpose(0, 1).reshape(part.shape[0], -1)  # rank order: ids ascend

        values, tokens = gather(values), gather(tokens)
        values, tokens = best(values, tokens, min(self.top_k, values.shape[1]))
        return values, tokens, torch.logsumexp(gather(norm), dim=-1, keepdim=True)

    def allocate(self, max_bs: int) -> None:
        """Buffers that the captured draft graph fills, for up to `max_bs` requests."""
        width = min(self.top_k, self.rows) if self.group is None else self.top_k
        shape, device = (max_bs, self.depth, width), self.weight.device
        self.captured = {
            "tokens": torch.empty(shape, dtype=torch.int64, device=device),
            "logp": torch.empty(shape, dtype=torch.float32, device=device),
        }

    def __call__(self, hidden: Any, input_ids: Any = None) -> None:
        """SGLang's draft sampler hook, run while the draft graph is captured."""
        tokens, logp = self.propose(hidden)
        self.captured["tokens"][: len(tokens)].copy_(tokens)
        self.captured["logp"][: len(logp)].copy_(logp)

    def replayed(self, bs: int) -> tuple[Any, Any]:
        """What the last replay of the draft graph proposed for its first `bs` requests."""
        return self.captured["tokens"][:bs], self.captured["logp"][:bs]
