"""Check every verify step of SGLang's DDTree speculative decoding against what its tree says.

Importing this package loads nothing but the standard library; names load on first use.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers know the name; importing `typing` would cost half the budget
if TYPE_CHECKING:
    from typing import Any

    from ddtree_guard.config import Config as Config
    from ddtree_guard.config import Mode as Mode
    from ddtree_guard.errors import GuardError as GuardError
    from ddtree_guard.guard import Guard as Guard
    from ddtree_guard.guard import Report as Report
    from ddtree_guard.rule import Finding as Finding
    from ddtree_guard.rule import Rule as Rule
    from ddtree_guard.step import Step as Step

__version__ = "0.1.0"
_HOMES = {
    "Config": "config", "Mode": "config", "GuardError": "errors", "Guard": "guard",
    "Report": "guard", "Finding": "rule", "Rule": "rule", "Step": "step",
}  # fmt: skip
__all__ = ["Config", "Finding", "Guard", "GuardError", "Mode", "Report", "Rule", "Step"]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(f"ddtree_guard.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ddtree_guard' has no attribute {name!r}")
