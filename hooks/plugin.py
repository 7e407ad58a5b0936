"""The entry point that SGLang loads in every process: group `sglang.srt.plugins`, name
`ddtree_guard`. It never raises into SGLang; with nothing to do it touches nothing.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path

from ddtree_guard.attention.backend import install
from ddtree_guard.config import PREFIX, Backend, Config, Mode, TreeConfig, setting
from ddtree_guard.ddtree import algorithm
from ddtree_guard.errors import GuardError, IncompatibleError, UsageError
from ddtree_guard.guard import Guard
from ddtree_guard.hooks.arm import GUARDS, scheduler_patch
from ddtree_guard.hooks.evidence import note_not_active
from ddtree_guard.hooks.facts import SUPPORTED, release
from ddtree_guard.hooks.patching import PatchReport, apply
from ddtree_guard.hooks.sites import SCHEDULER

log = logging.getLogger("ddtree_guard")
_INSTALLED: list[PatchReport] = []
_CHOSEN: list[Backend] = []  # the backend choice in force, if one was installed


def load() -> None:
    """Install what the environment asks for. SGLang calls it before it parses its arguments.

    In mode raise a guard that cannot be hooked ends the process with exit code 3: SGLang would
    swallow an exception and serve unchecked.
    """
    try:
        activate()
    except GuardError as error:
        log.error("ddtree_guard NOT ACTIVE: %s Serving continues with SGLang's own code.", error)
        _leave_evidence(str(error))
        if setting(PREFIX).lower() == Mode.RAISE.value:
            raise SystemExit(error.exit_code) from None
    except Exception as error:
        log.exception("ddtree_guard NOT ACTIVE: this is our bug; serving continues unchecked.")
        _leave_evidence(f"our bug: {type(error).__name__}: {error}")
        if setting(PREFIX).lower() == Mode.RAISE.value:
            raise SystemExit(IncompatibleError.exit_code) from None


def _leave_evidence(why: str) -> None:
    """For those who read the folder of dumps: this process was asked to be guarded and is not."""
    if setting(PREFIX).lower() in ("", Mode.OFF.value):
        return
    folder = Path(setting(f"{PREFIX}_DUMP_DIR") or Config().dump_dir)
    note_not_active(Config(mode=Mode.LOG, dump_dir=folder), why, release())


def activate(env: Mapping[str, str] | None = None) -> PatchReport | None:
    """Read the configuration; install the backend choice and, with a mode, the scheduler's hook.

    Returns the report of the backend choice, None where that touches nothing. Raises UsageError
    for a wrong value and IncompatibleError for an SGLang that cannot be hooked.
    """
    config = Config.from_env() if env is None else Config.from_env(env)
    for warning in config.warnings:
        log.warning("ddtree_guard: %s", warning)
    if config.backend is Backend.CORRECTED or config.mode is not Mode.OFF:
        check_host()
    if config.mode is not Mode.OFF:
        Guard(config)  # a misspelt rule is said now, not when the server is up
        _INSTALLED.append(_hook_scheduler(config))
    tree_config = TreeConfig.from_env() if env is None else TreeConfig.from_env(env)
    report = install(_choice(config.backend, tree_config))
    tree = algorithm.install()  # installs the backend choice itself where DDTREE is chosen
    if tree is not None:
        _INSTALLED.append(tree)
    if _CHOSEN and _CHOSEN[0] is not config.backend:
        log.warning(
            "ddtree_guard: backend=%s was chosen when this process loaded the plugin and stays; "
            "backend=%s takes effect in a new process.",
            _CHOSEN[0].value,
            config.backend.value,
        )
    elif report is not None:
        _INSTALLED.append(report)
        _CHOSEN[:] = [config.backend]
        log.info(
            "ddtree_guard boot mode=%s backend=%s release=%s",
            config.mode.value,
            config.backend.value,
            release(),
        )
    return report


def _hook_scheduler(config: Config) -> PatchReport:
    try:
        return apply(scheduler_patch(config).patches).require()
    except ImportError as error:
        raise IncompatibleError(
            f"expected {SCHEDULER} of SGLang {release()} to be importable, found {error}; repair "
            "the installation of SGLang."
        ) from error


def _choice(backend: Backend, tree: TreeConfig) -> Backend:
    """The backend to install. The incident is one of the stock backend."""
    if not tree.incident:
        return backend
    if backend is Backend.CORRECTED:
        raise UsageError(
            "SGLANG_DDTREE_INCIDENT=on needs the stock backend, found "
            "SGLANG_DDTREE_GUARD_BACKEND=corrected; unset one of them."
        )
    return Backend.STOCK


def unload() -> tuple[str, ...]:
    """Undo every `load`; returns a sentence for each patch that somebody else has replaced.

    Those patches stay in force, and a later call tries them again.
    """
    kept: list[str] = []
    while GUARDS:
        kept += GUARDS.pop().remove()
    algorithm.uninstall()
    for report in reversed(_INSTALLED):
        kept += report.restore()
    _CHOSEN.clear()
    _INSTALLED[:] = [report for report in _INSTALLED if report.in_force]
    return tuple(kept)


def check_host() -> None:
    """Raise IncompatibleError unless SGLang is importable and has the hooks that we need."""
    if importlib.util.find_spec("sglang") is None:
        raise IncompatibleError(
            f"expected SGLang {SUPPORTED}, found none; install ddtree-guard into the environment "
            "that serves, or SGLang here: `pip install '.[sglang]'` in a checkout."
        )
    for name in ("sglang.srt.plugins", "sglang.srt.layers.attention.attention_registry"):
        if not _has(name):
            raise IncompatibleError(
                f"expected SGLang {SUPPORTED} with {name}, found SGLang {release()} without it; "
                "install a supported SGLang."
            )


def _has(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is absent
        return False
