"""What a step costs the host, as counts: calls of torch's dispatcher, and launches of our kernels.

`launching_nothing` lets the device checker take the path that it takes on a GPU, on a CPU: kernels
look compiled and do nothing, and events have always happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddtree_guard.device import edges, kernel, launch, protocol


class Dispatches(TorchDispatchMode):  # type: ignore[misc]
    """Counts the calls that go through torch's dispatcher: each costs microseconds on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call."""
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Happened:
    """An event of a stream on which nothing waits."""

    def record(self, stream: Any = None) -> None:
        """Nothing to do."""

    def query(self) -> bool:
        """It has happened."""
        return True


class Launches:
    """How many kernels were launched."""

    count = 0

    def run(self, *args: Any) -> None:
        """One launch."""
        self.count += 1


@contextmanager
def launching_nothing() -> Iterator[Launches]:
    """Our kernels as on a GPU, without what they do."""
    counted = Launches()
    code = SimpleNamespace(run=counted.run, function=0, packed_metadata=())

    def compiled(*args: Any, **options: Any) -> Any:
        return code

    def stream(index: int) -> int:
        return 0

    with ExitStack() as stack:
        for made in (kernel.verify_kernel, edges.close_kernel, edges.before_kernel):
            stack.enter_context(mock.patch.object(made, "device_caches", {}, create=True))
            stack.enter_context(mock.patch.object(made, "warmup", compiled, create=True))
        patches: tuple[Any, ...] = (
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", stream, create=True),
            mock.patch.object(launch, "_raw_stream", stream),
            mock.patch.object(torch.cuda, "current_stream", return_value=None),
            mock.patch("ddtree_guard.device.call._COMPILED", {}),
        )
        for patch in patches:
            stack.enter_context(patch)
        yield counted


def on_stream(check: launch.DeviceCheck) -> None:
    """Let a check on the CPU read its verdicts back as from a GPU."""
    check._cuda, check._arrived = True, [Happened() for _ in range(launch.RING)]


def sign(slots: Any, step: int, live: int) -> None:
    """What the kernels leave of a clean step in `slots`, the verdict as an array; `step` counts
    from 1.
    """
    slots[(step - 1) % protocol.SLOTS, :6] = protocol.MAGIC, step, 0, step, live, step
