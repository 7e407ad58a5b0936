"""`ddtree-guard diff A B`: the first field in which two dumps differ, by meaning."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ddtree_guard.dump.compare import WHOSE, Difference, differences
from ddtree_guard.dump.read import Dump
from ddtree_guard.fold import say
from ddtree_guard.render import count, plain


def run(args: argparse.Namespace) -> int:
    """Print where the dumps part. 0 when they hold the same, 1 when they differ."""
    a, b = Dump(args.a), Dump(args.b)
    pairs, how = align(a, b)
    same_ids = not (a.redacted or b.redacted)
    found: list[tuple[int, int, list[Difference]]] = []
    for i, j in pairs:
        skip = (*WHOSE, "contract.not_checked") if a.redacted != b.redacted else WHOSE
        listed = list(differences(a.step(i), b.step(j), skip, same_ids))
        if listed:
            found.append((i, j, sorted(listed, key=lambda one: one.only)))
    missing = len(a) + len(b) - 2 * len(pairs)
    if args.json:
        print(json.dumps(_as_json(found, pairs, missing), indent=1))
    else:
        say("\n".join(_text(found, pairs, how, missing, same_ids)))
    return 1 if found or missing else 0


def align(a: Dump, b: Dump) -> tuple[list[tuple[int, int]], str]:
    """Pairs of step indices: by step id where the dumps share any, else by order from the end."""
    first, second = a.step_ids(), b.step_ids()
    shared = [s for s in first if s in second]
    if shared and len(set(first)) == len(first) and len(set(second)) == len(second):
        return [(first.index(s), second.index(s)) for s in shared], "step id"
    count = min(len(a), len(b))
    return [(len(a) - n, len(b) - n) for n in range(count, 0, -1)], "order, the newest last"


def _text(
    found: list[tuple[int, int, list[Difference]]], pairs: list[tuple[int, int]], how: str,
    missing: int, same_ids: bool,
) -> list[str]:  # fmt: skip
    lines = []
    parted = [(i, j, told) for i, j, listed in found if (told := [d for d in listed if not d.only])]
    if parted:
        i, j, told = parted[0]
        lines.append(f"first difference, step {i} of A and {j} of B:")
        lines.append(f"  {plain(str(told[0]))}")
        if len(told) > 1:
            lines.append(f"further differences in this step, {len(told) - 1}:")
            lines += [f"  {plain(str(one))}" for one in told[1:20]]
        if len(told) > 20:
            lines.append(f"  and {len(told) - 20} more")
    lines += _held_once(found)
    if not same_ids:
        lines.append("token ids are hashes here: compared by which of them are equal")
    if missing:
        lines.append(f"{count(missing, 'step')} {'is' if missing == 1 else 'are'} in one dump only")
    verdict = f"{len(parted)} of them differ" if parted else "all of them the same"
    if len(pairs) == 1:
        verdict = "they differ" if parted else "they are the same"
    verdict += " in what both hold" if found and not parted else ""
    lines.append(f"compared {count(len(pairs), 'pair')} of steps by {how}: {verdict}")
    return lines


def _held_once(found: list[tuple[int, int, list[Difference]]]) -> list[str]:
    """What only one of the dumps holds, which a step of the ring is not to be blamed for."""
    lines = []
    for side in "AB":
        names = dict.fromkeys(d.where for _, _, listed in found for d in listed if d.only == side)
        if names:
            lines.append(plain(f"only {side} holds, so not compared: {', '.join(names)}"))
    return lines


def _as_json(
    found: list[tuple[int, int, list[Difference]]], pairs: list[tuple[int, int]], missing: int
) -> dict[str, Any]:
    return {
        "pairs": len(pairs),
        "in_one_only": missing,
        "differ": [
            {
                "a": i,
                "b": j,
                "fields": [
                    {"where": d.where, "a": d.a, "b": d.b, "meaning": d.meaning} for d in listed
                ],
            }
            for i, j, listed in found
        ],
        "exit": 1 if found or missing else 0,
    }
