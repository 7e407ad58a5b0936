"""Finding -> text: the one source for the log, the command line, pytest and HTML. Plain text only.

Values come from a server that misbehaves and from files of strangers, so every value is quoted
before it reaches a terminal or a log: no newline, no escape sequence, no forged field.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ddtree_guard.rule import Finding
from ddtree_guard.step import Step

if TYPE_CHECKING:
    from ddtree_guard.guard import Report

LOG_PREFIX = "ddtree_guard finding"
LOG_KEYS = (
    "rule", "scope", "rid", "step", "expected", "actual", "tokens_left", "incident", "dump",
    "name",
)  # fmt: skip
REPEAT_KEYS = ("rule", "count", "total", "steps", "rids")  # of the line about repeats
_BARE = re.compile(r"[A-Za-z0-9_./:@%+*()\[\],<>-]+")
_PAIR = re.compile(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|[^\s"]+)')
_UNKNOWN = "-"
LEGEND = (
    "symbols: w rows per request, s prefix length, b draft block, B tree budget, bs requests, BS "
    "lanes, C context, V vocabulary, N slots of the KV pool, P page size"
)


def quote(value: object) -> str:
    """The value as one word: bare where it is harmless, else a JSON string in ASCII."""
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)


def plain(text: str) -> str:
    """The text without anything that a terminal or a log would obey."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def incident_id(finding: Finding, step: Step) -> str:
    """A short name for this finding, the same wherever it is rendered."""
    who = step.who
    seed = f"{finding.rule} {who.rank} {who.worker} {who.step_id} {finding.rid} {finding.row}"
    return "dg-" + hashlib.blake2b(seed.encode(errors="replace"), digest_size=2).hexdigest()


def line(
    finding: Finding, step: Step, incident: str | None = None, dump: object | None = None,
    name: str | None = None,
) -> str:  # fmt: skip
    """The greppable line. Keys and their order never change; an unknown value is `-`.

    `name` is the rid as redacted dumps hold it, which `ddtree-guard request` takes.
    """
    values: dict[str, object] = {
        "rule": finding.rule,
        "scope": finding.scope.value,
        "rid": known(finding.rid),
        "step": step.who.step_id,
        "expected": finding.expected,
        "actual": finding.actual,
        "tokens_left": _left(finding.tokens_left),
        "incident": incident or incident_id(finding, step),
        "dump": known(dump),
        "name": known(name),
    }
    return " ".join([LOG_PREFIX, *(f"{key}={quote(values[key])}" for key in LOG_KEYS)])


def parse_line(text: str) -> dict[str, str]:
    """The fields of a line made by `line`, or about repeats, wherever it stands in the text; empty
    if none.
    """
    fields: dict[str, str] = {}
    for key, value in _PAIR.findall(text):
        if key in (*LOG_KEYS, *REPEAT_KEYS) and key not in fields:
            fields[key] = _unquote(value)
    return fields if "rule" in fields else {}


def block(
    finding: Finding, step: Step, dump: object | None = None, same_cause: str | None = None
) -> str:
    """Six lines for a person: what, the equation, the symbols, who, why, and what to do next.

    `same_cause` is the rule beside whose finding this cause is already written out.
    """
    cause = f"same as {same_cause}" if same_cause else finding.cause or "not known"
    lines = (
        f"{finding.rule} {finding.name}: {finding.headline}",
        f"  {finding.equation}",
        f"  {_symbols(finding.bindings)}",
        f"  {_who(finding, step)}",
        f"  usual cause ({finding.confidence}): {cause}",
        f"  {_done(finding, dump)}",
    )
    return "\n".join(map(plain, lines))


def blocks(found: Iterable[tuple[Step, Finding]]) -> list[str]:
    """The blocks of several findings; a cause is written out where it first occurs."""
    first: dict[str, str] = {}
    lines = []
    for step, finding in found:
        rule = first.setdefault(finding.cause, finding.rule)
        lines.append(block(finding, step, same_cause=None if rule == finding.rule else rule))
    return lines


def headline(finding: Finding) -> str:
    """Rule, defect name and what happened, in one line."""
    return plain(f"{finding.rule} {finding.name}: {finding.headline}")


def summary(*reports: Report, selected_out: int = 0) -> str:
    """What was checked, what was found, what was not checked. Never a bare OK.

    A rule counts as checked when it was evaluated on every step; `selected_out` rules were left out
    on request.
    """
    checked, partly = coverage(*reports)
    skipped = {n.rule for report in reports for n in report.not_checked} - checked - partly
    broken = _ordered(rule for report in reports for rule in report.rules)
    findings = sum(len(report.findings) for report in reports)
    if broken:
        verdict = f"{count(findings, 'finding')} ({', '.join(broken)})"
    else:
        verdict = "clean" if checked or partly else "so nothing is known"
    some = f"{count(len(partly), 'rule')} on some steps only; " if partly else ""
    rest = count(len(skipped) + selected_out, "rule")
    return (
        f"checked {count(len(reports), 'step')}, {count(len(checked), 'rule')}, {verdict}; "
        f"{some}{rest} not checked"
    )


def coverage(*reports: Report) -> tuple[set[str], set[str]]:
    """The rules that were evaluated on every step, and those that were on some steps only."""
    each = [set(report.checked) for report in reports]
    checked = set.intersection(*each) if each else set()
    return checked, set().union(*each) - checked


def not_checked(*reports: Report, by_data: bool | None = None) -> list[str]:
    """One line per rule and reason that kept it from being evaluated, with the steps it hit.

    `by_data` True or False: only reasons that lie, or do not lie, in the data of the step.
    """
    hits: dict[tuple[str, str], int] = {}
    for report in reports:
        for entry in report.not_checked:
            if by_data not in (None, entry.by_data):
                continue
            key = (entry.rule, entry.why)
            hits[key] = hits.get(key, 0) + 1
    return [
        f"{rule} not checked{_on_some(count, len(reports))}: {plain(why)}"
        for (rule, why), count in hits.items()
    ]


def as_json(finding: Finding, step: Step) -> dict[str, Any]:
    """The finding as JSON values, with the step it is about."""
    fields = {name: getattr(finding, name) for name in Finding.__dataclass_fields__}
    fields |= {"scope": finding.scope.value, "site": finding.site.value}
    fields |= {"victims": list(finding.victims), "bindings": dict(finding.bindings)}
    return fields | {"step": step.who.step_id, "incident": incident_id(finding, step)}


def _symbols(bindings: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in bindings.items())


def _who(finding: Finding, step: Step) -> str:
    who = step.who
    parts: dict[str, object] = {
        "site": finding.site.value,
        "step": who.step_id,
        "rank": who.rank,
        "request": finding.request,
        "row": finding.row,
        "rid": finding.rid,
        "victims": ",".join(f"request {i}" for i in finding.victims) or None,
        "backend": f"{who.backend}/{who.backend_kind}",
        "graph": who.path,
    }
    reads = "latent (this kernel does not read it)" if finding.latent else "read by this kernel"
    words = [
        f"{key}={value if key == 'victims' else quote(value)}"
        for key, value in parts.items()
        if value is not None
    ]
    return "  ".join([" ".join(words), reads])


def _done(finding: Finding, dump: object | None) -> str:
    left = {
        True: "its tokens left",
        False: "its tokens did not leave",
        None: "whether its tokens left is not known",
    }
    parts = [finding.action or "reported only", left[finding.tokens_left]]
    if dump is not None:
        parts.append(f"dump {dump}")
    return "; ".join([*parts, f"next: {finding.next_step}"])


def _left(tokens_left: bool | None) -> str:
    return {True: "yes", False: "no", None: "unknown"}[tokens_left]


def known(value: object | None) -> object:
    """The value, or `-` for one that is not known."""
    return _UNKNOWN if value is None else value


def _unquote(value: str) -> str:
    if not value.startswith('"'):
        return value
    try:
        return str(json.loads(value))
    except ValueError:
        return value


def _ordered(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def count(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _on_some(count: int, total: int) -> str:
    return "" if count == total else f" on {count} of {total} steps"
