"""A branch of a captured graph: the check runs beside the forward pass and holds nothing up.

In line, at the head of the graph, it does: nothing else runs there, and after a pass over the
model's weights neither its code nor what it reads lies in a cache, so that two microseconds become
more than ten. A branch has to be joined before the capture ends, or the capture fails. SGLang calls
`capture_tail_hooks` of the model runner there, and a warm-up pass, of which it makes two, shows
whether it does: without that the check stays in line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

TAIL = "capture_tail_hooks"
WHOLE = "FullCudaGraphBackend"  # others end a capture within the pass, and begin another one


class Branch:
    """The side stream of one worker's captures."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._side: Any = torch.cuda.Stream(device) if self._cuda else None
        self._sure = False  # the pass before this one came to its end, with a graph in one piece
        self._open = False
        self.joined = 0  # captured passes whose check runs beside them
        self._hooks: Any = None  # the runner's own, while `_lent` takes their place
        self._lent: Any = None

    @contextmanager
    def beside(self, runner: Any) -> Iterator[None]:
        """What is queued within runs beside the rest of the pass that `runner` captures. In line
        where that is not sure, or nothing is captured.
        """
        sure, self._sure, self._open = self._sure, False, False
        if not self._cuda or not isinstance(getattr(runner, TAIL, None), list):
            yield
        elif not torch.cuda.is_current_stream_capturing():
            self._at_tail(runner)
            yield
        elif not sure:
            yield
        else:
            self._at_tail(runner)
            with self.fork():
                yield

    @contextmanager
    def fork(self) -> Iterator[None]:
        """On the side stream, behind all that is queued so far."""
        self._side.wait_stream(torch.cuda.current_stream())
        self._open = True
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """The current stream goes on when the branch has ended."""
        if self._open:
            self._open, self.joined = False, self.joined + 1
            torch.cuda.current_stream().wait_stream(self._side)

    def _at_tail(self, runner: Any) -> None:
        """Be called at the end of this pass, once, behind the runner's own hooks."""
        if getattr(runner, TAIL) is not self._lent:  # else the pass before did not come to its end
            self._hooks = getattr(runner, TAIL)

        def ended(graphs: Any, *rest: Any) -> None:
            setattr(runner, TAIL, self._hooks)
            self._lent = self._hooks = None
            self.join()
            self._sure = type(getattr(graphs, "backend", None)).__name__ == WHOLE

        self._lent = [*self._hooks, ended]
        setattr(runner, TAIL, self._lent)
