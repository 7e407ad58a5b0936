"""`ddtree-guard rules`: the catalogue as a table, as JSON, or as Markdown pages."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence

from ddtree_guard.commands.catalogue import catalogue, facts
from ddtree_guard.errors import UsageError
from ddtree_guard.rule import Rule


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
    """One line per rule, cut to `width` where given."""
    name = max((len(rule.name) for rule in rules), default=4)
    rows = [("id", "defect", "scope", "site", "what must hold")]
    rows += [(r.id, r.name, r.scope.value, r.site.value, r.statement) for r in rules]
    lines = [f"{a:5} {b:{name}} {c:8} {d:8} {e}" for a, b, c, d, e in rows]
    lines.append(f"{len(rules)} rules; `{'ddtree-guard explain ID'}` prints a rule's page")
    return [line if width is None or len(line) <= width else line[: width - 1] + "…"
            for line in lines]  # fmt: skip


def _width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
