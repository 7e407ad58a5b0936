"""`ddtree-guard report DUMP -o report.html`: one page for whoever has to fix it."""

from __future__ import annotations

import argparse
import json
import os

from ddtree_guard.dump.read import Dump
from ddtree_guard.errors import UsageError
from ddtree_guard.fold import say
from ddtree_guard.render import plain
from ddtree_guard.report.html import page, sentence, story


def run(args: argparse.Namespace) -> int:
    """Write the page and say what broke. Raises UsageError where it cannot be written."""
    told = story(Dump(args.dump))
    write(args.out, page(told))
    what = sentence(told)
    if args.json:
        rules = [finding.rule for finding in told.findings]
        print(json.dumps({"report": args.out, "sentence": what, "findings": rules}, indent=1))
    else:
        say(f"{plain(what)}\nwrote {args.out}")
    return 0


def write(path: str, text: str) -> None:
    """Write the page for its owner only; a link in its place is not followed."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"the report cannot be written to {path!r} ({why}); give a file that can be written "
            "with --out."
        ) from None
