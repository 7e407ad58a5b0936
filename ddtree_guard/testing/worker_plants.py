"""Faults in what a live DDTREE worker goes on with, for the tree probe.

Each is put in where it would arise: another token under the drafter (A7), a dead row of logits
(L1), a request that samples in a batch that is taken by argmax (L3), hidden states that change
before they are used (G7), rows off the path for the drafter (A5), and positions of the step before
in a graph's buffer, as if nobody had written them (G2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import _unsafe_preserve_version_counter

from ddtree_guard.hooks.statics import graph_runner

SAMPLES = "L3"
EARLY = ("A7", "G2")  # planted before the step's metadata exist
LATE = ("L1", "G7", "A5")
STALE = "positions"


def ask_to_sample(req: Any) -> Callable[[], None]:
    """Let a request of a greedy batch ask for a sampled token. Returns what undoes it."""
    params, held = req.sampling_params, req.sampling_params.top_k
    params.top_k = 40
    return lambda: setattr(params, "top_k", held)


class WorkerPlants:
    """Puts one fault at a time into the running step. `claim(rule)` says whether the step that has
    begun is to have an early one, and notes that it has.
    """

    def __init__(self, guard: Any, worker: Any, claim: Callable[[str], bool]) -> None:
        self.guard, self.claim = guard, claim
        self.late = ""  # what is planted in this step
        self._stale: Any = None
        worker._block = self._after(worker._block, self._another_anchor)
        worker._predict = self._after(worker._predict, self._overwritten)
        worker._commit = self._off_path(worker._commit)
        self._wrap_witness(guard.witness)
        self._wrap_certificates(guard.certificates)

    def _take(self, rule: str) -> bool:
        """Whether this late fault is due now; it is planted once."""
        due, self.late = self.late == rule, "" if self.late == rule else self.late
        return due

    @staticmethod
    def _after(method: Any, change: Callable[..., None]) -> Any:
        def spoilt(*args: Any) -> Any:
            result = method(*args)
            change(result, *args)
            return result

        return spoilt

    def _another_anchor(self, result: Any, *_: Any) -> None:
        ids = result[0]
        if len(ids) > 1 and self.claim("A7"):
            ids[-1, 0] = torch.where(ids[-1, 0] == 1, 2, 1)

    def _overwritten(self, result: Any, batch: Any, output: Any, *_: Any) -> None:
        if self._take("G7"):
            with torch.inference_mode():
                output.hidden_states.view(-1, output.hidden_states.shape[-1])[-1] += 1.0

    def _off_path(self, commit: Any) -> Any:
        def spoilt(accepted: Any, output: Any, slots: Any, *args: Any) -> Any:
            if self._take("A5"):  # the last row in the place of the last request's root
                rows, block = accepted.rows.clone(), accepted.accept_index.shape[1]
                rows[-block] += slots.shape[1] - 1
                accepted = dataclasses.replace(accepted, rows=rows)
            return commit(accepted, output, slots, *args)

        return spoilt

    def _wrap_witness(self, witness: Any) -> None:
        computed, building = witness.computed, witness.building

        def dead_row(output: Any, info: Any, graph: bool) -> None:
            step = getattr(self.guard.current, "step", None)
            if step is not None and self._take("L1"):
                row = (step.bs - 1) * step.w + int(step.tree.sizes[-1]) - 1
                with torch.inference_mode():
                    output.next_token_logits[row] = float("nan")
            computed(output, info, graph)

        def noted(runner: Any) -> None:
            building(runner)
            live = getattr(getattr(graph_runner(runner), "buffers", None), STALE, None)
            self._stale = None
            if live is not None and not live.is_inference():
                self._stale = live, live.clone(), _unsafe_preserve_version_counter(live)

        witness.computed, witness.building = dead_row, noted

    def _wrap_certificates(self, certificates: Any) -> None:
        replay = certificates.replay

        def replayed(backend: Any, batch: Any, runner: Any) -> Any:
            held, self._stale = self._stale, None
            known = STALE in certificates.stamps.moving and bool(certificates.stamps)
            if held is not None and known and self.claim("G2"):
                live, before, count = held
                live.copy_(before)
                count.__exit__(None, None, None)  # back to what it was before the buffer was filled
                if batch.spec_info.positions is not None:  # a planned replay copies them once more
                    rows = batch.spec_info.positions
                    rows.copy_(before[: len(rows)])
            return replay(backend, batch, runner)

        certificates.replay = replayed
