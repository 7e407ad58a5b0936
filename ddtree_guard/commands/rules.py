"""`ddtree-guard rules`: the catalogue as a table, as JSON, or as Markdown pages."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from ddtree_guard.commands.catalogue import catalogue, facts
from ddtree_guard.errors import UsageError
from ddtree_guard.fold import columns, fold
from ddtree_guard.rule import Rule

_NARROW = 40  # columns below which a folded statement reads badly beside its rule


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
        print("\n".join(table(rules, columns())))
    return 0


def table(rules: Sequence[Rule], width: int) -> list[str]:
    """A row per rule; where `width` is too narrow for that, what must hold comes below it."""
    rows = [("id", "defect", "scope", "site", "cost", "what must hold")]
    rows += [(r.id, r.name, r.scope.value, r.site.value, r.cost.value, r.statement) for r in rules]
    sizes = [max(len(row[at]) for row in rows) for at in range(5)]
    gap = "  " if sum(sizes) + 2 * len(sizes) <= width else " "
    lines: list[str] = []
    for *cells, statement in rows:
        head = "".join(f"{cell:{size}}{gap}" for cell, size in zip(cells, sizes, strict=True))
        if width - len(head) >= _NARROW:
            lines += fold(head + statement, width, hang=len(head)).split("\n")
        else:
            below = " " * (sizes[0] + 2)
            lines += [head.rstrip(), *fold(below + statement, width, hang=0).split("\n")]
    return [*lines, f"{len(rules)} rules; `ddtree-guard explain ID` prints a rule's page"]
