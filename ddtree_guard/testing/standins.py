"""Run one verify step through SGLang's real Triton backend and kernels on a CPU.

`run_verify` is the whole of it: a `VerifyCase` in, a `VerifyRun` out, holding the kernel's rows,
the dense oracle's rows and the Step that the guard would see. Needs SGLang importable and
TRITON_INTERPRET=1 set before Triton is imported.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from ddtree_guard.attention import backend as corrected
from ddtree_guard.attention.reference import verify_attention
from ddtree_guard.config import Backend
from ddtree_guard.hooks.observe import read_step
from ddtree_guard.step import Step, Tree
from ddtree_guard.testing import fakes
from ddtree_guard.testing.fakes import Sizes, sglang
from ddtree_guard.testing.steps import paint_mask

Choice = Literal["stock", "corrected", "auto"]
Path = Literal["eager", "graph"]


@dataclass(frozen=True, slots=True)
class VerifyCase:
    """One verify step. Row 0 of a tree is its root; the width is budget + 1.

    `lens` are the committed lengths. `parents` gives each request's tree (-1 for the root and for
    padding rows); without it trees grow from `seed` in the style of `kind`. `padded_bs` is the
    captured batch size of the graph path. `context` 0 means "just enough". `draft_tokens` is D,
    the server argument; None wires it as the incident does, to the block size.
    """

    lens: tuple[int, ...] = (37, 21)
    budget: int = 16
    block: int = 8
    parents: tuple[tuple[int, ...], ...] | None = None
    seed: int = 0
    kind: Literal["random", "chain", "star"] = "random"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    padded_bs: int | None = None
    context: int = 0
    draft_tokens: int | None = None

    @property
    def w(self) -> int:
        """Rows per request."""
        return self.budget + 1

    @property
    def bs(self) -> int:
        """Live requests."""
        return len(self.lens)


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
        budget=case.budget,
        algorithm="DDTREE",
    )


def grow_trees(case: VerifyCase) -> Tree:
    """The trees of a case: its `parents`, or trees grown from its seed; tokens, depths, links."""
    rng = np.random.default_rng(case.seed)
    parents = [
        case.parents[i] if case.parents is not None else _parents(rng, case)
        for i in range(case.bs)
    ]
    shape = (case.bs, case.w)
    depths = np.zeros(shape, np.int64)
    child, sibling = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
    sizes = np.ones(case.bs, np.int64)
    for i, tree in enumerate(parents):
        for row, parent in enumerate(tree):
            if parent < 0:
                continue
            sizes[i] = row + 1
            depths[i, row] = depths[i, parent] + 1
            if child[i, parent] < 0:
                child[i, parent] = row
            else:
                last = child[i, parent]
                while sibling[i, last] >= 0:
                    last = sibling[i, last]
                sibling[i, last] = row
    return Tree(
        tokens=rng.permuted(np.tile(np.arange(1, case.w + 1), (case.bs, 1)), axis=1) * 7,
        parents=np.array(parents, np.int64).reshape(shape),
        depths=depths,
        sizes=sizes,
        retrieve_index=np.arange(case.bs * case.w, dtype=np.int64).reshape(shape),
        retrieve_next_token=child,
        retrieve_next_sibling=sibling,
    )


def _parents(rng: np.random.Generator, case: VerifyCase) -> list[int]:
    """A chain down to the block's depth first (star: the root only), then random attachments."""
    w, deepest = case.w, case.block - 1
    spine = {"star": 1, "chain": w, "random": int(rng.integers(1, deepest + 1))}[case.kind]
    parents, depths = [-1], [0]
    for row in range(1, w):
        room = [p for p in range(row) if depths[p] < deepest]
        if case.kind == "star":
            parent = 0
        elif row <= spine and depths[row - 1] < deepest:
            parent = row - 1
        elif case.kind == "chain":
            return parents + [-1] * (w - row)  # the rest of the rows is padding
        else:
            parent = int(rng.choice(room))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything random about one step, on the CPU: trees, slots, and q, k, v rows."""

    case: VerifyCase
    tree: Tree
    slots: list[Any]  # per request: s + w slot ids
    rows: Any  # request pool row per request
    q: Any
    k: Any
    v: Any
    prefix: list[tuple[Any, Any]]


def make_inputs(case: VerifyCase) -> Inputs:
    """The inputs of a case. The same case gives the same inputs."""
    rng = np.random.default_rng(case.seed + 1)
    torch_rng = torch.Generator().manual_seed(case.seed)
    ids = torch.from_numpy(rng.permutation(sum(case.lens) + case.bs * case.w) + 1)
    slots = list(ids.split([s + case.w for s in case.lens]))

    def rows(count: int, heads: int) -> Any:
        return torch.randn((count, heads, case.head_dim), generator=torch_rng)

    total = case.bs * case.w
    return Inputs(
        case=case,
        tree=grow_trees(case),
        slots=slots,
        rows=torch.from_numpy(rng.permutation(case.bs) + 1),
        q=rows(total, case.heads),
        k=rows(total, case.kv_heads),
        v=rows(total, case.kv_heads),
        prefix=[(rows(s, case.kv_heads), rows(s, case.kv_heads)) for s in case.lens],
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


def verify_batch(inputs: Inputs, lanes: int | None = None, spec: Any = None) -> Any:
    """SGLang's ForwardBatch of a verify step, padded to `lanes` requests as its runner pads."""
    case, tree = inputs.case, inputs.tree
    live, lanes = case.bs, lanes or case.bs
    info = sglang("model_executor.forward_batch_info")
    seq_lens = torch.ones(lanes, dtype=torch.int64)
    seq_lens[:live] = torch.tensor(case.lens)
    rows, loc, positions, tokens = (
        torch.zeros(lanes, dtype=torch.int64),
        torch.zeros(lanes * case.w, dtype=torch.int64),
        torch.zeros(lanes * case.w, dtype=torch.int64),
        torch.zeros(lanes * case.w, dtype=torch.int64),
    )
    rows[:live] = inputs.rows
    loc[: live * case.w] = torch.cat([s[-case.w :] for s in inputs.slots])
    depths = torch.from_numpy(tree.depths)
    positions[: live * case.w] = (seq_lens[:live, None] + depths).reshape(-1)
    tokens[: live * case.w] = torch.from_numpy(tree.tokens).reshape(-1)
    return info.ForwardBatch(
        forward_mode=info.ForwardMode.TARGET_VERIFY,
        batch_size=lanes,
        input_ids=tokens,
        req_pool_indices=rows,
        seq_lens=seq_lens,
        out_cache_loc=loc,
        seq_lens_sum=int(seq_lens.sum()),
        seq_lens_cpu=seq_lens.clone(),
        positions=positions,
        spec_info=spec or tree_spec(inputs),
    )


def tree_spec(inputs: Inputs) -> Any:
    """The spec info of a DDTree step: SGLang's DFlashVerifyInput, w rows, a mask, the parents."""
    case, tree = inputs.case, inputs.tree
    cells, _ = paint_mask(tree, case.lens, case.w, case.lens)
    spec = sglang("speculative.dflash_info").DFlashVerifyInput(
        draft_token=torch.from_numpy(tree.tokens).reshape(-1),
        positions=None,
        draft_token_num=case.w,
        custom_mask=torch.from_numpy(cells).bool(),
    )
    spec.parents = torch.from_numpy(tree.parents)
    spec.depths = torch.from_numpy(tree.depths)
    spec.tree_sizes = torch.from_numpy(tree.sizes)
    return spec


def dummy_spec(inputs: Inputs, lanes: int) -> Any:
    """The spec info that a graph runner captures with: every committed length is 1."""
    w = inputs.case.w
    return sglang("speculative.dflash_info").DFlashVerifyInput(
        draft_token=None,
        positions=None,
        draft_token_num=w,
        custom_mask=torch.ones(lanes * w * (1 + w), dtype=torch.bool),
    )


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


def launch(backend: Any, inputs: Inputs, batch: Any) -> Any:
    """Run SGLang's extend attention for the batch: (lanes * w, heads, head_dim)."""
    runner = runner_of(backend)
    sizes, rows = _sizes(inputs.case, False), len(batch.req_pool_indices) * inputs.case.w
    batch.token_to_kv_pool = runner.token_to_kv_pool  # 0.5.12 finds its pool here
    q, k, v = (_padded(x, rows) for x in (inputs.q, inputs.k, inputs.v))
    with _nan_output(backend), fakes.host_context(runner.server_args):
        out = backend.forward_extend(q.flatten(1), k, v, fakes.attention_layer(sizes), batch)
    return out.view(rows, inputs.case.heads, inputs.case.head_dim)


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
        k, v = inputs.prefix[i]
        parts = (inputs.q[mine], k, v, inputs.k[mine], inputs.v[mine])
        rows.append(
            verify_attention(*(x.numpy() for x in parts), parents=inputs.tree.parents[i].tolist())
        )
    return np.stack(rows)
