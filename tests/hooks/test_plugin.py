"""The entry point: inert where nothing can be active, honest where something cannot be done."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree_guard.errors import IncompatibleError, UsageError
from ddtree_guard.hooks import plugin

PREFIX = "SGLANG_DDTREE_GUARD"


@pytest.fixture(autouse=True)
def _unloaded() -> Iterator[None]:
    yield
    assert plugin.unload() == ()


def _identities() -> dict[str, Any]:
    """Every object that the plugin could touch, by name."""
    from ddtree_guard.testing.fakes import sglang

    backend = sglang("layers.attention.triton_backend")
    registry = sglang("layers.attention.attention_registry")
    found = {f"registry.{k}": v for k, v in registry.ATTENTION_BACKENDS.items()}
    found |= {f"module.{k}": v for k, v in vars(backend).items() if not k.startswith("__")}
    found |= {f"class.{k}": v for k, v in vars(backend.TritonAttnBackend).items()}
    return found


def _unchanged(before: dict[str, Any]) -> bool:
    after = _identities()
    return before.keys() == after.keys() and all(after[k] is v for k, v in before.items())


@pytest.mark.sglang
@pytest.mark.parametrize("env", [{}, {PREFIX: "off"}, {PREFIX: "log"}])
def test_without_a_budget_every_object_is_the_original(env: dict[str, str]) -> None:
    from ddtree_guard.testing.fakes import sglang_with_kernels

    sglang_with_kernels("managers.scheduler")  # mode log hooks into it, and only into it
    before = _identities()
    assert plugin.activate(env) is None
    assert _unchanged(before)


@pytest.mark.sglang
def test_stock_touches_nothing_even_in_a_fork() -> None:
    from ddtree_guard.testing.fakes import fork_with_budget

    before = _identities()
    with fork_with_budget():
        assert plugin.activate({f"{PREFIX}_BACKEND": "stock"}) is None
    assert _unchanged(before)


@pytest.mark.sglang
def test_a_fork_gets_one_registry_entry_and_gets_it_back() -> None:
    from ddtree_guard.testing.fakes import fork_with_budget

    before = _identities()
    with fork_with_budget():
        assert plugin.activate({}) is not None
    now = _identities()
    assert [k for k in before if now[k] is not before[k]] == ["registry.triton"]
    assert plugin.unload() == ()
    assert _unchanged(before)


@pytest.mark.sglang
def test_a_registered_algorithm_makes_a_budget_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtree_guard.testing.fakes import sglang

    registry = sglang("speculative.spec_registry")
    monkeypatch.setitem(registry._REGISTRY, "DDTREE", object())
    assert plugin.activate({}) is not None


@pytest.mark.sglang
def test_loading_twice_patches_once() -> None:
    env = {f"{PREFIX}_BACKEND": "corrected"}
    first, second = plugin.activate(env), plugin.activate(env)
    assert first is not None
    assert second is not None
    assert [o.status for o in second.outcomes] == ["already"]


@pytest.mark.sglang
@pytest.mark.parametrize(("second", "warned"), [("stock", 1), ("corrected", 0)])
def test_another_choice_in_the_same_process_is_said_not_taken(
    caplog: pytest.LogCaptureFixture, second: str, warned: int
) -> None:
    plugin.activate({f"{PREFIX}_BACKEND": "corrected"})
    plugin.activate({f"{PREFIX}_BACKEND": second})
    assert caplog.text.count("backend=corrected was chosen") == warned
    assert "backend=stock takes effect in a new process" in caplog.text or not warned


@pytest.mark.sglang
def test_a_patch_under_somebody_elses_wrapper_is_restored_later() -> None:
    from ddtree_guard.testing.fakes import sglang

    registry = sglang("layers.attention.attention_registry").ATTENTION_BACKENDS
    stock = registry["triton"]
    plugin.activate({f"{PREFIX}_BACKEND": "corrected"})
    ours = registry["triton"]
    registry["triton"] = lambda runner: ours(runner)
    assert len(plugin.unload()) == 1
    registry["triton"] = ours
    assert plugin.unload() == ()
    assert registry["triton"] is stock


@pytest.mark.sglang
def test_boot_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ddtree_guard"):
        plugin.activate({f"{PREFIX}_BACKEND": "corrected"})
    assert len(caplog.records) == 1
    assert "mode=off backend=corrected release=" in caplog.text


def test_wrong_value_is_logged_and_does_not_reach_sglang(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(f"{PREFIX}_BACKEND", "fixed")
    plugin.load()
    assert "BACKEND=fixed is not a backend. Use one of: auto, stock, corrected." in caplog.text
    assert "NOT ACTIVE" in caplog.text
    with pytest.raises(UsageError):
        plugin.activate({f"{PREFIX}_BACKEND": "fixed"})


def test_a_misspelt_rule_is_said_before_the_server_is_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(PREFIX, "log")
    monkeypatch.setenv(f"{PREFIX}_RULES", "-A22")
    plugin.load()
    assert "NOT ACTIVE: no rule is called 'A22'" in caplog.text
    assert "our bug" not in caplog.text


def test_unknown_variable_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    plugin.activate({f"{PREFIX}_BACKND": "stock", f"{PREFIX}_BACKEND": "stock"})
    assert f"did you mean {PREFIX}_BACKEND?" in caplog.text


def test_our_own_fault_does_not_reach_sglang(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "install", lambda choice: 1 / 0)
    plugin.load()
    assert "this is our bug" in caplog.text


def _without(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )


def test_no_sglang_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    _without("sglang", monkeypatch)
    assert plugin.activate({}) is None
    with pytest.raises(
        IncompatibleError, match=r"none; .*`pip install '\.\[sglang\]'` in a checkout"
    ):
        plugin.activate({f"{PREFIX}_BACKEND": "corrected"})


@pytest.mark.sglang
def test_an_old_sglang_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    _without("sglang.srt.plugins", monkeypatch)
    monkeypatch.setattr(plugin, "release", lambda: "0.5.9")
    with pytest.raises(IncompatibleError, match=r"found SGLang 0\.5\.9 without it"):
        plugin.activate({f"{PREFIX}_BACKEND": "corrected"})


@pytest.mark.sglang
def test_a_missing_registry_entry_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtree_guard.testing.fakes import sglang

    registry = sglang("layers.attention.attention_registry")
    monkeypatch.delitem(registry.ATTENTION_BACKENDS, "triton")
    with pytest.raises(IncompatibleError, match=r"ATTENTION_BACKENDS\[triton\].*found it absent"):
        plugin.activate({f"{PREFIX}_BACKEND": "corrected"})


def test_entry_point_is_declared() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    group = text.split('[project.entry-points."sglang.srt.plugins"]')[1]
    assert 'ddtree_guard = "ddtree_guard.hooks.plugin:load"' in group.split("[")[0]
