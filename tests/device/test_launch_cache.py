"""Binding anew, as an eager step does, asks Triton once per kind of kernel, not once per step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddtree_guard.device import call


class Kernel:
    """A stand-in for a jitted kernel on a device: counts what it compiles and what it runs."""

    device_caches: dict[int, Any] = {}  # noqa: RUF012
    arg_names = ("tensor", "count", "W")

    def __init__(self) -> None:
        self.compiled = 0
        self.ran: list[tuple[Any, ...]] = []

    def warmup(self, *args: Any, **options: Any) -> Any:
        self.compiled += 1
        made = self

        class Compiled:
            function, packed_metadata = "function", "packed"

            @staticmethod
            def run(*call: Any) -> None:
                made.ran.append(call)

        return Compiled


def test_new_addresses_and_numbers_do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call.torch._C, "_cuda_getCurrentRawStream", lambda at: 7, raising=False)
    monkeypatch.setattr(call, "_COMPILED", {})
    kernel = Kernel()
    tensors = [torch.zeros(4, dtype=torch.int32) for _ in range(3)]
    for at, tensor in enumerate(tensors):
        call.bind(kernel, (2, 3), (tensor, at), 4, W=16)()
    assert kernel.compiled == 1
    assert [ran[-3] for ran in kernel.ran] == [tensor.data_ptr() for tensor in tensors]
    assert [ran[-2:] for ran in kernel.ran] == [(0, 16), (1, 16), (2, 16)]


@pytest.mark.parametrize("kind", ["dtype", "wide number", "meta", "warps"])
def test_another_kind_compiles(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(call.torch._C, "_cuda_getCurrentRawStream", lambda at: 7, raising=False)
    monkeypatch.setattr(call, "_COMPILED", {})
    kernel = Kernel()
    call.bind(kernel, (1, 1), (torch.zeros(4, dtype=torch.int32), 1), 4, W=16)
    dtype = torch.int64 if kind == "dtype" else torch.int32
    number = 2**40 if kind == "wide number" else 1
    call.bind(
        kernel, (1, 1), (torch.zeros(4, dtype=dtype), number), 8 if kind == "warps" else 4,
        W=32 if kind == "meta" else 16,
    )  # fmt: skip
    assert kernel.compiled == 2


class Wrapped:
    """A launcher as Triton 3.6 has it: Python around the call that queues the kernel."""

    launch_cooperative_grid, launch_pdl = "cooperative", "pdl"
    global_scratch_size = profile_scratch_size = 0

    def __init__(self, ran: list[tuple[Any, ...]]) -> None:
        self.launch = lambda *call: ran.append(call)

    def __call__(
        self, gridX: int, gridY: int, gridZ: int, stream: int, function: Any, *args: Any
    ) -> None:
        raise AssertionError("the wrapper costs more than the check may")


def test_the_wrapper_of_a_launcher_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call.torch._C, "_cuda_getCurrentRawStream", lambda at: 7, raising=False)
    monkeypatch.setattr(call, "_COMPILED", {})
    kernel = Kernel()
    tensor = torch.zeros(4, dtype=torch.int32)
    made = SimpleNamespace(run=Wrapped(kernel.ran), function="function", packed_metadata="packed")
    monkeypatch.setattr(kernel, "warmup", lambda *args, **options: made)
    bound = call.bind(kernel, (2, 3), (tensor, 5), 4, W=16)
    bound()
    head = (2, 3, 1, 7, "function", "cooperative", "pdl", None, None, "packed", None, None, None)
    assert kernel.ran == [(*head, tensor.data_ptr(), 5, 16)]


def test_a_launcher_with_scratch_memory_keeps_its_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Wrapped([])
    launcher.global_scratch_size = 8
    assert call._entry(launcher, "function") == (launcher, ("function",))
