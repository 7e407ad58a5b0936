"""Rounds of engines that take turns, over generations of them, and the row that is made of them.

A round is a block on each engine of two sides; a pair is two neighbouring rounds of one visit.
Generations are numbered on over runs.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

TOOLS = ("kv_canary", "async_assert")
COUPLES = (("off", "guard"), ("control", "twin"), ("control2", "twin2"))  # without a guard, with it
ENGINES = tuple(itertools.chain(*COUPLES))  # the ones that matter most first
SIDES = dict(zip(COUPLES[0], zip(*COUPLES, strict=True), strict=True))
MODES = {"guard": "log", "kv_canary": "log", "control": "off"}
FIELDS = ("tokens_per_s", "took_s", "step_s", "steps", "tokens", "p99_s")  # kept of a block
Block = dict[str, Any]


class Round(NamedTuple):
    """A block on each unguarded engine, and on each of the tool's."""

    off: list[Block]
    mine: list[Block]
    generation: int = 1
    visit: int = 0
    run: int = 1


@dataclass(slots=True)
class Case:
    """A width at a concurrency, and its rounds by tool, over all generations."""

    concurrency: int
    length: int = 0
    rounds: dict[str, list[Round]] = field(default_factory=dict)


def compact(block: Block) -> Block:
    """What is kept of a block: six digits of what is compared, four of the rest, and its own p99 of
    seconds a token.
    """
    held = block | {"p99_s": percentile(block["gaps"], 0.99)}
    digits = dict.fromkeys(FIELDS, 6) | {"took_s": 4, "p99_s": 4}
    return {name: float(f"{value:.{count}g}") if isinstance(value := held[name], float) else value
            for name, count in digits.items()}  # fmt: skip


def coverage(case: Case) -> tuple[int, int]:
    """Pairs of the guard's rounds so far, and its rounds."""
    rounds = case.rounds.get("guard", ())
    visits = Counter((one.generation, one.visit) for one in rounds)
    return sum(count // 2 for count in visits.values()), len(rounds)


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median."""
    return _interval(tuple(ratios))


@functools.lru_cache(512)  # most rows are made anew without having changed
def _interval(ratios: tuple[float, ...], draws: int = 2000) -> tuple[float, float]:
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def spread(ratios: list[float], alone: list[float]) -> tuple[float, float | None, float | None]:
    """The median and its interval; without pairs the median of rounds alone, 1 without those."""
    middle = round(statistics.median(ratios or alone or [1.0]), 4)
    if len(ratios) < 2:
        return middle, None, None
    low, high = interval(ratios)
    return middle, round(low, 4), round(high, 4)


def percentile(values: list[float], share: float) -> float | None:
    """The smallest value that at least `share` of all do not exceed; None without values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def rounds_of(tool: str, case: Case) -> list[Round]:
    """The rounds of a tool so far. The control's are of the first two engines without a guard."""
    rounds = list(case.rounds.get("guard" if tool in ENGINES else tool, ()))  # more may come
    if tool != "control":
        return rounds
    return [one._replace(off=one.off[:1], mine=one.off[1:2]) for one in rounds if one.off[1:]]


def paired(rounds: list[Round], ratios: list[float]) -> dict[int, list[float]]:
    """By generation, the geometric means of two neighbouring rounds of one visit, in which the
    sides took turns in going first. A round without its other is left out.
    """
    visits: dict[tuple[int, int], list[float]] = {}
    for one, ratio in zip(rounds, ratios, strict=True):
        visits.setdefault((one.generation, one.visit), []).append(ratio)
    found: dict[int, list[float]] = {}
    for (generation, _), held in visits.items():
        pairs = [math.sqrt(a * b) for a, b in zip(held[::2], held[1::2], strict=False)]
        found.setdefault(generation, []).extend(pairs)
    return {generation: pairs for generation, pairs in found.items() if pairs}


def summary(
    tool: str, w: int, case: Case, rounds: list[Round], facts: dict[str, Any]
) -> dict[str, Any]:
    """One row: a tool at a width and a concurrency, over its rounds; `p99_ms` is the median over
    its blocks of each one's p99.
    """
    sides = [one.off if tool == "off" else one.mine for one in rounds]
    mine = list(itertools.chain(*sides))
    others = rounds if tool != "off" else []  # those that are compared
    ratios = [mean("tokens_per_s", one.mine) / mean("tokens_per_s", one.off) for one in others]
    steps = [mean("step_s", one.off) / mean("step_s", one.mine) for one in others]
    pairs, step_pairs = paired(others, ratios), paired(others, steps)
    ratio, low, high = spread([*itertools.chain(*pairs.values())], ratios)
    step, step_low, step_high = spread([*itertools.chain(*step_pairs.values())], steps)
    verified, tokens = (sum(one[name] for one in mine) for name in ("steps", "tokens"))
    slow = [one["p99_s"] for one in mine if one["p99_s"] is not None]
    return {
        "tool": tool, "mode": MODES.get(tool, tool), "algorithm": "NGRAM", "w": w,
        "concurrency": case.concurrency, "blocks": len(rounds),
        "pairs": sum(map(len, pairs.values())), "runs": len({one.run for one in rounds}),
        "engines": sum({one.generation: len(side)
                        for one, side in zip(rounds, sides, strict=True)}.values()),
        "tokens_per_s": round(statistics.median(one["tokens_per_s"] for one in mine), 1),
        "ratio_to_off": ratio, "ratio_low": low, "ratio_high": high,
        "by_generation": [round(statistics.median(held), 4) for held in pairs.values()],
        "step_ms": round(1000 * statistics.median(one["step_s"] for one in mine), 4),
        "step_to_off": step, "step_low": step_low, "step_high": step_high,
        "accept_length": round(tokens / verified, 4) if verified else None,
        "steps_to_off": steps_to_off(rounds) if tool != "off" else 1.0,
        "p99_ms": round(1000 * statistics.median(slow), 3) if slow else None,
        "new_tokens": case.length, **facts, "ratios": [round(ratio, 4) for ratio in ratios],
    }  # fmt: skip


def mean(name: str, blocks: list[Block]) -> float:
    """The geometric mean over one side's engines."""
    return statistics.geometric_mean(block[name] for block in blocks)


def steps_to_off(rounds: list[Round]) -> float | None:
    """Verify steps of the tool's engines to the others', for the same requests: 1 if it is fair."""
    off = sum(block["steps"] for one in rounds for block in one.off)
    mine = sum(block["steps"] for one in rounds for block in one.mine)
    return round(mine / off, 5) if off else None
