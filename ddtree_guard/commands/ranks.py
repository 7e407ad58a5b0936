"""`ddtree-guard ranks DIR`: align the dumps of all ranks by step; name the first that differs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from ddtree_guard.dump.compare import OF_A_RANK, WHOSE, Difference, differences
from ddtree_guard.dump.find import find_dumps
from ddtree_guard.dump.read import Dump
from ddtree_guard.errors import DumpError, UsageError
from ddtree_guard.fold import say
from ddtree_guard.render import count, plain
from ddtree_guard.step import Step

SKIP = (*WHOSE, *OF_A_RANK, "slots.pools", "contract.not_checked")
Place = tuple[Dump, int]


def run(args: argparse.Namespace) -> int:
    """Print the first step in which a rank departs from the others. 0 when none does, else 1."""
    places, refused = index(args.dir)
    ranks = sorted({rank for ranks in places.values() for rank in ranks})
    if len(ranks) < 2:
        raise UsageError(
            f"dumps of two or more ranks were expected in {args.dir!r}, found "
            f"{', '.join(map(plain, ranks)) or 'none'}; give the folder of one run."
        )
    shared = sorted(key for key, found in places.items() if len(found) > 1)
    odd = next(filter(None, (compare(key, places[key]) for key in shared)), None)
    if args.json:
        print(json.dumps(_as_json(ranks, shared, odd, refused), indent=1))
    else:
        say("\n".join(_text(ranks, shared, odd, refused)))
    return 1 if odd is not None else 0


def index(folder: str) -> tuple[dict[tuple[str, int], dict[str, Place]], list[str]]:
    """(worker, step id) to the place of that step by rank, and sentences about unreadable dumps.

    Raises DumpError when there are dumps and none can be read.
    """
    places: dict[tuple[str, int], dict[str, Place]] = {}
    refused, read = [], 0
    for path in find_dumps(folder):
        try:
            dump = Dump(path)
            whose = [(*dump.whose(at), at) for at in range(len(dump))]
        except DumpError as error:
            refused.append(f"{path.name} was left out: {error}")
            continue
        read += 1
        for rank, worker, step_id, at in whose:
            places.setdefault((worker, step_id), {})[rank] = (dump, at)
    if refused and not read:
        raise DumpError(f"no dump in {folder!r} can be read; the first: {refused[0]}")
    return places, refused


def compare(key: tuple[str, int], found: dict[str, Place]) -> dict[str, Any] | None:
    """The rank that departs from most others in this step and how, or None."""
    steps = {rank: dump.step(at) for rank, (dump, at) in sorted(found.items())}
    groups: list[list[str]] = []  # ranks that hold the same
    for rank, step in steps.items():
        for group in groups:
            if next(_differences(steps[group[0]], step), None) is None:
                group.append(rank)
                break
        else:
            groups.append([rank])
    if len(groups) == 1:
        return None
    usual = max(groups, key=len)
    rank = next(group[0] for group in groups if group is not usual)
    first = next(_differences(steps[usual[0]], steps[rank]))
    return {"step": key[1], "worker": key[0], "rank": rank, "usual": usual[0],
            "agree": len(usual), "ranks": len(steps), "first": first}  # fmt: skip


def _differences(a: Step, b: Step) -> Iterator[Difference]:
    """Those in what both ranks have recorded: one has the whole step where it had a finding."""
    return (found for found in differences(a, b, SKIP) if not found.only)


def _text(
    ranks: list[str], shared: list[tuple[str, int]], odd: dict[str, Any] | None, refused: list[str]
) -> list[str]:
    lines = [plain(text) for text in refused]
    if odd is not None:
        first: Difference = odd["first"]
        who = f"{odd['agree']} of {odd['ranks']} ranks agree" if odd["agree"] > 1 else "no majority"
        lines += [
            plain(f"step {odd['step']}: {odd['rank']} departs from {odd['usual']} ({who})"),
            plain(f"  {first.where}: {first.a} on {odd['usual']}, {first.b} on {odd['rank']}"),
            f"  {first.meaning}",
        ]
    verdict = "first difference above" if odd is not None else "every rank holds the same"
    names = plain(", ".join(ranks))
    lines.append(f"{len(ranks)} ranks ({names}), {count(len(shared), 'shared step')}: {verdict}")
    if not shared:
        lines[-1] = f"{len(ranks)} ranks ({names}) share no step: nothing is known"
    return lines


def _as_json(
    ranks: list[str], shared: list[tuple[str, int]], odd: dict[str, Any] | None, refused: list[str]
) -> dict[str, Any]:
    shown = None
    if odd is not None:
        first: Difference = odd["first"]
        shown = {**odd, "first": {"where": first.where, "usual": first.a, "found": first.b}}
    return {"ranks": ranks, "shared_steps": len(shared), "odd": shown, "refused": refused,
            "exit": 1 if odd is not None else 0}  # fmt: skip
