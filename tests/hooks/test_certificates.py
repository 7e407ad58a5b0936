"""Birth certificates in a server: each replay beside the capture that it replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ddtree_guard.hooks.certificates import BUILT, INPUTS, replayed_size
from ddtree_guard.testing.cases import SMALL, small_case

pytestmark = pytest.mark.sglang


@pytest.fixture
def start(serve: Callable[..., Any]) -> Callable[..., Any]:
    return lambda algorithm="DDTREE": serve(small_case(algorithm, graph=True))


def _replays(guard: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []
    build = guard.checker.build
    monkeypatch.setattr(
        guard.checker,
        "build",
        lambda record, view: (seen.append((record, view)), build(record, view))[1],
    )
    return seen


@pytest.mark.parametrize("algorithm", SMALL)
def test_a_sound_replay_is_that_of_its_capture(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    server, guard = start(algorithm)
    seen = _replays(guard, monkeypatch)
    for _ in range(3):
        server.step()
    assert [record.doubt for record, _ in seen] == [False] * 3
    graph = seen[-1][0].step.graph
    assert (
        graph.born_key
        == graph.live_key
        == {"BS": 4, "w": server.case.w, "mask": algorithm != "DFLASH"}
    )
    assert set(graph.born) == set(graph.live)
    assert {*BUILT} - {"mask_indptr"} <= set(graph.born)
    assert graph.batch_sizes == (4,)
    assert graph.prompt_left.tolist() == [0, 0, 0]
    assert {"G1", "G3", "G4", "G6", "W6"} <= set(guard.guard.check(seen[-1][0].step).checked)
    assert guard.coverage.findings == 0


@pytest.mark.parametrize("name", ["qo_indptr", "kv_indptr", "mask_indptr", "cuda_graph_kv_indices"])
def test_a_buffer_that_was_replaced_after_capture_is_named(
    start: Callable[..., Any], lines: Callable[[], list[dict[str, str]]], name: str
) -> None:
    server, _ = start()
    server.step()
    setattr(server.backend, name, getattr(server.backend, name).clone())
    server.step()
    found = [line for line in lines() if line["rule"] == "G3"]
    assert [(line["step"], line["tokens_left"]) for line in found] == [("2", "no")]


def test_an_input_that_was_replaced_after_capture_is_named(
    start: Callable[..., Any], lines: Callable[[], list[dict[str, str]]]
) -> None:
    server, _ = start()
    server.step()
    server.static.seq_lens = server.static.seq_lens.clone()
    server.step()
    assert "G3" in [line["rule"] for line in lines()]


def test_a_batch_with_a_mask_is_not_of_a_graph_without(
    start: Callable[..., Any],
    lines: Callable[[], list[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    server, _ = start("DFLASH")
    server.step()
    monkeypatch.setattr(
        server,
        "redress",
        lambda spec: setattr(spec, "custom_mask", torch.ones(2000, dtype=torch.bool)),
    )
    server.step()
    found = {line["rule"]: line for line in lines()}
    assert (found["G1"]["expected"], found["G1"]["actual"]) == ("False", "True")


def test_the_graph_of_another_batch_size_is_named(
    start: Callable[..., Any], lines: Callable[[], list[dict[str, str]]]
) -> None:
    server, _ = start()
    server.step()
    server.chosen = 8
    server.step()
    found = {line["rule"]: line for line in lines()}
    assert (found["G1"]["expected"], found["G1"]["actual"]) == ("8", "4")
    assert found["G1"]["tokens_left"] == "no"


def test_a_graph_that_is_captured_again_has_a_new_certificate(
    start: Callable[..., Any], lines: Callable[[], list[dict[str, str]]]
) -> None:
    server, guard = start()
    server.step()
    server.capture()  # all buffers are new
    server.step()
    assert lines() == []
    assert not guard.fuses.faults


def test_a_request_in_its_prompt_is_named(
    start: Callable[..., Any], lines: Callable[[], list[dict[str, str]]]
) -> None:
    server, _ = start()
    server.reqs[-1].kv_committed_len -= 3
    server.step()
    assert [(line["rule"], line["rid"]) for line in lines()] == [("G6", "r2")]


def test_the_runner_says_which_graph_it_chose() -> None:
    from types import SimpleNamespace

    newer = SimpleNamespace(_replay_graph_key=SimpleNamespace(size=8), bs=4)
    assert replayed_size(SimpleNamespace(decode_cuda_graph_runner=newer)) == 8
    ragged = SimpleNamespace(_replay_graph_key=SimpleNamespace(size=64), ragged_verify_mode="on")
    assert replayed_size(SimpleNamespace(decode_cuda_graph_runner=ragged)) is None
    assert replayed_size(SimpleNamespace(graph_runner=SimpleNamespace(bs=2))) == 2
    assert replayed_size(SimpleNamespace()) is None
    assert "out_cache_loc" in INPUTS
