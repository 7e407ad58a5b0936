"""The flight recorder of a running server: each trigger through the real hooks, read back."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest

from ddtree_guard import cli
from ddtree_guard.dump.find import find_dumps
from ddtree_guard.dump.read import Dump
from ddtree_guard.dump.schema import SCHEMA_FILE
from ddtree_guard.guard import Guard
from ddtree_guard.hooks import arm
from ddtree_guard.metrics import Metrics
from ddtree_guard.recorder import heuristics
from ddtree_guard.testing.cases import VerifyCase, small_case
from ddtree_guard.testing.compare import differences
from ddtree_guard.testing.dumps import awaited, dumps_of
from ddtree_guard.testing.on_demand import plant_next

pytestmark = pytest.mark.sglang

PATHS = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


@pytest.fixture
def start(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, with_device: Callable[..., Any]
) -> Callable[..., Any]:
    """Starts guarded servers, with the device checker on the CPU where asked for."""
    made = arm.ServerGuard

    def make(case: VerifyCase, device: bool = False, **config: Any) -> Any:
        monkeypatch.setattr(arm, "ServerGuard", with_device if device else made)
        server, guard = serve(case, **config)
        if device and case.padded_bs:
            server.replayed = lambda: _replay(guard)
        return server, guard

    return make


def _replay(guard: Any) -> None:
    """What the captured graph holds: the check, which packs the step."""
    key, launch = next(iter(guard.checker._launches.items()))
    if launch.recorded:
        guard.checker.graphs.in_graph(key)


# --- every step -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("algorithm", "device", "graph"),
    [("DDTREE", False, False), ("DDTREE", True, False), ("DDTREE", True, True),
     ("EAGLE", True, False), ("NGRAM", True, True), ("DFLASH", True, True)],
)  # fmt: skip
def test_the_ring_holds_what_was_launched(
    start: Callable[..., Any], algorithm: str, device: bool, graph: bool
) -> None:
    from ddtree_guard.hooks.adapters import adapter_for
    from ddtree_guard.recorder.ring import Ring

    server, guard = start(small_case(algorithm, graph), device)
    seen: list[Any] = []
    build, guard.running.quick = guard.checker.build, False

    def built(record: Any, view: Any) -> None:
        build(record, view)
        seen.append(adapter_for(type(view.backend)).read_step(view.complete()))

    guard.checker.build = built
    for _ in range(4):
        server.step()
    recorder = guard.flight.recorder
    kept = recorder.ring.snapshot()
    assert [step.who.step_id for step in kept] == [1, 2, 3, 4]
    assert (recorder.ring.dropped, recorder.faults) == (0, 0)
    assert [step.outcome.committed[-1].tolist()[: len(sent[-1])] for step, sent in
            zip(kept, server.sent, strict=True)] == [sent[-1] for sent in server.sent]  # fmt: skip
    for step, launched in zip(kept, seen, strict=True):
        ring = Ring(1, launched.padded_bs, launched.w)
        ring.put(launched)
        (expected,) = ring.snapshot()
        assert _unlike(expected, step) == set()
        if algorithm != "DFLASH":
            assert np.array_equal(expected.tree.parents, step.tree.parents)
            assert np.array_equal(expected.tree.depths, step.tree.depths)
        assert [found for found in Guard().check(step).findings if not found.latent] == []


# a device packs what the kernels read: sizes that the spec info leaves out, and no host mirror
EXTRA = tuple(
    f"step.{name}"
    for name in (
        "tree.sizes", "tree.parents", "tree.depths", "mask.capacity", "mask.rids",
        "slots.capacity", "outcome.",
    )
)  # fmt: skip


def _unlike(expected: Any, step: Any) -> set[str]:
    return {text for text in differences(expected, step) if not text.startswith(EXTRA)}


def test_a_graph_captured_anew_mixes_no_steps(start: Callable[..., Any]) -> None:
    server, guard = start(small_case(graph=True), device=True)
    for _ in range(3):
        server.step()
    server.capture()
    for _ in range(2):
        server.step()
    kept = guard.flight.recorder.ring.snapshot()
    assert [step.who.step_id for step in kept] == [4, 5]
    assert [Guard().check(step).findings for step in kept] == [(), ()]


def test_the_device_is_not_asked_while_a_graph_is_captured(start: Callable[..., Any]) -> None:
    server, guard = start(small_case(graph=True), device=True)
    for _ in range(3):
        server.step()
    ring, prepare = guard.flight.recorder.ring, guard.checker.prepare
    ring.drain()
    told: list[Any] = []

    def prepared(view: Any) -> None:
        prepare(view)
        told.append((ring.fetch(None) is None, [step.who.step_id for step in ring.snapshot()]))

    guard.checker.prepare = prepared
    server.capture()
    assert told == [(True, [1, 2, 3])]  # another thread may ask all the same
    server.step()
    assert ring.fetch(None) is not None
    assert guard.flight.recorder.faults == 0


def test_a_replay_that_checks_nothing_mixes_no_steps(start: Callable[..., Any]) -> None:
    server, guard = start(small_case(graph=True), device=True)
    launch = next(iter(guard.checker._launches.values()), None)
    if launch is None or not launch.recorded:
        pytest.skip("0.5.12 has no place inside the graph")
    replayed = server.replayed
    for n in range(5):
        server.replayed = (lambda: None) if n == 2 else replayed
        server.step()
    ring = guard.flight.recorder.ring
    kept = ring.snapshot()
    assert [step.who.step_id for step in kept][:2] == [1, 2]
    assert 3 not in [step.who.step_id for step in kept]
    assert [Guard().check(step).findings for step in kept] == [()] * len(kept)
    assert len(kept) + ring.dropped == 5
    assert guard.coverage.ratio < 1.0


def test_steps_larger_than_a_slot_are_dropped_and_counted(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddtree_guard.hooks import tape

    counted: Counter[str] = Counter()
    monkeypatch.setattr(Metrics, "add", lambda self, name, n=1, **labels: counted.update({name: n}))
    monkeypatch.setattr(tape, "lanes_for", lambda least, most, w, steps: 2)
    server, guard = start(small_case(), device=True)
    for _ in range(3):
        server.step()
    assert guard.flight.recorder.ring.dropped == 3
    assert counted["ring_dropped_total"] == 3
    assert guard.coverage.ratio == 1.0
    assert not guard.fuses.faults


@pytest.mark.parametrize(
    ("most", "w", "steps"), [(16, 17, 64), (64, 65, 64), (256, 65, 64), (256, 1025, 64)]
)
def test_the_ring_stays_within_its_bound(most: int, w: int, steps: int) -> None:
    from ddtree_guard.hooks.tape import lanes_for
    from ddtree_guard.recorder.ring import MAX_BYTES, Ring

    lanes = lanes_for(4, most, w, steps)
    ring = Ring(steps, lanes, w, on_device=True)
    assert 4 <= lanes <= most
    assert 0 < ring.nbytes <= MAX_BYTES
    assert ring.steps >= 8 or lanes == 4


# --- triggers -------------------------------------------------------------------------------------
@PATHS
@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("rule", ["W3", "M2"])
def test_a_finding_offline_is_the_finding_online(
    start: Callable[..., Any],
    lines: Callable[[], list[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    device: bool,
    graph: bool,
) -> None:
    server, guard = start(small_case(graph=graph), device, redact=False)
    for _ in range(3):
        server.step()
    judged = []
    found = guard.flight.found
    monkeypatch.setattr(
        guard.flight, "found", lambda record, *rest: judged.append((record.step, rest[0]))
        or found(record, *rest)
    )  # fmt: skip
    plant_next(guard, rule)
    server.step()
    ((step, online),) = judged
    line = next(line for line in lines() if line["rule"] == rule)
    dump = Dump(line["dump"])
    assert dump.step_ids() == [1, 2, 3, 4]
    assert differences(step, dump.step(3)) == []  # bit for bit
    assert [finding for _, finding in dump.findings()] == list(online)
    report = Guard().check(dump.step(3))
    offline = {f.rule: (f.expected, f.actual, f.request, f.row) for f in report.findings}
    for f in online:  # a device at depth fast has no bit for some of the rules
        assert offline[f.rule] == (f.expected, f.actual, f.request, f.row)
    assert device or len(offline) == len(online)
    assert cli.main(["check", line["dump"]]) == 1
    assert [Guard().check(dump.step(n)).findings for n in range(3)] == [()] * 3


@pytest.mark.parametrize("rule", ["W3", "M2", "P1"])
def test_a_step_whose_buffers_were_reused_is_dumped_as_it_was(
    start: Callable[..., Any],
    lines: Callable[[], list[dict[str, str]]],
    rule: str,
) -> None:
    server, guard = start(small_case(graph=True), device=True, redact=False)
    for _ in range(3):
        server.step()
    plant_next(guard, rule)
    bad = server.step(overlap=True)
    good = server.step(overlap=True)  # refills the captured buffers
    server.resolve(*bad)
    server.resolve(*good)
    line = next(line for line in lines() if line["rule"] == rule)
    dump = Dump(line["dump"])
    assert (line["step"], dump.step_ids()[-1]) == ("4", 4)
    online = {f.rule: (f.expected, f.actual, f.request, f.row) for _, f in dump.findings()}
    report = Guard().check(dump.step(len(dump) - 1))
    offline = {f.rule: (f.expected, f.actual, f.request, f.row) for f in report.findings}
    assert offline == online
    assert {line["step"] for line in lines()} == {"4"}


@pytest.mark.parametrize("redact", [False, True], ids=["plain", "redacted"])
def test_what_a_live_server_writes_fits_the_shipped_schema(
    start: Callable[..., Any], tmp_path: Path, redact: bool
) -> None:
    server, guard = start(small_case(graph=True), device=True, redact=redact)
    for _ in range(3):
        server.step()
    plant_next(guard, "P1")
    server.step()
    guard.flight.recorder.trigger("signal", "SIGUSR2")
    rules = json.loads(SCHEMA_FILE.read_text())
    kinds = []
    for dump in map(Dump, find_dumps(tmp_path)):
        jsonschema.validate(dump.manifest, rules, jsonschema.Draft202012Validator)
        assert dump.manifest["schema"] == rules["properties"]["schema"]["const"]
        assert dump.requests()
        assert "ring=8MiB" in dump.doctor[0]
        kinds.append(dump.trigger["kind"])
    assert sorted(kinds) == ["finding", "signal"]


def test_a_storm_yields_one_dump_and_a_count(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: Counter[str] = Counter()
    monkeypatch.setattr(Metrics, "add", lambda self, name, n=1, **labels: counted.update({name: n}))
    server, guard = start(small_case())
    plant_next(guard, "W3", stays=True)
    for _ in range(6):
        server.step()
    (dump,) = dumps_of(tmp_path, "finding")
    assert dump.step_ids() == [1]
    assert counted["dumps_total"] == 1
    later = guard.flight.recorder.trigger("signal", "SIGUSR2")
    assert Dump(later).trigger["suppressed"] == 5


def test_heuristics_of_a_live_server_write_dumps_and_nothing_else(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heuristics, "STUCK", 4)
    monkeypatch.setattr(heuristics, "MIN_REQUEST_STEPS", 4)
    server, guard = start(small_case())
    walk = server._walk

    def stuck(inputs: Any) -> Any:
        predict, lens, index = (part.clone() for part in walk(inputs))
        index[:, 1:], lens[:], predict[:] = -1, 1, 7
        return predict, lens, index

    monkeypatch.setattr(server, "_walk", stuck)
    monkeypatch.setattr(guard.guard, "rules", ())  # a walk that stops early is a finding, too
    for _ in range(6):
        server.step()
    assert "accept length 1.00 for 4 steps" in awaited(tmp_path, "heuristic").trigger["why"]
    assert len(server.sent) == 6


def test_a_run_of_one_token_and_a_jump_are_noticed(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heuristics, "RUN", 5)
    monkeypatch.setattr(heuristics, "SETTLED", 4)
    _, guard = start(small_case())
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(guard.flight.recorder, "ask", lambda *why: asked.append(why))
    record = SimpleNamespace(step=None, step_id=1, rids=("a", "b"))
    for _ in range(5):
        guard.flight.accepted(record, [[9], [1, 2]])
    for n in range(40):
        guard.flight.accepted(record, [[n] * 3 + [n + 1] * 4, [n, n + 1, n, 5, 6, 7, n]])
    assert ("heuristic", "a request produced one token 5 times in a row") in asked
    assert any(re.match(r"accept length went from 1\.\d+ to \d", why) for _, why in asked)


# --- names, requests ------------------------------------------------------------------------------
def test_log_line_dump_and_request_are_joined_by_a_name(
    start: Callable[..., Any],
    lines: Callable[[], list[dict[str, str]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server, guard = start(small_case())
    for _ in range(3):
        server.step()
    plant_next(guard, "P1")
    server.step()
    line = next(line for line in lines() if line["rid"] != "-")
    dump = Dump(line["dump"])
    assert re.fullmatch(r"r-[0-9a-f]{12}", line["name"])
    assert dump.findings()[0][1].rid == line["name"]
    assert line["rid"] not in json.dumps(dump.manifest["requests"])
    capsys.readouterr()
    assert cli.main(["request", line["name"], str(tmp_path)]) == 1
    assert "4/4 steps checked, P1 in 1 of them" in capsys.readouterr().out
    other = guard.flight.name("r0")
    assert cli.main(["request", other, str(tmp_path)]) == 0
    assert "4/4 steps checked, clean" in capsys.readouterr().out
    assert cli.main(["request", "r0", str(tmp_path)]) == 2  # its id is hashed there
    assert "name=r-" in capsys.readouterr().err


def test_a_request_that_ended_is_one_line_and_in_the_trail(
    start: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO, "ddtree_guard")
    server, guard = start(small_case())
    for _ in range(4):
        server.step()
    guard.remove()
    told = [text for text in caplog.messages if text.startswith("ddtree_guard request rid=r1 ")]
    assert len(told) == 1
    assert 'verdict="4/4 steps checked, clean"' in told[0]
    name = told[0].split("name=")[1].split()[0]
    capsys.readouterr()
    assert cli.main(["request", name, str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "4/4 steps checked, clean" in out
    assert f"width {server.case.w} in 4" in out


def test_a_request_on_suspect_kv_is_not_clean(start: Callable[..., Any]) -> None:
    from ddtree_guard.testing.server import Req

    server, guard = start(small_case())
    plant_next(guard, "P1")
    server.step()
    tokens = [*server.reqs[-1].origin_input_ids, *server.reqs[-1].output_ids]
    child = Req("child", 0, cached=len(tokens))
    child.origin_input_ids = [*tokens, 1]
    server.extend([child])
    trail = guard.flight.recorder.trails.get("child")
    assert trail.tainted
    assert not trail.clean


def test_steps_that_were_not_checked_are_not_called_clean(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, guard = start(small_case())
    server.step()
    monkeypatch.setattr(guard.checker, "build", lambda *args: 1 / 0)
    server.step()
    assert guard.flight.recorder.trails.get("r0").verdict == "1/2 steps checked, clean"
    assert not guard.flight.recorder.trails.get("r0").clean


def test_a_tape_that_fails_costs_no_check(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, guard = start(small_case(), device=True)
    monkeypatch.setattr(guard.checker.tape, "_note", lambda *args: 1 / 0)
    for _ in range(3):
        server.step()
    assert guard.coverage.ratio == 1.0
    assert not guard.fuses.faults
    assert guard.flight.recorder.faults == 3


def test_no_array_of_a_step_is_kept_alive(start: Callable[..., Any]) -> None:
    server, guard = start(small_case(), device=True)
    for _ in range(3):
        server.step()
    for base, _ in guard.checker.tape._frames.values():
        assert [path for path, _, _ in base.arrays()] == []
    assert all(isinstance(slot.base.bs, (int, np.integer)) for slot in
               guard.flight.recorder.ring._slots if slot)  # fmt: skip
