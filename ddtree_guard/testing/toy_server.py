"""A whole DDTREE server in miniature on a CPU: a one-layer target, a drafter that guesses, the
real worker, SGLang's real Triton backend and kernels. Only the scheduler is a loop of three lines.

Needs SGLang importable and TRITON_INTERPRET=1. The plain text to compare with is computed densely,
without a KV cache, an attention kernel or a tree.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ddtree_guard.attention.backend import install
from ddtree_guard.config import Backend, Config
from ddtree_guard.ddtree.propose import Proposer
from ddtree_guard.hooks.runtime import ServerGuard
from ddtree_guard.hooks.sites import adopt
from ddtree_guard.hooks.witness import witness_of
from ddtree_guard.testing import fakes
from ddtree_guard.testing.fakes import Sizes, sglang

VOCAB, HEADS, KV_HEADS, HEAD_DIM = 24, 4, 2, 16
HIDDEN = HEADS * HEAD_DIM


class ToyTarget:
    """Embedding plus position, one attention layer, an output head. Seeded, float32."""

    def __init__(self, seed: int, context: int) -> None:
        rng = torch.Generator().manual_seed(seed)

        def weights(*shape: int) -> Any:
            return torch.randn(shape, generator=rng) * shape[-1] ** -0.5

        self.embedding, self.place = weights(VOCAB, HIDDEN) * 3, weights(context, HIDDEN) * 3
        self.q, self.k = weights(HIDDEN, HIDDEN) * 2, weights(HIDDEN, KV_HEADS * HEAD_DIM) * 2
        self.v, self.out = weights(HIDDEN, KV_HEADS * HEAD_DIM), weights(HIDDEN, HIDDEN) * 2
        # orthogonal rows: the drafter below can aim at any logits
        self.head = torch.linalg.qr(weights(HIDDEN, HIDDEN))[0][:VOCAB].contiguous()

    def project(self, tokens: Any, positions: Any) -> tuple[Any, Any, Any, Any]:
        """Residual, query, key and value rows."""
        x = self.embedding[tokens] + self.place[positions]
        return x, x @ self.q, x @ self.k, x @ self.v

    def logits(self, text: list[int]) -> Any:
        """Logits after every token of a text, computed densely."""
        positions = torch.arange(len(text))
        x, q, k, v = self.project(torch.tensor(text), positions)
        heads = [part.view(len(text), -1, HEAD_DIM).transpose(0, 1) for part in (q, k, v)]
        q, k, v = heads[0], *(h.repeat_interleave(HEADS // KV_HEADS, 0) for h in heads[1:])
        scores = (q @ k.transpose(1, 2)) * HEAD_DIM**-0.5
        scores.masked_fill_(torch.ones(len(text), len(text)).triu(1).bool(), float("-inf"))
        rows = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(text), HIDDEN)
        return (x + rows @ self.out) @ self.head.T

    def continue_greedily(self, text: list[int], count: int) -> list[int]:
        """The next `count` greedy tokens."""
        text = list(text)
        for _ in range(count):
            text.append(int(self.logits(text)[-1].argmax()))
        return text[-count:]


class Loose(SimpleNamespace):
    """A batch that has whatever SGLang looks for: None where the test did not say."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class ToyServer:
    """Requests with given prompts, decoded step by step by the real worker.

    `skill` is the chance that the drafter's favourite is the right token at a position; otherwise
    the right one is usually among the runners-up.
    """

    def __init__(
        self, prompts: list[list[int]], budget: int, block: int, skill: float = 0.6, seed: int = 0
    ) -> None:
        self.context, self.block, self.budget = 96, block, budget
        reserve = max(budget + 1, block)
        self.texts = [list(p) for p in prompts]
        self.starts = [len(p) for p in prompts]
        self.target, self.skill = ToyTarget(seed, self.context + reserve), skill
        self.rng = torch.Generator().manual_seed(seed)
        bs = len(prompts)
        self.sizes = Sizes(
            rows=bs + 1, context=self.context, width=reserve, heads=HEADS, kv_heads=KV_HEADS,
            head_dim=HEAD_DIM, slots=bs * (self.context + reserve) + 1, room=reserve, block=block,
            budget=budget, algorithm="DDTREE",
        )  # fmt: skip
        self.runner = self._runner()
        self.worker = self._worker()
        self.commits: list[Any] = []
        self.guard: Any = None
        self._prefill()

    def watch(self, config: Config) -> ServerGuard:
        """Let a guard see every step. Its hooks are gone when `guard.remove()` was called."""
        self.guard = guard = ServerGuard(config)
        adopt(guard, self.runner.attn_backend, self.runner)
        self.worker.observers.append(guard.walked)
        guard.witness = witness_of(guard, self.worker)
        return guard

    def _runner(self) -> Any:
        runner = Loose(**vars(fakes.model_runner(self.sizes)))
        runner.ngram_embedding_manager = SimpleNamespace(enabled=False)
        for part in ("model_config", "server_args"):
            setattr(runner, part, Loose(**vars(getattr(runner, part))))
        pool = runner.token_to_kv_pool
        pool.k_buffer, pool.v_buffer = [pool.k], [pool.v]
        pool.data_ptrs = torch.tensor([pool.k.data_ptr(), pool.v.data_ptr()], dtype=torch.uint64)
        pool.data_strides = torch.full((2,), KV_HEADS * HEAD_DIM * 4)
        table = runner.req_to_token_pool.req_to_token
        slots = torch.randperm(self.sizes.slots - 1, generator=self.rng) + 1
        for i in range(len(self.texts)):
            table[i + 1] = slots[i * table.shape[1] : (i + 1) * table.shape[1]]
        runner.server_args.disable_cuda_graph = True
        runner.server_args.speculative_ddtree_varies = True
        with fakes.fork_with_budget(), fakes.host_context(runner.server_args):
            report = install(Backend.AUTO)  # as a server that was not asked gets it
            try:
                registry = sglang("layers.attention.attention_registry").ATTENTION_BACKENDS
                runner.attn_backend = registry["triton"](runner)
            finally:
                if report is not None:
                    report.restore()
        runner.decode_cuda_graph_runner, runner.sampler, runner.dcp_size = None, None, 1
        embedding = self.target.embedding
        runner.model = SimpleNamespace(get_input_embeddings=lambda: lambda ids: embedding[ids])
        return runner

    def _worker(self) -> Any:
        import ddtree_guard.ddtree.worker as module

        worker = object.__new__(module.DDTreeWorker)
        worker._target_worker = SimpleNamespace(
            model_runner=self.runner, forward_batch_generation=self._verify
        )
        worker.model_runner, worker.device, worker.block_size = self.runner, "cpu", self.block
        worker.budget, worker.observers = self.budget, []
        worker._eager_mask = worker._ids = None
        worker._widest_row = KV_HEADS * HEAD_DIM * 4
        worker.proposer = Proposer(self.target.head, VOCAB, 0, self.block, 8)
        worker._draft_sampler, worker._mask_token_id = None, 0
        worker._draft_block_spec_info = None
        worker.draft_model_runner = SimpleNamespace(forward=self._draft)
        worker._append_target_hidden_to_draft_kv_by_loc = self._append
        return worker

    def _prefill(self) -> None:
        """Keys and values of every prompt but its last token, and that token as the root."""
        pool, table = self.runner.token_to_kv_pool, self.runner.req_to_token_pool.req_to_token
        for i, text in enumerate(self.texts):
            known = torch.tensor(text[:-1])
            slots = table[i + 1, : len(known)].long()
            _, _, k, v = self.target.project(known, torch.arange(len(known)))
            pool.k[slots], pool.v[slots] = k.view(-1, KV_HEADS, HEAD_DIM), v.view_as(pool.v[slots])

    def step(self, **request: Any) -> Any:
        """One decode step of all requests; `request` are sampling parameters of each of them."""
        params = SimpleNamespace(custom_params=request.pop("custom_params", None), top_k=1)
        lens = torch.tensor([len(text) - 1 for text in self.texts])
        roots = torch.tensor([text[-1] for text in self.texts])
        spec = SimpleNamespace(bonus_tokens=roots, reserved_seq_lens_cpu=None)
        batch = Loose(
            forward_mode=sglang("model_executor.forward_batch_info").ForwardMode.DECODE,
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
            seq_lens_sum=int(lens.sum()),
            req_pool_indices=torch.arange(len(lens)) + 1,
            spec_info=spec,
            reqs=[self._req(i, params) for i in range(len(lens))],
            **request,
        )  # fmt: skip
        if self.guard is not None:
            self.guard.begin(batch)
        info = sglang("model_executor.forward_batch_info")
        with (
            fakes.host_context(self.runner.server_args),
            mock.patch.object(info, "enable_num_token_non_padded", return_value=False),
        ):
            result = self.worker._decode(batch, None)
        if self.guard is not None:
            self.guard.end(result)
            self.guard.resolve(result)
        stride = result.speculative_num_draft_tokens
        for i, n in enumerate(result.accept_lens.tolist()):
            self.texts[i] += result.next_token_ids[i * stride : i * stride + n].tolist()
        return result

    def _req(self, i: int, params: Any) -> Any:
        """A request with its tokens so far, as the scheduler holds it."""
        start, text = self.starts[i], self.texts[i]
        return Loose(
            sampling_params=copy.copy(params), lora_id=None, rid=f"r{i}", finished=lambda: False,
            is_retracted=False, origin_input_ids=text[:start], output_ids=text[start:],
        )  # fmt: skip

    def expected(self, i: int) -> list[int]:
        """Plain greedy text of request i, as long as what was decoded so far."""
        start = self.starts[i]
        return self.target.continue_greedily(self.texts[i][:start], len(self.texts[i]) - start)

    def _draft(self, batch: Any) -> Any:
        """A drafter that mostly knows: hidden rows whose logits favour the right token."""
        rows = []
        for text in self.texts:
            right = self.target.continue_greedily(text, self.block - 1)
            rows.append(torch.zeros(HIDDEN))
            for token in right:
                logits = torch.rand(VOCAB, generator=self.rng) * 2
                lucky = torch.rand((), generator=self.rng) < self.skill
                logits[token] = 3.0 if lucky else 1.9
                rows.append(logits @ self.target.head)
        out = SimpleNamespace(hidden_states=torch.stack(rows))
        return SimpleNamespace(can_run_graph=False, logits_output=out)

    def _verify(self, forward_batch: Any, **_: Any) -> Any:
        """The target's forward of a verify batch through SGLang's attention."""
        x, q, k, v = self.target.project(forward_batch.input_ids, forward_batch.positions)
        k, v = k.view(-1, KV_HEADS, HEAD_DIM), v.view(-1, KV_HEADS, HEAD_DIM)
        layer = fakes.attention_layer(self.sizes)
        rows = self.runner.attn_backend.forward_extend(q, k, v, layer, forward_batch)
        hidden = x + rows.view(-1, HIDDEN) @ self.target.out
        logits = hidden @ self.target.head.T
        out = SimpleNamespace(next_token_logits=logits, hidden_states=hidden)
        return SimpleNamespace(logits_output=out, can_run_cuda_graph=False)

    def _append(self, **commit: Any) -> None:
        """What the worker hands to the drafter's KV cache."""
        self.commits.append(SimpleNamespace(**commit))
