"""The worker's decode step on SGLang's real Triton backend: lossless, the cache as it must be."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from ddtree_guard.hooks.facts import facts_of  # noqa: E402
from ddtree_guard.testing.fakes import sglang  # noqa: E402
from ddtree_guard.testing.toy_server import HEAD_DIM, KV_HEADS, VOCAB, ToyServer  # noqa: E402

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2], [1, 6, 1, 8, 0, 3, 3, 9, 8, 8, 7, 4]]


@pytest.fixture(autouse=True)
def _needs_interpreter(interpreter: None) -> None:
    return


def serve(budget: int, block: int = 8, steps: int = 4, **options: Any) -> ToyServer:
    server = ToyServer(PROMPTS, budget, block, **options)
    for _ in range(steps):
        server.step()
    return server


@pytest.mark.parametrize(("budget", "block"), [(3, 8), (7, 8), (16, 8), (33, 8), (16, 4)])
def test_greedy_text_equals_plain_decoding(budget: int, block: int) -> None:
    server = serve(budget, block)
    for i in range(len(PROMPTS)):
        assert server.texts[i][server.starts[i] :] == server.expected(i)
    grown = sum(len(t) - s for t, s in zip(server.texts, server.starts, strict=True))
    assert grown > 4 * len(PROMPTS) * 1.3  # more than a token per step: drafts were accepted


def test_committed_cache_holds_the_text_in_order() -> None:
    server = serve(16, skill=0.4)
    pool, table = server.runner.token_to_kv_pool, server.runner.req_to_token_pool.req_to_token
    for i, text in enumerate(server.texts):
        known = torch.tensor(text[:-1])
        _, _, k, v = server.target.project(known, torch.arange(len(known)))
        slots = table[i + 1, : len(known)].long()
        assert torch.allclose(pool.k[slots].flatten(1), k, atol=1e-5)
        assert torch.allclose(pool.v[slots].flatten(1), v, atol=1e-5)
    assert pool.k.shape[1:] == (KV_HEADS, HEAD_DIM)


def test_drafter_gets_the_hidden_rows_of_the_path() -> None:
    server = serve(16, steps=1, skill=0.4)
    commit, table = server.commits[0], server.runner.req_to_token_pool.req_to_token
    for i, text in enumerate(server.texts):
        start, n = server.starts[i] - 1, int(commit.commit_lens[i])
        rows = slice(i * 8, i * 8 + n)
        assert commit.positions[rows].tolist() == list(range(start, start + n))
        assert (commit.cache_loc_2d[i] == table[i + 1, start : start + 8]).all()
        dense = server.target.logits(text[: start + n])[start:]
        assert torch.allclose(commit.target_hidden[rows] @ server.target.head.T, dense, atol=1e-4)


def test_a_stop_token_inside_the_path_ends_the_text_there() -> None:
    """SGLang's own request does that, given what a step committed; no code of ours has to."""
    server = ToyServer(PROMPTS, 16, 8, skill=1.0)
    result = server.step()
    count, stride = int(result.accept_lens[0]), result.speculative_num_draft_tokens
    tokens = result.next_token_ids[:stride].tolist()[:count]
    stop = next(t for at, t in enumerate(tokens[1:-1], 1) if t not in tokens[:at])
    params = sglang("sampling.sampling_params").SamplingParams(max_new_tokens=50)
    params.stop_token_ids = {stop}
    params.normalize(None)
    batch = sglang("managers.schedule_batch")
    req = batch.Req("r0", "", array("q", PROMPTS[0]), params, vocab_size=VOCAB)
    req.output_ids.extend(tokens)
    req.update_finish_state(count)
    assert req.finished()
    assert list(req.output_ids_through_stop) == tokens[: tokens.index(stop) + 1]
    assert len(req.output_ids_through_stop) < count


def test_a_request_can_ask_for_a_smaller_budget() -> None:
    server = ToyServer(PROMPTS, 16, 8)
    widths: list[int] = []
    server.worker.observers.append(lambda step: widths.append(step.trees.width))
    for asked in (5, 40, 1):
        server.step(custom_params={"ddtree_budget": asked})
    assert widths == [6, 17, 2]
    for i in range(len(PROMPTS)):
        assert server.texts[i][server.starts[i] :] == server.expected(i)


def test_a_backend_of_one_width_is_never_given_a_narrower_batch() -> None:
    server = ToyServer(PROMPTS, 16, 8)
    backend = server.runner.attn_backend
    stock = next(c for c in type(backend).__mro__ if c.__module__.startswith("sglang."))
    follows = facts_of(stock).follows_batch
    server.runner.attn_backend = object.__new__(stock)
    params = SimpleNamespace(custom_params={"ddtree_budget": 4})
    batch = SimpleNamespace(reqs=[SimpleNamespace(sampling_params=params)])
    assert server.worker._step_budget(batch) == (4 if follows else 16)
    server.runner.attn_backend = backend
    assert server.worker._step_budget(batch) == 4


def test_wider_trees_commit_at_least_as_much_per_step() -> None:
    lens = {}
    for budget in (7, 32):
        server = ToyServer(PROMPTS, budget, 8, skill=0.3)
        lens[budget] = server.step().accept_lens.tolist()
    assert all(wide >= narrow for narrow, wide in zip(lens[7], lens[32], strict=True))
    assert sum(lens[32]) > sum(lens[7])
