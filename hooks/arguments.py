"""Serve arguments, read by SGLang's own parser and resolved by its own code, without a GPU.

Run in a process of its own: resolving sets environment variables, prints, and may end the process.
No weights are loaded and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree_guard.config import export
from ddtree_guard.errors import GuardError, UsageError

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)")
_MODEL_KEYS = ("hf_text_config", "hf_config")
_KEPT = (str, int, float, bool, type(None), list, tuple)


@dataclass(frozen=True, slots=True)
class Parsed:
    """Server arguments by name. `status`: resolved, raw, usage or refused; `why` in words.

    `raw` means that SGLang read them and could not complete them here; `usage` that it does not
    understand them, `refused` that it will not serve them.
    """

    status: str
    values: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    model: Mapping[str, Any] | None = None
    assumed: tuple[str, ...] = ()
    exit_code: int = 0


def serve_arguments(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(arguments, environment) of a pasted command: `A=1 python -m sglang.launch_server --x`."""
    rest = list(words)
    env: dict[str, str] = {}
    start = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
    if not any("sglang" in word or _ASSIGNMENT.fullmatch(word) for word in rest[:start]):
        return rest, env
    for word in rest[:start]:
        found = _ASSIGNMENT.fullmatch(word)
        if found:
            env[found[1]] = found[2]
    return rest[start:], env


def parse(words: Sequence[str], fields: Sequence[str]) -> Parsed:
    """Parse and, as far as that is possible here, resolve."""
    module = importlib.import_module("sglang.srt.server_args")
    raw, complaint = _read(module, list(words))
    if raw is None:
        return Parsed("usage", why=complaint, exit_code=UsageError.exit_code)
    assumed = []
    if getattr(raw, "device", None) is None and not _gpu():
        raw.device = "cuda"  # SGLang would look for a GPU and find none
        assumed.append("device=cuda, as there is no GPU here")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            args = module.ServerArgs.from_cli_args(raw)
            if hasattr(args, "resolve_once"):  # 0.5.18 on: the record keeps what was asked for
                args.resolve_once()
                values = args.resolved_dict()
            else:
                values = dict(vars(args))
    except GuardError as error:  # DDTREE of this package
        return Parsed("refused", _raw(raw, fields), str(error), exit_code=error.exit_code)
    except Exception as error:
        return _unresolved(raw, fields, error, tuple(assumed))
    values |= {name: getattr(args, name) for name in fields if name not in values
               and getattr(args, name, None) is not None}  # fmt: skip
    picked = {name: _plain(values.get(name)) for name in fields if name in values}
    return Parsed("resolved", picked, model=_model(args), assumed=tuple(assumed))


def _read(module: Any, words: list[str]) -> tuple[Any, str]:
    """(namespace, "") or (None, what the parser said)."""
    parser = argparse.ArgumentParser(prog="sglang serve")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            module.ServerArgs.add_cli_args(parser)
            if "--config" in words:
                words = _merged(parser, words)
            return parser.parse_args(words), ""
    except (SystemExit, Exception) as error:
        if isinstance(error, SystemExit) and not error.code:
            return None, "--help or the like among them prints and ends; leave it out"
        lines = [line for line in said.getvalue().splitlines() if ": error: " in line]
        return None, lines[-1].partition(": error: ")[2] if lines else f"{error}"


def _merged(parser: Any, words: list[str]) -> list[str]:
    for name in ("sglang.srt.utils.server_args_config_parser",
                 "sglang.srt.server_args_config_parser"):  # fmt: skip
        with contextlib.suppress(ImportError):
            merger = importlib.import_module(name).ConfigArgumentMerger
            try:
                made = merger(parser)
            except TypeError:  # 0.5.12 wants the names of the switches
                made = merger(boolean_actions=[])
            return list(made.merge_config_with_args(words))
    return words


def _unresolved(
    raw: Any, fields: Sequence[str], error: Exception, assumed: tuple[str, ...]
) -> Parsed:
    """What SGLang refuses, as against what it cannot find out on this machine."""
    why = " ".join(f"{type(error).__name__}: {error}".split())
    local = (Path(str(getattr(raw, "model_path", ""))) / "config.json").is_file()
    refusal = isinstance(error, (ValueError, NotImplementedError, AssertionError)) and str(error)
    if refusal and local:
        return Parsed("refused", _raw(raw, fields), why, assumed=assumed, exit_code=3)
    return Parsed("raw", _raw(raw, fields), why, assumed=assumed)


def _raw(raw: Any, fields: Sequence[str]) -> dict[str, Any]:
    return {name: _plain(getattr(raw, name)) for name in fields if hasattr(raw, name)}


def _plain(value: Any, depth: int = 0) -> Any:
    """The value as JSON can hold it; dataclasses and enums become what they hold."""
    value = getattr(value, "value", value)
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        value = {name: getattr(value, name) for name in fields}
    if isinstance(value, Mapping):
        return {str(k): _plain(v, depth + 1) for k, v in value.items()} if depth < 6 else None
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value] if depth < 6 else None
    return value if isinstance(value, _KEPT) else str(value)


def _model(args: Any) -> dict[str, Any] | None:
    """SGLang's view of the model: its configuration and the context that it would serve."""
    try:
        config = args.get_model_config()
        held = next(c for n in _MODEL_KEYS if (c := getattr(config, n, None)) is not None)
        values = {str(k): _plain(v) for k, v in held.to_dict().items()}
        return {**values, "max_position_embeddings": int(config.context_len)}
    except Exception:  # the doctor then reads config.json itself
        return None


def _gpu() -> bool:
    return bool(importlib.import_module("torch").cuda.is_available())


def offline() -> None:
    """Keep this process from downloading a model's configuration."""
    export(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1")
