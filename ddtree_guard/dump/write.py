"""Write steps and findings to a dump folder that appears whole or not at all.

`<root>/<run>/<time>_TP0_pid<p>_step<n>_<RULE>/` holds manifest.json and one safetensors file per
step. Everything is written and synced under a temporary name, then renamed; files are 0600 and the
folder 0700; the oldest dumps go when there are too many or they are too large.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

import ddtree_guard
from ddtree_guard.config import Capture, Config, RuleSelection
from ddtree_guard.dump.redact import QKV_REFUSED, Redactor, unchecked
from ddtree_guard.dump.rotate import TEMPORARY, rotate
from ddtree_guard.dump.schema import MANIFEST, MAX_MANIFEST, SCHEMA, encode
from ddtree_guard.errors import GuardError, UsageError
from ddtree_guard.rule import Finding
from ddtree_guard.step import Step

log = logging.getLogger(__name__)

StepFindings = tuple[int, Finding]  # index into the steps of the dump, finding


@dataclass(frozen=True, slots=True)
class Notes:
    """What a dump says beside its steps: why it was written, and the trail of its requests.

    `suppressed` counts triggers since the last dump that wrote none; `ring_dropped` steps that the
    ring could not keep; `doctor` holds what the process said of itself when it was armed.
    """

    trigger: str = "manual"
    why: str = ""
    suppressed: int = 0
    ring_dropped: int = 0
    requests: Sequence[Mapping[str, Any]] = ()
    doctor: Sequence[str] = ()


class DumpTooLarge(GuardError):
    """One step alone exceeds the size that dumps may take."""


class DumpWriter:
    """Writes the dumps of one process under one run folder.

    `failed` counts dumps that `save` could not write. Raises UsageError for a configuration that
    captures q, k and v rows while it redacts.
    """

    def __init__(
        self, run: str, config: Config | None = None, redactor: Redactor | None = None
    ) -> None:
        self.config = config or Config()
        if self.config.redact and self.config.capture is Capture.QKV:
            raise UsageError(QKV_REFUSED)
        self.folder = self.config.dump_dir / _safe(run)
        self.redactor = redactor or Redactor()
        self.failed = 0
        self._told: set[str] = set()

    def save(
        self,
        steps: Sequence[Step],
        findings: Sequence[StepFindings] = (),
        notes: Notes | None = None,
    ) -> Path | None:
        """Like `write`, but never raises: a failure is counted and warned of once per reason."""
        try:
            return self.write(steps, findings, notes)
        except (OSError, GuardError) as error:
            self._warn(str(getattr(error, "strerror", None) or error), error)
        except Exception as error:
            self._warn(type(error).__name__, error)
        return None

    def _warn(self, reason: str, error: Exception) -> None:
        self.failed += 1
        if reason in self._told:
            return
        self._told.add(reason)
        trace = not isinstance(error, (OSError, GuardError))
        text = "ddtree_guard: no dump was written to %s: %s; serving continues"
        log.warning(text, self.folder, error, exc_info=error if trace else None)

    def write(
        self,
        steps: Sequence[Step],
        findings: Sequence[StepFindings] = (),
        notes: Notes | None = None,
    ) -> Path:
        """Write a dump and return its folder. The oldest steps are left out if all are too large.

        Raises OSError as the file system does, DumpError for a value that cannot be held or must
        not be, and DumpTooLarge when the newest step alone is over the limit.
        """
        if not steps:
            raise UsageError("a dump was expected to hold a step, found none; give at least one.")
        notes = notes or Notes(trigger="finding" if findings else "manual")
        if self.config.redact:
            steps = [self.redactor.step(step) for step in steps]
            findings = [(at, self.redactor.finding(f)) for at, f in findings]
            hidden = [self.redactor.request(request) for request in notes.requests]
            notes = dataclasses.replace(notes, requests=hidden)
        coded = [_Coded(step) for step in steps]
        dropped = self._surplus(coded)
        rule = findings[0][1].rule if findings else notes.trigger
        findings = [(at - dropped, f) for at, f in findings if at >= dropped]
        for folder in (self.config.dump_dir, self.folder):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        manifest = self._manifest(coded[dropped:], findings, notes) | {"steps_left_out": dropped}
        final = self._publish(_name(steps[-1], rule), coded[dropped:], manifest)
        rotate(self.config.dump_dir, final, self.config.dump_keep, self.config.dump_max_mb << 20)
        return final

    def _surplus(self, coded: Sequence[_Coded]) -> int:
        """How many of the oldest steps must be left out."""
        limit, total, words = self.config.dump_max_mb << 20, 0, 0
        for at in range(len(coded) - 1, -1, -1):
            total += coded[at].nbytes
            words += coded[at].words
            if total <= limit and words <= MAX_MANIFEST // 2:  # the rest is for trails
                continue
            if at == len(coded) - 1:
                raise DumpTooLarge(
                    f"one step takes {total >> 20} MB, more than "
                    f"SGLANG_DDTREE_GUARD_DUMP_MAX_MB={self.config.dump_max_mb}."
                )
            return at + 1
        return 0

    def _publish(self, name: str, coded: Sequence[_Coded], manifest: dict[str, Any]) -> Path:
        unique = f"{TEMPORARY}{os.getpid()}-{threading.get_native_id()}-{name}"
        temporary = self.folder / unique
        os.mkdir(temporary, 0o700)
        try:
            for at, one in enumerate(coded):
                data = one.blob()  # one at a time: a step can take hundreds of megabytes
                blob = f"step-{at:04d}.safetensors"
                _write_file(temporary / blob, data)
                sealed = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
                manifest["blobs"][blob] = sealed
                manifest["steps"][at]["blob"] = blob
            text = json.dumps(manifest, indent=1, allow_nan=False)
            _write_file(temporary / MANIFEST, text.encode())
            _sync_folder(temporary)
            return _rename(temporary, self.folder / name)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _manifest(
        self, coded: Sequence[_Coded], findings: Sequence[StepFindings], notes: Notes
    ) -> dict[str, Any]:
        redact = self.config.redact
        return {
            "schema": SCHEMA,
            "created": _now().isoformat(timespec="milliseconds"),
            "versions": _versions(),
            "config": _config(self.config),
            "redacted": redact,
            "cannot_recheck": unchecked() if redact else {},
            "trigger": {
                "kind": notes.trigger,
                "why": notes.why,
                "suppressed": notes.suppressed,
                "ring_dropped": notes.ring_dropped,
            },
            "requests": [dict(request) for request in notes.requests],
            "doctor": list(notes.doctor),
            "blobs": {},
            "steps": [{"blob": "", "arrays": one.shapes(), "step": one.data} for one in coded],
            "findings": [{"step": at, "finding": encode(f, "", {})} for at, f in findings],
        }


class _Coded:
    """One step in the form of the dump."""

    def __init__(self, step: Step) -> None:
        self.arrays: dict[str, Any] = {}
        self.data = encode(step, "", self.arrays)
        self.nbytes = sum(array.nbytes for array in self.arrays.values())
        self.words = 2 * len(json.dumps(self.data)) + 100 * len(self.arrays)  # indented

    def blob(self) -> bytes:
        return bytes(safetensors.numpy.save(self.arrays))

    def shapes(self) -> dict[str, Any]:
        return {
            name: {"dtype": array.dtype.name, "shape": list(array.shape)}
            for name, array in self.arrays.items()
        }


def _write_file(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename(temporary: Path, final: Path) -> Path:
    """Rename to the final name, or to `~1`, `~2`, ... when another dump has that name."""
    for attempt in range(100):
        target = final.with_name(f"{final.name}~{attempt}") if attempt else final
        try:
            os.rename(temporary, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        else:
            _sync_folder(target.parent)
            return target
    raise FileExistsError(f"{final} and its 99 alternatives exist")


def _name(step: Step, rule: str) -> str:
    stamp = _now().strftime("%Y%m%dT%H%M%S.%f")[:-3] + "Z"
    rank, step_id = _safe(step.who.rank), _safe(str(step.who.step_id))
    return f"{stamp}_{rank}_pid{os.getpid()}_step{step_id}_{_safe(rule)}"


def _safe(name: str) -> str:
    """The name as a part of a file name, which may have 255 bytes in all."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip(".-")[:60] or "unnamed"


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _versions() -> dict[str, str]:
    """Versions of what is loaded; nothing is imported for this."""
    loaded = {name: sys.modules.get(name) for name in ("sglang", "torch", "triton")}
    versions = {n: str(getattr(m, "__version__", "")) for n, m in loaded.items() if m is not None}
    own = {"ddtree_guard": ddtree_guard.__version__, "numpy": np.__version__}
    return {**own, "python": platform.python_version(), **versions}


def _config(config: Config) -> dict[str, Any]:
    """The resolved configuration, as text and numbers."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {name: _config_value(value) for name, value in values.items()}


def _config_value(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, RuleSelection):
        ignored = [f"-{name}" + (f"@{day}" if day else "") for name, day in value.ignore]
        return ",".join([*value.select, *ignored])
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return value if isinstance(value, (bool, int)) else str(value)
