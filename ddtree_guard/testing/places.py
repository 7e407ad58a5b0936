"""Other places of the check in a captured graph, to compare an engine's with. Part of the probe.

Each is a patch of this process, made before anything is captured. A further one is a function, and
its name in PLACES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddtree_guard.config import setting


def in_line() -> None:
    """The check stands at the head of the graph, and the forward pass waits for it."""
    from ddtree_guard.hooks.branch import Branch

    def beside(branch: Any, runner: Any, launch: Callable[[], None], read: Any = ()) -> None:
        launch()

    Branch.beside = beside  # type: ignore[method-assign,assignment]


def early() -> None:
    """The check is the first node of its branch, and of the graph, not the last."""
    from ddtree_guard.hooks.branch import Branch

    own = Branch.beside

    def beside(branch: Branch, runner: Any, launch: Callable[[], None], read: Any = ()) -> None:
        own(branch, runner, launch, read)
        branch.launch()

    Branch.beside = beside  # type: ignore[method-assign,assignment]


PLACES: Mapping[str, Callable[[], None]] = {"in_line": in_line, "early": early}


def place() -> None:
    """Make the patch that DDTREE_GUARD_PROBE_IN_LINE=on, or another of PLACES, asks for."""
    for name, patch in PLACES.items():
        if setting(f"DDTREE_GUARD_PROBE_{name.upper()}"):
            patch()
