"""The vocabulary of checking: Rule, Finding, Site, Cost, Scope and the `rule` decorator."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ddtree_guard.step import Step

HEADINGS = ("Holds when", "Breaks as", "Usual cause", "Seen in")
HEADLINE = 60  # characters; numbers and names from hostile data must not flood a log


class Site(str, Enum):
    """The moment of a verify step at which a rule can first be evaluated."""

    INIT = "init"
    BUILD = "build"
    LAUNCH = "launch"
    CAPTURE = "capture"
    REPLAY = "replay"
    VERIFY = "verify"
    COMMIT = "commit"


class Cost(str, Enum):
    """What the rule reads, per step."""

    HOST = "host"
    REQUESTS = "O(bs)"
    ROWS = "O(bs*w)"
    BLOCKS = "O(bs*w*w)"
    MASK = "O(mask)"


class Scope(str, Enum):
    """Who is affected by a broken rule."""

    REQUEST = "request"
    BATCH = "batch"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule in one step, with the numbers.

    `request` and `row` name the first offender: the lowest request, then the lowest row.
    `victims` are other requests that the offender harms. `latent` is True when the kernel of this
    contract does not read the wrong cell, so the output is not affected. `tokens_left` says
    whether the step's tokens reached the client (None: not known). A check function fills
    `headline` to `latent`; `Rule.check` adds the rest.
    """

    headline: str
    equation: str
    expected: str
    actual: str
    request: int | None = None
    row: int | None = None
    victims: tuple[int, ...] = ()
    cause: str = ""
    confidence: str = "likely"
    latent: bool = False
    rule: str = ""
    name: str = ""
    scope: Scope = Scope.BATCH
    site: Site = Site.BUILD
    rid: str | None = None
    bindings: Mapping[str, int] = field(default_factory=dict)
    tokens_left: bool | None = None
    action: str = ""
    next_step: str = ""


class NotEvaluable(Exception):
    """Raised by a check function that cannot judge this step. The text says why.

    `Guard` turns it into "not checked"; it never reaches a person as an error.
    """


class NotApplicable(NotEvaluable):
    """Raised where the step lacks what the rule reads, or the contract leaves it nothing to judge:
    no fault of the data.
    """


Check = Callable[[Step], "Finding | None"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One invariant: its identity, and the pure function from a Step to a Finding or None.

    `needs` lists the Step fields (dotted paths) without which the rule is "not checked"; the
    function may take them as present, and may raise NotEvaluable on data it cannot judge. `bit` is
    the rule's bit in the device verdict, or None.
    """

    id: str
    name: str
    site: Site
    cost: Cost
    scope: Scope
    needs: tuple[str, ...]
    bit: int | None
    func: Check

    @property
    def family(self) -> str:
        """The letters of the id: `W` of `W3`."""
        return self.id.rstrip("0123456789")

    @property
    def page(self) -> str:
        """The manual page: the check function's docstring."""
        return inspect.getdoc(self.func) or ""

    @property
    def statement(self) -> str:
        """The first line of the page."""
        return self.page.split("\n", 1)[0]

    def check(self, step: Step) -> Finding | None:
        """Evaluate on a host Step that has every needed field; see `Guard` for the rest."""
        found = self.func(step)
        if found is None:
            return None
        return dataclasses.replace(
            found,
            headline=_clipped(found.headline),
            rule=self.id,
            name=self.name,
            scope=self.scope,
            site=self.site,
            rid=step.who.rid(found.request),
            bindings={**_bindings(step, found.request), **found.bindings},
            next_step=found.next_step or f"ddtree-guard explain {self.id}",
        )


def _clipped(text: str) -> str:
    return text if len(text) <= HEADLINE else text[: HEADLINE - 3] + "..."


def _bindings(step: Step, request: int | None) -> dict[str, int]:
    values: dict[str, Any] = {"w": step.w, "b": step.widths.block, "B": step.widths.budget}
    if request is not None:
        values["s"] = _length(step.layout.prefix_lens, request)
    values |= {"bs": step.bs, "BS": step.padded_bs}
    return {name: int(value) for name, value in values.items() if value is not None}


def _length(lens: Any, request: int) -> int | None:
    """Prefix length of a request, or None: a misshapen array must not cost the finding."""
    whole = lens is not None and lens.ndim == 1 and lens.dtype.kind in "iu"
    return int(lens[request]) if whole and 0 <= request < len(lens) else None


def rule(
    id: str,
    name: str,
    *,
    site: Site,
    cost: Cost,
    scope: Scope,
    needs: tuple[str, ...] = (),
    bit: int | None = None,
) -> Callable[[Check], Rule]:
    """Turn a check function into a Rule."""

    def decorate(func: Check) -> Rule:
        return Rule(id, name, site, cost, scope, needs, bit, func)

    return decorate
