"""What a hook hands to an adapter: the live objects of one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree_guard.hooks.certificates import Replay

RAGGED = "ragged_verify_layout"


def lanes_of(batch: Any) -> int:
    """Requests of a forward batch, padded ones too. `len` of a tensor takes five times as long."""
    return int(batch.req_pool_indices.shape[0])


def ragged(batch: Any) -> bool:
    """Whether a forward batch has no single width."""
    return getattr(batch.spec_info, RAGGED, None) is not None


def state_of(runner: Any) -> str:
    """A runner's runtime state, by what distinguishes it: adaptive speculation swaps widths."""
    return f"D={runner.server_args.speculative_num_draft_tokens}"


@dataclass(slots=True)  # one a step: a frozen one takes four times as long to make
class View:
    """One verify launch, just after its metadata was built.

    `batch` is the forward batch as the backend saw it, padded under graphs; `rids` are the live
    requests, in order, and `live` is their number. `metadata` is what the launch reads (None: the
    backend's newest). `path` is "eager" or "graph"; `state` names the runtime state where widths
    change at run time. `replay` is the birth certificate of the graph beside this replay, where
    there is one.

    In a server `complete` fills in rids, metadata, state and replay, and the inputs of a graph in
    `batch`: that takes longer than a replay should wait for.
    """

    backend: Any
    batch: Any
    runner: Any
    rids: tuple[str, ...] = ()
    step_id: int = 0
    rank: str = "TP0"
    path: str = "eager"
    metadata: Any = None
    state: str = "default"
    replay: Replay | None = None
    live: int = 0
    late: Callable[[View], None] | None = None

    def complete(self) -> View:
        """Fill in what was left for later. Returns the view."""
        late, self.late = self.late, None
        if late is not None:
            late(self)
        return self

    @property
    def bs(self) -> int:
        """Live requests; all lanes where the requests are not known."""
        return self.live or len(self.rids) or lanes_of(self.batch)
