"""Binding anew, as an eager step does, asks Triton once per kind of kernel, not once per step."""

from __future__ import annotations

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
