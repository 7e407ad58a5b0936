"""`ddtree-guard request RID [DIR]`: was this request's answer made from sound steps?"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree_guard.config import Config
from ddtree_guard.dump.find import find_dumps, find_trails
from ddtree_guard.dump.read import Dump, read_trails
from ddtree_guard.dump.trail import Trail, merged
from ddtree_guard.errors import DumpError, UsageError
from ddtree_guard.fold import say
from ddtree_guard.render import count, plain

_PROCESS = re.compile(r"(?:trail_|Z_)([A-Za-z0-9.-]+_pid\d+)")


@dataclass
class Answer:
    """The trails of one request by process, and what was looked through."""

    trails: dict[str, Trail] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)
    hashed: bool = False
    refused: list[str] = field(default_factory=list)
    looked: int = 0


def run(args: argparse.Namespace) -> int:
    """Print the verdict. 0 when every step was checked and clean, 1 otherwise."""
    folder = args.dir or str(Config.from_env().dump_dir)
    answer = look(folder, args.rid)
    if not answer.looked and answer.refused:
        raise DumpError(f"nothing in {folder!r} can be read; the first: {answer.refused[0]}")
    if not answer.trails:
        raise UsageError(_unknown(args.rid, folder, answer))
    if args.json:
        print(json.dumps(_as_json(args.rid, answer), indent=1))
    else:
        say("\n".join(map(plain, _text(args.rid, answer))))
    return 0 if all(trail.clean for trail in answer.trails.values()) else 1


def look(folder: str, rid: str) -> Answer:
    """Collect what trail files and dumps say of a request, by process.

    A process counts a request's steps on; after an idle time it begins anew. So of the parts with
    one beginning the longest counts, and parts with different beginnings add up.
    """
    answer = Answer()
    parts: dict[str, dict[float, Trail]] = {}
    for process, trail, hashed in _all(folder, answer):
        answer.hashed |= hashed
        if trail.rid != rid:
            answer.others.add(trail.rid)
        else:
            mine = parts.setdefault(process, {})
            before = mine.get(trail.first)
            if before is None or before.steps < trail.steps:
                mine[trail.first] = trail
    answer.trails = {process: merged(list(found.values())) for process, found in parts.items()}
    return answer


def _all(folder: str, answer: Answer) -> Iterator[tuple[str, Trail, bool]]:
    for path in _paths(folder):
        name = _PROCESS.search(path.name)
        process = name.group(1) if name else path.name
        try:
            if path.name.startswith("trail_"):
                for trail, hashed in read_trails(path.parent, path.name):
                    yield process, trail, hashed
            else:
                dump = Dump(path)
                for trail in dump.requests():
                    yield process, trail, dump.redacted
            answer.looked += 1
        except DumpError as error:
            answer.refused.append(f"{path.name} was left out: {error}")


def _paths(folder: str) -> list[Path]:
    """Trail files and dumps. Raises DumpError where neither can be looked for."""
    found: list[Path] = []
    refused: list[DumpError] = []
    for look_for in (find_trails, find_dumps):
        try:
            found += look_for(folder)
        except DumpError as error:
            refused.append(error)
    if len(refused) == 2:
        raise refused[0]
    return found


def _unknown(rid: str, folder: str, answer: Answer) -> str:
    known = count(len(answer.others), "other request") if answer.others else "no request at all"
    text = f"request {rid!r} was expected in {folder!r}, found {known}"
    if answer.hashed and not rid.startswith("r-"):
        return (
            f"{text}; ids are hashed there: give the name that the server's log states beside the "
            "id (name=r-...), or serve with SGLANG_DDTREE_GUARD_REDACT=off."
        )
    return f"{text}; trails reach disk a minute after a request's last step, or with a dump."


def _text(rid: str, answer: Answer) -> list[str]:
    lines = list(answer.refused)
    for process, trail in sorted(answer.trails.items()):
        lines.append(f"request {rid}, {process}: {trail.verdict}")
        lines.append(f"  width {_spread(trail.widths)}; longest run of one token {trail.run}")
        lines.append(f"  accepted per step: {_spread(trail.accept) or 'not seen'}")
    if any(trail.rules for trail in answer.trails.values()):
        lines.append("next: ddtree-guard check DUMP, ddtree-guard explain RULE")
    return lines


def _spread(counts: dict[int, int]) -> str:
    return ", ".join(f"{value} in {n}" for value, n in sorted(counts.items()))


def _as_json(rid: str, answer: Answer) -> dict[str, Any]:
    clean = all(trail.clean for trail in answer.trails.values())
    return {
        "rid": rid,
        "processes": {
            process: {**trail.as_json(), "verdict": trail.verdict}
            for process, trail in answer.trails.items()
        },
        "clean": clean,
        "refused": answer.refused,
        "exit": 0 if clean else 1,
    }
