"""What a DDTREE worker of this project goes on with, in the steps that are read to the host.

The worker asks in every step; nearly always the step is not one that is read, and nothing is done.
In the others: are the target's logits alive (L1), are all requests greedy where rows are taken by
argmax (L3), are the graph's outputs still what the replay left (G7), do the drafter's hidden rows
belong to the accepted path (A5), and did the draft start where the text ends (A7)? What a step's
tokens are was known to the scheduler before it, so A7 compares the device with the host. Inputs
that the replay was to find written are stamped (G2).

Nothing here is captured, and nothing is allocated or read in a step that is not read anyway.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddtree_guard.hooks.certificates import INPUTS
from ddtree_guard.hooks.observe import host
from ddtree_guard.hooks.record import Record
from ddtree_guard.hooks.statics import graph_runner
from ddtree_guard.rule import Finding
from ddtree_guard.step import Step

if TYPE_CHECKING:
    from ddtree_guard.hooks.runtime import ServerGuard

SUPPLIES = (
    "tree.top1", "mask.row_stride", "outcome.finite", "outcome.hidden_rows",
    "outcome.draft_anchor", "outcome.last_committed", "outcome.greedy", "outcome.greedy_kernel",
    "graph.generation", "graph.output_marks",
)  # fmt: skip
SITE = "witness"
LATE = ("A5", "A7")  # judged when the step is settled; L1, L3 and G7 with the acceptance
FIRST = 4  # steps whose inputs are stamped whatever their number
SIGNLESS = (1 << 63) - 1
POINTS = 1 << 16  # elements of an output that its fingerprint looks at
# what changes logits in place between the forward and their last use
_ADJUSTED = ("logit_bias", "acc_linear_penalties", "vocab_mask")


def witness_of(guard: ServerGuard, worker: Any) -> Witness | None:
    """The witness of a worker that asks one; None for any other worker."""
    return Witness(guard, worker) if hasattr(worker, "witness") else None


class Witness:
    """Looks into a worker's steps. `supplies` names the fields that it fills; `every` is from one
    step that is read to the next.
    """

    def __init__(self, guard: ServerGuard, worker: Any) -> None:
        self.guard = guard
        self.every = 1
        if guard.checker.kind == "device":
            from ddtree_guard.hooks.device_checker import SAMPLE

            self.every = SAMPLE[guard.config.depth]
        self.supplies: tuple[str, ...] = SUPPLIES
        inputs = _inputs(getattr(worker, "model_runner", None))
        if inputs is not None and inputs.positions.is_inference():  # torch counts no writes
            self.supplies = tuple(path for path in SUPPLIES if path != "graph.generation")
        self._rules = copy.copy(guard.guard)
        self._rules.rules = tuple(rule for rule in guard.guard.rules if rule.id in LATE)
        self._seen = 0  # the step whose outputs were seen last
        self._marks: dict[str, Any] = {}
        self._argmax = False  # the rows' tokens are the largest logits, for every request
        self._extremes: tuple[Any, Any] | None = None  # smallest and largest logit of each row
        worker.witness = self
        worker.observers.append(self.walked)

    # --- one step -------------------------------------------------------------------------------
    def building(self, runner: Any) -> None:
        """The inputs of the target's forward are about to be written."""
        step = self.guard.begun
        if (step % self.every and step > FIRST) or not self.guard.fuses.intact(SITE):
            return
        with self.guard.fuses.internal(SITE):
            self.guard.certificates.stamps.note(step, _inputs(runner), INPUTS)

    def computed(self, output: Any, info: Any, graph: bool) -> None:
        """The target's forward is queued; nobody has changed its output. `info`: for sampling."""
        step = self.guard.begun
        if (step % self.every and step > FIRST) or not self.guard.fuses.intact(SITE):
            return
        self._marks, self._seen = {}, 0
        with self.guard.fuses.internal(SITE):
            logits, hidden = output.next_token_logits, output.hidden_states
            self._extremes = logits.aminmax(dim=-1)  # NaN passes through both
            self._argmax = info is None or bool(info.is_all_greedy)  # as `ddtree.choose` decides
            if graph:
                outputs = {"hidden_states": hidden, "logits": None if _adjusts(info) else logits}
                self._marks = {n: (t, _mark(t)) for n, t in outputs.items() if t is not None}
            self._seen = step

    def walked(self, done: Any) -> None:
        """The step is committed (`ddtree.worker.TreeStep`): measure, and put it into the record."""
        if not self._seen:
            return
        seen, self._seen = self._seen, 0
        with self.guard.fuses.internal(SITE):
            record = self.guard.current
            if record is not None and record.step is not None and record.step_id == seen:
                record.step = self._measured(record.step, done, record.reqs)
        self._marks, self._extremes = {}, None

    def _measured(self, step: Step, done: Any, reqs: Sequence[Any]) -> Step:
        bs, w = step.bs, step.w
        marks = {name: (int(was), int(_mark(held))) for name, (held, was) in self._marks.items()}
        step = step.replace(
            graph__output_marks=marks,
            outcome__hidden_rows=_rows_handed_on(done, bs, w),
            outcome__draft_anchor=host(done.block[:bs, 0], np.int64),
            outcome__draft_lens=host(done.places[:bs, 0], np.int64),
            outcome__target_lens=np.asarray(step.layout.prefix_lens, np.int64)[:bs],
            outcome__greedy=_greedy(reqs) if self._argmax and len(reqs) == bs else None,
        )
        if self._extremes is None or len(self._extremes[0]) != bs * w:
            return step
        low, high = (host(part.float()).reshape(bs, w) for part in self._extremes)
        return step.replace(
            outcome__finite=np.isfinite(low) & np.isfinite(high),
            outcome__row_min=low,
            outcome__row_max=high,
        )

    def settle(self, record: Record) -> list[Finding]:
        """SGLang has waited for the step, and its requests on the host are as they were before."""
        step = record.step
        if step is None or step.outcome.draft_anchor is None:
            return []
        found: list[Finding] = []
        with self.guard.fuses.internal(SITE):
            if record.kv_before and len(record.reqs) == step.bs:
                last = _last_tokens(record.reqs, step.outcome.draft_anchor)
                step = record.step = step.replace(outcome__last_committed=last)
            found += self._rules.check(step).findings
        return found


def _inputs(runner: Any) -> Any:
    """The static inputs of a runner's decode graphs, or None."""
    return getattr(graph_runner(runner), "buffers", None)


def _adjusts(info: Any) -> bool:
    """Whether sampling changes logits in place."""
    if info is None:
        return False
    given = any(getattr(info, name, None) is not None for name in _ADJUSTED)
    return given or bool(getattr(info, "has_custom_logit_processor", False))


def _greedy(reqs: Sequence[Any]) -> Any:
    """Which requests ask for the most probable token: SGLang turns temperature 0 into top-k 1."""
    return np.array([getattr(req.sampling_params, "top_k", 1) <= 1 for req in reqs], np.bool_)


def _last_tokens(reqs: Any, anchor: Any) -> Any:
    """Each request's newest token on the host; the draft's own of one that SGLang has let go."""
    found = []
    for req, drafted in zip(reqs, anchor, strict=True):
        text = req.output_ids or req.origin_input_ids
        gone = not len(text) or req.is_retracted or req.finished()
        found.append(int(drafted) if gone else int(text[-1]))
    return np.array(found, np.int64)


def _rows_handed_on(done: Any, bs: int, w: int) -> Any:
    """(bs, b) rows of the tree whose hidden states the drafter was given, -1 behind the path.

    Found by their bits: where the row of the accepted path is not what was handed on, the first row
    that is, or -1 for none.
    """
    import torch

    accepted, index = done.accepted, done.accepted.accept_index[:bs].long()
    whole = bits(done.hidden).view(-1, done.hidden.shape[-1])
    handed = bits(done.handed).view(*index.shape, -1)
    first = torch.arange(bs, device=index.device)[:, None] * w
    inside = index.clamp(0, w - 1)  # A1 judges the path; a row that is none would end the server
    same = (whole[first + inside] == handed).all(-1)
    rows, same, lens = host(index, np.int64), host(same), host(accepted.lens[:bs], np.int64)
    rows[np.arange(rows.shape[1]) >= lens[:, None]] = -1
    for i, j in zip(*np.nonzero(~same & (rows >= 0)), strict=True):
        equal = host((whole[i * w : (i + 1) * w] == handed[i, j]).all(-1))
        rows[i, j] = int(np.argmax(equal)) if equal.any() else -1
    return rows


def bits(tensor: Any) -> Any:
    """The elements as whole numbers: equal bits are equal, NaN too."""
    import torch

    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.element_size()])


def _mark(tensor: Any) -> Any:
    """A fingerprint of a tensor, on its device: of elements all over it, each with its place."""
    import torch

    flat = bits(tensor).view(-1)
    some = flat[:: max(1, len(flat) // POINTS) | 1].to(torch.int64)
    place = torch.arange(1, len(some) + 1, device=some.device)
    return (some * (place * 2_654_435_761 | 1)).sum() & SIGNLESS
