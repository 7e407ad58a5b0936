"""Mode raise ends the process where the guard cannot be hooked; SGLang would swallow the reason."""

from __future__ import annotations

import pytest

from ddtree_guard.errors import IncompatibleError
from ddtree_guard.hooks import plugin


def _refuse() -> None:
    raise IncompatibleError("expected SGLang, found none; install it.")


@pytest.mark.parametrize(("mode", "code"), [("raise", 3), ("Raise ", 3)])
def test_raise_exits(monkeypatch: pytest.MonkeyPatch, mode: str, code: int) -> None:
    monkeypatch.setenv("SGLANG_DDTREE_GUARD", mode)
    monkeypatch.setattr(plugin, "check_host", _refuse)
    with pytest.raises(SystemExit) as stopped:
        plugin.load()
    assert stopped.value.code == code


def test_log_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_DDTREE_GUARD", "log")
    monkeypatch.setattr(plugin, "check_host", _refuse)
    plugin.load()
    assert "NOT ACTIVE: expected SGLang, found none" in caplog.text


def test_a_bug_of_ours_in_raise_exits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DDTREE_GUARD", "raise")
    monkeypatch.setattr(plugin, "check_host", lambda: 1 / 0)
    with pytest.raises(SystemExit) as stopped:
        plugin.load()
    assert stopped.value.code == 3
