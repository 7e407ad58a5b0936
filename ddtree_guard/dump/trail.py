"""The trail of one request: how its steps went, and its JSON form in dumps and trail files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtree_guard.errors import DumpError

TRAIL_SCHEMA = "ddtree-guard-trail/1"
MAX_KEYS = 4096
MAX_RID = 512  # characters kept of a request id


@dataclass(slots=True)
class Trail:
    """What is known of one request. `widths`, `accept` and `rules` count steps by verify width,
    by committed tokens and by broken rule; `run` is the longest run of one token; times are
    seconds since the epoch.
    """

    rid: str
    steps: int = 0
    checked: int = 0
    rules: dict[str, int] = field(default_factory=dict)
    widths: dict[int, int] = field(default_factory=dict)
    accept: dict[int, int] = field(default_factory=dict)
    run: int = 0
    tainted: bool = False
    first: float = 0.0
    last: float = 0.0

    @property
    def verdict(self) -> str:
        """The answer in one line: `412/412 steps checked, clean`."""
        text = f"{self.checked}/{self.steps} steps checked, "
        if self.rules:
            hits = ", ".join(f"{rule} in {n}" for rule, n in sorted(self.rules.items()))
            text += f"{hits} of them"
        else:
            text += "clean" if self.checked else "so nothing is known"
        return text + ("; its prefix holds KV of a step with a finding" if self.tainted else "")

    @property
    def clean(self) -> bool:
        """Whether every step was checked and nothing was found."""
        return not self.rules and not self.tainted and 0 < self.steps == self.checked

    def as_json(self) -> dict[str, Any]:
        """The form of the schema's `request`."""
        return {
            "rid": self.rid[:MAX_RID],
            "steps": self.steps,
            "checked": self.checked,
            "rules": dict(self.rules),
            "widths": {str(w): n for w, n in self.widths.items()},
            "accept": {str(length): n for length, n in self.accept.items()},
            "run": self.run,
            "tainted": self.tainted,
            "first": round(self.first, 3),
            "last": round(self.last, 3),
        }


_KINDS: Mapping[str, tuple[type, ...]] = {
    "rid": (str,), "steps": (int,), "checked": (int,), "rules": (dict,), "widths": (dict,),
    "accept": (dict,), "run": (int,), "tainted": (bool,), "first": (int, float),
    "last": (int, float),
}  # fmt: skip


def trail_from_json(data: Any) -> Trail:
    """The Trail of its JSON form. Raises DumpError where the data is not of the declared kind."""
    if not isinstance(data, dict) or set(data) != set(_KINDS):
        raise DumpError("the trail of a request does not have the fields of the schema.")
    for name, kinds in _KINDS.items():
        if type(data[name]) not in kinds:
            raise DumpError(f"{name} of a request's trail is not of the kind of the schema.")
    if len(data["rid"]) > MAX_RID or not 0 <= data["checked"] <= data["steps"] < 2**63:
        raise DumpError("the trail of a request states more checked steps than it ran.")
    counts = {name: _counts(data[name], name) for name in ("rules", "widths", "accept")}
    numbers = {name: _numbers(counts[name], name) for name in ("widths", "accept")}
    return Trail(**{**data, "rules": counts["rules"], **numbers})


def _counts(data: dict[Any, Any], name: str) -> dict[str, int]:
    good = len(data) <= MAX_KEYS and all(
        len(key) <= 32 and type(n) is int and 0 < n < 2**63 for key, n in data.items()
    )
    if not good:
        raise DumpError(f"{name} of a request's trail does not count steps.")
    return data


def _numbers(data: dict[str, int], name: str) -> dict[int, int]:
    if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in data):
        raise DumpError(f"{name} of a request's trail is keyed by something else than numbers.")
    return {int(key): n for key, n in data.items()}


def merged(trails: list[Trail]) -> Trail:
    """One trail of the parts that were written at different times, newest state of each process.

    Raises ValueError for an empty list.
    """
    if not trails:
        raise ValueError("no trail to merge")
    whole = Trail(trails[0].rid, first=min(t.first for t in trails))
    for part in trails:
        whole.steps += part.steps
        whole.checked += part.checked
        whole.run = max(whole.run, part.run)
        whole.tainted |= part.tainted
        whole.last = max(whole.last, part.last)
        for name in ("rules", "widths", "accept"):
            mine: dict[Any, int] = getattr(whole, name)
            for key, count in getattr(part, name).items():
                mine[key] = mine.get(key, 0) + count
    return whole
