"""What releases of SGLang are known to do wrong: one table, `known_faults.json`, with links.

A fault's `present` and `absent` are releases in which its code was seen, or its fix; between them
nothing is known. `when` names conditions of `CONDITIONS`; `feature` is what rule CFG5 calls it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ddtree_guard.doctor.deployment import Deployment
from ddtree_guard.hooks.contracts import row_of
from ddtree_guard.hooks.facts import numbers

WRONG = "wrong"  # effects that begin with it make a configuration wrong
Condition = Callable[[Deployment], "bool | None"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the table. `backends` may exclude with a leading `!`; empty means any."""

    id: str
    title: str
    incident: str
    evidence: str
    present: str
    absent: str
    algorithms: tuple[str, ...]
    backends: tuple[str, ...]
    when: tuple[str, ...]
    effect: str
    rules: tuple[str, ...]
    feature: str | None
    links: tuple[str, ...]
    change: str


@dataclass(frozen=True, slots=True)
class Match:
    """A fault that this deployment has (`sure`), or may have: `open` says what is not known."""

    fault: Fault
    sure: bool
    open: tuple[str, ...] = ()

    @property
    def wrong(self) -> bool:
        """Whether the deployment certainly has it and its output is wrong."""
        return self.sure and self.fault.effect.startswith(WRONG)


@cache
def table() -> tuple[Fault, ...]:
    """The table, as shipped."""
    text = files("ddtree_guard.doctor").joinpath("known_faults.json").read_text(encoding="utf-8")
    return tuple(Fault(**{k: _tuple(v) for k, v in row.items()}) for row in json.loads(text))


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def matches(d: Deployment) -> tuple[Match, ...]:
    """The faults that this deployment has or may have. A chain without a drafter has none."""
    if not d.algorithm:
        return ()
    found = [_match(fault, d) for fault in table()]
    return tuple(match for match in found if match is not None)


def _match(fault: Fault, d: Deployment) -> Match | None:
    """None where one condition is certainly not met."""
    if row_of(d.algorithm).algorithm not in fault.algorithms:
        return None
    answers: dict[str, bool | None] = {f"release {d.release}": _in_release(fault, d.release)}
    answers["attention backend"] = _on_backend(fault, d.backend)
    answers |= {name: CONDITIONS[name](d) for name in fault.when}
    if False in answers.values():
        return None
    unknown = tuple(name for name, answer in answers.items() if answer is None)
    return Match(fault, not unknown, unknown)


def _in_release(fault: Fault, release: str) -> bool | None:
    """Whether the release has the fault; None where its code was not looked at."""
    number = numbers(release)
    if number is None:
        return None
    if fault.absent and _satisfies(number, fault.absent):
        return False
    return True if fault.present and _satisfies(number, fault.present) else None


def _satisfies(number: tuple[int, int, int], bound: str) -> bool:
    limit = numbers(bound[2:])
    assert limit is not None
    return number <= limit if bound.startswith("<=") else number >= limit


def _on_backend(fault: Fault, backend: str | None) -> bool | None:
    if not fault.backends:
        return True
    if backend is None:
        return None
    excluded = [name[1:] for name in fault.backends if name.startswith("!")]
    return backend not in excluded if excluded else backend in fault.backends


def _above(value: int | None, limit: int) -> bool | None:
    return None if value is None else value > limit


def _topk(d: Deployment) -> bool | None:
    return True if d.ddtree else _above(d.topk, 1)


def _window(d: Deployment) -> bool | None:
    return d.model.window is not None if d.model_known else None


def _width_differs(d: Deployment) -> bool | None:
    if d.w is None or d.declared is None:
        return None
    return d.w != d.declared or d.varies


def _mask_beyond(d: Deployment) -> bool | None:
    if d.w is None or d.lanes is None or d.context is None:
        return None
    return d.lanes * d.w * (d.context + d.w) >= 1 << 31


CONDITIONS: Mapping[str, Condition] = {
    "tree": lambda d: d.tree,
    "graphs": lambda d: d.graphs,
    "topk-above-1": _topk,
    "pages-above-1": lambda d: _above(d.page_size, 1),
    "pages-of-1": lambda d: None if d.page_size is None else d.page_size == 1,
    # SGLang reserves 2D slots behind at most C - 4 tokens, in a row of C + D + 4 columns
    "draft-tokens-above-8": lambda d: _above(d.declared, 8),
    "sliding-window": _window,
    "recurrent": lambda d: d.model.recurrent if d.model_known else None,
    "width-differs": _width_differs,
    "mask-beyond-2^31": _mask_beyond,
    "kv-canary": lambda d: d.kv_canary not in ("none", "off", ""),
}
