"""Read a dump that may come from anyone. Nothing in it is trusted, and nothing in it is executed.

Names, sizes, offsets, types and hashes are checked before they are used; links are not followed;
each step is read when it is asked for. Whatever is wrong becomes one DumpError with one sentence.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_guard.dump import schema
from ddtree_guard.dump.schema import DTYPES, MANIFEST, decode_finding, decode_step
from ddtree_guard.dump.trail import TRAIL_SCHEMA, Trail, trail_from_json
from ddtree_guard.errors import DumpError, not_yours
from ddtree_guard.rule import Finding
from ddtree_guard.step import Step

_BLOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.safetensors")
_VERSION = re.compile(r"\d[0-9A-Za-z.+]{0,30}")
_DAMAGED = "it was cut off or changed after it was written: copy the dump again."
_HOLES, _RATIO = 1 << 20, 64  # a small sparse file must not take a gigabyte of memory
_WHO: dict[str, type] = {"rank": str, "worker": str, "step_id": int}
_TRIGGER: dict[str, type] = {"kind": str, "why": str, "suppressed": int, "ring_dropped": int}
_TYPES: dict[str, type] = {
    "schema": str, "created": str, "versions": dict, "config": dict, "redacted": bool,
    "cannot_recheck": dict, "blobs": dict, "steps": list, "findings": list, "steps_left_out": int,
    "trigger": dict, "requests": list, "doctor": list,
}  # fmt: skip


class Dump:
    """A dump on disk, its manifest checked. `steps` reads the blobs one at a time."""

    def __init__(self, path: Path | str) -> None:
        """Open a dump folder, or the manifest inside one. Raises DumpError."""
        path = Path(path)
        self.path = path.parent if path.name == MANIFEST else path
        raw = _read_file(self.path, MANIFEST, schema.MAX_MANIFEST)
        self.manifest = _manifest(raw, self.path)
        self.redacted: bool = self.manifest["redacted"]
        self.cannot_recheck: dict[str, str] = {
            str(rule): str(why) for rule, why in self.manifest["cannot_recheck"].items()
        }

    def __len__(self) -> int:
        return len(self.manifest["steps"])

    def step(self, index: int) -> Step:
        """The step with this index, oldest first. Raises DumpError."""
        entry = self.manifest["steps"][index]
        blob = self.manifest["blobs"][entry["blob"]]
        data = _read_file(self.path, entry["blob"], schema.MAX_BLOB, blob["bytes"])
        if hashlib.sha256(data).hexdigest() != blob["sha256"]:
            raise DumpError(
                f"{entry['blob']} of {str(self.path)!r} is not what the manifest describes "
                f"(SHA-256 differs); {_DAMAGED}"
            )
        arrays = read_arrays(data, entry["blob"])
        _compare(arrays, entry["arrays"], entry["blob"])
        return decode_step(entry["step"], arrays)

    def steps(self) -> Iterator[Step]:
        """Every step, oldest first, each read when it is asked for. Raises DumpError."""
        for index in range(len(self)):
            yield self.step(index)

    def findings(self) -> list[tuple[int, Finding]]:
        """The findings as recorded, each with the index of its step. Raises DumpError."""
        return [(entry["step"], decode_finding(entry["finding"])) for entry in self._entries()]

    def whose(self, index: int) -> tuple[str, str, int]:
        """Rank, worker and step id of a step, by the manifest alone. Raises DumpError."""
        step = self.manifest["steps"][index]["step"]
        who = step.get("who", {}) if isinstance(step, dict) else {}
        values = [who.get(name) if isinstance(who, dict) else None for name in _WHO]
        if [type(value) for value in values] != list(_WHO.values()):
            raise DumpError(f"step {index} of the manifest does not say whose it is.")
        rank, worker, step_id = values
        return str(rank), str(worker), int(step_id or 0)

    def step_ids(self) -> list[int]:
        """The id of every step, oldest first. Raises DumpError."""
        return [self.whose(index)[2] for index in range(len(self))]

    @property
    def trigger(self) -> dict[str, Any]:
        """Why the dump was written: `kind`, `why`, `suppressed`, `ring_dropped`."""
        return dict(self.manifest["trigger"])

    @property
    def doctor(self) -> list[str]:
        """What the process said of itself when it was armed."""
        return [str(line) for line in self.manifest["doctor"]]

    def requests(self) -> list[Trail]:
        """The trails of the requests that the process served last. Raises DumpError."""
        return [trail_from_json(data) for data in self.manifest["requests"]]

    def _entries(self) -> Iterator[dict[str, Any]]:
        for entry in self.manifest["findings"]:
            if not isinstance(entry, dict) or set(entry) != {"step", "finding"}:
                raise DumpError("a finding of the manifest is not an object of step and finding.")
            if type(entry["step"]) is not int or not 0 <= entry["step"] < len(self):
                raise DumpError(f"a finding names step {entry['step']!r}, which is not there.")
            yield entry


def _read_file(folder: Path, name: str, limit: int, expected: int | None = None) -> bytes:
    """The bytes of a regular file in the folder, no links followed, size known beforehand."""
    try:
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        raise DumpError(not_yours(folder)) from None
    except (OSError, ValueError) as error:
        raise DumpError(
            f"{str(folder)!r} is not a dump folder ({_reason(error)}); give the folder that holds "
            f"{MANIFEST}."
        ) from None
    try:
        # Not blocking, so that a named pipe in place of the file cannot hang the reader.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(name, flags, dir_fd=directory), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DumpError(f"{name} is not a regular file.")
            if status.st_size > limit or expected not in (None, status.st_size):
                wanted = f"at most {limit}" if expected is None else str(expected)
                raise DumpError(
                    f"{name} of {str(folder)!r} has {status.st_size} bytes, expected {wanted}; "
                    f"{_DAMAGED}"
                )
            if status.st_size > _HOLES and status.st_blocks * 512 * _RATIO < status.st_size:
                raise DumpError(
                    f"{name} is mostly holes: {status.st_size} bytes, {status.st_blocks * 512} on "
                    "disk; if it is sound, copy the dump with `cp --sparse=never`."
                )
            return file.read(status.st_size + 1)[: status.st_size]
    except FileNotFoundError:
        raise DumpError(_missing(folder, name)) from None
    except PermissionError:
        raise DumpError(not_yours(folder / name)) from None
    except OSError as error:
        raise DumpError(
            f"{name} of {str(folder)!r} cannot be read ({_reason(error)}); it must be a plain "
            "file, not a link."
        ) from None
    finally:
        os.close(directory)


def read_trails(folder: Path, name: str) -> Iterator[tuple[Trail, bool]]:
    """The trails of a trail file, each with whether its rid is hashed. Raises DumpError.

    A last line that was cut off when the process died is left out.
    """
    for line in io.BytesIO(_read_file(folder, name, schema.MAX_TRAILS)):
        if not line.endswith(b"\n"):
            return
        if len(line) > schema.MAX_LINE:
            raise DumpError(f"{name} has a line of {len(line)} bytes, more than any trail takes.")
        data = _json(line, name)
        if not isinstance(data, dict) or data.get("schema") != TRAIL_SCHEMA:
            raise DumpError(f"{name} holds a line that is not of schema {TRAIL_SCHEMA!r}.")
        yield trail_from_json(data.get("request")), data.get("redacted") is True


def _missing(folder: Path, name: str) -> str:
    """What to say when the folder lacks a file: perhaps it is the folder above the dumps."""
    inside = sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    if name == MANIFEST and inside:
        if len(inside) == 1:
            return f"{str(folder)!r} holds a dump; give that one: {inside[0]}."
        return f"{str(folder)!r} holds {len(inside)} dumps; give one, for example {inside[-1]}."
    return (
        f"{str(folder)!r} is not a whole dump: it holds no {name}; give the folder that the log "
        "names (dump=...)."
    )


def _written_by(data: Any) -> str:
    """Which version can read a manifest of another schema, if it says so."""
    versions = data.get("versions") if isinstance(data, dict) else None
    version = versions.get("ddtree_guard") if isinstance(versions, dict) else None
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        return "read it with the version of ddtree-guard that wrote it."
    return f"ddtree-guard {version} wrote it: read it with that version."


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _json(raw: bytes, what: str) -> Any:
    try:
        return json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_int,
            parse_constant=_constant,
        )
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise DumpError(f"{what} is not valid JSON ({reason}); {_DAMAGED}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return values


def _int(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def _constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _manifest(raw: bytes, folder: Path) -> dict[str, Any]:
    """The manifest with every entry that the reader uses checked for its kind."""
    data: dict[str, Any] = _json(raw, f"{MANIFEST} of {str(folder)!r}")
    found = data.get("schema") if isinstance(data, dict) else None
    if found != schema.SCHEMA:
        raise DumpError(
            f"{str(folder)!r} is not a dump that this version reads: expected schema "
            f"{schema.SCHEMA!r}, found {str(found)[:80]!r}; {_written_by(data)}"
        )
    for name, kind in _TYPES.items():
        if type(data.get(name)) is not kind:
            raise DumpError(f"{MANIFEST} lacks {name!r} or it is not a {kind.__name__}.")
    if not 0 < len(data["steps"]) <= schema.MAX_STEPS:
        raise DumpError(f"the dump holds {len(data['steps'])} steps, not 1 to {schema.MAX_STEPS}.")
    for name, kind in _TRIGGER.items():
        if set(data["trigger"]) != set(_TRIGGER) or type(data["trigger"][name]) is not kind:
            raise DumpError(f"{MANIFEST} does not say in the form of the schema why it was made.")
    for name, blob in data["blobs"].items():
        _check_blob(name, blob)
    for entry in data["steps"]:
        _check_entry(entry, data["blobs"])
    return data


def _check_blob(name: str, blob: Any) -> None:
    if not _BLOB.fullmatch(name):
        raise DumpError(f"the manifest names the file {name[:80]!r}, which no dump may contain.")
    good = isinstance(blob, dict) and set(blob) == {"sha256", "bytes"}
    if not good or type(blob["bytes"]) is not int or not isinstance(blob["sha256"], str):
        raise DumpError(f"the manifest does not give size and SHA-256 of {name!r}.")


def _check_entry(entry: Any, blobs: dict[str, Any]) -> None:
    good = isinstance(entry, dict) and set(entry) == {"blob", "arrays", "step"}
    if not good or not isinstance(entry["arrays"], dict):
        raise DumpError("a step of the manifest is not an object of blob, arrays and step.")
    if not isinstance(entry["blob"], str) or entry["blob"] not in blobs:
        raise DumpError(f"a step names the file {entry['blob']!r}, which the manifest lacks.")


def read_arrays(data: bytes, name: str = "the file") -> dict[str, Any]:
    """The arrays of a safetensors file, read only after its header was checked whole.

    Raises DumpError. The arrays are read-only views of `data`.
    """
    size = int.from_bytes(data[:8], "little") if len(data) >= 8 else -1
    if not 2 <= size <= min(schema.MAX_HEADER, len(data) - 8):
        raise DumpError(f"{name} is not a safetensors file: its header length is {size}.")
    header = _json(data[8 : 8 + size], f"the header of {name}")
    if not isinstance(header, dict):
        raise DumpError(f"the header of {name} is not an object.")
    header.pop("__metadata__", None)
    body = memoryview(data)[8 + size :]
    arrays, spans = {}, []
    for key, info in header.items():
        dtype, shape, begin, end = _tensor(key, info, name)
        spans.append((begin, end))
        if end <= len(body):
            arrays[key] = _view(body[begin:end], dtype, shape, key)
    # The format leaves no holes and no overlaps: the spans tile the body exactly.
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise DumpError(f"the arrays of {name} overlap or leave a gap at byte {at}.")
        at = end
    if at != len(body):
        raise DumpError(f"the arrays of {name} take {at} bytes, but it holds {len(body)}.")
    return arrays


def _tensor(key: str, info: Any, name: str) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    """dtype, shape and byte span of one header entry. Raises DumpError unless they agree."""
    if len(key) > schema.MAX_NAME or not isinstance(info, dict):
        raise DumpError(f"the header of {name} describes {key[:40]!r} in no known way.")
    shape, span = info.get("shape"), info.get("data_offsets")
    if set(info) != {"dtype", "shape", "data_offsets"} or not (_sizes(shape) and _sizes(span)):
        raise DumpError(f"the header of {name} does not give dtype, shape and place of {key!r}.")
    assert isinstance(shape, list)
    assert isinstance(span, list)
    known = isinstance(info["dtype"], str) and info["dtype"] in DTYPES
    if not known or len(shape) > schema.MAX_DIMS or len(span) != 2:
        raise DumpError(
            f"{key} in {name} has dtype {str(info['dtype'])[:20]!r} and {len(shape)} dimensions; "
            f"expected one of {', '.join(DTYPES)} and at most {schema.MAX_DIMS}."
        )
    dtype = np.dtype(DTYPES[info["dtype"]])
    begin, end = span
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise DumpError(
            f"{key} in {name} has shape {shape} of {dtype.name}, which does not fill its "
            f"{end - begin} bytes."
        )
    return dtype, tuple(shape), begin, end


def _view(raw: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...], key: str) -> Any:
    """The bytes as an array. A bool is 0 or 1: NumPy misbehaves on any other byte."""
    if dtype != np.bool_:
        return np.frombuffer(raw, dtype).reshape(shape)
    cells = np.frombuffer(raw, np.uint8).reshape(shape)
    if cells.size and cells.max() > 1:
        raise DumpError(f"{key} is an array of bool but holds the byte {int(cells.max())}.")
    return cells.view(np.bool_)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= 2**40 for n in value)


@functools.cache
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # NumPy makes it anew each time


def _compare(arrays: dict[str, Any], declared: dict[str, Any], name: str) -> None:
    """Hold the arrays of the file against those that the manifest declares."""
    if set(arrays) != set(declared):
        odd = sorted(set(arrays) ^ set(declared))[0]
        raise DumpError(f"the manifest and {name} do not hold the same arrays: see {odd[:80]!r}.")
    for key, array in arrays.items():
        found = {"dtype": _name(array.dtype), "shape": list(array.shape)}
        if declared[key] != found:
            raise DumpError(f"{key} in {name} is {found}, but the manifest says {declared[key]}.")
