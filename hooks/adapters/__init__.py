"""Adapters: how a live backend and its batch become a Step. Chosen by what the class looks like.

A fork whose backend none of ours fits registers its own:

    register_adapter("my-backend", lambda cls: hasattr(cls, "my_plan"), read_my_step)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ddtree_guard.hooks.adapters import generic, triton
from ddtree_guard.hooks.view import View
from ddtree_guard.step import Step


class ReadStep(Protocol):
    """Turns a view of a launch into a host Step, changing nothing."""

    def __call__(self, view: View) -> Step:
        """The Step of this launch. Whatever it raises is counted as a fault of the guard."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """`match` looks at a backend class; `read_step` reads a launch of such a backend.

    `supplies` lists the Step fields (dotted paths) that it fills: rules that need others are
    counted as not active in the boot line. Acceptance and lengths come from other hooks.
    """

    name: str
    match: Callable[[type], bool]
    read_step: ReadStep
    supplies: tuple[str, ...] = ()


_BUILT_IN = (
    Adapter("triton", triton.match, triton.read_step, triton.SUPPLIES),
    Adapter("generic", lambda backend_class: True, generic.read_step, generic.SUPPLIES),
)
_REGISTERED: list[Adapter] = []


def register_adapter(
    name: str,
    match: Callable[[type], bool],
    read_step: ReadStep,
    supplies: tuple[str, ...] = generic.SUPPLIES,
) -> Adapter:
    """Use `read_step` for backend classes that `match`. The newest registration wins.

    Call it from a plugin of your own, before SGLang builds its backends. Returns the adapter, for
    `unregister_adapter`.
    """
    adapter = Adapter(name, match, read_step, supplies)
    _REGISTERED.insert(0, adapter)
    return adapter


def unregister_adapter(adapter: Adapter) -> None:
    """Undo `register_adapter`."""
    _REGISTERED.remove(adapter)


def adapter_for(backend_class: type) -> Adapter:
    """The adapter of a backend class: a registered one, else Triton's, else the generic one."""
    return next(a for a in (*_REGISTERED, *_BUILT_IN) if a.match(backend_class))
