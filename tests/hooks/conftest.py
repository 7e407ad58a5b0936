"""What the tests of the server's hooks share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree_guard import render
from ddtree_guard.config import Config, Mode

# what stock's own buffers get wrong on sound steps, found once: no room for the tree columns
LATENT = {"M5"}


class Store:
    """A key-value store of one process, as torch.distributed has one."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.held[key] = value

    def get(self, key: str) -> bytes:
        return self.held[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.held for key in keys)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards leave evidence and dumps in the working directory unless told otherwise."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def with_device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes guards whose checker is the device's, on the CPU."""
    from ddtree_guard.hooks import arm

    made = arm.ServerGuard

    def make(*args: Any, **kwargs: Any) -> Any:
        guard = made(*args, **kwargs)
        guard.checker = arm.device_checker(guard)
        monkeypatch.setattr(guard.checker, "self_test", lambda: "")  # has its own tests
        return guard

    return make


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts guarded servers, their dumps in `tmp_path`; their hooks are gone afterwards."""
    from ddtree_guard.hooks import arm
    from ddtree_guard.testing.server import MiniServer

    def make(case: Any, choice: Any = "auto", **config: Any) -> Any:
        server = MiniServer(case, choice)
        guard = server.arm(Config(**{"mode": Mode.LOG, "dump_dir": tmp_path, **config}))
        assert guard is not None
        return server, guard

    yield make
    while arm.GUARDS:
        assert arm.GUARDS.pop().remove() == ()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, str]]]:
    """The findings in the log so far, as fields, latent ones left out."""
    caplog.set_level(logging.INFO, "ddtree_guard")

    def read() -> list[dict[str, str]]:
        found = [render.parse_line(text) for text in caplog.messages]
        return [line for line in found if line and line["rule"] not in LATENT]

    return read
