"""Servers that a test starts: was each of them guarded, and if not, why?

A server that does not load our plugin leaves no trace of it, so starts are noted here: commands by
Python's audit events, schedulers of an engine in this process by `multiprocessing`. What a forked
child executes (`os.spawnv`) is audited in that child only and is not seen.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ddtree_guard.config import PREFIX, Config, setting
from ddtree_guard.evidence import Process
from ddtree_guard.render import plain

GROUP = "sglang.srt.plugins"
_STARTS = frozenset(("subprocess.Popen", "os.posix_spawn", "os.system"))
_SHELL = "/bin/sh -c "
# programs that name a server without starting it; `pkill -f sglang.launch_server` is common
_TOOLS = frozenset((
    "cat", "curl", "echo", "egrep", "fuser", "grep", "head", "kill", "killall", "less", "ls",
    "lsof", "pgrep", "pidof", "pkill", "printf", "ps", "rg", "tail", "test", "which",
))  # fmt: skip
_BEFORE = frozenset(("env", "exec", "nohup", "setsid", "sudo", "time"))


@dataclass(frozen=True, slots=True)
class Start:
    """A server that was started: with what command, and with which variables."""

    command: str
    why: str  # what in its environment keeps the guard away; empty if nothing does
    process: BaseProcess | None = None

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        if self.process is not None:
            return self.process.is_alive()
        inner = self.command.removeprefix(_SHELL).rstrip("& ")
        return any(command in (self.command, inner) for command in _commands())


class Servers:
    """Notes what is started. `take` gives what is new."""

    _active: Servers | None = None
    _hooked = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._new: list[Start] = []
        self._start: Any = None
        self._ours: Any = None

    def watch(self) -> None:
        """Begin to note. An audit hook cannot be taken away; it sleeps afterwards."""
        Servers._active = self
        if not Servers._hooked:
            Servers._hooked = True
            sys.addaudithook(Servers._audit)
        self._start = original = BaseProcess.start
        note = self._note

        def start(self: BaseProcess) -> None:
            target = getattr(self, "_target", None)
            name = f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', '')}"
            if name.startswith("sglang.") and "scheduler_process" in name:
                note(name, None, self)
            original(self)  # what it raises is the test's

        self._ours = start
        BaseProcess.start = start  # type: ignore[method-assign]

    def stop(self) -> None:
        """Note nothing any more."""
        Servers._active = None
        if BaseProcess.start is self._ours:
            BaseProcess.start = self._start  # type: ignore[method-assign]

    @staticmethod
    def _audit(event: str, args: tuple[Any, ...]) -> None:
        if event not in _STARTS or Servers._active is None:
            return
        env: Mapping[Any, Any] | None = None
        if event == "os.system":
            words: Sequence[Any] = [*_SHELL.split(), args[0]]
        elif event == "os.posix_spawn":
            if sys._getframe(1).f_globals.get("__name__") == "subprocess":
                return  # Popen at work, which has been audited
            words, env = args[1:3]
        else:
            words, env = args[1], args[3]
            words = words if isinstance(words, (list, tuple)) else [words]
        if is_server(words):
            Servers._active._note(" ".join(map(_text, words)), env)

    def _note(
        self, command: str, env: Mapping[Any, Any] | None, process: BaseProcess | None = None
    ) -> None:
        try:
            why = self._why(env)
        except Exception as error:  # it would come out of the test's own call
            why = f"its environment cannot be read ({type(error).__name__}: {error})"
        self._new.append(Start(command, why, process))

    def _why(self, env: Mapping[Any, Any] | None) -> str:
        """What in the environment keeps the guard away."""

        def value(name: str) -> str:
            return setting(name) if env is None else _text(_look(env, name)).strip()

        boot = importlib.import_module("ddtree_guard.hooks.boot")
        mode, folder = value(PREFIX).lower(), value(f"{PREFIX}_DUMP_DIR")
        if mode in ("", "off"):
            return (
                f"its environment has {PREFIX}={mode or '(not set)'}; hand the test's environment "
                "on to it"
            )
        plugins = boot.excluded_by({"SGLANG_PLUGINS": value("SGLANG_PLUGINS")})
        if plugins:
            return str(boot.excluded_line(plugins))
        if Path(folder or Config().dump_dir).absolute() != self.folder:
            return f"its {PREFIX}_DUMP_DIR is {folder or '(not set)'}, not that of this session"
        return ""

    def take(self) -> list[Start]:
        """Starts since the last call, and older ones without the guard that still run."""
        new, self._new = self._new, []
        return new

    def keep(self, starts: Sequence[Start]) -> None:
        """Servers without the guard: named again in the next test, as long as they run."""
        self._new = [start for start in starts if start.alive] + self._new


def is_server(words: Sequence[Any]) -> bool:
    """Whether a command starts an SGLang server."""
    texts = [_text(word) for word in words]
    if len(texts) > 2 and re.fullmatch(r"-[a-z]*c", texts[1]) and texts[0].endswith("sh"):
        return any(_starts(part.split()) for part in re.split(r"[;&|()\n]+", texts[2]))
    return _starts(texts)


def _starts(texts: Sequence[str]) -> bool:
    """Whether a command without a shell's operators starts a server."""
    names = (Path(t).name for t in texts if "=" not in t)
    if next((name for name in names if name not in _BEFORE), "") in _TOOLS:
        return False
    serves = any(Path(t).name == "sglang" for t in texts) and "serve" in texts
    return serves or any(
        "sglang.launch_server" in t or t.strip("'\"").endswith("launch_server.py") for t in texts
    )


def _look(env: Mapping[Any, Any], name: str) -> Any:
    """A variable of an environment whose names are text or bytes; this process's refuses bytes."""
    for key in (name, name.encode()):
        with contextlib.suppress(KeyError, TypeError):
            return env[key]
    return ""


def _text(word: Any) -> str:
    return os.fsdecode(word) if isinstance(word, (bytes, os.PathLike)) else str(word)


def unguarded(starts: Sequence[Start], new: Sequence[Process]) -> list[Start]:
    """The starts of servers whose schedulers have left no word; `new` did so since the last look.

    A command starts one server of many schedulers, `multiprocessing` starts them one by one.
    """
    mine = os.getpid()
    servers = {p.pid if p.ppid == mine else p.ppid for p in new}
    certain = [s for s in starts if s.why and f"{PREFIX}=" not in s.command]
    others = sorted((s for s in starts if s not in certain), key=lambda start: not start.why)
    return certain + others[: max(0, len(others) - len(servers))]


def sentence(start: Start) -> str:
    """Why the server of a start is not guarded."""
    why = start.why or missing_here()
    command = plain(start.command)[:200]
    return f"NOT GUARDED: a server was started and left no evidence: {why} [{command}]"


def _commands() -> Iterator[str]:
    """The command lines of the processes of this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes().decode(errors="replace").rstrip("\0").replace("\0", " ")


def missing_here() -> str:
    """Why a server of this environment would not load the guard, as far as one sees here."""
    boot = importlib.import_module("ddtree_guard.hooks.boot")
    plugins = boot.excluded_by({"SGLANG_PLUGINS": setting("SGLANG_PLUGINS")})
    if plugins:
        return str(boot.excluded_line(plugins))
    if importlib.util.find_spec("sglang") is None:
        return "SGLang is not installed in this environment"
    if not visible():
        return (
            f"SGLang finds plugins by entry point ({GROUP}) and none is called ddtree_guard; "
            "install it (`pip install .` in a checkout of ddtree-guard) where the server runs"
        )
    return "it ended, or is still loading, before it armed the guard; see the server's log"


def visible() -> bool:
    """Whether SGLang would find the plugin in this environment."""
    points = importlib.metadata.entry_points(group=GROUP)
    return any(point.name == "ddtree_guard" for point in points)
