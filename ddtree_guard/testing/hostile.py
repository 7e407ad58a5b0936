"""Dumps of strangers: mutate a sound dump in every way a file can lie, and run every reader on it.

`Arena` holds a sound dump and a canary beside it; `attack` makes one mutated copy from a seed and
runs all commands in this process. A command may refuse (exit 4), or answer (0, 1, or 2 where the
question does not fit the dump); anything else is a failure.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import io
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from ddtree_guard import cli
from ddtree_guard.config import Config
from ddtree_guard.dump.schema import DTYPES, MANIFEST
from ddtree_guard.dump.write import DumpWriter, Notes
from ddtree_guard.guard import Guard
from ddtree_guard.recorder.trail import Trails
from ddtree_guard.step import Attention, Step
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step
from ddtree_guard.testing.watch import CANARY, Watch

ANSWERS = (0, 1, 2, 4)
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**63, 2**64 - 1, -(2**63), 1e308, 0.5, "", "x", "\x1b[2J",
    "../../" + CANARY, "/etc/passwd", "$array", [], {}, [[]], [None], [1, "a"], {"$array": "x"},
    {"$array": "mask.cells"}, {"$float": "nan"}, {"$list": [1]}, {"$static": {}}, "9" * 400,
    "\ud800",
    {"a": {"b": {"c": []}}}, [0] * 100, "<script>alert(1)</script>", "r\nrule=W3",
)  # fmt: skip
TYPES = {name: code for code, name in DTYPES.items()}


def target_step(step_id: int = 7) -> Step:
    """A small step of a graph with every part filled, q, k and v rows included."""
    step = sound_step(step_id, lens=(5, 3), w=5, block=4, padded_bs=3)
    rng, rows = np.random.default_rng(step_id), 10

    def floats(count: int, heads: int) -> Any:
        return rng.standard_normal((count, heads, 4)).astype(np.float32)

    attention = Attention(
        q=floats(rows, 2), k=floats(rows, 1), v=floats(rows, 1), k_prefix=floats(8, 1),
        v_prefix=floats(8, 1), output=floats(rows, 2), scale=0.5, layer=0,
    )  # fmt: skip
    return step.replace(attention=attention, who__step_id=step_id)


@dataclass
class Arena:
    """`root/run` holds a sound dump of TP0 and one of TP1, and a trail file; `root` a canary."""

    root: Path
    sound: Path = field(init=False)
    blobs: list[str] = field(init=False)

    def __post_init__(self) -> None:
        config = Config(dump_dir=self.root / "sound", redact=False)
        steps = [FAULTS["W3"](target_step(7), 1).step]
        findings = [(0, finding) for finding in Guard().check(steps[0]).findings]
        trails = Trails(self.root / "sound" / "run", "TP0")
        trails.ran(("r0", "r1"), 5, True)
        trails.accepted(["r0"], [[1, 2, 2]])
        notes = Notes("finding", "W3", requests=trails.recent(), doctor=("armed=1/1",))
        self.sound = DumpWriter("run", config).write(steps, findings, notes)
        others = [step.replace(who__rank="TP1") for step in steps]
        self.other = DumpWriter("run", config).write(others, findings, notes)
        trails.sweep(idle_s=-1.0)
        self.blobs = sorted(path.name for path in self.sound.glob("*.safetensors"))
        (self.root / CANARY).write_text(CANARY)

    def copy(self) -> Path:
        """A fresh copy of everything; returns the folder of the dump to mutate."""
        work = self.root / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(self.sound.parent, work / "run")
        return work / "run" / self.sound.name

    def commands(self, dump: Path, rng: random.Random) -> Iterator[list[str]]:
        """Every reader of dumps, on this dump, as text or as JSON."""
        out, path, run = self.root / "out", str(dump), str(dump.parent)
        out.mkdir(exist_ok=True)
        argvs = [
            ["check", path],
            ["show", path],
            ["explain", path],
            ["diff", path, str(self.sound)]
            if rng.random() < 0.5
            else ["diff", str(self.sound), path],
            ["ranks", run],
            ["request", "r0", run],
            ["recompute", path],
            ["bundle", path, "-o", str(out / "bundle.zip")],
            ["report", path, "-o", str(out / "report.html")],
        ]
        yield from ([*argv, *(["--json"] if rng.random() < 0.3 else [])] for argv in argvs)


@dataclass
class Outcome:
    """Exit code of each command on one mutated dump; `faults` says what must not be."""

    kind: str
    codes: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def attack(arena: Arena, seed: int) -> Outcome:
    """Mutate a copy of the sound dump and run every command on it."""
    rng = random.Random(seed)
    dump = arena.copy()
    name = rng.choice(list(MUTATIONS))
    MUTATIONS[name](dump, rng, arena)
    outcome = Outcome(name)
    for argv in arena.commands(dump, rng):
        out, err = io.StringIO(), io.StringIO()
        with (
            Watch(arena.root) as watch,
            redirected(out, err),
            mock.patch.object(
                cli,
                "build_parser",
                _parser,  # building it takes longer than most commands
            ),
        ):
            try:
                code = cli.main(argv)
            except BaseException as error:  # nothing may escape
                code = -1
                err.write(f"escaped: {error!r}")
        said = out.getvalue() + err.getvalue()
        outcome.codes.append(code)
        where = f"seed {seed}, {name}, {' '.join(argv[:1])}"
        if code not in ANSWERS or "Traceback" in said or "\x1b" in said:
            outcome.faults.append(f"{where}: exit {code}: {said[-300:]}")
        outcome.faults += [f"{where}: {event}" for event in watch.events]
    if (arena.root / CANARY).read_text() != CANARY:
        outcome.faults.append(f"seed {seed}, {name}: the canary was changed")
    return outcome


_parser = functools.cache(cli.build_parser)


@contextlib.contextmanager
def redirected(out: io.StringIO, err: io.StringIO) -> Iterator[None]:
    """Catch what a command prints."""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


# --- mutations ------------------------------------------------------------------------------------
Mutation = Callable[[Path, random.Random, Arena], None]


def _flip(path: Path, rng: random.Random, most: int = 8) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, most)):
        data[rng.randrange(len(data) if rng.random() < 0.5 else min(len(data), 2000))] ^= (
            rng.randrange(1, 256)
        )
    path.write_bytes(data)


def seal(dump: Path) -> None:
    """Make sizes and hashes of the manifest match the blobs again, as an attacker would."""
    manifest = json.loads((dump / MANIFEST).read_text())
    for name in manifest["blobs"]:
        data = (dump / name).read_bytes()
        sealed = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        manifest["blobs"][name] = sealed
    _save(dump, manifest)


def _save(dump: Path, manifest: Any) -> None:
    (dump / MANIFEST).write_text(json.dumps(manifest))


def _any_blob(dump: Path, rng: random.Random, arena: Arena) -> Path:
    return dump / rng.choice(arena.blobs)


def flip_blob(dump: Path, rng: random.Random, arena: Arena) -> None:
    """Bytes of a blob flipped; the manifest notices."""
    _flip(_any_blob(dump, rng, arena), rng)


def flip_sealed(dump: Path, rng: random.Random, arena: Arena) -> None:
    """Bytes of a blob flipped and the hash made to match."""
    _flip(_any_blob(dump, rng, arena), rng)
    seal(dump)


def flip_manifest(dump: Path, rng: random.Random, arena: Arena) -> None:
    """Bytes of the manifest flipped."""
    _flip(dump / MANIFEST, rng, 3)


def truncate(dump: Path, rng: random.Random, arena: Arena) -> None:
    """A file cut off, sometimes with a matching hash."""
    path = rng.choice([_any_blob(dump, rng, arena), dump / MANIFEST])
    os.truncate(path, rng.randrange(path.stat().st_size))
    if path.name != MANIFEST and rng.random() < 0.7:
        seal(dump)


def inflate(dump: Path, rng: random.Random, arena: Arena) -> None:
    """A header length, a file or a stated size made huge."""
    path = _any_blob(dump, rng, arena)
    data = path.read_bytes()
    choice = rng.randrange(3)
    if choice == 0:
        length = rng.choice((0, 1, len(data), 2**20, 2**31, 2**63, 2**64 - 1))
        path.write_bytes(struct.pack("<Q", length) + data[8:])
        seal(dump)
    elif choice == 1:
        os.truncate(path, rng.choice((2**24, 2**30 - 8, 2**40)))  # sparse
        manifest = json.loads((dump / MANIFEST).read_text())
        manifest["blobs"][path.name]["bytes"] = path.stat().st_size
        _save(dump, manifest)
    else:
        header(dump, rng, path, lambda h: _sizes(h, rng))


def header(
    dump: Path, rng: random.Random, path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    """Rewrite a safetensors header and seal the dump."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    content = json.loads(data[8 : 8 + size])
    change(content)
    raw = json.dumps(content).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + size :])
    seal(dump)


def _sizes(content: dict[str, Any], rng: random.Random) -> None:
    entry = content[rng.choice([key for key in content if key != "__metadata__"])]
    entry["shape"] = [rng.choice((2**20, 2**40, -1, 0, 2**63)) for _ in range(rng.randint(1, 5))]


def lie_in_header(dump: Path, rng: random.Random, arena: Arena) -> None:
    """Random values anywhere in a safetensors header."""
    header(dump, rng, _any_blob(dump, rng, arena), lambda h: _poison(h, rng))


def lie_in_manifest(dump: Path, rng: random.Random, arena: Arena) -> None:
    """Random values anywhere in the manifest, which stays valid JSON."""
    manifest = json.loads((dump / MANIFEST).read_text())
    for _ in range(rng.randint(1, 3)):
        _poison(manifest, rng)
    _save(dump, manifest)


def lie_in_step(dump: Path, rng: random.Random, arena: Arena) -> None:
    """Random values in the scalars of a step, of the right kind more often than not."""
    manifest = json.loads((dump / MANIFEST).read_text())
    for _ in range(rng.randint(1, 4)):
        _poison(rng.choice(manifest["steps"])["step"], rng, same_kind=rng.random() < 0.7)
    _save(dump, manifest)


def _poison(value: Any, rng: random.Random, same_kind: bool = False) -> None:
    """Replace or remove one value somewhere inside."""
    while True:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        if not keys:
            return
        key = rng.choice(list(keys))
        inner = value[key]
        if isinstance(inner, (dict, list)) and inner and rng.random() < 0.85:
            value = inner
            continue
        odd = [o for o in ODD if type(o) is type(inner)] if same_kind else list(ODD)
        if isinstance(value, dict) and rng.random() < 0.1:
            del value[key]
        elif odd:
            value[key] = copy.deepcopy(rng.choice(odd))  # a later lie may change it again
        return


def wrong_arrays(dump: Path, rng: random.Random, arena: Arena) -> None:
    """Arrays of another dtype, shape or content, declared as such: nothing lies but the values."""
    path = _any_blob(dump, rng, arena)
    at = arena.blobs.index(path.name)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    content = json.loads(data[8 : 8 + size])
    body = data[8 + size :]
    arrays: dict[str, Any] = {}
    for key, info in content.items():
        if key != "__metadata__":
            begin, end = info["data_offsets"]
            raw = np.frombuffer(body[begin:end], np.dtype(DTYPES[info["dtype"]]))
            arrays[key] = raw.reshape(info["shape"]).copy()
    for key in rng.sample(sorted(arrays), rng.randint(1, 3)):
        arrays[key] = _other(arrays[key], rng)
    _rewrite(dump, path, at, arrays)


def _other(array: Any, rng: random.Random) -> Any:
    choice = rng.randrange(6)
    random_numbers = np.random.default_rng(rng.randrange(2**32))
    if choice == 0:
        return array.astype(rng.choice(["int8", "uint64", "float64", "bool", "float16", "int32"]))
    if choice == 1:
        return array.reshape(-1)[: rng.randint(0, array.size)]
    if choice == 2:
        return array.reshape(1, *array.shape) if array.ndim < 4 else array.reshape(-1)
    if choice == 3 and array.dtype.kind in "iu":
        limits = np.iinfo(array.dtype)
        return random_numbers.integers(limits.min, limits.max, array.shape, array.dtype)
    if choice == 4 and array.dtype.kind in "iu":
        return array + np.asarray(rng.choice((-1, 1, 100))).astype(array.dtype)
    if choice == 5 and array.dtype.kind == "f":
        return np.full_like(array, rng.choice((np.nan, np.inf, -np.inf, 0.0)))
    return random_numbers.permutation(array.reshape(-1)).reshape(array.shape)


def _rewrite(dump: Path, path: Path, at: int, arrays: dict[str, Any]) -> None:
    content, body = {}, b""
    for key, array in arrays.items():
        raw = np.ascontiguousarray(array).tobytes()
        span = [len(body), len(body) + len(raw)]
        content[key] = {"dtype": TYPES[array.dtype.name], "shape": list(array.shape),
                        "data_offsets": span}  # fmt: skip
        body += raw
    head = json.dumps(content).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + body)
    manifest = json.loads((dump / MANIFEST).read_text())
    manifest["steps"][at]["arrays"] = {
        key: {"dtype": a.dtype.name, "shape": list(a.shape)} for key, a in arrays.items()
    }
    _save(dump, manifest)
    seal(dump)


def link(dump: Path, rng: random.Random, arena: Arena) -> None:
    """A file or the folder replaced by a link, a pipe or a folder."""
    path = rng.choice([_any_blob(dump, rng, arena), dump / MANIFEST])
    choice = rng.randrange(4)
    if choice == 0:
        path.unlink()
        path.symlink_to(arena.root / CANARY)
    elif choice == 1:
        path.unlink()
        os.mkfifo(path)
    elif choice == 2:
        path.unlink()
        path.mkdir()
    else:
        shutil.rmtree(dump)
        dump.symlink_to(arena.root, target_is_directory=True)


def remove(dump: Path, rng: random.Random, arena: Arena) -> None:
    """A file is missing, or one too many is there."""
    if rng.random() < 0.5:
        rng.choice([_any_blob(dump, rng, arena), dump / MANIFEST]).unlink()
    else:
        (dump / "step-0000.pkl").write_bytes(b"cos\nsystem\n(S'touch /tmp/x'\ntR.")


def lie_in_trail(dump: Path, rng: random.Random, arena: Arena) -> None:
    """The trail file beside the dump flipped, truncated or replaced."""
    path = next(dump.parent.glob("trail_*.jsonl"))
    choice = rng.randrange(3)
    if choice == 0:
        _flip(path, rng)
    elif choice == 1:
        os.truncate(path, rng.randrange(path.stat().st_size))
    else:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        _poison(lines, rng)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


MUTATIONS: dict[str, Mutation] = {
    f.__name__: f
    for f in (
        flip_blob, flip_sealed, flip_manifest, truncate, inflate, lie_in_header, lie_in_manifest,
        lie_in_step, wrong_arrays, link, remove, lie_in_trail,
    )
}  # fmt: skip
