"""Candidates of the drafter: the chain in front, global ids, ranks merged as one vocabulary."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ddtree_guard.ddtree.propose import Proposer, best  # noqa: E402

BLOCK, HIDDEN, VOCAB = 5, 16, 40


class Rank:
    """A tensor-parallel group of one process that plays all ranks in turn."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.parts = world_size, list[list[Any]]()
        self.turn = self.call = 0

    def all_gather_into_tensor(self, whole: Any, part: Any) -> None:
        """First pass: remember every rank's part. Second: hand out all of them."""
        if len(self.parts) <= self.call:
            self.parts.append([])
        if len(self.parts[self.call]) < self.world_size:
            self.parts[self.call].append(part.clone())
        if len(self.parts[self.call]) == self.world_size:
            whole.copy_(torch.cat(self.parts[self.call]))
        self.call += 1


def hidden_and_weight(seed: int, coarse: bool) -> tuple[Any, Any]:
    """Hidden rows of three blocks and an output head; `coarse` values make logits tie."""
    rng = torch.Generator().manual_seed(seed)
    draw = torch.randint(-2, 3, (3 * BLOCK + VOCAB, HIDDEN), generator=rng).float()
    fine = torch.randn((3 * BLOCK + VOCAB, HIDDEN), generator=rng)
    rows = draw if coarse else fine
    return rows[: 3 * BLOCK], rows[3 * BLOCK :]


@pytest.mark.parametrize("coarse", [False, True], ids=["random", "ties"])
@pytest.mark.parametrize("seed", range(5))
def test_rank_zero_is_the_chain_and_log_probabilities_are_those_of_the_head(
    seed: int, coarse: bool
) -> None:
    hidden, weight = hidden_and_weight(seed, coarse)
    tokens, logp = Proposer(weight, VOCAB, 0, BLOCK, 6).propose(hidden)
    logits = hidden.view(3, BLOCK, -1)[:, 1:] @ weight.T
    assert tokens.shape == logp.shape == (3, BLOCK - 1, 6)
    assert (tokens[..., 0] == logits.argmax(-1)).all()
    wanted = torch.log_softmax(logits, -1)
    assert torch.allclose(logp, wanted.gather(-1, tokens).clamp(max=0), atol=1e-5)
    assert (logp[..., :-1] >= logp[..., 1:]).all()
    assert all(len(set(row.tolist())) == 6 for row in tokens.view(-1, 6))


@pytest.mark.parametrize("coarse", [False, True], ids=["random", "ties"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_propose_what_one_would(world: int, coarse: bool) -> None:
    hidden, weight = hidden_and_weight(7, coarse)
    alone = Proposer(weight, VOCAB, 0, BLOCK, 6).propose(hidden)
    group, rows = Rank(world), VOCAB // world
    for _ in range(2):  # once to collect the parts, once to read the whole
        for rank in range(world):
            group.call = 0
            shard = weight[rank * rows : (rank + 1) * rows]
            padded = torch.cat([shard, torch.full((8, HIDDEN), 99.0)])  # rows of no token
            proposer = Proposer(padded, rows, rank * rows, BLOCK, 6, group)
            tokens, logp = proposer.propose(hidden)
    assert torch.allclose(logp, alone[1], atol=1e-5)
    assert (tokens[..., 0] == alone[0][..., 0]).all()  # ties too: the lowest id first
    logits = hidden.view(3, BLOCK, -1)[:, 1:] @ weight.T
    assert torch.allclose(logits.gather(-1, tokens), logits.gather(-1, alone[0]))


@pytest.mark.parametrize("shares", [(37, 3), (3, 37), (38, 2)])
def test_a_rank_with_fewer_tokens_than_candidates_gives_as_many_as_the_others(
    shares: tuple[int, int],
) -> None:
    """The last rank of a padded vocabulary. Ranks gather one shape, or they hang."""
    hidden, weight = hidden_and_weight(7, coarse=False)
    alone = Proposer(weight, VOCAB, 0, BLOCK, 6).propose(hidden)
    group = Rank(2)
    for _ in range(2):
        for rank, start in enumerate((0, shares[0])):
            group.call = 0
            shard = weight[start : start + shares[rank]]
            proposer = Proposer(shard, shares[rank], start, BLOCK, 6, group)
            tokens, logp = proposer.propose(hidden)
    assert len({part.shape for part in group.parts[0]}) == 1
    assert torch.equal(tokens, alone[0])
    assert torch.allclose(logp, alone[1], atol=1e-5)
    proposer.allocate(4)
    assert proposer.captured["tokens"].shape == (4, BLOCK - 1, 6)


def test_more_candidates_than_tokens_are_cut_to_the_vocabulary() -> None:
    hidden, weight = hidden_and_weight(1, coarse=False)
    proposer = Proposer(weight, VOCAB, 0, BLOCK, 64)
    assert proposer.propose(hidden)[0].shape[-1] == VOCAB


def test_a_captured_proposer_fills_static_buffers_of_the_live_requests() -> None:
    hidden, weight = hidden_and_weight(2, coarse=False)
    proposer = Proposer(weight, VOCAB, 0, BLOCK, 6)
    proposer.allocate(8)
    proposer(hidden)
    held = proposer.captured["tokens"].data_ptr()
    tokens, logp = proposer.replayed(3)
    wanted = proposer.propose(hidden)
    assert tokens.data_ptr() == held
    assert torch.equal(tokens, wanted[0])
    assert torch.equal(logp, wanted[1])


def test_equal_values_keep_the_first_maximum_in_front() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    for k in (1, 2, 3):
        top, ids = best(values, torch.arange(5).expand(1, -1), k)
        assert ids[0, 0] == 1
        assert len(set(ids[0].tolist())) == k
        assert (values.gather(1, ids) == top).all()
