"""Which inputs of a captured graph were written in a step: torch counts the writes to a tensor.

The counter (`_version`) is kept on the host, belongs to a buffer and all its views, and moves with
every copy into it. Kernels write past it, so a buffer whose counter was never seen to move is
not judged, and neither is one of inference mode, which has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Stamps:
    """Counters of a runner's static inputs, noted before they are filled and compared after."""

    def __init__(self) -> None:
        self.moving: set[str] = set()  # inputs that are known to be written by what is counted
        self._noted: tuple[int, dict[str, tuple[int, int]]] | None = None

    def note(self, step_id: int, buffers: Any, names: Iterable[str]) -> None:
        """The buffers are about to be filled for a step. Reads no device memory."""
        noted = {}
        for name in names:
            tensor = getattr(buffers, name, None)
            if tensor is not None and not tensor.is_inference():
                noted[name] = tensor.data_ptr(), tensor._version
        self._noted = step_id, noted

    def __bool__(self) -> bool:
        return self._noted is not None

    def written(self, tensors: Mapping[str, Any]) -> tuple[int, dict[str, int]] | None:
        """(generation of this step, generation of each input), or None where nothing was noted."""
        noted, self._noted = self._noted, None
        if noted is None:
            return None
        now, before = noted
        found = {}
        for name, (pointer, version) in before.items():
            tensor = tensors.get(name)
            if tensor is None or tensor.data_ptr() != pointer or tensor.is_inference():
                continue
            if tensor._version != version:
                self.moving.add(name)
            elif name in self.moving:
                found[name] = now - 1
        return now, found
