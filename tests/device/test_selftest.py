"""The self-test passes, and fails when the kernel under it is blind."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from ddtree_guard.device import selftest
from ddtree_guard.device.protocol import BITS
from ddtree_guard.device.verdict import Verdict


def test_every_device_rule_alarms_and_the_sound_step_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert selftest.selftest_main(SimpleNamespace(device="cpu", json=True)) == 0
    results = json.loads(capsys.readouterr().out)
    assert {result["rule"] for result in results} == {"sound", *BITS}
    assert all(result["passed"] for result in results)


def test_blind_checker_fails_the_self_test(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selftest, "_eager", lambda check, operands: Verdict(1, 0))
    monkeypatch.setattr(selftest, "operands_from_step", lambda *args: None)
    assert selftest.selftest_main(SimpleNamespace(device="cpu")) == 1
    text = capsys.readouterr().out
    assert f"{len(BITS)} rules, {len(BITS)} failed" in text
