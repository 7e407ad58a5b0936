"""Step -> dump -> Step, bit for bit; and the dump's own promises: schema, hashes, permissions."""

import dataclasses
import hashlib
import json
import stat
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_guard.config import Config
from ddtree_guard.dump import schema
from ddtree_guard.dump.read import Dump
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.guard import Guard
from ddtree_guard.step import Static, Step
from ddtree_guard.testing.compare import differences
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step

LENS = (37, 21, 50)


def config(root: Path, redact: bool = False) -> Config:
    return Config(dump_dir=root, redact=redact)


def round_trip(root: Path, step: Step) -> Step:
    return Dump(DumpWriter("run", config(root)).write([step])).step(0)


@given(
    seed=st.integers(0, 2**32),
    lens=st.lists(st.integers(1, 90), min_size=2, max_size=4),
    w=st.integers(2, 40),
    extra=st.sampled_from([None, 0, 1, 3]),
    kind=st.sampled_from(["random", "chain", "star"]),
)
@settings(max_examples=40, deadline=None)
def test_any_step_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    lens: list[int],
    w: int,
    extra: int | None,
    kind: str,
) -> None:
    lanes = None if extra is None else len(lens) + extra
    step = sound_step(seed, lens=tuple(lens), w=w, padded_bs=lanes, kind=kind)
    assert differences(step, round_trip(tmp_path_factory.mktemp("d"), step)) == []


@pytest.mark.parametrize("dtype", sorted(schema.DTYPES.values()))
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0), (2, 3)])
def test_every_dtype_and_shape_comes_back(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.random.default_rng(3).integers(0, 2, size, np.uint8).tobytes()
    step = sound_step().replace(mask__cells=np.frombuffer(raw, dtype).reshape(shape))
    assert differences(step, round_trip(tmp_path, step)) == []


def test_odd_values_come_back(tmp_path: Path) -> None:
    key = {"ratio": float("nan"), "low": -float("inf"), "x": 1.5, "nested": ("a", (1, None))}
    step = sound_step(padded_bs=4, lens=LENS).replace(
        graph__born_key={**key, "flag": True, "list": [1, 2], "inner": {"a": 2**63}},
        graph__born={"q": Static(2**64 - 1, "int64", (3, 4), (4, 1), 12, -1)},
        outcome__row_min=np.array([[np.nan, -np.inf], [-0.0, 1e-310]]),
        layout__grids={"extend": (4, 4)},
        who__rids=("a b", 'quote"', "ünï\n"),
    )
    assert differences(step, round_trip(tmp_path, step)) == []


def test_a_strided_array_is_kept_by_value(tmp_path: Path) -> None:
    values = np.arange(40, dtype=np.int32)[::2]
    step = sound_step().replace(positions__values=values)
    assert np.array_equal(round_trip(tmp_path, step).positions.values, values)


def test_a_tensor_is_taken_to_the_host(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    step = sound_step().replace(positions__values=torch.arange(6, dtype=torch.int32))
    back = round_trip(tmp_path, step).positions.values
    assert back.dtype == np.int32
    assert back.tolist() == [0, 1, 2, 3, 4, 5]


def test_findings_and_several_steps_come_back(tmp_path: Path) -> None:
    steps = [sound_step(i, lens=LENS, padded_bs=4).replace(who__step_id=i) for i in range(3)]
    steps[2] = FAULTS["W3"](steps[2], 2).step
    findings = [(2, finding) for finding in Guard().check(steps[2]).findings]
    dump = Dump(DumpWriter("run", config(tmp_path)).write(steps, findings))
    assert dump.findings() == findings
    assert [differences(a, b) for a, b in zip(steps, dump.steps(), strict=True)] == [[], [], []]


@pytest.mark.parametrize("redact", [False, True])
def test_the_manifest_obeys_its_schema(tmp_path: Path, redact: bool) -> None:
    step = FAULTS["W3"](sound_step(lens=LENS, padded_bs=4), 2).step
    findings = [(0, finding) for finding in Guard().check(step).findings]
    path = DumpWriter("run", config(tmp_path, redact)).write([step], findings)
    manifest = json.loads((path / schema.MANIFEST).read_text())
    rules = json.loads(schema.SCHEMA_FILE.read_text())
    jsonschema.Draft202012Validator.check_schema(rules)
    jsonschema.validate(manifest, rules, jsonschema.Draft202012Validator)
    assert manifest["schema"] == schema.SCHEMA
    assert set(rules["properties"]) == set(manifest)


def test_hashes_sizes_and_safetensors_agree_with_the_reader(tmp_path: Path) -> None:
    path = DumpWriter("run", config(tmp_path)).write([sound_step(lens=LENS)])
    dump = Dump(path)
    ((name, blob),) = dump.manifest["blobs"].items()
    data = (path / name).read_bytes()
    assert (hashlib.sha256(data).hexdigest(), len(data)) == (blob["sha256"], blob["bytes"])
    for key, value in safetensors.numpy.load(data).items():
        assert np.array_equal(value, dump.step(0).get(key))


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    path = DumpWriter("run", config(tmp_path / "new")).write([sound_step()])
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}


def test_every_part_of_a_step_is_a_record() -> None:
    hints = schema._hints(Step)
    parts = [name for name, kind in hints.items() if dataclasses.is_dataclass(kind)]
    assert len(parts) == len(hints) - 2  # all but bs and padded_bs
