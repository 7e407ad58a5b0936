"""`ddtree-guard dump --pid PID`: ask a running scheduler for a dump."""

from __future__ import annotations

import argparse
import json

from ddtree_guard.fold import say
from ddtree_guard.recorder import signals


def run(args: argparse.Namespace) -> int:
    """Send SIGUSR2 to a process that has a handler for it, and to no other."""
    signals.ask(args.pid)
    if args.json:
        print(json.dumps({"pid": args.pid, "asked": True}))
    else:
        say(f"asked process {args.pid}; its log names the dump (`ddtree_guard dump trigger=...`)")
    return 0
