"""`ddtree-guard show DUMP`: one step as tables and pictures."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ddtree_guard.dump.read import Dump
from ddtree_guard.errors import UsageError
from ddtree_guard.fold import say
from ddtree_guard.render import blocks, plain
from ddtree_guard.report import drawing, rows, terminal
from ddtree_guard.rule import Finding
from ddtree_guard.step import Step


def run(args: argparse.Namespace) -> int:
    """Draw the step of the first recorded finding, or the one asked for."""
    dump = Dump(args.dump)
    found = dump.findings()
    at = _pick("step", args.step, len(dump), found[0][0] if found else len(dump) - 1)
    step = dump.step(at)
    mine = [finding for index, finding in found if index == at]
    request = _pick("request", args.request, step.bs, rows.offender(mine, step))
    if args.json:
        print(json.dumps(as_json(dump, at, step, request, mine), indent=1))
        return 0
    out = terminal.console()
    widths = ", ".join(f"{name} {value}" for name, value in step.widths.holders.items())
    say(
        f"step {step.who.step_id} (index {at} of {len(dump)}), {plain(step.who.rank)}, "
        f"{plain(step.who.backend_kind)} {plain(step.who.backend)}, {plain(step.who.path)} path, "
        f"SGLang {plain(step.who.release) or '?'}\n"
        f"bs={step.bs} BS={step.padded_bs} w={step.w} b={step.widths.block} "
        f"B={step.widths.budget}; widths held: {plain(widths) or 'not in this step'}"
    )
    kind, why = plain(dump.trigger["kind"]), plain(dump.trigger["why"])
    say(f"written by trigger {kind}{why and ': ' + why}")
    if dump.redacted:
        say("redacted dump: tokens and request ids are hashes, equal where the ids are equal")
    for text in blocks((step, finding) for finding in mine):
        say("\n" + text)
    print()
    if not step.bs:
        say("no requests: this step is the configuration that a server started with")
        return 0
    out.print(terminal.requests_table(step, out.width))
    for picture in (terminal.ruler, terminal.heatmap):
        out.print(picture(step, request, out.width))
        out.print()
    out.print(terminal.tree(step, request, out.width))
    out.print()
    return 0


def as_json(
    dump: Dump, at: int, step: Step, request: int, findings: list[Finding]
) -> dict[str, Any]:
    """What `show` draws, as JSON values."""
    return {
        "dump": str(dump.path),
        "steps": len(dump),
        "index": at,
        "step": step.who.step_id,
        "request": request,
        "bs": step.bs,
        "padded_bs": step.padded_bs,
        "w": step.w,
        "widths": dict(step.widths.holders),
        "requests": rows.request_rows(step),
        "findings": [finding.rule for finding in findings],
        "ruler": drawing.rulers(step, request),
        "mask": drawing.heatmap(step, request),
        "tree": drawing.tree(step, request),
    }


def _pick(what: str, asked: int | None, count: int, default: int) -> int:
    if asked is None:
        return default
    if not count:
        raise UsageError(f"--{what} is {asked}, but this step has no {what}s.")
    if not 0 <= asked < count:
        raise UsageError(f"--{what} is {asked}, but the dump holds {what}s 0 to {count - 1}.")
    return asked
