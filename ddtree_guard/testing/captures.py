"""Captures without a GPU: two streams that note what is queued on them, in the place of CUDA's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class FullCudaGraphBackend:
    """Named like SGLang's, whose captures are in one piece."""


class Stream:
    """Notes what waits for what."""

    def __init__(self, name: str, queued: list[str]) -> None:
        self.name, self.queued, self.capturing = name, queued, False

    def wait_stream(self, other: Stream) -> None:
        """A stream that waits for a captured one is captured with it."""
        assert other.capturing or not self.capturing  # else it would leave the capture
        self.queued.append(f"{self.name} waits for {other.name}")
        self.capturing = other.capturing


class Streams:
    """The stream that SGLang captures, and the one that a `Branch` makes. `replace`, as pytest's
    `monkeypatch.setattr`, puts them in the place of torch.cuda's.
    """

    def __init__(self, replace: Callable[[Any, str, Any], None]) -> None:
        self.queued: list[str] = []
        self.main, self.side = Stream("main", self.queued), Stream("side", self.queued)
        self.current = self.main
        replace(torch.cuda, "Stream", lambda device: self.side)
        replace(torch.cuda, "current_stream", lambda: self.current)
        replace(torch.cuda, "stream", self._on)
        replace(torch.cuda, "is_current_stream_capturing", lambda: self.current.capturing)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        self.current, before = stream, self.current
        try:
            yield
        finally:
            self.current = before

    def begin(self, capturing: bool) -> None:
        """Another pass; whatever was captured before has come to its end."""
        self.queued.clear()
        self.main.capturing, self.side.capturing = capturing, False

    def queue(self, what: str) -> None:
        """Something on the stream that is current."""
        self.queued.append(f"{what} on {self.current.name}")
