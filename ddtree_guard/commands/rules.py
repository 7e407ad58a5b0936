"""`ddtree-guard rules`: the catalogue as a table, as JSON, or as Markdown pages."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence

from ddtree_guard.commands.catalogue import catalogue, facts
from ddtree_guard.errors import UsageError
from ddtree_guard.rule import Rule

_NARROW = 30  # columns below which a folded statement reads badly beside its rule


def run(args: argparse.Namespace) -> int:
    """Print or write the catalogue."""
    rules = catalogue()
    if args.markdown:
        from ddtree_guard.report.pages import write_pages

        try:
            count = write_pages(args.markdown, rules)
        except OSError as error:
            raise UsageError(
                f"pages cannot be written to {args.markdown!r} ({error.strerror}); give a folder "
                "that can be written."
            ) from None
        print(f"wrote {count} files to {args.markdown}", file=sys.stderr)
    if args.json:
        print(json.dumps([facts(rule) for rule in rules], indent=1))
    elif not args.markdown:
        print("\n".join(table(rules, _width())))
    return 0


def table(rules: Sequence[Rule], width: int | None = None) -> list[str]:
    """One line per rule; where `width` is too narrow for that, what must hold comes below."""
    name = max((len(rule.name) for rule in rules), default=4)
    rows = [("id", "defect", "scope", "site", "cost", "what must hold")]
    rows += [(r.id, r.name, r.scope.value, r.site.value, r.cost.value, r.statement) for r in rules]
    lines: list[str] = []
    for a, b, c, d, e, statement in rows:
        head = f"{a:5} {b:{name}} {c:8} {d:8} {e:8} "
        if width is None or len(head) + len(statement) <= width:
            lines.append(head + statement)
        elif width - len(head) >= _NARROW:
            lines += textwrap.wrap(
                statement, width, initial_indent=head, subsequent_indent=" " * len(head)
            )
        else:
            indent = " " * 6
            lines.append(head.rstrip())
            lines += textwrap.wrap(
                statement, width, initial_indent=indent, subsequent_indent=indent
            )
    return [*lines, f"{len(rules)} rules; `ddtree-guard explain ID` prints a rule's page"]


def _width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
