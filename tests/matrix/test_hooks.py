"""Every hook on the release that is installed here: found, restored, and missed when it moved."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ddtree_guard.config import Config, Mode
from ddtree_guard.hooks import arm, boot, plugin, sites
from ddtree_guard.hooks.facts import release
from ddtree_guard.hooks.patching import Patch
from ddtree_guard.testing.cases import VerifyCase

pytestmark = [pytest.mark.sglang, pytest.mark.matrix]

TRITON = "sglang.srt.layers.attention.triton_backend"


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    assert plugin.unload() == ()


def _guard(tmp_path: Path, mode: Mode = Mode.LOG) -> Any:
    from ddtree_guard.hooks.runtime import ServerGuard

    return ServerGuard(Config(mode=mode, dump_dir=tmp_path))


def _load() -> Any:
    """SGLang's modules that the hooks touch; their kernels are not needed to import them."""
    from ddtree_guard.testing.fakes import sglang, sglang_with_kernels

    sglang("model_executor.model_runner")
    sglang_with_kernels("speculative.ngram_worker")
    sglang_with_kernels("managers.scheduler")
    return sglang("layers.attention.triton_backend").TritonAttnBackend


def _hooks(guard: Any, backend_class: Any) -> tuple[sites.Hook, ...]:
    worker = importlib.import_module("sglang.srt.speculative.ngram_worker").NGRAMWorker
    live = worker.__new__(worker)
    return (
        *sites.scheduler_hooks(guard),
        *sites.backend_hooks(guard, backend_class),
        sites.worker_hook(guard, live),
        sites.verify_hook(guard, live),
    )


def _raw(patch: Patch) -> Any:
    path, _, name = patch.target.rpartition(".")
    owner: Any = sys.modules
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        if ".".join(parts[:count]) in sys.modules:
            owner = sys.modules[".".join(parts[:count])]
            for part in parts[count:]:
                owner = getattr(owner, part, None)
            break
    return inspect.getattr_static(owner, name, None)


def test_every_required_site_is_hooked_and_every_object_comes_back(tmp_path: Path) -> None:
    guard = _guard(tmp_path)
    hooks = _hooks(guard, _load())
    patches = [patch for hook in hooks for patch in hook.patches]
    before = [_raw(patch) for patch in patches]
    states = guard.install(hooks)
    assert [state.detail for state in states if state.blocking] == []
    assert [a is b for a, b in zip(before, map(_raw, patches), strict=True)].count(False) >= 6
    assert guard.remove() == ()
    assert all(a is b for a, b in zip(before, map(_raw, patches), strict=True))


def test_every_patch_says_why_in_one_sentence(tmp_path: Path) -> None:
    for hook in _hooks(_guard(tmp_path), _load()):
        for patch in hook.patches:
            assert 20 <= len(patch.why) <= 120, patch.target
            assert patch.expects, patch.target


def test_the_scheduler_is_armed_through_its_own_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _load()
    from ddtree_guard.testing.server import MiniServer

    scheduler = importlib.import_module("sglang.srt.managers.scheduler").Scheduler

    def init_model_worker(self: Any) -> str:
        self.init_model_worker(arm.GUARDS[-1])
        return "original"

    monkeypatch.setattr(scheduler, "init_model_worker", init_model_worker)
    plugin.activate(
        {"SGLANG_DDTREE_GUARD": "log", "SGLANG_DDTREE_GUARD_DUMP_DIR": str(tmp_path),
         "SGLANG_DDTREE_GUARD_BACKEND": "stock"}
    )  # fmt: skip
    assert scheduler.init_model_worker is not init_model_worker
    server = MiniServer(VerifyCase(head_dim=16), "corrected")
    assert scheduler.init_model_worker(server) == "original"
    server.step()
    assert arm.GUARDS[-1].coverage.steps_checked == 1
    assert plugin.unload() == ()
    assert scheduler.init_model_worker is init_model_worker


def test_a_doctored_copy_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _load()
    source = Path(importlib.import_module(TRITON).__file__ or "").read_text()
    name = "def init_forward_metadata(self, forward_batch"
    assert name in source
    module = ModuleType("doctored_triton_backend")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    changed = source.replace(name, "def init_forward_metadata(self, plan, forward_batch")
    exec(compile(changed, "doctored", "exec"), vars(module))
    guard = _guard(tmp_path)
    states = guard.install(sites.backend_hooks(guard, module.TritonAttnBackend))
    build = next(state for state in states if state.hook.site == "build")
    assert build.blocking
    assert "signature-changed" in build.detail
    assert "plan" in build.detail
    assert guard.remove() == ()


def test_a_backend_without_the_method_is_told_apart(tmp_path: Path) -> None:
    _load()
    guard = _guard(tmp_path)
    states = guard.install(sites.backend_hooks(guard, Bare))
    assert [state.hook.site for state in states if state.blocking] == ["build", "replay"]
    assert all("absent" in state.detail for state in states)


class Bare:
    """A backend class without any of the methods."""


def test_a_fork_with_an_odd_version_string_arms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _load()
    from ddtree_guard.testing.server import MiniServer

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.17+corp.42")
    caplog.set_level(logging.INFO, "ddtree_guard")
    server = MiniServer(VerifyCase(head_dim=16), "corrected")
    guard = server.arm(Config(mode=Mode.LOG, dump_dir=tmp_path))
    server.step()
    assert guard is not None
    assert guard.coverage.steps_checked == 1
    assert any("armed=1/1" in t and "0.5.17+corp.42(untested)" in t for t in caplog.messages)


@pytest.mark.parametrize(("listed", "loaded"), [("", True), ("ddtree_guard", True), ("a,b", False)])
def test_sglangs_own_loader_drops_us_silently_and_we_can_tell(
    monkeypatch: pytest.MonkeyPatch, listed: str, loaded: bool
) -> None:
    _load()
    plugins = importlib.import_module("sglang.srt.plugins")
    entry = importlib.metadata.EntryPoint(
        "ddtree_guard", "ddtree_guard.hooks.plugin:load", plugins.GENERAL_PLUGINS_GROUP
    )
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry])
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setenv("SGLANG_PLUGINS", listed)
    monkeypatch.setenv("SGLANG_DDTREE_GUARD", "log")
    scheduler = importlib.import_module("sglang.srt.managers.scheduler").Scheduler
    before = scheduler.init_model_worker
    plugins.load_plugins()
    assert (scheduler.init_model_worker is not before) is loaded
    assert (boot.excluded_by({"SGLANG_PLUGINS": listed}) is None) is loaded
    monkeypatch.setattr(plugins, "_plugins_loaded", False)


def test_off_touches_nothing_of_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    _load()
    scheduler = importlib.import_module("sglang.srt.managers.scheduler").Scheduler
    before = dict(vars(scheduler))
    for env in ({}, {"SGLANG_DDTREE_GUARD": "off"}):
        plugin.activate({**env, "SGLANG_DDTREE_GUARD_BACKEND": "stock"})
    assert all(vars(scheduler)[name] is value for name, value in before.items())


def test_the_release_is_one_of_the_matrix_or_named_untested() -> None:
    assert boot.tested(release()) in ("gpu-tested", "cpu-tested", "untested")
