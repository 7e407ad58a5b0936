"""Other places of the check in a captured graph, to compare an engine's with. Part of the probe.

Each is a patch of this process, made before anything is captured. A further one is a function, and
its name in PLACES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from ddtree_guard.config import setting


def in_line() -> None:
    """The check stands at the head of the graph, and the forward pass waits for it."""
    from ddtree_guard.hooks.branch import Branch

    @contextmanager
    def beside(branch: Any, runner: Any, read: Any = ()) -> Iterator[None]:
        yield

    Branch.beside = beside  # type: ignore[method-assign,assignment]


def late() -> None:
    """The branch is the same, but the check is its last node to be captured, not the graph's first:
    the side stream forks at the head, and is launched upon at the tail, before it is joined.
    """
    import torch

    from ddtree_guard.hooks.branch import Branch
    from ddtree_guard.hooks.device import GraphChecks

    own_check, own_join = GraphChecks.in_graph, Branch.join
    waiting: list[tuple[Branch, Callable[[], None]]] = []

    def in_graph(checks: GraphChecks, key: Any) -> None:
        branch = checks.branch
        if branch._open:
            waiting.append((branch, partial(own_check, checks, key)))
        else:
            own_check(checks, key)

    def join(branch: Branch) -> None:
        if branch._forked():
            with torch.cuda.stream(branch._side):
                for owner, launch in waiting:
                    if owner is branch:
                        launch()
        # also what a capture that died has left: a pass to warm up comes before the next one
        waiting[:] = [entry for entry in waiting if entry[0] is not branch]
        own_join(branch)

    GraphChecks.in_graph = in_graph  # type: ignore[method-assign,assignment]
    Branch.join = join  # type: ignore[method-assign,assignment]


PLACES: Mapping[str, Callable[[], None]] = {"in_line": in_line, "late": late}


def place() -> None:
    """Make the patch that DDTREE_GUARD_PROBE_IN_LINE=on, or another of PLACES, asks for."""
    for name, patch in PLACES.items():
        if setting(f"DDTREE_GUARD_PROBE_{name.upper()}"):
            patch()
