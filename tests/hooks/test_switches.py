"""SGLang's own switches that take the ground from under the guard are said, not ignored."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_guard.config import Config, Mode
from ddtree_guard.hooks import arm, switches
from ddtree_guard.testing.cases import VerifyCase

CASE = VerifyCase(lens=(9, 4, 12), head_dim=16, heads=2, kv_heads=1, budget=8)

NGRAM = dataclasses.replace(CASE, algorithm="NGRAM", draft_tokens=9)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    while arm.GUARDS:
        assert arm.GUARDS.pop().remove() == ()


def _switch(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    monkeypatch.setattr(switches, "setting", lambda name: values.get(name, ""))


@pytest.mark.parametrize(
    ("value", "said"), [("1", True), ("TRUE", True), ("0", False), ("", False)]
)
def test_a_plan_stream_cannot_be_guarded(
    monkeypatch: pytest.MonkeyPatch, value: str, said: bool
) -> None:
    _switch(monkeypatch, SGLANG_ENABLE_OVERLAP_PLAN_STREAM=value)
    assert bool(switches.unguardable()) is said


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [("NGRAM", True), ("EAGLE3", True), ("", True), ("DFLASH", False), ("DDTREE", False)],
)
def test_metadata_from_a_graph_cannot_be_guarded_where_sglang_makes_one(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, said: bool
) -> None:
    _switch(monkeypatch, SGLANG_ENABLE_METADATA_GLUE_GRAPH="true")
    assert bool(switches.unguardable(algorithm)) is said
    _switch(monkeypatch, SGLANG_ENABLE_METADATA_GLUE_GRAPH="0")
    assert not switches.unguardable(algorithm)


@pytest.mark.parametrize(
    ("value", "said"), [("3.5", True), ("-1", False), ("", False), ("x", False)]
)
def test_a_simulated_walk(monkeypatch: pytest.MonkeyPatch, value: str, said: bool) -> None:
    _switch(monkeypatch, SGLANG_SIMULATE_ACC_LEN=value)
    assert switches.simulated_walk() is said


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("switch", "case"),
    [
        ("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", CASE),
        ("SGLANG_ENABLE_METADATA_GLUE_GRAPH", NGRAM),
    ],
)
def test_what_cannot_be_guarded_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    switch: str, case: VerifyCase,
) -> None:  # fmt: skip
    from ddtree_guard.testing.server import MiniServer

    _switch(monkeypatch, **{switch: "true"})
    MiniServer(case, "auto").arm(Config(mode=Mode.LOG, dump_dir=tmp_path))
    told = [text for text in caplog.messages if text.startswith("NOT GUARDED: rank 0 of 1")]
    assert "unset it; serving continues unchecked" in told[0]


@pytest.mark.sglang
def test_simulated_acceptance_is_not_judged_and_the_boot_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from ddtree_guard.testing.server import MiniServer

    _switch(monkeypatch, SGLANG_SIMULATE_ACC_LEN="2")
    server = MiniServer(CASE, "auto")
    walk = server._walk

    def made_up(inputs: object) -> object:
        predict, lens, index = walk(inputs)  # type: ignore[arg-type]
        index[:, 1:] = index[:, :1]
        return predict, lens, index

    monkeypatch.setattr(server, "_walk", made_up)
    guard = server.arm(Config(mode=Mode.LOG, dump_dir=tmp_path))
    assert guard is not None
    server.step()
    assert guard.coverage.findings == 0
    assert any("not_checked=A1,A2,A3(simulated)" in text for text in caplog.messages)
