"""The tree kernels compiled, on a GPU: the interpreter's cases again, and many more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ddtree_guard.ddtree import tree, tree_kernel, verify, verify_kernel  # noqa: E402
from ddtree_guard.ddtree.choose import choose  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
FIELDS = ("tokens", "parents", "depths", "sizes", "next_token", "next_sibling")


def case(rng: np.random.Generator, bs: int, ties: bool) -> tuple[Any, Any, Any]:
    """tokens, logp, roots."""
    depth, top_k = int(rng.integers(1, 32)), int(rng.integers(1, 33))
    shape = (bs, depth, top_k)
    logp = -(rng.integers(0, 3, shape) if ties else rng.exponential(2.0, shape))
    logp = -np.sort(-logp.astype(np.float32), axis=-1)
    tokens = np.argsort(rng.random((*shape[:2], 64)), axis=-1)[..., :top_k]
    return np.ascontiguousarray(tokens), logp, rng.integers(0, 64, bs)


def on_gpu(*parts: Any) -> list[Any]:
    return [torch.from_numpy(np.ascontiguousarray(part)).cuda() for part in parts]


@pytest.mark.parametrize("ties", [False, True], ids=["random", "ties"])
@pytest.mark.parametrize("budget", [1, 2, 7, 8, 15, 16, 17, 31, 32, 64, 255, 256, 257])
def test_search_equals_reference(budget: int, ties: bool) -> None:
    rng = np.random.default_rng(budget)
    for _ in range(4):
        inputs = case(rng, 24 if budget < 100 else 6, ties)
        wanted = tree.search(*inputs, budget)
        found = tree_kernel.build(*on_gpu(*inputs), budget)
        for name in FIELDS:
            assert (getattr(wanted, name) == getattr(found, name).cpu().numpy()).all(), name
        lens = rng.integers(0, 3000, len(inputs[2]))
        cells, _ = tree.paint(wanted, lens)
        mask = torch.full((len(cells) + 9,), 5, dtype=torch.uint8, device="cuda")
        rows = torch.empty(found.parents.numel(), dtype=torch.int64, device="cuda")
        tree_kernel.paint(found, torch.from_numpy(lens).cuda(), rows, mask)
        assert (mask[:-9].cpu().numpy() == cells).all()
        assert (mask[-9:] == 5).all()
        assert (rows.cpu().numpy() == tree.positions(wanted, lens)).all()


def test_search_equals_reference_at_the_largest_sizes() -> None:
    rng = np.random.default_rng(1)
    logp = -np.sort(rng.integers(0, 9, (3, 31, 40)).astype(np.float32), axis=-1)
    inputs = rng.integers(0, 151_936, logp.shape), logp, rng.integers(0, 9, 3)
    wanted, found = tree.search(*inputs, 1024), tree_kernel.build(*on_gpu(*inputs), 1024)
    for name in FIELDS:
        assert (getattr(wanted, name) == getattr(found, name).cpu().numpy()).all(), name


@pytest.mark.parametrize("budget", [7, 16, 64, 256])
def test_walk_and_moves_equal_reference(budget: int) -> None:
    rng = np.random.default_rng(budget)
    for _ in range(6):
        tokens, logp, roots = case(rng, 16, ties=False)
        trees, block = tree.search(tokens, logp, roots, budget), logp.shape[1] + 1
        predict = rng.integers(0, 64, trees.tokens.shape)
        for i in range(16):  # follow the tree where it goes
            for row in rng.permutation(np.arange(1, int(trees.sizes[i]))):
                predict[i, trees.parents[i, row]] = trees.tokens[i, row]
        lens = rng.integers(1, 900, 16)
        wanted = verify.walk(trees.tokens, trees.parents, predict, lens, block)
        device = tree_kernel.build(*on_gpu(tokens, logp, roots), budget)
        found = verify_kernel.walk(device, *on_gpu(predict, lens), block)
        for name in ("accept_index", "lens", "committed", "bonus", "new_lens", "rows"):
            assert (getattr(wanted, name) == getattr(found, name).cpu().numpy()).all(), name
        slots = rng.permutation(16 * trees.width + 3)[: 16 * trees.width].reshape(16, -1)
        pools = [torch.randn(len(slots.flat) + 3, 2, 128, device="cuda") for _ in range(4)]
        copies = [pool.clone() for pool in pools]
        for moved in verify.moves(wanted.accept_index, wanted.lens, slots):
            for new, old in zip(copies, pools, strict=True):
                values = [old[source].clone() for source, _ in moved]
                for value, (_, target) in zip(values, moved, strict=True):
                    new[target] = value
        addresses = torch.tensor([p.data_ptr() for p in pools], dtype=torch.uint64, device="cuda")
        stride = torch.full((4,), 1024, device="cuda")
        verify_kernel.move_kv(addresses, stride, 1024, found, *on_gpu(slots), block)
        assert all(torch.equal(new, old) for new, old in zip(copies, pools, strict=True))


class TorchSampler:
    """Plain draws from the rows' probabilities, as SGLang's simplest path."""

    def _sample_from_probs(self, probs: Any, info: Any, positions: Any, plain: bool) -> Any:
        return torch.multinomial(probs, 1)


def test_sampled_trees_have_the_distribution_of_plain_sampling() -> None:
    """262,144 draws of two tokens over a vocabulary of eight: chi-square at p = 0.001."""
    from types import SimpleNamespace

    torch.manual_seed(3)
    draws, vocab, block = 1 << 18, 8, 3
    target = torch.randn(vocab + 1, vocab, device="cuda") * 1.5  # logits after a token; last: root
    logp = torch.log_softmax(torch.randn(2, vocab, device="cuda"), -1).sort(descending=True)
    shape = (draws, 2, vocab)
    trees = tree_kernel.build(
        logp.indices.expand(shape).contiguous(), logp.values.expand(shape).contiguous(),
        torch.full((draws,), vocab, device="cuda"), 5,
    )  # fmt: skip
    logits = target[trees.tokens.clamp(max=vocab)].view(-1, vocab)
    temperature = torch.full((draws, 1), 0.8, device="cuda")
    info = SimpleNamespace(
        is_all_greedy=False, need_top_p_sampling=False, need_top_k_sampling=False,
        need_min_p_sampling=False, temperatures=temperature, top_ks=None, top_ps=None,
        min_ps=None, sampling_seed=None,
    )  # fmt: skip
    rows = torch.zeros(draws * trees.width, dtype=torch.int64, device="cuda")
    predict = choose(logits, info, trees.width, rows, TorchSampler())
    lens = torch.zeros(draws, dtype=torch.int64, device="cuda")
    accepted = verify_kernel.walk(trees, predict, lens, block)
    probs = torch.softmax(target / 0.8, -1)
    one = accepted.committed[:, 0]
    rest = torch.multinomial(probs[one], 1)[:, 0]  # a step that ends there leaves it to plain
    two = torch.where(accepted.lens > 1, accepted.committed[:, 1], rest)
    seen = torch.bincount(one * vocab + two, minlength=vocab * vocab).double()
    expected = (probs[vocab][:, None] * probs[:vocab]).reshape(-1).double() * draws
    chi2 = float(((seen - expected) ** 2 / expected).sum())
    assert chi2 < 103.4  # 63 degrees of freedom
    assert 0.1 < float((accepted.lens > 1).double().mean()) < 0.99
