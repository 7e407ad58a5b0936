"""`ddtree-guard explain`: the manual page of a rule, a log line or the findings of a dump."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import textwrap
from typing import Any

from ddtree_guard import loglines
from ddtree_guard.commands.catalogue import advice, catalogue, facts, find, reads, sections
from ddtree_guard.errors import UsageError
from ddtree_guard.fold import columns, say
from ddtree_guard.render import LEGEND, LOG_PREFIX, parse_line, plain
from ddtree_guard.rule import Rule

_WIDTH = 96  # of a page on a wide terminal
_WITH_RULE = (LOG_PREFIX, "ddtree_guard repeated")  # the heads of lines with `rule=`
_INCIDENT = re.compile(r"[IH]\d{1,2}")


def run(args: argparse.Namespace) -> int:
    """Print the page or pages. Raises UsageError for an unknown rule, DumpError for a bad dump."""
    text = " ".join(args.what)
    first, *rest = args.what
    exists = os.path.exists(first)
    head = "" if exists and not rest else loglines.head(text)
    line = parse_line(text) if head in ("", *_WITH_RULE) else {}
    if line:
        rule = find(line["rule"])
        return _print(args.json, [rule], {"line": line}, _line_text(line))
    means = loglines.meaning(text)
    if head:
        return _explain_line(args.json, means)
    if exists or (os.sep in first and not rest and not means):
        if rest:
            raise UsageError(f"explain takes one dump, found {rest[0]!r} behind {first!r}.")
        return _explain_dump(args.json, first)
    words = [word.strip("`'\"()[]{}.,:;") for word in text.split()] or [text]
    if len(words) == 1:
        family = [rule for rule in catalogue() if rule.family == words[0].upper()]
        if family:
            return _list(args.json, family, f"family {words[0].upper()}")
        if _INCIDENT.fullmatch(words[0].upper()):
            return _explain_incident(args.json, words[0].upper())
    named = _rule_in(words)
    if named is None and means:
        return _explain_line(args.json, means)
    return _print(args.json, [named or find(words[0])], {}, "")


def _rule_in(words: list[str]) -> Rule | None:
    """The rule that a pasted line such as `12:01 also W3 mask-offset-gap: ...` names first."""
    known = {name: rule for rule in catalogue() for name in (rule.id, rule.name)}
    return next((known[word] for word in words if word in known), None)


def _explain_line(as_json: bool, means: str) -> int:
    """A log line that no rule stands behind."""
    if as_json:
        print(json.dumps({"means": means, "rules": []}, indent=1))
    else:
        say(means)
    return 0


def _explain_incident(as_json: bool, incident: str) -> int:
    """The rules that would have caught an incident."""
    rules = [r for r in catalogue() if incident in re.findall(r"\w+", sections(r)["Seen in"])]
    if not rules:
        raise UsageError(f"no rule names the incident {incident}; docs/incidents.md lists all.")
    return _list(as_json, rules, f"incident {incident}, described in docs/incidents.md: seen by")


def _list(as_json: bool, rules: list[Rule], title: str) -> int:
    if as_json:
        print(json.dumps({"rules": [facts(rule) for rule in rules]}, indent=1))
    else:
        lines = [f"{rule.id:5} {rule.name}: {rule.statement}" for rule in rules]
        say("\n".join([title, *lines]), hang=6)
        print("`ddtree-guard explain ID` prints a rule's page")
    return 0


def page(rule: Rule) -> str:
    """The manual page for a terminal."""
    parts = sections(rule)
    head = f"{rule.id} {rule.name}"
    where = f"scope {rule.scope.value}, site {rule.site.value}, cost {rule.cost.value}" + (
        f", device bit {rule.bit}" if rule.bit is not None else ""
    )
    width = min(columns(), _WIDTH)
    lines = [head, "=" * len(head), *textwrap.wrap(parts.pop("Statement"), width), where, ""]
    for heading, text in parts.items():
        lines += textwrap.wrap(f"{heading}: {text}", width, subsequent_indent="  ")
    harm, cures = advice(rule)
    lines.append(f"Harm: {harm}")
    for number, cure in enumerate(cures, 1):
        text = f"What to do, {number}: {cure}"
        # a flag stays whole, to be copied
        lines += textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)
    lines += textwrap.wrap(f"Reads: {', '.join(reads(rule))}", width, subsequent_indent="  ")
    return "\n".join(lines)


def _line_text(line: dict[str, str]) -> str:
    return _repeats_text(line) if "count" in line else _finding_text(line)


def _repeats_text(line: dict[str, str]) -> str:
    """What a line counts; the first finding of its rule has a line with numbers and a dump."""
    rids = line.get("rids", "-")
    who = "" if rids == "-" else f", requests {rids.replace('+', ' and more')}"
    first = f"grep '{LOG_PREFIX} rule={line['rule']} ' in the log has the first one and its dump."
    return plain(
        f"Rule {line['rule']} was broken {line['count']} more times in steps "
        f"{line.get('steps', '?')}{who}; {line.get('total', '?')} repeats since the process "
        f"started. {first}"
    )


def _finding_text(line: dict[str, str]) -> str:
    dump = line.get("dump", "-")
    left = {"yes": "had left", "no": "had not left"}.get(line.get("tokens_left", ""), "")
    sentence = (
        f"Step {line.get('step', '?')}, request {line.get('rid', '-')}: expected "
        f"{line.get('expected', '?')}, found {line.get('actual', '?')}"
    )
    sentence += f"; the step's tokens {left}." if left else "."
    nextly = "" if dump == "-" else f"\nNext: ddtree-guard check {_path(dump)}"
    return plain(sentence) + nextly


def _path(path: object) -> str:
    """A path as one word of a shell, with nothing that a terminal would obey."""
    return plain(shlex.quote(str(path)))


def _explain_dump(as_json: bool, path: str) -> int:
    from ddtree_guard import render
    from ddtree_guard.dump.read import Dump

    dump = Dump(path)
    found = dump.findings()
    firsts = {finding.rule: (at, finding) for at, finding in reversed(found)}
    rules = [find(name) for name in reversed(firsts)]
    blocks = render.blocks((dump.step(at), f) for at, f in reversed(list(firsts.values())))
    extra = {
        "dump": str(dump.path),
        "trigger": dump.trigger,
        "findings": [[at, f.rule] for at, f in found],
    }
    if not rules and not as_json:
        why = render.plain(f"{dump.trigger['kind']}: {dump.trigger['why'] or 'no reason given'}")
        say(f"No finding was recorded in this dump. It was written by trigger {why}.")
        say(f"Next: ddtree-guard check {_path(dump.path)}")
        return 0
    return _print(as_json, rules, extra, "\n\n".join(blocks))


def _print(as_json: bool, rules: list[Rule], extra: dict[str, Any], text: str) -> int:
    if as_json:
        print(json.dumps({**extra, "rules": [facts(rule) for rule in rules]}, indent=1))
    else:
        say("\n\n".join(filter(None, [text, *map(page, rules), LEGEND])))
    return 0
