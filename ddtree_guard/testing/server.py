"""A server small enough for a CPU: SGLang's real Triton backend and result processing in a loop.

`MiniServer` does per step what a scheduler and a spec worker do, in their order: requests in,
trees, metadata (eager, or into captured buffers), the tree walk, the worker's result, and
SGLang's own token resolution. The guard is armed on it as on a real scheduler. Trees are random
and walks take random children: only what surrounds the model is simulated.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from ddtree_guard.config import Config
from ddtree_guard.hooks import arm, sites
from ddtree_guard.hooks.runtime import ServerGuard
from ddtree_guard.testing import fakes, standins
from ddtree_guard.testing.batches import dummy_spec, verify_batch
from ddtree_guard.testing.cases import Inputs, VerifyCase, make_inputs
from ddtree_guard.testing.fakes import sglang

DECODE, EXTEND, IDLE = "DECODE", "EXTEND", "IDLE"
STATIC = (
    "input_ids", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc", "positions",
)  # fmt: skip


class Req:
    """A request as the hooks see one: ids, tokens and lengths on the host."""

    def __init__(self, rid: str, length: int, cached: int = 0) -> None:
        self.rid = rid
        self.origin_input_ids = list(range(length))
        self.output_ids: list[int] = []
        self.prefix_indices = torch.zeros(cached, dtype=torch.int64)
        self.kv_committed_len = length
        self.kv = self  # 0.5.18 on keeps the lengths one level down
        self.grammar = None
        self.is_retracted = False
        self.spec_verify_ct = self.spec_num_correct_drafts = 0

    def finished(self) -> bool:
        """Never: the test decides how many steps there are."""
        return False

    def update_spec_correct_drafts_histogram(self, count: int) -> None:
        """A statistic that nobody reads here."""


def eagle_sample(verify_input: Any, batch: Any, logits_output: Any) -> Any:
    """The walk's result in SGLang's form: predict, accepted lengths, accepted rows (global)."""
    return batch.walk


class Worker:
    """The spec worker. `server` does the work; the class is what the guard hooks."""

    def __init__(self, server: MiniServer) -> None:
        self.server = server

    def forward_batch_generation(self, batch: Any, on_publish: Any = None) -> Any:
        """One verify step, or nothing for an extend batch."""
        if batch.forward_mode.is_extend():
            return SimpleNamespace(accept_lens=None)
        if batch.forward_mode.is_idle():
            return self.server.idle()
        inputs = self.server.prepare(batch)
        self.server.build(inputs)
        if self.server.case.algorithm == "DFLASH":  # it accepts without a tree walk
            return self.server.result(*batch.walk)
        walk = eagle_sample(self.server.spec, batch, None)
        if self.server.case.algorithm == "EAGLE":
            self.server.redraft(*walk)
        return self.server.result(*walk)


class MiniServer:
    """The loop. `case` gives the sizes; `graph` replays captured buffers of `case.padded_bs`."""

    def __init__(self, case: VerifyCase, choice: standins.Choice = "corrected") -> None:
        self.case = case
        roomy = dataclasses.replace(
            case,
            lens=tuple(s + 64 for s in case.lens),
            context=case.context or max(case.lens) + 64 + case.w,
        )
        self.reqs = [Req(f"r{i}", s) for i, s in enumerate(case.lens)]
        self.server_args = SimpleNamespace(
            speculative_algorithm=case.algorithm, enable_metrics=False
        )
        self._choice, self._roomy = choice, roomy
        self.rng = np.random.default_rng(case.seed)
        self.steps = 0
        self.sent: list[list[Any]] = []  # what left, per step
        self.spec: Any = None
        self.static: Any = None  # what the captured graph reads
        self._states: dict[int, tuple[Any, ...]] = {}  # runtime states by width
        self.inputs: Any = None  # the batch whose buffers the last launch read
        self.chosen = 0  # size of the graph that is replayed, where it is not the padded one
        self.redress: Callable[[Any], None] = lambda spec: None  # changes a step's spec info
        self.replayed: Callable[[], None] = lambda: None  # what a captured graph would run
        self.layers = 0  # attention layers that a step really runs

    @property
    def graph(self) -> bool:
        """Whether steps run through captured buffers."""
        return self.case.padded_bs is not None

    # what the guard's arming sees of a scheduler
    def init_model_worker(self, guard: ServerGuard | None) -> None:
        """Build the backend and, for graphs, its captured metadata."""
        self.backend = standins.build_backend(self._roomy, self._choice)
        self.runner = standins.runner_of(self.backend)
        self.model_worker = Worker(self)
        self.guard = guard
        if guard is not None:
            sites.adopt(guard, self.backend, self.runner)
        self.runner.graph_runner = None
        if self.graph:
            self.capture()

    def capture(self) -> None:
        """Capture the one batch size: SGLang's metadata, then the place inside the graph."""
        lanes = self.case.padded_bs or 0
        inputs = make_inputs(self._roomy)
        self.static = batch = verify_batch(inputs, lanes, dummy_spec(inputs, lanes))
        batch.seq_lens.fill_(1)
        batch.req_pool_indices.zero_()
        self.runner.graph_runner = SimpleNamespace(buffers=batch)
        with fakes.host_context(self.runner.server_args):
            self.backend.init_cuda_graph_state(lanes, lanes * self.case.w)
            if not hasattr(self.backend, "init_forward_metadata_out_graph"):
                self.backend.init_forward_metadata_capture_cuda_graph(
                    lanes, lanes * self.case.w, batch.req_pool_indices, batch.seq_lens, None,
                    batch.forward_mode, batch.spec_info,
                )  # fmt: skip
                self._attend(inputs, batch)
                return
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
            self.backend.init_forward_metadata_in_graph(batch)
            self._attend(inputs, batch)

    def arm(self, config: Config) -> ServerGuard | None:
        """Start the server with the guard, as `Scheduler.init_model_worker` is wrapped."""
        with warnings.catch_warnings():  # of SGLang's modules, when they are first imported
            warnings.simplefilter("ignore")
            guard = arm.start(config, self)
        self.init_model_worker(guard)
        arm.finish(config, guard, self)
        return guard

    def switch(self, case: VerifyCase, guard: ServerGuard | None) -> None:
        """Another runtime state: adaptive speculation has a backend and graphs per width."""
        self._states[self.case.w] = (self.case, self._roomy, self.backend, self.runner, self.static)
        if case.w in self._states:
            held = self._states[case.w]
            self.case, self._roomy, self.backend, self.runner, self.static = held
            return
        self.case = case
        self._roomy = dataclasses.replace(
            self._roomy, budget=case.budget, draft_tokens=case.draft_tokens
        )
        self.init_model_worker(guard)

    # a step
    def step(self, overlap: bool = False) -> Any:
        """One decode step of all requests. With `overlap` the caller resolves the result later."""
        batch = self.batch(DECODE, self.reqs)
        result = self.model_worker.forward_batch_generation(batch)
        return (result, batch) if overlap else self.resolve(result, batch)

    def extend(self, reqs: list[Req]) -> None:
        """A prefill batch of new requests."""
        self.model_worker.forward_batch_generation(self.batch(EXTEND, reqs))

    def idle(self) -> Any:
        """A rank of DP attention without requests: it replays its graph beside those with some."""
        batch, lanes = self.static, self.case.padded_bs or 0
        batch.seq_lens.fill_(1)
        for name in ("req_pool_indices", "out_cache_loc", "positions", "input_ids"):
            getattr(batch, name).zero_()
        batch.seq_lens_cpu, batch.seq_lens_sum = batch.seq_lens.clone(), lanes
        batch.spec_info = dummy_spec(make_inputs(self._roomy), lanes)
        with fakes.host_context(self.runner.server_args):
            standins.replay(self.backend, copy.copy(batch))
            self.replayed()
        return SimpleNamespace(accept_lens=torch.zeros(0, dtype=torch.int32))

    def batch(self, mode: str, reqs: list[Req]) -> Any:
        """A ScheduleBatch as far as the hooks look."""
        modes = sglang("model_executor.forward_batch_info").ForwardMode
        return SimpleNamespace(
            forward_mode=modes[mode],
            reqs=list(reqs),
            is_spec_v2=True,
            sampling_info=SimpleNamespace(is_all_greedy=True),
        )

    def resolve(self, result: Any, batch: Any) -> Any:
        """SGLang's own resolution of a result's tokens; they are sent when it returns."""
        host = mock.MagicMock()
        tokens = _resolver()(host, result, batch)
        self.sent.append(tokens)
        for req, row in zip(batch.reqs, tokens, strict=True):
            req.output_ids.extend(row)
        return tokens

    def prepare(self, batch: Any) -> Inputs:
        """Trees, slots and the walk of this step; SGLang's pools filled for it."""
        self.steps += 1
        lens = tuple(len(r.origin_input_ids) + len(r.output_ids) for r in batch.reqs)
        case = dataclasses.replace(self.case, lens=lens, seed=self.case.seed + self.steps)
        inputs = make_inputs(case)
        standins_case = dataclasses.replace(inputs, case=case)
        standins.fill_pools(self.backend, standins_case)
        batch.walk = self._walk(inputs)
        return inputs

    def _walk(self, inputs: Inputs) -> Any:
        """Down from each root to random children; the last row's choice is no child's token."""
        bs, w, tree = inputs.case.bs, inputs.case.w, inputs.tree
        predict = np.zeros(bs * w, np.int32)
        index = np.full((bs, w), -1, np.int32)
        for i in range(bs):
            row, count = 0, 0
            while True:
                index[i, count] = i * w + row
                count += 1
                kids = np.flatnonzero(tree.parents[i] == row)
                kids = kids[kids > 0]
                if not len(kids) or self.rng.random() < 0.5:
                    predict[i * w + row] = 0  # token 0 is in no tree
                    break
                row_next = int(self.rng.choice(kids))
                predict[i * w + row] = tree.tokens[i, row_next]
                row = row_next
        lens = (index >= 0).sum(axis=1).astype(np.int32)
        return torch.from_numpy(predict), torch.from_numpy(lens), torch.from_numpy(index)

    def build(self, inputs: Inputs) -> None:
        """Let the backend build the step's metadata, eagerly or into the captured buffers."""
        lanes = self.case.padded_bs or inputs.case.bs
        batch = verify_batch(inputs, lanes)
        self.spec = batch.spec_info
        self.redress(self.spec)
        self.spec.positions = batch.positions[: inputs.case.bs * inputs.case.w].clone()
        with fakes.host_context(self.runner.server_args):
            if not self.graph:
                self.inputs = batch
                self.backend.init_forward_metadata(batch)
                self._attend(inputs, batch)
                return
            for name in STATIC:  # a graph reads the buffers that it was captured with
                getattr(self.static, name).copy_(getattr(batch, name))
            self.static.spec_info, self.static.seq_lens_sum = self.spec, batch.seq_lens_sum
            self.inputs = self.static
            self.runner.graph_runner.bs = self.chosen or lanes
            view = copy.copy(self.static)  # as SGLang's replay view: its slots are the live batch's
            view.out_cache_loc = batch.out_cache_loc[: inputs.case.bs * inputs.case.w]
            standins.replay(self.backend, view)
            self.plan()
            self.replayed()
            self._replay_attention(inputs)

    def _attend(self, inputs: Inputs, batch: Any) -> None:
        """The model's attention layers, through SGLang's kernel."""
        for layer in range(self.layers):
            standins.launch(self.backend, inputs, batch, layer)

    def _replay_attention(self, inputs: Inputs) -> None:
        """What a replay runs: the same kernels and captured copies, and no Python of a step."""
        shadow: Any = getattr(self.guard, "shadow", None)
        pending = getattr(shadow, "_pending", None)
        if not self.layers:
            return
        if pending is not None:  # as in a capture: no step is known
            shadow._pending = None
        self._attend(inputs, self.static)
        if pending is not None:
            shadow._pending = pending
            shadow.ran(self.runner)

    def plan(self) -> None:
        """What a planned replay copies once more: positions and tokens, from the spec info."""
        for name, source in (("positions", "positions"), ("input_ids", "draft_token")):
            value = getattr(self.spec, source)
            if value is not None:
                getattr(self.static, name)[: len(value)].copy_(value)

    def redraft(self, predict: Any, lens: Any, index: Any) -> None:
        """EAGLE's second draft forward: it runs in the step and shares the input buffers."""
        bs, path = index.shape
        rows = self.inputs.input_ids.view(-1, self.case.w)
        rows[:bs, :path] = predict[index.long().clamp(min=0)].to(rows.dtype)
        for name in ("positions", "out_cache_loc"):
            value = getattr(self.inputs, name)
            value.copy_(value.flip(0))

    def result(self, predict: Any, lens: Any, index: Any) -> Any:
        """The worker's result: accepted tokens per request, w apart."""
        bs, w = index.shape
        rows = index.long().clamp(min=0)
        return sglang("managers.utils").GenerationBatchResult(
            next_token_ids=predict[rows].reshape(bs * w),
            accept_lens=lens,
            speculative_num_draft_tokens=w,
        )


def _resolver() -> Any:
    """SGLang's function that turns a result into tokens, looked up anew: it may be hooked."""
    if "sglang.srt.managers.scheduler_output_processor_mixin" in sys.modules or not _has_v2():
        mixin = sglang("managers.scheduler_output_processor_mixin").SchedulerOutputProcessorMixin
        return mixin._resolve_spec_overlap_tokens
    module = sglang("managers.scheduler_components.batch_result_processor")
    return module.SchedulerBatchResultProcessor._resolve_spec_v2_tokens


def _has_v2() -> bool:
    try:
        sglang("managers.scheduler_components.batch_result_processor")
    except ImportError:
        return False
    return True
