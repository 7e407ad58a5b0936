"""Run one verify step through SGLang's real Triton backend and kernels on a CPU.

`run_verify` is the whole of it: a `VerifyCase` in, a `VerifyRun` out, holding the kernel's rows,
the dense oracle's rows and the Step that the guard would see. Needs SGLang importable and
TRITON_INTERPRET=1 set before Triton is imported.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from ddtree_guard.attention import backend as corrected
from ddtree_guard.attention.reference import verify_attention
from ddtree_guard.config import Backend
from ddtree_guard.hooks.observe import read_step
from ddtree_guard.step import Step
from ddtree_guard.testing import fakes
from ddtree_guard.testing.batches import dummy_spec, verify_batch
from ddtree_guard.testing.cases import Inputs, VerifyCase, make_inputs
from ddtree_guard.testing.fakes import Sizes, sglang

__all__ = ["VerifyCase", "VerifyRun", "build_backend", "run_verify"]

Choice = Literal["stock", "corrected", "auto"]
Path = Literal["eager", "graph"]


@dataclass(frozen=True, slots=True)
class VerifyRun:
    """What a verify step gave.

    `output` and `expected` are float arrays (bs, w, heads, head_dim); a row of `output` that the
    kernel never wrote is NaN. `wrong_rows` lists (request, row) whose distance from the oracle is
    above `TOLERANCE` or that were not written. `max_error` is the largest distance over the rows
    that were written. `ran` is False where the kernel was not launched because its metadata
    reaches beyond the rows; then the arrays are None and nothing is known about the rows.
    """

    output: Any
    expected: Any
    step: Step
    wrong_rows: tuple[tuple[int, int], ...]
    max_error: float
    ran: bool = True

    @property
    def right(self) -> bool:
        """Whether the kernel ran and every row is within `TOLERANCE` of the oracle."""
        return self.ran and not self.wrong_rows

    @property
    def rows(self) -> int:
        """Rows compared: bs * w."""
        return self.step.bs * self.step.w

    @property
    def unwritten_rows(self) -> int:
        """Rows that the kernel never wrote."""
        return int(np.isnan(self.output).any(axis=(2, 3)).sum()) if self.ran else 0


TOLERANCE = 1e-5
_RUNNERS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def build_backend(case: VerifyCase, choice: Choice = "stock", draft: bool = False) -> Any:
    """SGLang's Triton backend for this case, as the attention registry creates it.

    "stock" is the class as shipped, "corrected" this package's subclass of it, "auto" whichever
    the guard picks; both go through `install`, which is undone before this returns. `draft`
    builds the draft runner's backend.
    """
    runner = fakes.model_runner(_sizes(case, draft), draft)
    with fakes.fork_with_budget(), fakes.host_context(runner.server_args):
        report = corrected.install(Backend(choice))
        try:
            registry = sglang("layers.attention.attention_registry").ATTENTION_BACKENDS
            backend = registry["triton"](runner)
        finally:
            if report is not None:
                report.restore()
    _RUNNERS[backend] = runner
    return backend


def runner_of(backend: Any) -> Any:
    """The stand-in model runner that a backend was built for."""
    return _RUNNERS[backend]


def _sizes(case: VerifyCase, draft: bool) -> Sizes:
    lanes = case.padded_bs or case.bs
    room = case.w + 4  # columns beyond the context that a verify step may reserve
    width = case.block if draft or case.draft_tokens is None else case.draft_tokens
    return Sizes(
        rows=lanes + 2,
        context=case.context or max(case.lens) + case.w,
        width=width,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        slots=sum(case.lens) + case.bs * case.w + 8,
        room=room,
        block=case.block,
        budget=case.budget if case.algorithm == "DDTREE" else None,
        algorithm=case.algorithm,
        topk=case.topk,
        steps=case.block - 1,
    )


def fill_pools(backend: Any, inputs: Inputs) -> None:
    """Write the committed keys and values, and the slot tables, where the server would."""
    runner = runner_of(backend)
    for i, s in enumerate(inputs.case.lens):
        slots = inputs.slots[i]
        table = runner.req_to_token_pool.req_to_token
        table[inputs.rows[i], : len(slots)] = slots.to(table.dtype)
        runner.token_to_kv_pool.k[slots[:s]], runner.token_to_kv_pool.v[slots[:s]] = inputs.prefix[
            i
        ]


def build_metadata(backend: Any, inputs: Inputs, path: Path) -> Any:
    """Let the backend build the step's metadata as SGLang's runners do; returns the batch.

    Graph: buffers for `padded_bs` requests of w rows, capture with lengths 1, replay with the
    case's. Afterwards `backend.forward_metadata` is what the captured kernels read.
    """
    with fakes.host_context(runner_of(backend).server_args):
        if path == "eager":
            batch = verify_batch(inputs)
            backend.init_forward_metadata(batch)
            return batch
        lanes = inputs.case.padded_bs or inputs.case.bs
        backend.init_cuda_graph_state(lanes, lanes * inputs.case.w)
        capture(backend, inputs, lanes)
        batch = verify_batch(inputs, lanes)
        replay(backend, batch)
        return batch


def capture(backend: Any, inputs: Inputs, lanes: int) -> None:
    """Build the metadata of a capture of `lanes` requests with committed length 1."""
    batch = verify_batch(inputs, lanes, dummy_spec(inputs, lanes))
    batch.seq_lens.fill_(1)
    batch.req_pool_indices.zero_()
    if hasattr(backend, "init_forward_metadata_out_graph"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        return
    backend.init_forward_metadata_capture_cuda_graph(
        lanes, lanes * inputs.case.w, batch.req_pool_indices, batch.seq_lens, None,
        batch.forward_mode, batch.spec_info,
    )  # fmt: skip


def replay(backend: Any, batch: Any) -> None:
    """Refill the captured metadata for a batch, as a graph runner does before a replay."""
    if hasattr(backend, "init_forward_metadata_out_graph"):
        backend.init_forward_metadata_out_graph(batch)
        return
    backend.init_forward_metadata_replay_cuda_graph(
        batch.batch_size, batch.req_pool_indices, batch.seq_lens, batch.seq_lens_sum, None,
        batch.forward_mode, batch.spec_info, batch.seq_lens_cpu,
    )  # fmt: skip


def run_verify(backend: Any, case: VerifyCase, path: Path = "eager") -> VerifyRun:
    """Run the case's verify step on a backend from `build_backend`.

    Eager: `init_forward_metadata`, then the extend kernel. Graph: `init_cuda_graph_state`,
    capture with dummy lengths, replay with the case's lengths, then the kernel on the captured
    metadata. Outputs are pre-filled with NaN. The kernel is not launched where the metadata
    reaches beyond the rows, because it would write out of bounds.
    """
    inputs = make_inputs(case)
    fill_pools(backend, inputs)
    batch = build_metadata(backend, inputs, path)
    return finish(backend, inputs, batch, path)


def finish(backend: Any, inputs: Inputs, batch: Any, path: Path) -> VerifyRun:
    """Read the Step of metadata that was built, launch the kernel, compare with the oracle."""
    case, runner = inputs.case, runner_of(backend)
    rows = len(batch.req_pool_indices) * case.w
    step = read_step(
        backend, batch, runner, path=path, bs=case.bs, q_rows=rows,
        rids=tuple(f"r{i}" for i in range(case.bs)),
    )  # fmt: skip
    if int(step.layout.qo_indptr[-1]) > rows:
        return VerifyRun(None, None, step, (), 0.0, ran=False)
    output = launch(backend, inputs, batch)[: case.bs * case.w]
    output = output.numpy().reshape(case.bs, case.w, case.heads, case.head_dim)
    expected = oracle(inputs)
    error = np.abs(output - expected).max(axis=(2, 3))  # NaN where a row was never written
    wrong = tuple((int(i), int(r)) for i, r in np.argwhere(~(error <= TOLERANCE)))
    written = error[~np.isnan(error)]
    return VerifyRun(output, expected, step, wrong, float(written.max(initial=0.0)))


def launch(backend: Any, inputs: Inputs, batch: Any, layer_id: int = 0) -> Any:
    """Run SGLang's extend attention for the batch: (lanes * w, heads, head_dim)."""
    runner = runner_of(backend)
    layer = fakes.attention_layer(_sizes(inputs.case, False), layer_id)
    rows = len(batch.req_pool_indices) * inputs.case.w
    batch.token_to_kv_pool = runner.token_to_kv_pool  # 0.5.12 finds its pool here
    q, k, v = (_padded(x, rows) for x in (inputs.q, inputs.k, inputs.v))
    with _nan_output(backend), fakes.host_context(runner.server_args):
        out = backend.forward_extend(q.flatten(1), k, v, layer, batch)
    return out.view(rows, inputs.case.heads, inputs.case.head_dim)


def overrun_rows(case: VerifyCase) -> int:
    """Rows beyond the output that the stock kernel writes in the case's eager step.

    Guard rows lie behind every operand, so what is written there belongs to somebody else on a
    real server. Run it in a child process: the same launch without guard rows can crash.
    """
    backend, inputs = build_backend(case), make_inputs(case)
    fill_pools(backend, inputs)
    batch = build_metadata(backend, inputs, "eager")
    meta, rows = backend.forward_metadata, case.bs * case.w
    spare = int(meta.qo_indptr[-1]) + rows
    mask = meta.custom_mask
    meta.custom_mask = torch.cat([mask, mask.new_ones(int(meta.mask_indptr[-1]))])[: len(mask)]
    kernel, written = backend.extend_attention_fwd, 0

    def guarded(q: Any, k: Any, v: Any, out: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal written
        q, k, v, wide = (_padded(x, spare) for x in (q, k, v, out))
        wide[rows:] = GUARD
        kernel(q[:rows], k[:rows], v[:rows], wide[:rows], *args, **kwargs)
        written = int((wide[rows:] != GUARD).any(dim=2).any(dim=1).sum())

    backend.extend_attention_fwd = guarded
    launch(backend, inputs, batch)
    return written


GUARD = 12345.0


def _padded(x: Any, rows: int) -> Any:
    return torch.cat([x, x.new_zeros((rows - len(x), *x.shape[1:]))])


@contextmanager
def _nan_output(backend: Any) -> Iterator[None]:
    """Fill the output with NaN just before the kernel: reused memory can hold the right answer."""
    kernel: Callable[..., Any] = backend.extend_attention_fwd

    def prefilled(q: Any, k: Any, v: Any, out: Any, *args: Any, **kwargs: Any) -> Any:
        out.fill_(float("nan"))
        return kernel(q, k, v, out, *args, **kwargs)

    backend.extend_attention_fwd = prefilled
    try:
        yield
    finally:
        backend.extend_attention_fwd = kernel


def oracle(inputs: Inputs) -> Any:
    """What every live row must be: (bs, w, heads, head_dim)."""
    w = inputs.case.w
    rows = []
    for i in range(inputs.case.bs):
        mine = slice(i * w, (i + 1) * w)
        q, k, v = (x[mine].numpy() for x in (inputs.q, inputs.k, inputs.v))
        k_prefix, v_prefix = (x.numpy() for x in inputs.prefix[i])
        parents = inputs.tree.parents[i].tolist()
        rows.append(verify_attention(q, k_prefix, v_prefix, k, v, parents))
    return np.stack(rows)
