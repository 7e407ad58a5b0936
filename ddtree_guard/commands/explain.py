"""`ddtree-guard explain`: the manual page of a rule, a log line or the findings of a dump."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from typing import Any

from ddtree_guard.commands.catalogue import facts, find, reads, sections
from ddtree_guard.render import parse_line
from ddtree_guard.rule import Rule

_WIDTH = 96


def run(args: argparse.Namespace) -> int:
    """Print the page or pages. Raises UsageError for an unknown rule, DumpError for a bad dump."""
    text = " ".join(args.what)
    line = parse_line(text)
    if line:
        rule = find(line["rule"])
        return _print(args.json, [rule], {"line": line}, _line_text(line))
    if len(args.what) == 1 and (os.path.exists(text) or os.sep in text):
        return _explain_dump(args.json, text)
    return _print(args.json, [find(_name_in(text))], {}, "")


def page(rule: Rule) -> str:
    """The manual page for a terminal."""
    parts = sections(rule)
    head = f"{rule.id} {rule.name}"
    where = f"scope {rule.scope.value}, site {rule.site.value}, cost {rule.cost.value}" + (
        f", device bit {rule.bit}" if rule.bit is not None else ""
    )
    lines = [head, "=" * len(head), *textwrap.wrap(parts.pop("Statement"), _WIDTH), where, ""]
    for heading, text in parts.items():
        lines += textwrap.wrap(f"{heading}: {text}", _WIDTH, subsequent_indent="  ")
    lines += textwrap.wrap(f"Reads: {', '.join(reads(rule))}", _WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def _name_in(text: str) -> str:
    """The rule that a pasted headline such as `W3 mask-offset-gap: request 1 ...` starts with."""
    return text.split()[0].rstrip(":,") if text.split() else text


def _line_text(line: dict[str, str]) -> str:
    dump = line.get("dump", "-")
    left = {"yes": "had left", "no": "had not left"}.get(line.get("tokens_left", ""), "")
    sentence = (
        f"Step {line.get('step', '?')}, request {line.get('rid', '-')}: expected "
        f"{line.get('expected', '?')}, found {line.get('actual', '?')}"
    )
    sentence += f"; the step's tokens {left}." if left else "."
    return sentence + ("" if dump == "-" else f"\nNext: ddtree-guard check {dump}")


def _explain_dump(as_json: bool, path: str) -> int:
    from ddtree_guard import render
    from ddtree_guard.dump.read import Dump

    dump = Dump(path)
    found = dump.findings()
    firsts = {finding.rule: (at, finding) for at, finding in reversed(found)}
    rules = [find(name) for name in reversed(firsts)]
    blocks = [render.block(f, dump.step(at)) for at, f in reversed(list(firsts.values()))]
    extra = {
        "dump": str(dump.path),
        "trigger": dump.trigger,
        "findings": [[at, f.rule] for at, f in found],
    }
    if not rules and not as_json:
        why = render.plain(f"{dump.trigger['kind']}: {dump.trigger['why'] or 'no reason given'}")
        print(f"No finding was recorded in this dump. It was written by trigger {why}.")
        print(f"Next: ddtree-guard check {dump.path}")
        return 0
    return _print(as_json, rules, extra, "\n\n".join(blocks))


def _print(as_json: bool, rules: list[Rule], extra: dict[str, Any], text: str) -> int:
    if as_json:
        print(json.dumps({**extra, "rules": [facts(rule) for rule in rules]}, indent=1))
    else:
        print("\n\n".join(filter(None, [text, *map(page, rules)])))
    return 0
