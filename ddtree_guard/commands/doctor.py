"""`ddtree-guard doctor`: bare, with serve arguments, or against a running server."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from ddtree_guard.doctor import examine
from ddtree_guard.doctor.client import Client, address_of
from ddtree_guard.doctor.diagnosis import Diagnosis
from ddtree_guard.doctor.document import document
from ddtree_guard.doctor.text import lines
from ddtree_guard.errors import UsageError

_KEY = 4096  # bytes of a key file


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; its exit code. Raises NoAnswer where a server cannot be asked."""
    found = diagnose(args)
    print(json.dumps(document(found), indent=1) if args.json else "\n".join(lines(found)))
    return found.exit_code


def diagnose(args: argparse.Namespace) -> Diagnosis:
    """The diagnosis that the arguments ask for."""
    words = args.arguments
    if words[:1] == ["--"]:
        words = words[1:]
    if args.url is None:
        for name, value in (("--api-key", args.api_key), ("--no-canaries", args.no_canaries)):
            if value:
                raise UsageError(f"{name} is for --url, and none is given; see `doctor --help`.")
        return examine.arguments(words) if words else examine.environment()
    if words:
        raise UsageError("give --url or serve arguments behind --, not both; see `doctor --help`.")
    if not (math.isfinite(args.timeout) and args.timeout > 0):
        raise UsageError(f"--timeout is {args.timeout}, expected a number of seconds above 0.")
    client = Client(address_of(args.url), _key(args.api_key), args.timeout)
    return examine.server(client, not args.no_canaries)


def _key(given: str | None) -> str | None:
    """The key, or what the file of `@FILE` holds: a command line is seen by everybody."""
    if given is None:
        return None
    key = given
    if given.startswith("@"):
        try:
            with Path(given[1:]).open(encoding="utf-8") as file:
                key = file.read(_KEY).strip()
        except (OSError, ValueError) as error:
            raise UsageError(f"the key file {given[1:]!r} cannot be read ({error}).") from None
    if not key or not key.isascii() or not key.isprintable():
        raise UsageError("--api-key is empty or holds characters that no HTTP header can hold.")
    return key
