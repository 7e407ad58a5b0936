"""`ddtree-guard bundle DUMP`: one file for a public issue, with a scan that proves what it lacks.

Every id is hashed anew with a key that is thrown away, rows of q, k and v are left out, and words
are kept only where they pass the scan: no request id, no host name, no path.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import getpass
import json
import os
import re
import socket
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_guard.config import Config
from ddtree_guard.dump.read import Dump, read_arrays
from ddtree_guard.dump.redact import HIDDEN, TOKEN_FIELDS, Redactor
from ddtree_guard.dump.schema import MANIFEST
from ddtree_guard.dump.trail import Trail
from ddtree_guard.dump.write import DumpWriter, Notes
from ddtree_guard.errors import GuardError, UsageError
from ddtree_guard.fold import say
from ddtree_guard.render import count
from ddtree_guard.rule import Finding
from ddtree_guard.step import Attention, Step

_PATH = re.compile(r"(?<![\w.<])(?:~|\.{1,2})?/[\w.+@-]+(?:/[\w.+@-]+)+|[A-Za-z]:\\[^\s\"]+")
_NAME = re.compile(r"[A-Za-z0-9_.+-]{0,40}")
_HASHED_RID = re.compile(r"r-[0-9a-f]{12}")


class Leak(GuardError):
    """The scan found something in the bundle that must not be published."""


def run(args: argparse.Namespace) -> int:
    """Scan the bundle, write it, and say what it holds. Raises Leak instead of a bad one."""
    dump = Dump(args.dump)
    out = Path(args.out or f"{dump.path.name}.zip")
    members = build(dump)
    if args.doctor:
        members["doctor.txt"] = _doctor(dump)
    secrets = Secrets(dump)
    secrets.scan(members)
    _write(out, members)
    size = out.stat().st_size
    scanned = f"{len(members)} files scanned for {secrets.words}"
    if args.json:
        print(json.dumps({"bundle": str(out), "bytes": size, "files": sorted(members),
                          "scanned_for": secrets.words}, indent=1))  # fmt: skip
    else:
        say(f"wrote {out} ({size >> 10} KiB); {scanned}: none found; safe to attach to an issue")
    return 0


def build(dump: Dump) -> dict[str, bytes]:
    """The files of the bundle, by name."""
    steps = [_bare(step) for step in dump.steps()]
    findings = [(at, _words(finding)) for at, finding in dump.findings()]
    trails = [_trail(trail).as_json() for trail in dump.requests()]
    notes = Notes(
        trigger=dump.trigger["kind"] if dump.trigger["kind"] in _KINDS else "manual",
        why=_clean(dump.trigger["why"], dump),
        suppressed=dump.trigger["suppressed"],
        ring_dropped=dump.trigger["ring_dropped"],
        requests=trails,
        doctor=[_clean(line, dump) for line in dump.doctor],
    )
    with tempfile.TemporaryDirectory(prefix="ddtree-guard-") as folder:
        config = Config(dump_dir=Path(folder), dump_max_mb=1 << 20)
        path = DumpWriter("bundle", config, Redactor()).write(steps, findings, notes)
        members = {f"dump/{file.name}": file.read_bytes() for file in sorted(path.iterdir())}
    manifest = json.loads(members[f"dump/{MANIFEST}"])
    recorded = dump.manifest
    manifest["config"] = _plain_values(recorded["config"])
    manifest["versions"] = _plain_values(recorded["versions"]) | {"bundled": "1"}
    for name in ("ddtree_guard", "python", "numpy"):
        manifest["versions"].setdefault(name, "unknown")
    manifest["created"] = recorded["created"] if _TIME.fullmatch(recorded["created"]) else ""
    members[f"dump/{MANIFEST}"] = json.dumps(manifest, indent=1).encode()
    members["README.txt"] = _readme(dump, findings).encode(errors="replace")
    return members


def _doctor(dump: Dump) -> bytes:
    """What the doctor says of the environment where the bundle is made."""
    from ddtree_guard.doctor.examine import environment
    from ddtree_guard.doctor.text import words_of

    lines = [_clean(line, dump) for line in words_of(environment())]
    return "\n".join([*lines, ""]).encode(errors="replace")


_KINDS = ("finding", "signal", "heuristic", "crash", "manual")
_TIME = re.compile(r"[0-9T:.+-]{10,40}")


def _bare(step: Step) -> Step:
    """Without operand rows, and without words that SGLang or a fork could have filled freely."""
    who = step.who
    names = {
        "backend": _name(who.backend),
        "algorithm": _name(who.algorithm),
        "release": _name(who.release),
        "rank": _name(who.rank),
    }
    exempt = {_name(rule): HIDDEN for rule in step.contract.not_checked}
    return step.replace(
        attention=Attention(),
        contract__not_checked=exempt,
        **{f"who__{name}": value for name, value in names.items()},
    )


def _name(text: str) -> str:
    return text if _NAME.fullmatch(text) else HIDDEN


def _words(finding: Finding) -> Finding:
    """The finding in the words of the rule; what a mode or a user added is dropped."""
    return dataclasses.replace(finding, action="", next_step="")


def _trail(trail: Trail) -> Trail:
    return dataclasses.replace(trail, first=0.0, last=0.0)


def _plain_values(values: dict[str, Any]) -> dict[str, Any]:
    """Names and short plain values; a path or anything else free is hidden."""
    return {
        _name(str(key)): value if isinstance(value, (bool, int)) else _name(str(value))
        for key, value in values.items()
        if key not in ("dump_dir", "warnings")
    }


def _clean(text: str, dump: Dump) -> str:
    """The text with paths, this host's name and the dump's request ids taken out."""
    for secret in sorted(set(_rids(dump)), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = _PATH.sub(HIDDEN, text)
    return _host().sub(HIDDEN, text)


def _rids(dump: Dump) -> Iterator[str]:
    """Every request id that the dump states anywhere."""
    for entry in dump.manifest["steps"]:
        step = entry["step"] if isinstance(entry["step"], dict) else {}
        for part, name in (("who", "rids"), ("mask", "rids")):
            value = step.get(part)
            listed = value.get(name) if isinstance(value, dict) else None
            yield from (str(rid) for rid in listed or () if len(str(rid)) > 3)
    yield from (trail.rid for trail in dump.requests() if len(trail.rid) > 3)


def _host() -> re.Pattern[str]:
    """This machine's and this user's names, as whole words: a host may be called `vm`."""
    names = [socket.gethostname(), socket.gethostname().split(".")[0]]
    with contextlib.suppress(KeyError, OSError):  # a user without a name
        names += [name for name in (getpass.getuser(),) if len(name) > 4]
    known = sorted({re.escape(name) for name in names if name not in ("", "localhost")}, key=len)
    words = "|".join(known[::-1]) or "(?!)"
    return re.compile(rf"(?<![A-Za-z0-9_])(?:{words})(?![A-Za-z0-9_])")


class Secrets:
    """What must not be in the bundle, taken from the dump itself and from this machine."""

    words = "token ids, request ids, host names and paths"

    def __init__(self, dump: Dump) -> None:
        self.rids = sorted(set(_rids(dump)))
        self.host = _host()
        self.ids = {
            (at, path): np.unique(value[value >= 0])
            for at, step in enumerate(dump.steps())
            for path in TOKEN_FIELDS
            if (value := step.get(path)) is not None and value.dtype.kind in "iu"
        }

    def scan(self, members: dict[str, bytes]) -> None:
        """Raise Leak for the first secret found, naming file and kind but not the secret."""
        for name, data in members.items():
            for rid in self.rids:
                if rid.encode(errors="replace") in data or json.dumps(rid)[1:-1].encode() in data:
                    raise Leak(_leak(name, "a request id"))
            if name.endswith((".json", ".txt")):
                self._scan_text(name, data.decode())
        self._scan_ids(members)

    def _scan_text(self, name: str, text: str) -> None:
        if _PATH.search(text):
            raise Leak(_leak(name, "a path"))
        if self.host.search(text):
            raise Leak(_leak(name, "the name of this host or user"))
        if name.endswith(".json"):
            for rid in _rids_of(json.loads(text)):
                if not _HASHED_RID.fullmatch(rid):
                    raise Leak(_leak(name, "a request id that is no hash"))

    def _scan_ids(self, members: dict[str, bytes]) -> None:
        manifest = json.loads(members[f"dump/{MANIFEST}"])
        for at, entry in enumerate(manifest["steps"]):
            arrays = read_arrays(members[f"dump/{entry['blob']}"])
            for path in arrays:
                if path.startswith("attention."):
                    raise Leak(_leak(entry["blob"], "q, k or v rows"))
            for path in TOKEN_FIELDS:
                found, before = arrays.get(path), self.ids.get((at, path))
                if found is not None and before is not None and np.isin(found, before).any():
                    raise Leak(_leak(entry["blob"], f"a token id in {path}"))


def _leak(name: str, what: str) -> str:
    return (
        f"the bundle was expected to hold nothing private, but {name} would hold {what}; nothing "
        "was written; report this, it is a fault of the bundle command."
    )


def _rids_of(manifest: Any) -> Iterator[str]:
    for entry in manifest["steps"]:
        yield from entry["step"]["who"]["rids"]
        yield from entry["step"]["mask"]["rids"] or ()
    yield from (request["rid"] for request in manifest["requests"])
    yield from (f["finding"]["rid"] for f in manifest["findings"] if f["finding"]["rid"])


def _readme(dump: Dump, findings: Iterable[tuple[int, Finding]]) -> str:
    rules = list(dict.fromkeys(finding.rule for _, finding in findings))
    doctor = [_clean(line, dump) for line in dump.doctor] or ["nothing was recorded"]
    return "\n".join(
        [
            f"A ddtree-guard dump of {count(len(dump), 'step')} for a public issue.",
            f"Rules recorded as broken: {', '.join(map(_name, rules)) or 'none'}.",
            "Token ids and request ids are hashes with a key that nobody has.",
            "",
            "What the process said when it was armed:",
            *(f"  {line}" for line in doctor),
            "",
            "Read it with: unzip, then `ddtree-guard check dump`, `ddtree-guard show dump`.",
            "",
        ]
    )


def _write(out: Path, members: dict[str, bytes]) -> None:
    """Write the archive, for its owner only. Raises UsageError where that is not possible."""
    try:
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with (
            os.fdopen(descriptor, "wb") as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            for name, data in members.items():
                info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
                info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o600 << 16
                archive.writestr(info, data)
    except OSError as error:
        raise UsageError(
            f"the bundle cannot be written to {str(out)!r} ({error.strerror}); give a file that "
            "can be written with --out."
        ) from None
