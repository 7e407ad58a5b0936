"""What arming leaves on disk: armed with the boot line, or why not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_guard.config import Config, Mode
from ddtree_guard.evidence import ARMED, IDLE, NOT_ARMED, Process, read_processes
from ddtree_guard.hooks import arm, plugin
from ddtree_guard.hooks.facts import facts_of
from ddtree_guard.testing.cases import VerifyCase

pytestmark = pytest.mark.sglang


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Config]:
    yield Config(mode=Mode.LOG, dump_dir=tmp_path / "dumps")
    while arm.GUARDS:
        arm.GUARDS.pop().remove()


def server(choice: Any = "corrected") -> Any:
    from ddtree_guard.testing.server import MiniServer

    return MiniServer(VerifyCase(lens=(9, 5), head_dim=16, heads=2, kv_heads=1), choice)


def only(config: Config) -> Process:
    (process,) = read_processes(config.dump_dir)
    return process


def test_an_armed_server_counts_its_steps_and_findings(config: Config) -> None:
    from ddtree_guard.testing.fakes import sglang

    made = server("stock")
    guard = made.arm(config)
    for _ in range(3):
        made.step()
    guard.remove()
    process = only(config)
    assert (process.state, process.problem) == (ARMED, "")
    assert process.boot.startswith("ddtree_guard armed=1/1 mode=log")
    assert (process.verify_steps, process.steps_checked, process.open) == (3, 3, 0)
    assert process.rules > 20
    if facts_of(sglang("layers.attention.triton_backend").TritonAttnBackend).follows_batch:
        assert not process.found["W3"]  # stock is right on this release
        return
    assert process.found["W3"] == 3
    assert "CFG1" in process.found
    hit = next(hit for hit in process.hits if hit.rule == "W3")
    assert (hit.step, Path(hit.dump or "").is_dir()) == (1, True)
    assert hit.line.startswith("ddtree_guard finding rule=W3")


def test_a_step_whose_tokens_are_on_their_way_is_open(config: Config) -> None:
    made = server()
    guard = made.arm(config)
    pending = made.step(overlap=True)
    assert guard.evidence.counters()["open"] == 1
    made.resolve(*pending)
    counts = guard.evidence.counters()
    assert (counts["open"], counts["steps"], counts["verify_steps"]) == (0, 1, 1)


def test_a_hook_that_is_missing_is_the_reason(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arm, "self_test", lambda guard: "self-test: W3 did not fire")
    server().arm(config)
    process = only(config)
    assert (process.state, process.problem) == (NOT_ARMED, "self-test: W3 did not fire")


def test_a_guard_that_cannot_start_is_the_reason(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arm, "scheduler_hooks", lambda guard: 1 / 0)
    scheduler = server()
    guard = arm.start(config, scheduler)
    arm.finish(config, guard, scheduler)
    states = {process.state for process in read_processes(config.dump_dir)}
    assert NOT_ARMED in states
    assert ARMED not in states


def test_a_server_without_speculation_is_idle(config: Config) -> None:
    args = SimpleNamespace(speculative_algorithm=None)
    assert arm.start(config, SimpleNamespace(server_args=args)) is None
    process = only(config)
    assert (process.state, process.problem) == (IDLE, "")
    assert process.why == "no speculative algorithm is active"


def test_a_plugin_that_is_not_active_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DDTREE_GUARD", "log")
    monkeypatch.setenv("SGLANG_DDTREE_GUARD_DUMP_DIR", str(tmp_path / "dumps"))
    monkeypatch.setenv("SGLANG_DDTREE_GUARD_BACKEND", "fixed")
    plugin.load()
    (process,) = read_processes(tmp_path / "dumps")
    assert "BACKEND=fixed is not a backend" in process.problem


def test_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DDTREE_GUARD_DUMP_DIR", str(tmp_path / "dumps"))
    monkeypatch.setenv("SGLANG_DDTREE_GUARD_BACKEND", "fixed")
    plugin.load()
    assert not (tmp_path / "dumps").exists()
