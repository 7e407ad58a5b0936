"""Run one verify step through SGLang's real Triton backend and kernels on a CPU.

`run_verify` is the whole of it: a `VerifyCase` in, a `VerifyRun` out, holding the kernel's rows,
the dense oracle's rows and the Step that the guard would see. Needs SGLang importable and
TRITON_INTERPRET=1 set before Triton is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddtree_guard.step import Step

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
    that were written.
    """

    output: Any
    expected: Any
    step: Step
    wrong_rows: tuple[tuple[int, int], ...]
    max_error: float

    @property
    def rows(self) -> int:
        """Rows compared: bs * w."""
        return int(self.output.shape[0] * self.output.shape[1])

    @property
    def unwritten_rows(self) -> int:
        """Rows that the kernel never wrote."""
        raise NotImplementedError


TOLERANCE = 1e-5


def build_backend(case: VerifyCase, choice: Choice = "stock", draft: bool = False) -> Any:
    """SGLang's Triton backend for this case, as the attention registry would create it.

    "stock" is the class as shipped, "corrected" this package's subclass of it, "auto" whichever
    the guard picks. `draft` builds the draft runner's backend.
    """
    raise NotImplementedError


def run_verify(backend: Any, case: VerifyCase, path: Path = "eager") -> VerifyRun:
    """Run the case's verify step on a backend from `build_backend`.

    Eager: `init_forward_metadata`, then the extend kernel. Graph: `init_cuda_graph_state`,
    capture with dummy lengths, replay with the case's lengths, then the kernel on the captured
    metadata. Outputs are pre-filled with NaN.
    """
    raise NotImplementedError


def random_parents(case: VerifyCase) -> Sequence[Sequence[int]]:
    """The trees of a case, grown from its seed where `parents` is not given."""
    raise NotImplementedError
