"""Verdict words on the host: decode them, and put them into words with the NumPy rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddtree_guard.device.protocol import BITS, MAGIC, NO_OFFENDER, ROW_RADIX
from ddtree_guard.rule import Finding
from ddtree_guard.step import Device, Step

# Of these the device reads a part: K2 within a request, A3 without tokens, T6 without the drafter's
# columns; at depth `fast` M1 and K1 at the ends of the prefix only.
PARTIAL_FULL = frozenset({"K2", "A3", "T6"})
PARTIAL = PARTIAL_FULL | {"M1", "K1"}
# What a rule takes as sound. Where that is broken too, the checkers may differ: the device looks
# for doubtful mask cells at `mask_indptr`, which W3 has then reported.
ASSUMES: Mapping[str, tuple[str, ...]] = {
    "T3": ("T1",), "M1": ("W3",), "M2": ("W3",), "M3": ("T2", "W3"), "M4": ("W3",), "M6": ("W3",),
    "K1": ("W2",), "K4": ("W2",),
}  # fmt: skip


@dataclass(slots=True)  # one a step: a frozen one takes four times as long to make
class Verdict:
    """One step's verdict. `first` maps each broken rule to its first offender (request, row).

    `step` counts steps from 1 whose check began; `launches` counts launches of the build check;
    `live` is bs; `close` counts the ends of steps, also of those whose check did not run.
    """

    step: int
    bits: int
    launches: int = 0
    live: int = 0
    first: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    close: int = 0

    @property
    def rules(self) -> tuple[str, ...]:
        """Ids of the broken rules, in bit order."""
        return tuple(name for name, bit in BITS.items() if self.bits >> bit & 1)


def decode(words: Sequence[int] | Any) -> Verdict | None:
    """The verdict in one slot's words, or None if no step was signed there."""
    if int(words[0]) != MAGIC:
        return None
    bits, first = int(words[2]), {}
    if bits:
        for name, bit in BITS.items():
            key = int(words[8 + bit])
            if bits >> bit & 1 and key != NO_OFFENDER:
                first[name] = divmod(key, ROW_RADIX)
    return Verdict(int(words[1]), bits, int(words[3]), int(words[4]), first, int(words[5]))


def explain(
    verdict: Verdict,
    step: Step,
    check: Callable[[Step], Any],
    covered: Sequence[str] = tuple(BITS),
    *,
    full: bool = False,
) -> Any:
    """Cold path: the NumPy rules on the host Step that the verdict is about.

    `check` is `Guard.check`; its Report is returned, with DG1 in it if the two checkers differ on a
    rule that both could judge. `covered` are the rules that the launch decided, `full` its depth.
    """
    cold = check(step)
    broken = {*verdict.rules, *cold.rules}
    judged = [n for n in covered if n in cold.checked and broken.isdisjoint(ASSUMES.get(n, ()))]
    partial = PARTIAL_FULL if full else PARTIAL
    device = Device(
        hot=tuple(name for name in verdict.rules if name in judged),
        cold=tuple(name for name in cold.rules if name in judged),
        partial=tuple(name for name in judged if name in partial),
        first=dict(verdict.first),
    )
    return check(step.replace(device=device))


def disagreements(report: Any) -> tuple[Finding, ...]:
    """The DG1 findings of a report."""
    return tuple(finding for finding in report.findings if finding.rule == "DG1")
