"""What `ddtree-guard demo` tells: the debugging chain of the incident, with its evidence."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddtree_guard import render
from ddtree_guard.fold import say
from ddtree_guard.report import drawing, terminal
from ddtree_guard.step import Step

if TYPE_CHECKING:
    from rich.console import Console

    from ddtree_guard.demo import Recheck, Result


Row = tuple[str, str, str, str, str]
HEAD = ("hypothesis", "experiment", "wrong rows", "max error", "verdict")


def tell(results: Sequence[Result], draft: int, dump: Path, checked: Recheck, good: bool) -> None:
    """Print the demo's result for a person."""
    out = terminal.console()
    fault = next((r for r in results if r.telling is not None), None)
    out.print()
    out.print(terminal.table(HEAD, chain(results, fault)))
    if fault is not None:
        _evidence(out, fault)
    _remedy(out, results, draft)
    out.print("THE DUMP", style="bold")
    say(f"  {dump}")
    what = (
        "no torch, triton or sglang imported"
        if not checked.loaded
        else "IMPORTED " + ", ".join(checked.loaded)
    )
    say(f"  ddtree-guard check: exit {checked.exit_code}, {what}")
    say(f"  {render.plain(checked.summary)}")
    path = shlex.quote(str(dump))
    say(f"  next: ddtree-guard show {path}\n        ddtree-guard explain W3\n", hang=6)
    odd = [r.experiment.name for r in results if not r.as_expected]
    verdict = "Everything came out as the incident says it must."
    if not good:
        verdict = f"NOT as the incident says it must: {', '.join(odd) or 'draft width or re-check'}"
    out.print(verdict, style="bold green" if good else "bold red", markup=False)


def chain(results: Sequence[Result], fault: Result | None) -> list[Row]:
    """The rows of the table."""
    rows = []
    for result in results:
        rows.append(_row(result))
        e = result.experiment
        if fault is not None and (e.backend, e.path) == ("stock", "graph"):
            rows.append(_mask_row(fault.step))
    return rows


def _row(result: Result) -> Row:
    e = result.experiment
    answer = _VERDICTS.get(e.name, "") if result.as_expected else "!NOT as in the incident"
    return (
        f"{e.hypothesis}?",
        f"B={e.budget} {e.backend} {e.path}",
        f"{result.wrong_rows} of {result.rows}",
        f"{result.max_error:.1e}" if math.isfinite(result.max_error) else "-",
        answer,
    )


_VERDICTS = {
    "budget-7-stock-eager": "no: 7 + 1 rows = block 8",
    "budget-16-stock-eager": "yes",
    "budget-16-stock-graph": "no: eager is as wrong",
    "budget-16-corrected-eager": "yes: 17 rows, not 8",
    "budget-16-corrected-graph": "cured there too",
}


def _mask_row(step: Step) -> Row:
    """Read the step's mask at the offsets that the tree implies, instead of the backend's."""
    wrong = mask_errors(step)
    verdict = "no: read at wrong places" if not wrong else f"!yes: {wrong} cells"
    return ("the tree mask?", "B=16 mask, as built", "-", "-", verdict)


def mask_errors(step: Step) -> int:
    """Cells of all tree blocks that are not as the tree says, at the offsets implied by w."""
    lens = step.layout.prefix_lens.astype(np.int64)
    right = step.replace(
        layout__qo_indptr=np.arange(step.padded_bs + 1, dtype=np.int64) * step.w,
        layout__mask_indptr=np.concatenate([[0], np.cumsum(step.w * (lens + step.w))]),
    )
    states = [drawing.mask_states(right, request) for request in range(step.bs)]
    return sum(int((s > drawing.SEEN).sum()) for s in states)


def _evidence(out: Console, fault: Result) -> None:
    step, telling = fault.step, fault.telling
    assert telling is not None
    out.print("WHAT THE GUARD SAYS, before the kernel runs", style="bold")
    say(render.block(telling, step))
    for finding in fault.findings:
        if finding is not telling:
            say(f"also {render.headline(finding)}")
    out.print()
    request = step.bs - 1
    out.print(terminal.ruler(step, request, out.width))
    out.print(terminal.heatmap(step, request, out.width))
    out.print()


def _remedy(out: Console, results: Sequence[Result], draft: int) -> None:
    fixed = [r for r in results if r.experiment.backend == "corrected"]
    wrong, rows = sum(r.wrong_rows for r in fixed), sum(r.rows for r in fixed)
    out.print("THE FIX", style="bold")
    say(
        "  the corrected backend: rows per request = budget + 1 on the target, block size on the "
        "draft\n"
        f"  {wrong} of {rows} rows wrong; the draft runner's backend keeps {draft}\n"
        "  serve with SGLANG_DDTREE_GUARD_BACKEND=auto: corrected exactly where stock is wrong\n"
    )
