"""Config: every variable, wrong values that name the right ones, and unknown variables."""

from __future__ import annotations

import ast
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import ddtree_guard
from ddtree_guard.config import (
    PREFIX,
    VARIABLES,
    Backend,
    Capture,
    Config,
    Depth,
    LogStyle,
    Mode,
    RuleSelection,
)
from ddtree_guard.errors import UsageError

VALUES: list[tuple[str, str, str, Any]] = [
    ("", "log", "mode", Mode.LOG),
    ("", "raise", "mode", Mode.RAISE),
    ("", "off", "mode", Mode.OFF),
    ("", " LOG ", "mode", Mode.LOG),
    ("_BACKEND", "stock", "backend", Backend.STOCK),
    ("_BACKEND", "corrected", "backend", Backend.CORRECTED),
    ("_DEPTH", "full", "depth", Depth.FULL),
    ("_DUMP_DIR", "/var/dg", "dump_dir", Path("/var/dg")),
    ("_DUMP_MAX_MB", "7", "dump_max_mb", 7),
    ("_DUMP_KEEP", "3", "dump_keep", 3),
    ("_RING_STEPS", "9", "ring_steps", 9),
    ("_REDACT", "off", "redact", False),
    ("_REDACT", "1", "redact", True),
    ("_SHADOW_EVERY", "100", "shadow_every", 100),
    ("_SHADOW_EVERY", "0", "shadow_every", 0),
    ("_RULES", "W,-W3", "rules", RuleSelection(("W",), (("W3", None),))),
    ("_LOG", "block", "log", LogStyle.BLOCK),
]


@pytest.mark.parametrize(("suffix", "text", "name", "value"), VALUES)
def test_variable_sets_its_field(suffix: str, text: str, name: str, value: Any) -> None:
    assert getattr(Config.from_env({PREFIX + suffix: text}), name) == value


def test_capture_of_qkv_needs_redaction_off() -> None:
    config = Config.from_env({f"{PREFIX}_CAPTURE": "qkv", f"{PREFIX}_REDACT": "off"})
    assert (config.capture, config.redact) == (Capture.QKV, False)


@pytest.mark.parametrize("redact", [{}, {f"{PREFIX}_REDACT": "on"}])
def test_capture_of_qkv_is_refused_while_redacting(redact: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"CAPTURE=qkv is refused .*Set .*_REDACT=off"):
        Config.from_env({f"{PREFIX}_CAPTURE": "qkv", **redact})


def test_every_variable_is_tried_above() -> None:
    tried = {suffix.removeprefix("_") for suffix, *_ in VALUES} | {"CAPTURE"}
    assert tried == {"", *VARIABLES}


def test_an_empty_environment_is_the_default_and_off() -> None:
    assert Config.from_env({}) == Config()
    assert Config().mode is Mode.OFF
    assert Config().redact


@pytest.mark.parametrize("suffix", ["", *(f"_{v}" for v in VARIABLES)])
def test_an_empty_value_is_the_default(suffix: str) -> None:
    assert Config.from_env({PREFIX + suffix: ""}) == Config()


WRONG = [
    ("", "warn", "SGLANG_DDTREE_GUARD=warn is not a mode. Use one of: off, log, raise."),
    ("", "contain", "Use one of: off, log, raise."),
    ("_BACKEND", "triton", "is not a backend. Use one of: auto, stock, corrected."),
    ("_DEPTH", "deep", "is not a depth. Use one of: fast, full."),
    ("_CAPTURE", "all", "is not a capture. Use one of: meta, qkv."),
    ("_LOG", "json", "Use one of: line, block."),
    ("_REDACT", "yes", "SGLANG_DDTREE_GUARD_REDACT=yes is not a switch. Use one of: on, off."),
    ("_DUMP_MAX_MB", "0", "is not a whole number of at least 1."),
    ("_DUMP_MAX_MB", "1.5", "is not a whole number of at least 1."),
    ("_DUMP_KEEP", "-1", "is not a whole number of at least 1."),
    ("_RING_STEPS", "many", "is not a whole number of at least 1."),
    ("_DUMP_KEEP", "9" * 5000, "999... is not a whole number of at most 12 digits."),
    ("_SHADOW_EVERY", "\u00b2", "is not a whole number of at least 0."),
    ("_RULES", "W3@2026-12-31", "'W3@2026-12-31' is not understood. Write a rule id or family"),
    ("_RULES", "W 3", "'W 3' is not understood."),
    ("_RULES", "-", "'-' is not understood."),
    ("_RULES", "W1,-W3@soon", "'-W3@soon' ends on 'soon', which is not a day. Write YYYY-MM-DD."),
    ("_RULES", "-W3@2026-02-30", "which is not a day"),
]


@pytest.mark.parametrize(("suffix", "text", "message"), WRONG)
def test_wrong_value_names_the_right_ones(suffix: str, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Config.from_env({PREFIX + suffix: text})
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("SGLANG_DDTREE_GUARD_DUMPDIR", "SGLANG_DDTREE_GUARD_DUMP_DIR"),
        ("SGLANG_DDTREE_GUARD_BACKENDS", "SGLANG_DDTREE_GUARD_BACKEND"),
        ("SGLANG_DDTREE_GUARD_RULE", "SGLANG_DDTREE_GUARD_RULES"),
    ],
)
def test_unknown_variable_warns_with_the_nearest_name(name: str, nearest: str) -> None:
    config = Config.from_env({name: "x", PREFIX: "log"})
    assert config.warnings == (f"{name} is not a variable of the guard; did you mean {nearest}?",)
    assert config.mode is Mode.LOG


def test_variables_of_others_are_no_concern() -> None:
    env = {"SGLANG_DDTREE": "x", "SGLANG_DDTREE_GUARDIAN": "y", "PATH": "/bin"}
    assert Config.from_env(env) == Config()


def test_selection_ends_on_its_day() -> None:
    selection = RuleSelection.parse(" -p1@2026-12-31 , W ")
    assert selection.ignore == (("P1", date(2026, 12, 31)),)
    assert selection.names() == ("W", "P1")


def test_only_config_reads_the_environment() -> None:
    root = Path(ddtree_guard.__file__).parent
    readers = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            if named and isinstance(node.value, ast.Name) and node.value.id == "os":
                readers.add(path.relative_to(root).as_posix())
    assert readers <= {"config.py"}


def test_the_kind_of_a_setting_is_said_in_words() -> None:
    with pytest.raises(UsageError, match="LOG=x is not a log style"):
        Config.from_env({"SGLANG_DDTREE_GUARD_LOG": "x"})
