"""Launches of our kernels that are bound once and queued many times."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ddtree_guard.device.protocol import HAS_BITS

_COMPILED: dict[Any, Any] = {}
_WRAPPED = ("self", "gridX", "gridY", "gridZ", "stream", "function", "args")


class Call:
    """One launch of `kernel`, compiled now; a call queues it on the current stream.

    `put` replaces arguments for the launches that follow: tensors of the same dtypes, numbers of
    the same width. On CUDA the compiled kernel is called directly with raw addresses: Triton's own
    launch path looks up specialisations in Python on each call, which costs more than the launch.
    """

    __slots__ = ("_args", "_grid", "_head", "_index", "_keep", "_run", "_stream")

    def __init__(
        self, kernel: Any, grid: tuple[int, int], args: tuple[Any, ...], warps: int,
        registers: int = 0, **meta: Any,
    ) -> None:  # fmt: skip
        compiled = _compiled(kernel, grid, args, warps, registers, meta)
        launcher = compiled.run  # loads the module; `function` is set after that
        self._run, head = _entry(launcher, compiled.function)
        head += (compiled.packed_metadata, None, None, None)
        self._head, self._grid = len(head), grid
        tail = (meta[name] for name in kernel.arg_names[len(args) :])
        self._args = [*head, *map(_raw, args), *tail]
        self._keep = list(args)  # the addresses are valid only while somebody holds the tensors
        self._index = args[0].device.index or 0
        self._stream = torch._C._cuda_getCurrentRawStream

    def put(self, at: int, values: Sequence[Any]) -> None:
        """Replace the arguments from number `at` on. The caller keeps tensors alive."""
        raw = [value if value.__class__ is int else value.data_ptr() for value in values]
        if self._keep[at] is not None:
            self._keep[at : at + len(raw)] = [None] * len(raw)
        at += self._head
        self._args[at : at + len(raw)] = raw

    def __call__(self) -> None:
        x, y = self._grid
        self._run(x, y, 1, self._stream(self._index), *self._args)


class _Interpreted(Call):
    """The same through Triton's interpreter."""

    __slots__ = ("_kernel", "_meta")

    def __init__(
        self, kernel: Any, grid: tuple[int, int], args: tuple[Any, ...], warps: int,
        registers: int = 0, **meta: Any,
    ) -> None:  # fmt: skip
        self._kernel, self._grid, self._args, self._meta = kernel, grid, list(args), meta

    def put(self, at: int, values: Sequence[Any]) -> None:
        """Replace the arguments from number `at` on."""
        for n, value in enumerate(values, at):
            flags = getattr(value, "dtype", None) is torch.bool  # bytes, to a kernel
            self._args[n] = value.view(torch.uint8) if flags else value

    def __call__(self) -> None:
        self._kernel[self._grid](*self._args, **self._meta)


def bind(
    kernel: Any, grid: tuple[int, int], args: tuple[Any, ...], warps: int, registers: int = 0,
    **meta: Any,
) -> Call:  # fmt: skip
    """A launch of `kernel` with these arguments; the constexpr ones by name."""
    kind = Call if hasattr(kernel, "device_caches") else _Interpreted
    return kind(kernel, grid, args, warps, registers, **meta)


def _raw(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def _entry(launcher: Any, function: Any) -> tuple[Any, tuple[Any, ...]]:
    """What queues a compiled kernel, and its arguments behind grid and stream.

    Triton 3.6 wraps its launcher in Python to allocate scratch memory, which ours need not.
    """
    kind = inspect.getattr_static(type(launcher), "__call__", None)
    names = tuple(inspect.signature(kind).parameters) if inspect.isfunction(kind) else ()
    scratch = [getattr(launcher, f"{name}_scratch_size", 1) for name in ("global", "profile")]
    if names != _WRAPPED or any(scratch) or not hasattr(launcher, "launch"):
        return launcher, (function,)
    flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    return launcher.launch, (function, *flags, None, None)


def _compiled(
    kernel: Any, grid: tuple[int, int], args: tuple[Any, ...], warps: int, registers: int,
    meta: Mapping[str, Any],
) -> Any:  # fmt: skip
    """The compiled kernel for arguments of these types, whose values it does not depend on."""
    types = tuple(a.dtype if isinstance(a, torch.Tensor) else -(2**31) <= a < 2**31 for a in args)
    key = (kernel, args[0].device, types, warps, registers, *meta.values())
    if key not in _COMPILED:
        options = {"num_warps": warps} | ({"maxnreg": registers} if registers else {})
        if meta.get("HAS", 0) & HAS_BITS["wait"]:
            options["launch_pdl"] = True
        _COMPILED[key] = kernel.warmup(*args, grid=grid, **options, **meta)
    return _COMPILED[key]
