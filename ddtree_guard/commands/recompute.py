"""`ddtree-guard recompute DUMP`: recorded attention rows against the dense oracle.

The oracle sees the tree, the lengths and the operands, never an offset or a mask. With `--kernel`
SGLang's own kernel runs too, on offsets and a mask made from the tree: if its rows are right, the
recorded offsets or mask are at fault and not the kernel.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddtree_guard.attention.reference import verify_attention, visible
from ddtree_guard.dump.read import Dump
from ddtree_guard.errors import DumpError, IncompatibleError, UsageError
from ddtree_guard.fold import say
from ddtree_guard.render import count, plain
from ddtree_guard.step import Step

TOLERANCE = 0.02  # of the largest value: bfloat16 rows of a long prefix stay below
MAX_WORK = 1 << 31  # heads * w * (s + w) of a request: what the oracle may have to hold
Operands = tuple[Any, Any, Any, Any, Any, Any]  # q, k_prefix, v_prefix, k, v, parents


@dataclass
class Result:
    """One step: distances from the oracle, (bs, w), as a fraction of the largest value."""

    index: int
    step: Step
    error: Any
    kernel_error: Any = None
    wrong: list[tuple[int, int]] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    """Print the first wrong row. 0 when every recorded row is right, 1 when one is not."""
    if not args.tolerance > 0:
        raise UsageError(f"--tolerance is a fraction above 0, found {args.tolerance}.")
    dump = Dump(args.dump)
    kernel = load_kernel() if args.kernel else None
    results = [
        result
        for at in range(len(dump))
        if (result := recompute(at, dump.step(at), args.tolerance, kernel)) is not None
    ]
    if not results:
        raise UsageError(
            "a dump with q, k and v rows was expected, found metadata only; serve with "
            "SGLANG_DDTREE_GUARD_CAPTURE=qkv and SGLANG_DDTREE_GUARD_REDACT=off to capture them."
        )
    if args.json:
        print(json.dumps(_as_json(results, args.tolerance), indent=1))
    else:
        say("\n".join(map(plain, _text(results, args.tolerance))))
    return 1 if any(result.wrong for result in results) else 0


def recompute(
    index: int, step: Step, tolerance: float = TOLERANCE, kernel: Callable[..., Any] | None = None
) -> Result | None:
    """Compare a step's recorded rows with the oracle; None for a step without them.

    Raises DumpError when the recorded operands do not fit the tree and the lengths.
    """
    if step.attention.q is None:
        return None
    requests = operands(step)
    scale = step.attention.scale
    shape = (len(requests), step.w, *step.attention.output.shape[1:])
    output = step.attention.output[: shape[0] * step.w].reshape(shape)
    right = np.stack([verify_attention(*one, scale=scale) for one in requests])
    result = Result(index, step, _distance(output, right))
    if kernel is not None:
        rows = kernel(requests, scale)
        result.kernel_error = _distance(rows.reshape(right.shape), right)
    whose = requests_of(step)
    result.wrong = [(whose[i], int(r)) for i, r in np.argwhere(~(result.error <= tolerance))]
    return result


def _distance(rows: Any, right: Any) -> Any:
    """Largest distance in each row over the largest right value; NaN where a row has a NaN."""
    with np.errstate(all="ignore"):
        largest = np.abs(right).max() or 1.0
        return np.abs(rows.astype(np.float64) - right).max(axis=(2, 3)) / largest


def operands(step: Step) -> list[Operands]:
    """What the oracle needs, per request. Raises DumpError where it does not fit together."""
    a, w = step.attention, step.w
    whose = requests_of(step)
    bs = len(whose)
    parents, lens = _parents(step), step.layout.prefix_lens
    if parents is not None and parents.shape == (step.bs, w):
        parents = parents[whose]
    if lens is not None and lens.ndim == 1 and len(lens) >= step.bs:
        lens = lens[whose]
    arrays = {"q": a.q, "k": a.k, "v": a.v, "k_prefix": a.k_prefix, "v_prefix": a.v_prefix,
              "output": a.output, "parents": parents, "prefix_lens": lens}  # fmt: skip
    for name, value in arrays.items():
        if value is None:
            raise DumpError(f"step {step.who.step_id} holds q but not {name}; nothing is known.")
    shapes = {name: value.shape for name, value in arrays.items()}
    fits = (
        all(arrays[name].ndim == 3 for name in list(arrays)[:6])
        and parents.shape == (bs, w)
        and parents.dtype.kind in "iu"
        and lens.ndim == 1
        and lens.dtype.kind in "iu"
        and len(lens) >= bs
        and all(shapes[name][0] >= bs * w for name in ("q", "k", "v", "output"))
        and shapes["q"] == shapes["output"]
        and shapes["k"] == shapes["v"]
        and shapes["k_prefix"] == shapes["v_prefix"]
        and shapes["k"][1:] == shapes["k_prefix"][1:]
        and shapes["q"][2] == shapes["k"][2] > 0
        and shapes["k"][1] > 0
        and shapes["q"][1] % shapes["k"][1] == 0 < shapes["q"][1]
        and all(arrays[name].dtype.kind == "f" for name in list(arrays)[:6])
    )
    mine = [int(s) for s in lens[:bs]] if fits else []
    if not fits or min(mine) < 0 or sum(mine) != shapes["k_prefix"][0]:
        raise DumpError(f"the attention rows of step {step.who.step_id} do not fit its lengths.")
    if max(shapes["q"][1] * w * (s + w) for s in mine) > MAX_WORK:
        raise DumpError(f"step {step.who.step_id} is too large to be recomputed here.")
    starts = np.concatenate([[0], np.cumsum(mine)])
    found = []
    for i in range(bs):
        rows, prefix = slice(i * w, (i + 1) * w), slice(int(starts[i]), int(starts[i + 1]))
        tree = [int(p) for p in parents[i]]
        if any(parent >= row for row, parent in enumerate(tree)):
            raise DumpError(f"request {i} of step {step.who.step_id} has a parent after its child.")
        found.append(
            (a.q[rows], a.k_prefix[prefix], a.v_prefix[prefix], a.k[rows], a.v[rows], tree)
        )
    return found


def requests_of(step: Step) -> list[int]:
    """The requests whose rows a step holds. Raises DumpError for what cannot be a list of them."""
    held = step.attention.requests
    if held is None:
        return list(range(step.bs))
    known = held.ndim == 1 and held.dtype.kind in "iu" and 0 < len(held) <= step.bs
    whose = [int(i) for i in held] if known else []
    if not known or whose != sorted(set(whose)) or whose[0] < 0 or whose[-1] >= step.bs:
        raise DumpError(f"step {step.who.step_id} does not say whose attention rows it holds.")
    return whose


def _parents(step: Step) -> Any:
    """The tree's parents; a chain has no array of them."""
    if step.tree.parents is None and step.contract.chain:
        return np.tile(np.arange(-1, step.w - 1), (step.bs, 1))
    return step.tree.parents


def load_kernel() -> Callable[[list[Operands], float | None], Any]:
    """SGLang's extend attention as a function of operands. Raises IncompatibleError without it."""
    try:
        import torch

        try:
            from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
        except ImportError:  # up to 0.5.15
            from sglang.srt.layers.attention.triton_ops.extend_attention import (
                extend_attention_fwd,
            )
    except ImportError as error:
        raise IncompatibleError(
            f"--kernel runs SGLang's kernel, but {error.name or 'it'} cannot be imported here; "
            "leave --kernel out, or run it where SGLang is installed."
        ) from None
    return lambda requests, scale: _launch(torch, extend_attention_fwd, requests, scale)


def _launch(torch: Any, forward: Callable[..., Any], requests: list[Operands], scale: Any) -> Any:
    """Run the kernel on offsets and masks that follow from the trees. Every index is ours."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def put(value: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(value)).to(device)

    q, kp, vp, k, v, trees = zip(*requests, strict=True)
    w, lens = len(trees[0]), [len(x) for x in kp]
    masks = [
        np.concatenate([np.ones((w, s), bool), visible(tree)], axis=1).reshape(-1)
        for s, tree in zip(lens, trees, strict=True)
    ]
    rows = put(np.concatenate(q))
    out = torch.full_like(rows, float("nan"))
    running = [np.concatenate([[0], np.cumsum(x)]) for x in ([w] * len(lens), lens,
                                                             [len(m) for m in masks])]  # fmt: skip
    given = {
        "q_extend": rows, "k_extend": put(np.concatenate(k)), "v_extend": put(np.concatenate(v)),
        "o_extend": out, "k_buffer": put(np.concatenate(kp)), "v_buffer": put(np.concatenate(vp)),
        "qo_indptr": put(running[0]), "kv_indptr": put(running[1].astype(np.int32)),
        "kv_indices": put(np.arange(sum(lens))), "custom_mask": put(np.concatenate(masks)),
        "is_causal": True, "mask_indptr": put(running[2]), "max_len_extend": w,
        "k_scale": 1.0, "v_scale": 1.0, "sm_scale": scale or rows.shape[2] ** -0.5,
    }  # fmt: skip
    import inspect

    known = inspect.signature(forward).parameters
    with np.errstate(all="ignore"):  # Triton's interpreter divides in lanes that nobody reads
        forward(**{name: value for name, value in given.items() if name in known})
    return out.cpu().numpy()


def _text(results: list[Result], tolerance: float) -> list[str]:
    lines = []
    for result in results:
        step, total = result.step, result.error.size
        head = (
            f"step {step.who.step_id} (index {result.index}), {len(result.error)} of {step.bs} "
            f"requests, w={step.w}"
        )
        if not result.wrong:
            lines.append(f"{head}: {total} rows as the oracle says, largest error "
                         f"{np.nanmax(result.error):.1e}")  # fmt: skip
        else:
            i, r = result.wrong[0]
            rid, error = step.who.rid(i), result.error[requests_of(step).index(i), r]
            lines.append(f"{head}: {len(result.wrong)} of {total} rows are wrong")
            lines.append(
                f"  first: request {i}{f' (rid {rid})' if rid else ''}, row {r}: error "
                f"{error:.1e} of the largest value, allowed {tolerance:.1e}"
            )
        if result.kernel_error is not None:
            lines.append("  " + _kernel_text(result, tolerance))
    wrong, rows = sum(len(r.wrong) for r in results), sum(r.error.size for r in results)
    lines.append(
        f"recomputed {count(rows, 'row')} of {count(len(results), 'step')} with dense attention: "
        + (f"{wrong} wrong" if wrong else "all right")
    )
    return lines


def _kernel_text(result: Result, tolerance: float) -> str:
    bad = int((~(result.kernel_error <= tolerance)).sum())
    if bad:
        return f"SGLang's kernel on offsets from the tree: {bad} rows wrong, so the kernel is"
    if result.wrong:
        return "SGLang's kernel on offsets from the tree is right: recorded offsets or mask are not"
    return "SGLang's kernel on offsets from the tree is right as well"


def _as_json(results: list[Result], tolerance: float) -> dict[str, Any]:
    def worst(error: Any) -> float | None:
        value = float(np.max(error))
        return value if np.isfinite(value) else None

    return {
        "tolerance": tolerance,
        "steps": [
            {
                "index": r.index,
                "step": r.step.who.step_id,
                "rows": int(r.error.size),
                "wrong": [list(place) for place in r.wrong],
                "max_error": worst(r.error),
                "kernel_max_error": None if r.kernel_error is None else worst(r.kernel_error),
            }
            for r in results
        ],
        "exit": 1 if any(r.wrong for r in results) else 0,
    }
