"""One verify step in flight: from the worker's entry until SGLang has waited for its tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ddtree_guard.hooks.contracts import row_of
from ddtree_guard.hooks.view import View
from ddtree_guard.rule import Finding
from ddtree_guard.step import Step


@dataclass(slots=True)  # not frozen, as `View`
class Walk:
    """The acceptance of a step, on the device. `predict` (bs*w,) holds the target's tokens and
    `index` (bs, path) the accepted rows, counted over the batch if `global_rows`, else within the
    request; both are None for a chain. `lens` (bs,) counts committed tokens. `greedy` says
    whether the walk follows `predict` for every request.
    """

    lens: Any
    predict: Any = None
    index: Any = None
    greedy: bool = False
    global_rows: bool = True


@dataclass
class Record:
    """What is known of a step so far. `reqs` are SGLang's own request objects.

    `view` and `step` come with the build site; `findings` of a host checker are known at once,
    those of the device when its verdict has arrived. `ticket` belongs to the checker, `note` to the
    recorder, which has `kept` the step, `shadow` and `rows` to shadow mode. `mark` is the device's
    number of this step, which names its slot in the ring; `w` the step's width.
    `studied`: what could wait until the step was queued is done. `ahead`: nothing was launched
    before its replay.
    `reused`: what the launch read may belong to another forward by now, and explains nothing.
    `doubt`: the host has seen something that only the whole step can put into words. `why`: the
    reason for which the step cannot be checked. What is not given lies in the class until it is
    set: there is a record a step.
    """

    step_id: int
    reqs: tuple[Any, ...]
    rids: tuple[str, ...] = ()
    view: View | None = None
    step: Step | None = None
    findings: list[Finding] = field(default_factory=list)
    checked: bool = field(default=False, init=False)
    settled: bool = field(default=False, init=False)
    studied: bool = field(default=False, init=False)
    ahead: bool = field(default=False, init=False)
    w: int = field(default=0, init=False)
    mark: int = field(default=0, init=False)
    ticket: Any = field(default=None, init=False)
    note: Any = field(default=None, init=False)
    kept: bool = field(default=False, init=False)
    reused: bool = field(default=False, init=False)
    doubt: bool = field(default=False, init=False)
    why: str = field(default="", init=False)
    kv_before: list[int | None] = field(default_factory=list)
    outcome: Walk | None = field(default=None, init=False)
    shadow: Any = field(default=None, init=False)
    rows: Any = field(default=None, init=False)

    @property
    def built(self) -> bool:
        """Whether the build site saw the step."""
        return self.view is not None

    @property
    def is_chain(self) -> bool:
        """Whether its rows are known to be a chain."""
        return self.step is not None and self.step.contract.chain

    @property
    def redrafts(self) -> bool:
        """Whether the worker's drafter uses the step's input buffers after its walk."""
        args = None if self.view is None else self.view.runner.server_args
        return row_of(str(getattr(args, "speculative_algorithm", ""))).redrafts


@dataclass(slots=True)
class Coverage:
    """Counters of one process. `skipped` counts the reasons why verify steps were not checked;
    `settled` the steps about which everything was said.
    """

    verify_steps: int = 0
    steps_checked: int = 0
    findings: int = 0
    latent: int = 0
    settled: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def ratio(self) -> float:
        """Checked over all verify steps; 1.0 before the first one. Below 1.0 is an alarm."""
        return self.steps_checked / self.verify_steps if self.verify_steps else 1.0
