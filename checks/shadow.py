"""Sampled oracles: one request's attention rows against answers that share nothing with a backend.

The numbers come from shadow mode (`attention.shadow`), which computes them on the device from the
rows themselves; these rules only judge them, so a dump can be judged again without any row.
"""

from __future__ import annotations

import math
from typing import Any

from ddtree_guard.checks.common import first, numbers
from ddtree_guard.rule import Cost, Finding, NotApplicable, NotEvaluable, Rule, Scope, Site, rule
from ddtree_guard.step import Step

_NEEDS = ("shadow.request", "shadow.tolerance")


@rule(
    "D1", "node-is-not-its-chain", site=Site.VERIFY, cost=Cost.ROWS, scope=Scope.REQUEST,
    needs=("shadow.chain", *_NEEDS),
)  # fmt: skip
def node_is_not_its_chain(step: Step) -> Finding | None:
    """A node's attention equals that of the plain chain of its ancestors.

    Holds when: each node's row is, within rounding, what plain decoding of the prefix followed by
    the node's ancestors and itself gives, walked parent by parent. Padding rows are left out.
    Breaks as: the target judges a node in a context that is not its own, so wrong tokens are
    accepted and right ones refused; text turns into short fragments.
    Usual cause: a mask read at the wrong place or stride, a sibling that is visible, keys of a node
    in another node's slot.
    Seen in: I01, I13, I18, I25.
    """
    errors, at = _first_wrong(step, "chain")
    if at is None:
        return None
    return _finding(step, at, errors[at], f"row {at} is not the chain of its ancestors", "chain")


@rule(
    "D3", "root-is-not-plain-decode", site=Site.VERIFY, cost=Cost.REQUESTS, scope=Scope.REQUEST,
    needs=("shadow.decode", *_NEEDS),
)  # fmt: skip
def root_is_not_plain_decode(step: Step) -> Finding | None:
    """The root's attention equals that of plain decoding of the same prefix.

    Holds when: row 0 is, within rounding, attention over the prefix and itself. No tree and no mask
    has a part in it: where it breaks, so does everything else.
    Breaks as: the token after the committed text is already wrong, as if another prompt had been
    given.
    Usual cause: the prefix's slots, length or scale are wrong, a cell of another request's tree is
    visible, or the row was never written.
    Seen in: I01, I08, I41.
    """
    error, allowed = float(step.shadow.decode or 0.0), _allowed(step)
    if error <= allowed:
        return None
    return _finding(step, 0, error, "the root is not plain decoding", "decode")


@rule(
    "D4", "row-is-not-dense-attention", site=Site.VERIFY, cost=Cost.ROWS, scope=Scope.REQUEST,
    needs=("shadow.dense", *_NEEDS),
)  # fmt: skip
def row_is_not_dense_attention(step: Step) -> Finding | None:
    """The verify kernel's rows equal dense attention over the same queries, keys and values.

    Holds when: each node's row is, within rounding, the softmax over the prefix and the node's
    ancestors, with visibility taken from the tree and keys from the KV pool. Padding is left out.
    Breaks as: whatever offsets, masks or index lists said, the rows that the model went on with are
    wrong at this layer; the text that follows is not the model's.
    Usual cause: a width, mask or index fault that another rule names as well; alone, a fault of the
    kernel, of a scale, or keys that changed between their write and their use.
    Seen in: I01, I02, I14, I36.
    """
    errors, at = _first_wrong(step, "dense")
    if at is None:
        return None
    return _finding(step, at, errors[at], f"row {at} is not dense attention", "dense")


def _first_wrong(step: Step, name: str) -> tuple[Any, int | None]:
    errors = numbers(step, f"shadow.{name}")
    return errors, first(~(errors <= _allowed(step)))


def _allowed(step: Step) -> float:
    allowed, request = step.shadow.tolerance, step.shadow.request
    if allowed is None or request is None:
        raise NotApplicable("no attention rows were compared in this step")
    if not 0 < allowed < 1 or not 0 <= request < step.bs:
        raise NotEvaluable(f"a tolerance of {allowed} for request {request} cannot be judged")
    return float(allowed)


def _finding(step: Step, row: int, error: float, what: str, name: str) -> Finding:
    shadow, allowed = step.shadow, _allowed(step)
    place = "" if shadow.layer is None else f" at layer {shadow.layer}"
    cause, confidence = _cause(step)
    return Finding(
        headline=f"request {shadow.request}: {what}",
        equation=f"{name} error of row {row}{place} = {_number(error)}, expected at most "
        f"{allowed:.2g} ({shadow.dtype or 'dtype unknown'}); {_spread(step, name)}",
        expected=f"<={allowed:.2g}",
        actual=f"{_number(error)} in row {row}{place}",
        request=shadow.request,
        row=row,
        cause=cause,
        confidence=confidence,
        bindings=_bindings(step),
    )


def _bindings(step: Step) -> dict[str, int]:
    held = {"layer": step.shadow.layer, "s": step.shadow.length}
    return {name: int(value) for name, value in held.items() if value is not None}


def _number(error: float) -> str:
    return f"{error:.2g}" if math.isfinite(error) else "NaN or infinity"


def _spread(step: Step, name: str) -> str:
    """How many rows are wrong, and the largest error."""
    if name == "decode":
        return "1 row compared"
    errors = numbers(step, f"shadow.{name}")
    wrong, compared = ~(errors <= _allowed(step)), errors != -1
    return (
        f"{int(wrong.sum())} of {int(compared.sum())} rows wrong, largest {_number(errors.max())}"
    )


def _cause(step: Step) -> tuple[str, str]:
    """The root sees no tree, so whether it is right tells the halves apart."""
    decode = step.shadow.decode
    if decode is not None and decode <= _allowed(step):
        text = "the root is right, so the prefix and the scale are: a node saw other rows than its"
        return f"{text} ancestors, or its row was not written", "likely"
    return (
        "the root is wrong as well, and it sees no tree: the prefix's slots, its length, the "
        "scale, or an offset that misplaces every row of the request",
        "likely",
    )


RULES: tuple[Rule, ...] = (
    node_is_not_its_chain,
    root_is_not_plain_decode,
    row_is_not_dense_attention,
)
