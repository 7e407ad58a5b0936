"""The DDTREE worker: SGLang's DFlash v2 worker with a tree in place of the chain.

One step: draft one block (SGLang's draft model, in its own graph) -> candidates per position ->
tree -> target verifies w = B + 1 rows under the tree mask -> walk -> commit. Prefill and idle
batches are the parent's. Nothing here waits for the device.

Slots: the scheduler reserves D = max(w, b) slots behind the committed prefix before each step.
Row r is written to slot r of them; afterwards the accepted rows' keys and values move to the first
slots, in path order, and the drafter's keys and values of the same tokens are written there. The
slots behind stay reserved for the next step.

Importing this module imports SGLang; only `algorithm` does so, in the scheduler process.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.distributed import get_tp_group
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative import dflash_utils, dflash_worker_v2
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from ddtree_guard.attention.backend import free_bytes, graph_mask, is_corrected, reach
from ddtree_guard.config import TreeConfig
from ddtree_guard.ddtree import tree_kernel, verify_kernel
from ddtree_guard.ddtree.choose import choose
from ddtree_guard.ddtree.limits import (
    REQUEST_KEY,
    check_arguments,
    check_model,
    check_step,
    step_bytes,
)
from ddtree_guard.ddtree.propose import Proposer
from ddtree_guard.ddtree.tree import TOP_K_MAX, Trees, default_top_k
from ddtree_guard.ddtree.verify import Accepted
from ddtree_guard.errors import IncompatibleError, UsageError
from ddtree_guard.hooks.facts import BUDGET, facts_of


@dataclass(frozen=True, slots=True)
class TreeStep:
    """One finished verify step, for observers. Device tensors; nothing has been synchronized."""

    batch: Any  # SGLang's ForwardBatch, its spec_info the tree
    trees: Trees
    predict: Any  # (bs, w)
    accepted: Accepted
    graph: bool
    block: Any = None  # (bs, b) tokens that the drafter was given
    places: Any = None  # (bs, b) their positions
    hidden: Any = None  # (bs*w, H) the target's hidden states
    handed: Any = None  # (bs*b, H) those that the drafter was handed


class DDTreeWorker(dflash_worker_v2.DFlashWorkerV2):  # type: ignore[misc]
    """Drafts a block, verifies a tree."""

    witness: Any = None  # a guard's `hooks.witness.Witness`, asked in the middle of steps

    def __init__(self, server_args: Any, *args: Any, **kwargs: Any) -> None:
        check_arguments(server_args)
        self.budget = int(getattr(server_args, BUDGET))
        self.observers: list[Callable[[TreeStep], None]] = []
        super().__init__(draft_arguments(server_args), *args, **kwargs)
        self.top_k = tree_top_k(self.budget)
        self.proposer = self._make_proposer()
        self._eager_mask: Any = None
        self._ids: Any = None
        self._widest_row = 0

    def init_attention_backends(self) -> None:
        super().init_attention_backends()
        for name in ("num_draft_tokens", "speculative_num_draft_tokens"):
            if getattr(self.draft_model_runner.attn_backend, name, None):  # 0.5.17 gives it D
                setattr(self.draft_model_runner.attn_backend, name, self.block_size)
        runner = self.model_runner
        check_model(runner, mambaish_config(runner.model_config) is not None)
        self._widest_row = int(runner.token_to_kv_pool.data_strides.max())
        self._check_memory()

    def _check_memory(self) -> None:
        """Refuse a budget whose largest step cannot fit beside the KV pool."""
        runner, config = self.model_runner, self.model_runner.model_config
        requests, w = int(runner.req_to_token_pool.size), self.budget + 1
        tokens = min(int(runner.max_total_num_tokens), requests * int(config.context_len))
        inner = getattr(runner.model, "model", None)
        taps = len(getattr(inner, "layers_to_capture", ())) or 1
        need = step_bytes(
            requests, w, tokens, int(config.vocab_size), taps * int(config.hidden_size),
            runner.dtype.itemsize,
        )  # fmt: skip
        check_step(need, free_bytes(self.device), requests, w)

    def _make_proposer(self) -> Proposer:
        head = getattr(self.model_runner.model, "lm_head", None)
        weight = getattr(head, "weight", None)
        shard = getattr(head, "shard_indices", None)
        added = 0 if shard is None else int(shard.num_added_elements)
        plain = (torch.float32, torch.bfloat16, torch.float16)  # float8 is floating point, too
        if weight is None or weight.dtype not in plain or added:
            raise IncompatibleError(
                "DDTREE drafts through the target's output head and needs it unquantized and "
                "without added tokens; use --speculative-algorithm DFLASH."
            )
        group = get_tp_group()
        rows = weight.shape[0] if shard is None else int(shard.num_org_elements)
        start = 0 if shard is None else int(shard.org_vocab_start_index)
        ranks = group if group.world_size > 1 else None
        return Proposer(weight, int(rows), start, self.block_size, self.top_k, ranks)

    def _maybe_build_draft_sampler(self) -> Proposer:
        """SGLang's hook: what runs at the end of the captured draft graph."""
        self.proposer.allocate(max(self.server_args.cuda_graph_config.decode.bs))
        return self.proposer

    def forward_batch_generation(self, batch: Any, on_publish: Any = None, **kwargs: Any) -> Any:
        mode = batch.forward_mode
        if mode.is_extend() or batch.is_extend_in_batch or mode.is_idle():
            return super().forward_batch_generation(batch, on_publish, **kwargs)
        batch.seq_lens.record_stream(torch.cuda.current_stream())
        return self._decode(batch, on_publish)

    def _decode(self, batch: Any, on_publish: Any) -> Any:
        width = self._step_budget(batch) + 1
        lens = batch.seq_lens
        draft_input = batch.spec_info
        ids, block_slots, positions = self._block(batch, draft_input)
        tokens, logp = self._draft(batch, draft_input, ids, block_slots, positions)
        trees = tree_kernel.build(tokens, logp, ids[:, 0].contiguous(), width - 1)
        slots = self._row_slots(batch, width)
        verify_batch, graph = self._prepare(batch, draft_input, trees, slots, tokens)
        out = self.target_worker.forward_batch_generation(
            batch=None,
            forward_batch=verify_batch,
            is_verify=True,
            skip_attn_backend_init=True,
        )
        if self.witness is not None:
            self.witness.computed(out.logits_output, batch.sampling_info, graph)
        predict = self._predict(batch, out.logits_output, width, verify_batch)
        accepted = verify_kernel.walk(trees, predict, lens, self.block_size)
        if on_publish is not None:
            on_publish(accepted.new_lens)
        rows = self._commit(accepted, out.logits_output, slots, block_slots)
        done = TreeStep(verify_batch, trees, predict, accepted, graph, ids, positions, *rows)
        for observe in self.observers:
            observe(done)
        return GenerationBatchResult(
            logits_output=out.logits_output,
            next_token_ids=accepted.committed.view(-1),
            accept_lens=accepted.lens,
            can_run_cuda_graph=out.can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=accepted.bonus, new_seq_lens=accepted.new_lens
            ),
            speculative_num_draft_tokens=self.block_size,
            new_seq_lens=accepted.new_lens,
        )

    def _step_budget(self, batch: Any) -> int:
        """The budget of this step: the least that a request asks for, at most the server's.

        A backend that holds one width for all steps reads beyond the rows of a narrower one.
        """
        asked = [self.budget]
        if not self._backend_follows():
            return self.budget
        for req in batch.reqs or ():
            params = req.sampling_params.custom_params
            if isinstance(params, dict) and REQUEST_KEY in params:
                asked.append(params[REQUEST_KEY])
        return min(asked)

    def _backend_follows(self) -> bool:
        """Whether the target's attention backend takes the width from the batch."""
        backend = self.model_runner.attn_backend
        return is_corrected(backend) or facts_of(type(backend)).follows_batch

    def _block(self, batch: Any, draft_input: Any) -> tuple[Any, Any, Any]:
        """Input ids, slots and positions of the draft block, (bs, b) each."""
        shape = (len(batch.seq_lens), self.block_size)
        ids, positions, slots = torch.empty((3, *shape), dtype=torch.int64, device=self.device)
        dflash_worker_v2._prepare_dflash_draft_block_unchecked(
            bonus_tokens=draft_input.bonus_tokens.view(-1),
            prefix_lens=batch.seq_lens.view(-1),
            req_pool_indices=batch.req_pool_indices.view(-1),
            req_to_token=self.model_runner.req_to_token_pool.req_to_token,
            block_ids_out=ids,
            positions_out=positions,
            cache_loc_out=slots,
            mask_token_id=int(self._mask_token_id),
        )
        return ids, slots, positions

    def _draft(
        self, batch: Any, draft_input: Any, ids: Any, slots: Any, positions: Any
    ) -> tuple[Any, Any]:
        """One forward of the draft model: candidates and log-probabilities, (bs, L, K)."""
        bs = len(ids)
        embeds = self.model_runner.model.get_input_embeddings()(ids)
        lens_cpu, lens_sum = host_bound(batch, draft_input, self.block_size)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=ids.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=slots.reshape(-1),
            seq_lens_sum=lens_sum,
            seq_lens_cpu=lens_cpu,
            positions=positions.reshape(-1),
            input_embeds=embeds.view(-1, embeds.shape[-1]),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        with torch.inference_mode():
            out = self.draft_model_runner.forward(forward_batch)
            if out.can_run_graph and self._draft_sampler is not None:
                return self.proposer.replayed(bs)
            return self.proposer.propose(out.logits_output.hidden_states)

    def _row_slots(self, batch: Any, width: int) -> Any:
        """KV slots of the tree's rows, (bs, w): those behind the committed prefix."""
        table = self.model_runner.req_to_token_pool.req_to_token
        columns = batch.seq_lens[:, None] + torch.arange(width, device=batch.seq_lens.device)
        return table[batch.req_pool_indices[:, None], columns].to(torch.int64)

    def _prepare(
        self, batch: Any, draft_input: Any, trees: Trees, slots: Any, drafted: Any
    ) -> tuple[Any, bool]:
        """The target's forward batch, its metadata built; and whether a graph will run."""
        width = trees.width
        positions = torch.empty_like(slots).view(-1)
        lens_cpu, lens_sum = host_bound(batch, draft_input, max(width, self.block_size))
        mask = self._mask(len(slots), width, lens_sum)
        tree_kernel.paint(trees, batch.seq_lens, positions, mask)
        spec = DFlashVerifyInput(
            draft_token=trees.tokens.view(-1),
            positions=positions,
            draft_token_num=width,
            custom_mask=mask,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        spec.parents, spec.depths, spec.tree_sizes = trees.parents, trees.depths, trees.sizes
        # for the guard: the tree must hold the first token of each position; how the mask was laid;
        # and it is longer than the step needs, see `_mask`
        spec.drafted, spec.mask_columns, spec.mask_is_buffer = drafted, width, True
        spec.retrieve_index = self._row_ids(len(slots), width)
        spec.retrieve_next_token = trees.next_token
        spec.retrieve_next_sibling = trees.next_sibling
        held = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu, batch.seq_lens_sum = lens_cpu, lens_sum
        batch.out_cache_loc = slots.view(-1)
        if self.witness is not None:
            self.witness.building(self.model_runner)
        try:
            prepared: tuple[Any, bool] = spec.prepare_for_verify(batch, self.target_worker)
        finally:
            batch.seq_lens_cpu, batch.seq_lens_sum = held
        return prepared

    def _mask(self, bs: int, width: int, lens_sum: int) -> Any:
        """Where this step's mask goes: the captured buffer, or one of our own in eager mode.

        Both can be longer than the step needs: the exact length is known on the device only.
        """
        cells = width * (lens_sum + bs * width)
        backend = self.model_runner.attn_backend
        captured = graph_mask(backend, facts_of(type(backend)))
        if captured is not None:
            # A replay reads no other mask. `lens_sum` does not know where the context ends.
            longest = reach(int(backend.max_context_len), min(self.budget + 1, self.block_size))
            if captured.numel() >= min(cells, bs * width * (longest + width)):
                return captured
        if self._eager_mask is None or self._eager_mask.numel() < cells:
            size = max(cells, 2 * (0 if self._eager_mask is None else self._eager_mask.numel()))
            self._eager_mask = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._eager_mask

    def _row_ids(self, bs: int, width: int) -> Any:
        """SGLang's retrieve index, (bs, w): where a row lies in the flattened batch."""
        if self._ids is None or self._ids.numel() < bs * width:
            self._ids = torch.arange(2 * bs * width, device=self.device)
        return self._ids[: bs * width].view(bs, width)

    def _predict(self, batch: Any, logits_output: Any, width: int, verify_batch: Any) -> Any:
        """The target's token for every row, (bs, w), the same on every rank."""
        logits, info = logits_output.next_token_logits, batch.sampling_info
        if info is not None:
            dflash_utils.apply_dflash_verify_logits_adjustments(
                next_token_logits=logits, sampling_info=info, draft_token_num=width
            )
        sampler, positions = self.model_runner.sampler, verify_batch.positions
        predict = choose(logits, info, width, positions, sampler).contiguous()
        if self.proposer.group is not None:
            self.proposer.group.broadcast(predict, src=0)
        return predict

    def _commit(
        self, accepted: Accepted, logits_output: Any, slots: Any, block_slots: Any
    ) -> tuple[Any, Any]:
        """Target KV of the path to its place, and the drafter's KV of the same tokens. Returns the
        target's hidden states, and those of the path, which the drafter is handed.
        """
        pool = self.model_runner.token_to_kv_pool
        verify_kernel.move_kv(
            pool.data_ptrs, pool.data_strides, self._widest_row, accepted, slots,
            self.block_size,
        )  # fmt: skip
        hidden = logits_output.hidden_states
        hidden = hidden.view(-1, hidden.shape[-1])
        handed = hidden.index_select(0, accepted.rows)
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=handed,
            cache_loc=block_slots.reshape(-1),
            cache_loc_2d=block_slots,
            positions=accepted.positions,
            commit_lens=accepted.lens,
        )
        logits_output.hidden_states = None  # large, and overlap would copy it to the host
        return hidden, handed


def draft_arguments(server_args: Any) -> Any:
    """Server arguments of the draft worker: a copy whose width is the draft block's."""
    copy = deepcopy(server_args)
    copy.override(
        "ddtree_guard.draft",
        speculative_num_draft_tokens=int(server_args.speculative_dflash_block_size),
    )
    copy.__dict__.pop("max_speculative_num_draft_tokens", None)  # a cached property of D
    return copy


def tree_top_k(budget: int) -> int:
    """Candidates per draft position, SGLANG_DDTREE_TOPK or a default. Raises UsageError."""
    given = TreeConfig.from_env().top_k
    if given is not None and given > TOP_K_MAX:
        raise UsageError(f"SGLANG_DDTREE_TOPK={given} is not a whole number of 1 to {TOP_K_MAX}.")
    return given or default_top_k(budget)


def host_bound(batch: Any, draft_input: Any, more: int) -> tuple[Any, int]:
    """Upper bounds of the committed lengths known on the host, and their sum; no device read.

    The scheduler's mirror may lag by one step. Where it keeps none, what it has reserved.
    """
    if batch.seq_lens_cpu is not None:
        lens = batch.seq_lens_cpu + more
        return lens, int(lens.sum())
    if draft_input.reserved_seq_lens_cpu is not None:
        return draft_input.reserved_seq_lens_cpu, int(draft_input.reserved_seq_lens_sum)
    lens = batch.seq_lens.to("cpu")
    return lens, int(lens.sum())
