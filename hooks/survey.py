"""What an environment is: `python -m ddtree_guard.hooks.survey OUT.json [-- SERVE ARGUMENTS]`.

A process of its own, because importing SGLang prints, warns, sets variables and may fail in many
ways, and because its plugins are loaded for real: SGLang drops a plugin silently, so that ours
loads is tried and not assumed. Everything is left behind when the process ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ddtree_guard
from ddtree_guard.config import Config, TreeConfig, export, setting
from ddtree_guard.doctor.deployment import FIELDS
from ddtree_guard.errors import GuardError, IncompatibleError
from ddtree_guard.guard import Guard
from ddtree_guard.hooks import arguments, boot, plugin
from ddtree_guard.hooks.facts import CLASS, facts_of, release, unknown_buffers
from ddtree_guard.hooks.fuses import Fuses
from ddtree_guard.hooks.inspection import inspect_hooks
from ddtree_guard.hooks.no_shadow import shadow_for

GROUP = "sglang.srt.plugins"
_PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "sglang-kernel", "sgl-kernel")


def main(argv: Sequence[str]) -> int:
    """Write the survey as JSON to the first argument. 0 unless that file cannot be written."""
    out, words = Path(argv[0]), list(argv[2:])
    warnings.simplefilter("ignore")
    words, env = arguments.serve_arguments(words)
    export(**env)
    found: dict[str, Any] = {}
    try:
        survey(found, words if len(argv) > 1 else None, out)
    except BaseException as error:  # the parent reads what there is, and the last line here
        print(" ".join(f"{type(error).__name__}: {error}".split()), file=sys.stderr)
    _write(out, found)
    return 0


def survey(found: dict[str, Any], words: list[str] | None, out: Path | None = None) -> None:
    """Fill `found` step by step, writing it after each: a later step may end the process."""
    steps = [("environment", _environment), ("sglang", _sglang), ("hooks", _hooks)]
    steps += [("plugin", _plugin)]
    for name, step in steps:
        found["during"] = name
        if out is not None:
            _write(out, found)
        found[name] = step()
    if words is not None and found["sglang"]["importable"]:
        found["during"] = "arguments"
        if out is not None:
            _write(out, found)
        arguments.offline()
        found["arguments"] = dataclasses.asdict(arguments.parse(words, FIELDS))
    found["during"] = ""


def _write(out: Path, found: dict[str, Any]) -> None:
    part = out.with_suffix(".part")
    part.write_text(json.dumps(found, default=str))
    part.replace(out)


def _environment() -> dict[str, Any]:
    versions = {"ddtree_guard": ddtree_guard.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {"versions": versions, "gpu": _gpu()}


def _gpu() -> str:
    """How many GPUs there are, or why none. No name: asking for one would take memory there."""
    if importlib.util.find_spec("torch") is None:
        return "none: torch is not installed"
    try:
        count = importlib.import_module("torch").cuda.device_count()
    except Exception as error:
        return f"none: {type(error).__name__}: {error}"
    return f"{count} that torch sees" if count else "none"


def _sglang() -> dict[str, Any]:
    """Release, how far it was tested, and which generation its Triton backend is."""
    here = importlib.util.find_spec("sglang") is not None
    values: dict[str, Any] = {"installed": here, "release": release() if here else None}
    values |= {"tested": boot.tested(release()) if here else None, "importable": False}
    values |= {"generation": None, "why": "" if here else "SGLang is not installed"}
    if not here:
        return values
    try:
        plugin.check_host()
        importlib.import_module("sglang.srt.server_args")
        values["importable"] = True
        module, _, name = CLASS.rpartition(".")
        stock = getattr(importlib.import_module(module), name)
        values["generation"] = facts_of(stock).name
        values["unknown_buffers"] = sorted(unknown_buffers(stock))
    except Exception as error:
        text = str(error) if isinstance(error, GuardError) else f"{type(error).__name__}: {error}"
        values["why"] = " ".join(text.split())
        values["incompatible"] = isinstance(error, IncompatibleError)
    return values


def _hooks() -> list[dict[str, Any]]:
    if importlib.util.find_spec("sglang") is None:
        return []
    return [{**dataclasses.asdict(seen), "blocking": seen.blocking} for seen in inspect_hooks()]


def _plugin() -> dict[str, Any]:
    """Whether SGLang loads this plugin in this environment, and with which settings."""
    names = {point.name for point in importlib.metadata.entry_points(group=GROUP)}
    listed = setting("SGLANG_PLUGINS")
    values: dict[str, Any] = {
        "found": boot.PLUGIN in names,
        "excluded_by": boot.excluded_by({"SGLANG_PLUGINS": listed}),
        "others": sorted(names - {boot.PLUGIN}),
        "loaded": False,
        "why": "",
    }
    try:
        config = Config.from_env()
        Guard(config)  # knows the rules' names
        values["incident"] = TreeConfig.from_env().incident
        values |= {"mode": config.mode.value, "backend": config.backend.value}
        values["warnings"] = list(config.warnings)
        values["shadow"] = _shadow(config)
    except GuardError as error:
        values["setting"] = str(error)
    if importlib.util.find_spec("sglang") is not None:
        _load(values)
    return values


def _shadow(config: Config) -> str:
    """What shadow mode would say of itself before a server runs; empty where it is off."""
    try:
        return shadow_for(config, Fuses(), lambda backend: None, ()).line()
    except Exception as error:  # torch or Triton does not import here
        return " ".join(f"does not load here: {type(error).__name__}: {error}".split())


def _load(values: dict[str, Any]) -> None:
    """Let SGLang's own loader load its plugins, with ours watched."""
    try:
        with _watched(values):
            importlib.import_module("sglang.srt.plugins").load_plugins()
    except (Exception, SystemExit) as error:
        values["why"] = " ".join(f"{type(error).__name__}: {error}".split())


@contextlib.contextmanager
def _watched(values: dict[str, Any]) -> Iterator[None]:
    original = plugin.load

    def load() -> None:
        try:
            plugin.activate()
            values["loaded"] = True
        except Exception as error:  # what `load` would log and swallow
            values["why"] = " ".join(f"{error}".split())

    plugin.load = load
    try:
        yield
    finally:
        plugin.load = original


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
