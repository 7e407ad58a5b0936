"""Runs of the overhead benchmark that add up: what a result file keeps of each, and which of it a
later run may go on from.

Beside its rows a file has `rounds`, a list of what `environment.round` names each, and their blocks
of what `environment.block` does; `facts`, one for each engine that was started; and
`environment.runs`. Rows are always made of all rounds that are kept. Rounds can be pooled if the
guard's sources, the model's shape, the release, the device and the requests were the same; each
width has rounds of one such kind only.
"""

from __future__ import annotations

import json
import time
from collections import ChainMap, Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from files import write
from rounds import FIELDS, SIDES, TOOLS, Block, Case, Round, rounds_of, summary

COUNTED = ("verify_steps", "steps_checked", "findings", "violations_logged", "dumps", "ahead")
COLUMNS = ("w", "concurrency", "tool", "new_tokens", "run", "generation", "visit", "off", "mine")
_PLACE = ("run", "generation")  # of a fact
EMPTY: dict[str, Any] = {"environment": {}, "rows": [], "failed": {}, "facts": [], "rounds": []}
GATE, LOW = 0.995, 0.99  # what the median and the interval's lower end must reach


def met(row: dict[str, Any]) -> bool:
    """Whether a row of the guard is as fast as it has to be."""
    return bool(row["ratio_to_off"] >= GATE and (row["ratio_low"] or 0) >= LOW)


# --- one width ---
@dataclass(slots=True)
class Width:
    """One verify width: what is known of its engines, by tool, and its cases with their rounds."""

    w: int
    facts: dict[str, list[dict[str, Any]]]  # one a start of an engine
    cases: list[Case]

    def rows(self) -> list[dict[str, Any]]:
        """One row a case and tool that has rounds; the guard's is of the twins as well."""
        return [
            summary(tool, self.w, case, rounds, self.known(tool))
            for case in self.cases
            for tool in ("off", "guard", "control", *TOOLS)
            if (rounds := rounds_of(tool, case))
        ]

    def known(self, tool: str) -> dict[str, Any]:
        """Facts of the newest run's first engine; of counts, sums over all engines of its side. A
        probe that did not answer, or was never asked, has not counted nothing: `uncounted` says
        how many did not; without any the sum is None.
        """
        newest = sorted(self.facts.get(tool, ()), key=lambda one: -one["run"])
        known = [{name: value for name, value in one.items() if value is not None}
                 for one in newest]  # fmt: skip
        side = [one for name in SIDES.get(tool, (tool,)) for one in self.facts.get(name, ())]
        counts = {n: [one[n] for one in side if one.get(n) is not None] for n in COUNTED}
        told = [name for name, held in counts.items() if held]
        silent = sum(any(one.get(name) is None for name in told or COUNTED) for one in side)
        first = {name: value for name, value in ChainMap(*known, *newest).items()
                 if name not in _PLACE}  # fmt: skip
        sums = {name: sum(held) if held else None for name, held in counts.items()}
        return first | sums | {"uncounted": silent}

    def runs(self) -> set[int]:
        """The runs that it has rounds of."""
        held = [list(rounds) for case in self.cases for rounds in list(case.rounds.values())]
        return {one.run for rounds in held for one in rounds}

    def lines(self) -> list[dict[str, Any]]:
        """Its rounds, by what a file's columns are named."""
        return [
            {"w": self.w, "concurrency": case.concurrency, "tool": tool,
             "new_tokens": case.length, "run": one.run, "generation": one.generation,
             "visit": one.visit, "off": _listed(one.off), "mine": _listed(one.mine)}
            for case in self.cases
            for tool, rounds in list(case.rounds.items())  # more may come
            for one in list(rounds)
        ]  # fmt: skip

    def told(self) -> list[dict[str, Any]]:
        """Its facts, as a file has them."""
        return [{"w": self.w, "tool": tool, **one} for tool, held in self.facts.items()
                for one in held]  # fmt: skip

    def take(self, lines: Iterable[dict[str, Any]], facts: Iterable[dict[str, Any]]) -> None:
        """Have these rounds and facts of earlier runs, before those of its own."""
        cases = {case.concurrency: case for case in self.cases}
        for line in lines:
            case = cases.get(line["concurrency"])
            if case is None:
                case = cases[line["concurrency"]] = Case(line["concurrency"])
                self.cases.append(case)
            case.length = line["new_tokens"]
            case.rounds.setdefault(line["tool"], []).append(_round(line))
        mine, self.facts = self.facts, {}
        for one in facts:
            fact = {name: value for name, value in one.items() if name not in ("w", "tool")}
            self.facts.setdefault(one["tool"], []).append(fact)
        for tool, held in mine.items():
            self.facts.setdefault(tool, []).extend(held)


def _listed(blocks: list[Block]) -> list[list[Any]]:
    return [[block[name] for name in FIELDS] for block in blocks]


def _round(line: dict[str, Any]) -> Round:
    off, mine = ([dict(zip(FIELDS, block, strict=True)) for block in line[side]]
                 for side in ("off", "mine"))  # fmt: skip
    return Round(off, mine, line["generation"], line["visit"], line["run"])


# --- the file ---
@dataclass(slots=True)
class Pool:
    """A result file: as it was found, what of it may be gone on from, and the run that does."""

    path: Path
    before: dict[str, Any]
    run: dict[str, Any]
    runs: dict[int, dict[str, Any]] = field(default_factory=dict)  # earlier ones, by number
    rounds: list[dict[str, Any]] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    @classmethod
    def open(cls, path: Path, fresh: bool, run: dict[str, Any]) -> Pool:
        """Read a file, and say it where it is not gone on from; what it holds stays in it until
        something was measured. Exits where it is no result file.
        """
        before = _read(path, fresh)
        pool = cls(path, before, run)
        if fresh and before:
            print(f"--fresh: what {path} holds is replaced by what is measured", flush=True)
        elif before.get("rows") and not _same_form(before["environment"]):
            held = len(before["rows"])
            print(f"{path} is of an older form, without rounds to go on from: its {held} rows are "
                  "replaced by what is measured", flush=True)  # fmt: skip
        elif before.get("rounds"):
            pool._load()
        run["run"] = 1 + max(pool.runs, default=0)
        return pool

    def _load(self) -> None:
        """What the file has of earlier runs."""
        try:
            self.runs = {one["run"]: one for one in self.before["environment"]["runs"]}
            lines = [dict(zip(COLUMNS, line, strict=True)) for line in self.before["rounds"]]
            self.rounds, self.facts = lines, self.before["facts"]
            if lost := {line["run"] for line in [*lines, *self.facts]} - self.runs.keys():
                raise ValueError(f"environment.runs lacks {sorted(lost)}")
        except (KeyError, TypeError, ValueError) as error:
            raise SystemExit(_damaged(self.path, error)) from None

    @property
    def generations(self) -> int:
        """The highest number of a generation so far: a new one has a number of its own."""
        return max((line["generation"] for line in [*self.rounds, *self.facts]), default=0)

    def of(self, width: Width, run: dict[str, Any]) -> tuple[int, Counter[str]]:
        """Fill a width with the rounds that belong to a run's. Returns how many, and for how many
        of the others what was not the same.
        """
        why: Counter[str] = Counter()
        kept: list[dict[str, Any]] = []
        for line in [line for line in self.rounds if line["w"] == width.w]:
            other = _other(self.runs[line["run"]], run)
            why.update([other] if other else [])
            kept += [] if other else [line]
        lengths = {line["concurrency"]: line["new_tokens"] for line in kept}  # the newest
        same = [line for line in kept if line["new_tokens"] == lengths[line["concurrency"]]]
        if len(same) < len(kept):
            why["other requests (new_tokens)"] = len(kept) - len(same)
        numbers = {line["run"] for line in same}
        told = [one for one in self.facts if one["w"] == width.w and one["run"] in numbers]
        width.take(same, told)
        return len(same), why

    def join(self, width: Width) -> None:
        """Let a width that is about to be measured go on from earlier runs; say from what not."""
        count, why = self.of(width, self.run)
        text = f"w={width.w}: {count} rounds of earlier runs are kept"
        if why:
            reasons = "; ".join(f"{number} for {reason}" for reason, number in why.items())
            text += f"; {sum(why.values())} are dropped: {reasons}"
        if count or why:
            print(text, flush=True)

    def measured(self, widths: Iterable[Width]) -> dict[int, Width]:
        """Those that this run has rounds of."""
        return {width.w: width for width in widths if self.run["run"] in width.runs()}

    def result(self, widths: Iterable[Width], failed: dict[str, str]) -> dict[str, Any]:
        """What the file is to hold: nothing but `failed` is new until something was measured, and
        a width that was not measured stays.
        """
        mine = self.measured(widths)
        if not mine:
            return {**EMPTY, **self.before, "failed": failed}
        shown = [self._stored(w) for w in dict.fromkeys(line["w"] for line in self.rounds)
                 if w not in mine] + [*mine.values()]  # fmt: skip
        lines = [line for width in shown for line in width.lines()]
        own = {line["generation"] for line in lines if line["run"] == self.run["run"]}
        self.run |= {"seconds": round(time.monotonic() - self.begun), "generations": sorted(own)}
        every = self.runs | {self.run["run"]: self.run}
        runs = [every[number] for number in sorted({line["run"] for line in lines})]
        rows = [row for width in shown for row in width.rows()]
        return {
            "environment": {"note": note(runs, rows, shown), "round": COLUMNS, "block": FIELDS,
                            "runs": runs},
            "rows": rows, "failed": failed,
            "facts": [one for width in shown for one in width.told()],
            "rounds": [[line[name] for name in COLUMNS] for line in lines],
        }  # fmt: skip

    def save(self, widths: Iterable[Width], failed: dict[str, str]) -> dict[str, Any]:
        """Rewrite the file as a whole; returns what is in it."""
        result = self.result(widths, failed)
        write(self.path, result)
        return result

    def _stored(self, w: int) -> Width:
        """A width as the file has it."""
        width = Width(w, {}, [])
        newest = max(line["run"] for line in self.rounds if line["w"] == w)
        self.of(width, self.runs[newest])
        return width


def _read(path: Path, fresh: bool) -> dict[str, Any]:
    """A result file; empty where there is none."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError(f"found a {type(found).__name__}")
    except ValueError as error:
        if fresh:
            return {}
        raise SystemExit(_damaged(path, error)) from None
    return EMPTY | found


def _damaged(path: Path, error: Exception) -> str:
    return f"{path} is no result file: {error}. Restore it, or replace it with --fresh."


def _same_form(environment: dict[str, Any]) -> bool:
    """Whether the rounds of a file can be read."""
    return [environment.get(name) for name in ("round", "block")] == [[*COLUMNS], [*FIELDS]]


def _kind(run: dict[str, Any]) -> dict[str, Any]:
    """What the rounds of a run are rounds of."""
    same = {name: run.get(name) for name in ("shape", "release", "device")}
    return {"sources of the guard": run["guard"]["sources"], **same}


def _other(held: dict[str, Any], run: dict[str, Any]) -> str:
    """The first thing in which an earlier run is not like another, in words; empty if none is."""
    now = _kind(run)
    found = [f"other {name} ({value}, not {now[name]})" for name, value in _kind(held).items()
             if value != now[name]]  # fmt: skip
    return found[0] if found else ""


# --- in words ---
def note(runs: list[dict[str, Any]], rows: list[dict[str, Any]], shown: list[Width]) -> str:
    """Where, how often, and the verdict."""
    mine = [row for row in rows if row["tool"] == "guard"]
    same = [row for row in rows if row["tool"] == "control" and row["ratio_low"]]
    newest, lives = runs[-1], sum(len(run["generations"]) for run in runs)
    text = (
        f"{newest['device']}, SGLang {newest['release']}, {newest['processors']} processors; "
        f"{_counted(len(runs), 'run')}, {_counted(lives, 'generation')} of engines. Required: "
        f"median at least {GATE}, interval above {LOW}; met in {sum(map(met, mine))} of "
        f"{len(mine)} rows."
    )
    if same:
        low, high = min(r["ratio_low"] for r in same), max(r["ratio_high"] for r in same)
        text += " Not resolved to 1 %: two" if low < 0.99 or high > 1.01 else " Two"
        text += (
            f" engines without a guard (control) differ by {low:.3f} to {high:.3f} in the same "
            f"blocks."
        )
    return text + _apart(runs, shown) + _silent(mine)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _apart(runs: list[dict[str, Any]], shown: list[Width]) -> str:
    """Which widths were measured with what, where that is not the same."""
    kinds = {run["run"]: run["guard"]["sources"] for run in runs}
    by = {width.w: kinds[max(width.runs())] for width in shown}
    if len(set(by.values())) < 2:
        return ""
    parts = ", ".join(f"w={w} {kind}" for w, kind in by.items())
    return f" Widths are of different sources of the guard: {parts}."


def _silent(mine: list[dict[str, Any]]) -> str:
    """How many guarded engines have not said what they counted."""
    count = sum({row["w"]: row["uncounted"] for row in mine}.values())
    return f" {_counted(count, 'guarded engine')} did not say what they counted." if count else ""
