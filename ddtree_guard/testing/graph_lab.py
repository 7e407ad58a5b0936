"""SGLang's real Triton verify attention in a captured graph with the device check inside.

On a CPU "capture" records the calls and "replay" makes them again, in Triton's interpreter. Every
fault is planted in what a server would do between two replays; nothing calls a rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from ddtree_guard.config import Depth
from ddtree_guard.device.from_step import step_of
from ddtree_guard.device.launch import DeviceCheck
from ddtree_guard.device.operands import Buffers, Shape
from ddtree_guard.device.verdict import Verdict
from ddtree_guard.hooks.device import TREE, GraphChecks, buffers_of_backend
from ddtree_guard.step import Contract, Graph, Step
from ddtree_guard.testing import fakes
from ddtree_guard.testing.batches import dummy_spec, verify_batch
from ddtree_guard.testing.captures import FullCudaGraphBackend
from ddtree_guard.testing.cases import Inputs, VerifyCase, make_inputs
from ddtree_guard.testing.standins import build_backend, fill_pools, oracle, runner_of
from ddtree_guard.testing.steps import GRAPH_PADS, paint_mask

LANES, BUDGET, BLOCK, CONTEXT = 4, 16, 8, 96
W = BUDGET + 1
CONTRACT = Contract(name="graph", mask_length="capacity", pad_lanes=GRAPH_PADS)
_STATIC = ("input_ids", "req_pool_indices", "seq_lens", "out_cache_loc", "positions")


def case_of(lens: tuple[int, ...], seed: int) -> VerifyCase:
    """A verify case whose server argument D equals w, so that the stock backend is right."""
    return VerifyCase(
        lens=lens, budget=BUDGET, block=BLOCK, seed=seed, padded_bs=LANES, context=CONTEXT,
        draft_tokens=W,
    )  # fmt: skip


@dataclass
class Replay:
    """What one replay gave: the device verdict, the host Step, and the attention rows."""

    verdict: Verdict
    step: Step
    output: Any


@dataclass
class Lab:
    """A server's verify graph: static buffers, SGLang's backend, the captured region."""

    device: str
    first: Inputs
    backend: Any = None
    batch: Any = None  # the ForwardBatch of static tensors
    tree: dict[str, Any] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    generation: int = 0
    live: int = 0
    _replay: Callable[[], None] = lambda: None
    _output: Any = None

    def __post_init__(self) -> None:
        with _on(self.device):
            self.backend = build_backend(self.first.case)
        runner = runner_of(self.backend)
        with fakes.host_context(runner.server_args):
            self.backend.init_cuda_graph_state(LANES, LANES * W)
        self.checks = GraphChecks(DeviceCheck(self.device))
        self.batch = verify_batch(self.first, LANES, dummy_spec(self.first, LANES))
        for name in _STATIC:
            setattr(self.batch, name, getattr(self.batch, name).to(self.device))
        self.batch.spec_info.custom_mask = self.batch.spec_info.custom_mask.to(self.device)
        self._rows = torch.zeros(
            (3, LANES * W, self.first.case.heads * self.first.case.head_dim), device=self.device
        )
        self.tree = {
            name: torch.zeros((LANES, W), dtype=torch.int64, device=self.device) for name in TREE
        }
        self.tree["sizes"] = torch.zeros(LANES, dtype=torch.int64, device=self.device)
        self._capture()

    @property
    def shape(self) -> Shape:
        """The launch as the host knows it."""
        return Shape(
            lanes=LANES, w=W, contract=CONTRACT, depth_max=BLOCK - 1, vocab=50_000,
            pool=runner_of(self.backend).token_to_kv_pool.k.shape[0],
            max_extend_len=self.backend.forward_metadata.max_extend_len,
            rows=dict.fromkeys(("q", "out_cache_loc", "positions", "input_ids"), LANES * W),
            depth=Depth.FULL,
        )  # fmt: skip

    @property
    def buffers(self) -> Buffers:
        """What the captured kernels read."""
        return buffers_of_backend(
            self.backend.forward_metadata, self.captured, self.checks.live_count, self.tree
        )

    def write(self, inputs: Inputs, skip: tuple[str, ...] = (), clear: bool = True) -> None:
        """Write a batch to the static buffers, as the runner does before a replay."""
        self.generation += 1
        self.live = inputs.case.bs
        fill_pools(self.backend, _to(inputs, self.device))
        fresh = verify_batch(inputs, LANES)
        for name in _STATIC:
            if name not in skip:
                value, target = getattr(fresh, name), getattr(self.batch, name)
                count = len(value) if clear else len(value) // LANES * self.live
                target[:count] = value[:count].to(self.device)
                self.written[name] = self.generation
        for name in TREE:
            value = torch.from_numpy(getattr(inputs.tree, name))
            self.tree[name].zero_()
            self.tree[name][: self.live] = value.to(self.device)
        self.batch.spec_info = fresh.spec_info
        self.batch.spec_info.custom_mask = fresh.spec_info.custom_mask.to(self.device)
        for row, rows in zip(self._rows, (inputs.q, inputs.k, inputs.v), strict=True):
            flat = rows.flatten(1)
            row.zero_()
            row[: len(flat), : flat.shape[1]] = flat.to(self.device)

    def replay(self, inputs: Inputs) -> Replay:
        """Let SGLang refill its metadata, replay, and read the verdict and the step."""
        with fakes.host_context(runner_of(self.backend).server_args):
            self.backend.init_forward_metadata_out_graph(self.batch)
            self.checks.before_replay("verify", self.live)
            self._replay()
        self.checks.check.close()
        self.checks.check.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
        (verdict,) = self.checks.check.poll()
        rows = self._output[: self.live * W].cpu().numpy().copy()
        output = rows.reshape(self.live, W, inputs.case.heads, inputs.case.head_dim)
        return Replay(verdict, self._step(), output)

    def _step(self) -> Step:
        table = runner_of(self.backend).req_to_token_pool.req_to_token
        held = table[self.captured.req_pool_indices[: self.live]].cpu().numpy().copy()
        step = step_of(self.buffers, self.shape, self.live, slots__req_to_token=held)
        return step.replace(graph=self._certificate(), who__path="graph")

    def _certificate(self) -> Graph:
        names = {"lens": "seq_lens"}
        live = {
            name: getattr(self.batch, names.get(name, name), getattr(self.buffers, name))
            for name in Buffers.__dataclass_fields__
        }
        live = {name: None if value is None else value for name, value in live.items()}
        written = {
            name: self.written[static]
            for name, static in (("positions", "positions"), ("out_cache_loc", "out_cache_loc"))
            if static in self.written
        }
        return self.checks.certificates["verify"].replay(
            {"BS": LANES, "w": W, "mask": True}, live, written, self.generation
        )

    def _capture(self) -> None:
        runner = runner_of(self.backend)
        self.captured = dataclasses.replace(self.batch)
        layer = fakes.attention_layer(_sizes())
        with fakes.host_context(runner.server_args):
            self.backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
            table = runner.req_to_token_pool.req_to_token
            self.checks.before_capture(
                "verify", {"BS": LANES, "w": W, "mask": True}, self.buffers, self.shape,
                (table, self.captured.req_pool_indices),
            )  # fmt: skip
            kv = self.first.case.kv_heads * self.first.case.head_dim

            graphs = SimpleNamespace(backend=FullCudaGraphBackend())
            model_runner = SimpleNamespace(capture_tail_hooks=[])

            def region() -> None:
                self.checks.branch.beside(model_runner, lambda: self.checks.in_graph("verify"))
                q, k, v = self._rows
                shape = (LANES * W, self.first.case.kv_heads, self.first.case.head_dim)
                self._output = self.backend.forward_extend(
                    q, k[:, :kv].reshape(shape), v[:, :kv].reshape(shape), layer, self.captured
                )
                for hook in model_runner.capture_tail_hooks:
                    hook(graphs, self._output)

            self._replay = _recorded(region, self.device)
        self.checks.captured()


def _recorded(region: Callable[[], None], device: str) -> Callable[[], None]:
    """Capture a region into a CUDA graph; on a CPU the region itself is the graph."""
    if device != "cuda":
        return region
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        region()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        region()
    replay: Callable[[], None] = graph.replay
    return replay


@contextmanager
def _on(device: str) -> Iterator[None]:
    """Stand-in runners whose pools lie on the device."""
    build = fakes.model_runner

    def moved(*args: Any, **kwargs: Any) -> Any:
        runner = build(*args, **kwargs)
        runner.device = device
        requests, kv = runner.req_to_token_pool, runner.token_to_kv_pool
        requests.req_to_token = requests.req_to_token.to(device)
        # One pool serves every batch of the lab: room for its longest requests.
        room = (LANES * (CONTEXT + W) + 8, *kv.k.shape[1:])
        kv.k, kv.v = torch.zeros(room, device=device), torch.zeros(room, device=device)
        return runner

    with mock.patch.object(fakes, "model_runner", moved):
        yield


def _to(inputs: Inputs, device: str) -> Inputs:
    prefix = [(k.to(device), v.to(device)) for k, v in inputs.prefix]
    slots = [slots.to(device) for slots in inputs.slots]
    return dataclasses.replace(inputs, prefix=prefix, slots=slots, rows=inputs.rows.to(device))


def _sizes() -> fakes.Sizes:
    case = case_of((1,), 0)
    return fakes.Sizes(1, CONTEXT, W, case.heads, case.kv_heads, case.head_dim, 1, 1)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong between replays. `names` must be found, by device and host."""

    name: str
    device: tuple[str, ...]
    host: tuple[str, ...]
    plant: Callable[[Lab, Inputs, Inputs], None]


def _another_batch(lab: Lab, old: Inputs, new: Inputs) -> None:
    lab.write(new, skip=("positions", "out_cache_loc", "input_ids"))


def _short_after_long(lab: Lab, old: Inputs, new: Inputs) -> None:
    lab.write(new, clear=False)


def _stale_positions(lab: Lab, old: Inputs, new: Inputs) -> None:
    lab.write(new, skip=("positions",))


def _swapped_masks(lab: Lab, old: Inputs, new: Inputs) -> None:
    lab.write(new)
    order = np.arange(new.case.bs)[::-1]
    _mask_of(
        lab, new, new.case.lens, dataclasses.replace(new.tree, parents=new.tree.parents[order])
    )


def _wrong_stride(lab: Lab, old: Inputs, new: Inputs) -> None:
    lab.write(new)
    lab.backend.num_draft_tokens = W - 1


def _long_mask(lab: Lab, old: Inputs, new: Inputs) -> None:
    lab.write(new)
    _mask_of(lab, new, tuple(s + 1 for s in new.case.lens), new.tree)


def _mask_of(lab: Lab, new: Inputs, lens: tuple[int, ...], tree: Any) -> None:
    cells, _ = paint_mask(tree, lens, W, lens)
    lab.batch.spec_info.custom_mask = torch.from_numpy(cells).bool().to(lab.device)


def _aliasing_lane(lab: Lab, old: Inputs, new: Inputs) -> None:
    lab.write(new)
    lab.batch.out_cache_loc[-W:] = lab.batch.out_cache_loc[:W]


def _moved_pointer(lab: Lab, old: Inputs, new: Inputs) -> None:
    moved = lab.batch.positions.clone()
    lab.batch.positions = moved
    lab.write(new)


FAULTS = (
    Fault("another-batch", ("P1", "K3"), ("P1", "K3", "G2"), _another_batch),
    Fault("short-step-after-long", ("G4",), ("G4",), _short_after_long),
    Fault("stale-positions", ("P1",), ("P1", "G2"), _stale_positions),
    Fault("swapped-masks", ("M2",), ("M2",), _swapped_masks),
    Fault("wrong-stride", ("W1", "W3"), ("W1", "W3"), _wrong_stride),
    Fault("over-long-mask", ("M2",), ("M2",), _long_mask),
    Fault("lane-aliases-live-slot", ("G4", "K2"), ("G4", "G5", "K2"), _aliasing_lane),
    Fault("moved-pointer", ("P1",), ("G3", "P1"), _moved_pointer),
)


def long_and_short() -> tuple[Inputs, Inputs]:
    """A full batch, and a shorter one of fewer requests with other trees and equal lengths."""
    return make_inputs(case_of((37, 21, 50, 9), 1)), make_inputs(case_of((30, 30, 30), 2))


def run_fault(fault: Fault, device: str) -> tuple[Replay, Replay]:
    """A sound replay of the long batch, then the faulty one of the short batch, in a new lab."""
    old, new = long_and_short()
    lab = Lab(device, old)
    lab.write(old)
    sound = lab.replay(old)
    fault.plant(lab, old, new)
    return sound, lab.replay(new)


def error_of(replay: Replay, inputs: Inputs) -> float:
    """Largest distance of the attention rows from the dense oracle."""
    return float(np.abs(replay.output - oracle(inputs)).max())
