"""The dump format: names, limits, and the exact two-way mapping between records and JSON.

A record (Step, a part of it, Finding, Static) becomes a JSON object of its fields; an array becomes
`{"$array": name}` and its bytes go to the step's safetensors file under that name, the dotted path
of the field. Decoding follows the type hints of the records, so a manifest of the wrong kind is
refused field by field and nothing of it is executed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_guard.errors import DumpError
from ddtree_guard.rule import Finding
from ddtree_guard.step import Static, Step

SCHEMA = "ddtree-guard-dump/1"
SCHEMA_FILE = Path(__file__).with_name("manifest.schema.json")
MANIFEST = "manifest.json"

MAX_MANIFEST = 4 << 20  # bytes; JSON takes up to 20 times as much memory
MAX_HEADER = 1 << 18  # bytes of one safetensors header
MAX_BLOB = 1 << 30  # bytes of one safetensors file
MAX_STEPS = 4096
MAX_TRAILS = 64 << 20  # bytes of one trail file
MAX_LINE = 1 << 16  # bytes of one of its lines
MAX_NAME = 256  # characters of an array name
MAX_DIMS = 4
MAX_LANES = 16_384  # requests of a step
MAX_WIDTH = 2_048  # rows of a request
MAX_BLOCK_CELLS = 1 << 25  # BS*w*w: what a rule may have to allocate
MAX_DEPTH = 16  # nesting of a value
MAX_SHARED = 8 << 10  # characters of a part that is decoded once for all steps

DTYPES: Mapping[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16",
    "U32": "uint32", "I32": "int32", "U64": "uint64", "I64": "int64",
    "F16": "float16", "F32": "float32", "F64": "float64",
}  # fmt: skip


def encode(value: Any, path: str, arrays: dict[str, Any]) -> Any:
    """The JSON form of a value. Arrays are added to `arrays` under their dotted path.

    Raises DumpError for a value that the format cannot hold exactly.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        coded = {name: encode(v, _join(path, name), arrays) for name, v in fields.items()}
        return {"$static": coded} if isinstance(value, Static) else coded
    if hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, np.generic):
        arrays[path] = _host_array(value, path)
        return {"$array": path}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, arrays)
    if isinstance(value, (tuple, list)):
        items = [encode(v, _join(path, str(i)), arrays) for i, v in enumerate(value)]
        return items if isinstance(value, tuple) else {"$list": items}
    return _encode_scalar(value, path)


def _encode_mapping(value: Mapping[Any, Any], path: str, arrays: dict[str, Any]) -> Any:
    for key in value:
        if not isinstance(key, str) or key.startswith("$"):
            raise DumpError(f"{path} has the key {key!r}; a dump holds only names without $.")
    return {key: encode(v, _join(path, key), arrays) for key, v in value.items()}


def _encode_scalar(value: Any, path: str) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise DumpError(f"{path} is a {type(value).__name__}, which a dump cannot hold.")


def _host_array(value: Any, path: str) -> Any:
    """The array as contiguous NumPy, from NumPy or from a tensor of any device."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    array = np.asarray(value, order="C")
    if array.dtype.name not in DTYPES.values():
        raise DumpError(f"{path} has dtype {array.dtype}, which a dump cannot hold.")
    return array


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def decode_step(data: Any, arrays: Mapping[str, Any]) -> Step:
    """The Step of its JSON form. Raises DumpError where the data is not of the declared kind."""
    step = _Decoder(arrays).record(data, Step, "step")
    assert isinstance(step, Step)
    w, lanes = step.widths.w, step.padded_bs
    if not (0 < w <= MAX_WIDTH and 0 <= step.bs <= lanes <= MAX_LANES):
        raise DumpError(
            f"the dump states bs={step.bs}, BS={lanes}, w={w}; expected 0 <= bs <= BS <= "
            f"{MAX_LANES} and 1 <= w <= {MAX_WIDTH}."
        )
    if lanes * w * w > MAX_BLOCK_CELLS:
        raise DumpError(f"the dump states BS={lanes} and w={w}, more than can be checked here.")
    return step


def decode_finding(data: Any) -> Finding:
    """The Finding of its JSON form. Raises DumpError where the data is not of the declared kind."""
    finding = _Decoder({}).record(data, Finding, "finding")
    assert isinstance(finding, Finding)
    return finding


class _Decoder:
    """Decodes JSON by type hint, with the arrays that the step's file holds."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.arrays = arrays

    def record(self, data: Any, kind: type, path: str) -> Any:
        if not isinstance(data, dict):
            raise _wrong(path, f"an object with the fields of {kind.__name__}", data)
        hints = _hints(kind)
        for name in data:
            if name not in hints:
                raise DumpError(
                    f"{path} has the field {name!r}, which this version of ddtree-guard does not "
                    "know; read the dump with the version that its manifest names."
                )
        empty, decode = _may_be_absent(kind), self.part if kind is Step else self.value
        values = {
            name: value
            if (value is None and name in empty) or type(value) is hints[name]  # most fields
            else decode(value, hints[name], _join(path, name))
            for name, value in data.items()
        }
        try:
            return kind(**values)
        except TypeError:
            needed = [n for n in _required(kind) if n not in data]
            raise DumpError(f"{path} lacks the field {needed[0]!r}.") from None

    def part(self, data: Any, hint: Any, path: str) -> Any:
        """A part of a step. Most parts are the same in every step, so they are decoded once."""
        if isinstance(data, dict):
            text = json.dumps(data)
            if len(text) < MAX_SHARED and "$array" not in text:
                return _shared_part(hint, path, text)
        return self.value(data, hint, path)

    def value(self, data: Any, hint: Any, path: str, depth: int = 0) -> Any:
        if type(data) is hint or (data is None and _optional(hint)):
            return data  # most values
        if depth > MAX_DEPTH:
            raise DumpError(f"{path} is nested more than {MAX_DEPTH} deep.")
        if isinstance(data, dict) and len(data) == 1 and next(iter(data)).startswith("$"):
            return self.tagged(data, hint, path, depth)
        if hint is Any:
            return self.anything(data, path, depth)
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            return self.union(data, args, path, depth)
        if origin is tuple:
            return self.items(data, args, path, depth)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return self.mapping(data, args[1], path, depth)
        return self.leaf(data, hint, path)

    def tagged(self, data: dict[str, Any], hint: Any, path: str, depth: int) -> Any:
        (tag, inner), kinds = next(iter(data.items())), typing.get_args(hint) or (hint,)
        if tag == "$array" and (np.ndarray in kinds or hint is Any):
            if isinstance(inner, str) and inner in self.arrays:
                return self.arrays[inner]
            raise DumpError(f"{path} names the array {inner!r}, which the file does not hold.")
        if tag == "$static" and (Static in kinds or hint is Any):
            return self.record(inner, Static, path)
        if tag == "$float" and inner in ("nan", "inf", "-inf") and (float in kinds or hint is Any):
            return float(inner)
        if tag == "$list" and hint is Any:
            return list(self.items(inner, (Any, ...), path, depth))
        raise _wrong(path, _words(hint), data)

    def anything(self, data: Any, path: str, depth: int) -> Any:
        if isinstance(data, list):
            return self.items(data, (Any, ...), path, depth)
        if isinstance(data, dict):
            return self.mapping(data, Any, path, depth)
        return data

    def union(self, data: Any, args: tuple[Any, ...], path: str, depth: int) -> Any:
        if data is None and type(None) in args:
            return None
        rest = [arg for arg in args if arg is not type(None)]
        return self.value(data, rest[0], path, depth + 1)

    def items(self, data: Any, args: tuple[Any, ...], path: str, depth: int) -> tuple[Any, ...]:
        if not isinstance(data, list):
            raise _wrong(path, "a list", data)
        kinds = [args[0]] * len(data) if args[1:] == (...,) else list(args)
        if len(kinds) != len(data):
            raise _wrong(path, f"{len(kinds)} values", data)
        pairs = enumerate(zip(data, kinds, strict=True))
        return tuple(self.value(v, k, _join(path, str(i)), depth + 1) for i, (v, k) in pairs)

    def mapping(self, data: Any, hint: Any, path: str, depth: int) -> dict[str, Any]:
        if not isinstance(data, dict) or any(key.startswith("$") for key in data):
            raise _wrong(path, "an object", data)
        return {k: self.value(v, hint, _join(path, k), depth + 1) for k, v in data.items()}

    def leaf(self, data: Any, hint: Any, path: str) -> Any:
        if dataclasses.is_dataclass(hint) and hint is not Static:
            return self.record(data, typing.cast(type, hint), path)
        if isinstance(hint, type) and issubclass(hint, Enum):
            try:
                return hint(data)
            except ValueError:
                raise _wrong(path, "one of " + ", ".join(m.value for m in hint), data) from None
        exact = isinstance(hint, type) and type(data) is hint
        if exact or (hint is float and type(data) is int):
            return data
        raise _wrong(path, _words(hint), data)


@functools.cache
def _optional(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


@functools.lru_cache(maxsize=128)
def _shared_part(hint: Any, path: str, text: str) -> Any:
    return _Decoder({}).value(json.loads(text), hint, path)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Type hints of a record's fields, with the aliases of `step` made exact."""
    exact = {"Array": np.ndarray | None, "Int": int | None}
    hints = typing.get_type_hints(kind, localns=exact)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


@functools.cache
def _may_be_absent(kind: type) -> frozenset[str]:
    return frozenset(name for name, hint in _hints(kind).items() if _optional(hint))


def _required(kind: type) -> list[str]:
    missing = dataclasses.MISSING
    fields = dataclasses.fields(kind)
    return [f.name for f in fields if f.default is missing and f.default_factory is missing]


def _words(hint: Any) -> str:
    kinds = [k for k in (typing.get_args(hint) or (hint,)) if k is not type(None)]
    names = {np.ndarray: "an array", int: "a whole number", str: "text", bool: "true or false"}
    return " or ".join(names.get(k, getattr(k, "__name__", str(k))) for k in kinds)


def _wrong(path: str, expected: str, found: Any) -> DumpError:
    text = repr(found)
    shown = text if len(text) <= 60 else text[:57] + "..."
    return DumpError(f"{path} should be {expected}, but is {shown}.")
