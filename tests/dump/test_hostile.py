"""A dump from a stranger: every mutation gives one DumpError or the right answer, and no more."""

import hashlib
import json
import os
import random
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddtree_guard.config import Config
from ddtree_guard.dump import schema
from ddtree_guard.dump.read import Dump, read_arrays
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.errors import DumpError
from ddtree_guard.guard import Guard
from ddtree_guard.step import Step
from ddtree_guard.testing.compare import differences
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step

BLOB = "step-0000.safetensors"
STEP = FAULTS["W3"](sound_step(3, lens=(37, 21, 50), padded_bs=4), 2).step


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    findings = [(0, finding) for finding in Guard().check(STEP).findings]
    config = Config(dump_dir=tmp_path_factory.mktemp("dumps"), redact=False)
    return DumpWriter("run", config).write([STEP], findings)


@pytest.fixture
def dump(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "dump"))


def read(path: Path) -> Step | str:
    """The step of a dump, or the sentence that refuses it. Any other exception is a failure."""
    try:
        opened = Dump(path)
        opened.findings()
        step = opened.step(0)
    except DumpError as error:
        sentence = str(error)
        assert sentence
        assert len(sentence) < 700
        assert "Traceback" not in sentence
        return sentence
    Guard().check(step)
    return step


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest as an attacker would: still valid JSON."""
    manifest = json.loads((path / schema.MANIFEST).read_text())
    change(manifest)
    (path / schema.MANIFEST).write_text(json.dumps(manifest))


def seal(path: Path) -> None:
    """Make size and SHA-256 of the manifest match the blob again."""
    data = (path / BLOB).read_bytes()
    sealed = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    edit(path, lambda m: m["blobs"].update({BLOB: sealed}))


def reheader(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the safetensors header and seal the dump."""
    data = (path / BLOB).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    raw = json.dumps(header).encode()
    (path / BLOB).write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + size :])
    seal(path)


@pytest.mark.parametrize("seed", range(120))
def test_flipped_bytes_of_the_blob_are_noticed(dump: Path, seed: int) -> None:
    rng, data = random.Random(seed), bytearray((dump / BLOB).read_bytes())
    for _ in range(rng.choice((1, 1, 3))):
        data[rng.randrange(len(data) if seed % 2 else 3000)] ^= rng.randrange(1, 256)
    (dump / BLOB).write_bytes(data)
    assert "SHA-256 differs" in str(read(dump))
    seal(dump)
    found = read(dump)  # sealed by the attacker: refused, or read as what the bytes now say
    assert isinstance(found, str) or differences(STEP, found)


@pytest.mark.parametrize("seed", range(120))
def test_flipped_bytes_of_the_manifest_change_nothing_unseen(dump: Path, seed: int) -> None:
    rng, data = random.Random(seed), bytearray((dump / schema.MANIFEST).read_bytes())
    data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
    (dump / schema.MANIFEST).write_bytes(data)
    found = read(dump)
    assert isinstance(found, (str, Step))


@pytest.mark.parametrize("name", [BLOB, schema.MANIFEST])
@pytest.mark.parametrize("seed", range(20))
def test_truncated_files_are_refused(dump: Path, name: str, seed: int) -> None:
    data = (dump / name).read_bytes()
    (dump / name).write_bytes(data[: random.Random(seed).randrange(len(data))])
    assert isinstance(read(dump), str)
    if name == BLOB:
        seal(dump)
        assert isinstance(read(dump), str)


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**31, 2**63, 2**64 - 1])
def test_inflated_header_lengths_are_refused(dump: Path, length: int) -> None:
    data = (dump / BLOB).read_bytes()
    (dump / BLOB).write_bytes(struct.pack("<Q", length) + data[8:])
    seal(dump)
    assert "header length" in str(read(dump)) or "JSON" in str(read(dump))


HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "inflated shape": lambda h: h["mask.cells"].update(shape=[2**40]),
    "product overflow": lambda h: h["mask.cells"].update(shape=[2**32, 2**32]),
    "negative size": lambda h: h["mask.cells"].update(shape=[-1]),
    "shape of floats": lambda h: h["mask.cells"].update(shape=[1.5]),
    "shape of bools": lambda h: h["mask.cells"].update(shape=[True]),
    "too many dimensions": lambda h: h["mask.cells"].update(shape=[1] * 40),
    "end behind the file": lambda h: h["mask.cells"]["data_offsets"].__setitem__(1, 2**40),
    "descending span": lambda h: h["mask.cells"]["data_offsets"].reverse(),
    "overlap": lambda h: h["mask.cells"].update(h["positions.values"]),
    "three offsets": lambda h: h["mask.cells"]["data_offsets"].append(0),
    "wider dtype": lambda h: h["mask.cells"].update(dtype="I64"),
    "same width dtype": lambda h: h["positions.values"].update(dtype="F64"),
    "unknown dtype": lambda h: h["mask.cells"].update(dtype="OBJECT"),
    "dtype of a list": lambda h: h["mask.cells"].update(dtype=["U8"]),
    "extra key": lambda h: h["mask.cells"].update(pickle="gASV"),
    "entry is text": lambda h: h.update({"mask.cells": "U8"}),
    "array gone": lambda h: h.pop("mask.cells"),
    "array renamed": lambda h: h.update({"mask.other": h.pop("mask.cells")}),
    "long name": lambda h: h.update({"x" * 5000: h.pop("mask.cells")}),
    "empty": lambda h: h.clear(),
}


@pytest.mark.parametrize("case", HEADERS)
def test_lying_headers_are_refused(dump: Path, case: str) -> None:
    reheader(dump, HEADERS[case])
    assert isinstance(read(dump), str)


def test_a_bool_array_holds_only_bools(dump: Path) -> None:
    reheader(dump, lambda h: h["mask.cells"].update(dtype="BOOL"))
    arrays = json.loads((dump / schema.MANIFEST).read_text())["steps"][0]["arrays"]
    arrays["mask.cells"]["dtype"] = "bool"
    edit(dump, lambda m: m["steps"][0].update(arrays=arrays))
    found = read(dump)
    assert isinstance(found, Step)
    assert found.mask.cells.dtype == np.bool_
    header = b'{"a":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}}'
    with pytest.raises(DumpError, match="holds the byte 7"):
        read_arrays(struct.pack("<Q", len(header)) + header + b"\x01\x07")


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([(0, 4), (6, 10)], "gap at byte 4"),
        ([(0, 6), (4, 10)], "gap at byte 6"),
        ([(2, 6), (6, 10)], "gap at byte 0"),
        ([(0, 4), (4, 8)], "take 8 bytes, but it holds 10"),
        ([(0, 4), (4, 12)], "take 12 bytes, but it holds 10"),
    ],
)
def test_arrays_tile_the_file(spans: list[tuple[int, int]], words: str) -> None:
    header = json.dumps(
        {
            name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
            for name, (begin, end) in zip("ab", spans, strict=True)
        }
    ).encode()
    with pytest.raises(DumpError, match=words):
        read_arrays(struct.pack("<Q", len(header)) + header + bytes(10))


def step_of(manifest: dict[str, Any]) -> dict[str, Any]:
    step: dict[str, Any] = manifest["steps"][0]["step"]
    return step


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "other schema": lambda m: m.update(schema="flashinfer-bench/1"),
    "newer schema": lambda m: m.update(schema="ddtree-guard-dump/2"),
    "no blobs": lambda m: m.update(blobs={}),
    "blobs of a list": lambda m: m.update(blobs=[BLOB]),
    "no steps": lambda m: m.update(steps=[]),
    "steps of text": lambda m: m.update(steps="x"),
    "too many steps": lambda m: m.update(steps=m["steps"] * 5000),
    "step without arrays": lambda m: m["steps"][0].pop("arrays"),
    "step names no blob": lambda m: m["steps"][0].update(blob="other.safetensors"),
    "step names a list": lambda m: m["steps"][0].update(blob=[BLOB]),
    "blob above the folder": lambda m: m["blobs"].update({"../x.safetensors": m["blobs"][BLOB]}),
    "blob at an absolute path": lambda m: m["blobs"].update({"/etc/passwd": m["blobs"][BLOB]}),
    "blob size of text": lambda m: m["blobs"][BLOB].update(bytes="9"),
    "blob size wrong": lambda m: m["blobs"][BLOB].update(bytes=2**50),
    "hash of another file": lambda m: m["blobs"][BLOB].update(sha256="0" * 64),
    "hash is no text": lambda m: m["blobs"][BLOB].update(sha256=None),
    "w is text": lambda m: step_of(m)["widths"].update(w="17"),
    "w is a bool": lambda m: step_of(m)["widths"].update(w=True),
    "w is missing": lambda m: step_of(m)["widths"].pop("w"),
    "w is huge": lambda m: step_of(m)["widths"].update(w=10**15),
    "w is negative": lambda m: step_of(m)["widths"].update(w=-17),
    "bs is huge": lambda m: step_of(m).update(bs=10**9, padded_bs=10**9),
    "bs above BS": lambda m: step_of(m).update(bs=9),
    "lanes times w is huge": lambda m: (
        step_of(m).update(padded_bs=16384), step_of(m)["widths"].update(w=8192)
    ),
    "unknown field": lambda m: step_of(m)["widths"].update(__reduce__=1),
    "part is a list": lambda m: step_of(m).update(mask=[]),
    "rids of numbers": lambda m: step_of(m)["who"].update(rids=[1, 2]),
    "array is a number": lambda m: step_of(m)["mask"].update(cells=5),
    "array is a list": lambda m: step_of(m)["mask"].update(cells=[1, 0]),
    "array unknown": lambda m: step_of(m)["mask"].update(cells={"$array": "nope"}),
    "array of a list": lambda m: step_of(m)["mask"].update(cells={"$array": []}),
    "width is an array": lambda m: step_of(m)["widths"].update(w={"$array": "mask.cells"}),
    "unknown tag": lambda m: step_of(m)["mask"].update(cells={"$pickle": "gASV"}),
    "static of text": lambda m: step_of(m)["graph"].update(born={"q": {"$static": "x"}}),
    "float tag of code": lambda m: step_of(m)["graph"].update(born_key={"a": {"$float": "1"}}),
    "holders of text": lambda m: step_of(m)["widths"].update(holders={"a": "b"}),
    "grid of one": lambda m: step_of(m)["layout"].update(grids={"a": [1]}),
    "reserved key": lambda m: step_of(m)["widths"].update(holders={"$a": 1, "b": 2}),
    "declared shape": lambda m: m["steps"][0]["arrays"]["mask.cells"].update(shape=[3]),
    "declared dtype": lambda m: m["steps"][0]["arrays"]["mask.cells"].update(dtype="int8"),
    "finding without step": lambda m: m["findings"][0].pop("step"),
    "finding of step 9": lambda m: m["findings"][0].update(step=9),
    "finding of step True": lambda m: m["findings"][0].update(step=True),
    "finding scope": lambda m: m["findings"][0]["finding"].update(scope="world"),
    "finding is a list": lambda m: m.update(findings=[[]]),
}  # fmt: skip


@pytest.mark.parametrize("case", MANIFESTS)
def test_lying_manifests_are_refused(dump: Path, case: str) -> None:
    edit(dump, MANIFESTS[case])
    assert isinstance(read(dump), str)


def nested(depth: int) -> str:
    return '{"schema": ' + "[" * depth + "]" * depth + "}"


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "{}", "{", nested(100_000), '{"schema": NaN}', '{"a": 1, "a": 2}',
     '{"schema": ' + "9" * 100_000 + "}", '\ufeff{"schema": 1}', "gASVMQAAAAAAAACMBXBvc2l4"],
    ids=["empty", "null", "list", "object", "open", "deep", "nan", "twice", "digits", "bom", "b64"],
)  # fmt: skip
def test_a_manifest_that_is_none_is_refused(dump: Path, text: str) -> None:
    (dump / schema.MANIFEST).write_text(text)
    assert isinstance(read(dump), str)


def test_a_deep_value_is_refused(dump: Path) -> None:
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    edit(dump, lambda m: step_of(m)["graph"].update(born_key={"a": deep}))
    assert "nested" in str(read(dump))


@pytest.mark.parametrize("name", [BLOB, schema.MANIFEST])
def test_links_are_refused(dump: Path, name: str) -> None:
    (dump / name).rename(dump.parent / name)
    (dump / name).symlink_to(dump.parent / name)
    assert "not a link" in str(read(dump))


@pytest.mark.parametrize("name", [BLOB, schema.MANIFEST])
def test_pipes_and_folders_are_refused(dump: Path, name: str) -> None:
    (dump / name).unlink()
    os.mkfifo(dump / name)
    assert "not a regular file" in str(read(dump))
    (dump / name).unlink()
    (dump / name).mkdir()
    assert isinstance(read(dump), str)


def test_missing_files_and_folders_are_named(dump: Path) -> None:
    assert "holds a dump; give that one" in str(read(dump.parent))
    (dump / BLOB).unlink()
    assert f"it holds no {BLOB}" in str(read(dump))
    assert "is not a dump folder" in str(read(dump / "nowhere"))
    assert "is not a dump folder" in str(read(Path("a\0b")))


def test_a_large_file_is_refused_before_it_is_read(dump: Path) -> None:
    os.truncate(dump / BLOB, 2**40)  # sparse
    edit(dump, lambda m: m["blobs"][BLOB].update(bytes=2**40))
    tracemalloc.start()
    try:
        assert "expected" in str(read(dump))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
