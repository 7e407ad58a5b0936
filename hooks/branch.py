"""A branch of a captured graph: the check runs beside the forward pass and holds nothing up.

In line, at the head of the graph, it does: nothing else runs there, and after a pass over the
model's weights neither its code nor what it reads lies in a cache. The branch begins there, and the
check waits for no more than it would there, but it is captured last, at the end of the pass: the
nodes that a replay starts with are the pass's own (`benchmarks/replay_time.py` compares the two).

A branch has to be joined before the capture ends, or the capture fails. SGLang calls
`capture_tail_hooks` of the model runner there, and a warm-up pass, of which it makes two, shows
whether it does: without that the check stays in line. So it does where the pass itself writes what
the check reads, and where SGLang keeps to a part of the processor (`enable_pdmux`), in which our
stream is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

TAIL = "capture_tail_hooks"
WHOLE = "FullCudaGraphBackend"  # others end a capture within the pass, and begin another one


class Branch:
    """The side stream of one worker's captures."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._side: Any = torch.cuda.Stream(device) if self._cuda else None
        # whose warm-up pass, just before this one, came to its end, with a graph in one piece, and
        # left what the check reads as it was
        self._sure: Any = None
        self._open = False
        self._waiting: list[Callable[[], None]] = []  # for the end of this pass
        self._launched = False  # upon the branch of this pass
        self.joined = 0  # captured passes with a check beside them
        self.rewritten = False  # the newest warm-up pass has changed what the check reads
        self._give_back: Callable[[], None] | None = None  # while a runner's hooks are lent
        # holds back our exceptions where SGLang calls us
        self.internal: Callable[[], AbstractContextManager[None]] = nullcontext

    def beside(self, runner: Any, launch: Callable[[], None], read: Iterable[Any] = ()) -> None:
        """What `launch` queues runs beside the rest of the pass that `runner` captures: it is
        called when the pass has come to its end. At once, and in line, where that is not sure, or
        nothing is captured. `read`: small tensors that it reads; models that write them in place
        exist, as Gemma 3 does its positions.
        """
        sure, self._sure = self._sure is runner, None
        args = getattr(runner, "server_args", None)
        tail = getattr(runner, TAIL, None)
        if not self._cuda or not isinstance(tail, list) or getattr(args, "enable_pdmux", False):
            launch()
        elif not torch.cuda.is_current_stream_capturing():
            self._at_tail(runner, read)
            launch()
        elif self._forked() or sure:  # forked: by another backend, in this very pass
            if not self._open:
                self._at_tail(runner)
            self._fork()
            self._waiting.append(launch)
        else:
            launch()

    def _fork(self) -> None:
        """The branch goes on behind all that is queued so far."""
        self._side.wait_stream(torch.cuda.current_stream())
        self._open = True

    def launch(self) -> None:
        """Launch what waits for the end of the pass, one after the other, upon the branch."""
        waiting, self._waiting = self._waiting, []
        for check in waiting if self._forked() else ():
            with self.internal(), torch.cuda.stream(self._side):
                check()
                self._launched = True

    def join(self) -> None:
        """Launch what waits; the current stream goes on when the branch has ended."""
        self.launch()
        if self._forked():
            self.joined += self._launched
            torch.cuda.current_stream().wait_stream(self._side)
        self._open = False

    def forget(self) -> None:
        """A pass that did not come to its end leaves nothing to a later one, and keeps nothing."""
        self._waiting, self._open, self._launched = [], False, False
        if self._give_back is not None:
            self._give_back()

    def _forked(self) -> bool:
        """Whether there is a branch to be joined: that of a capture that died is none."""
        if self._open:
            with torch.cuda.stream(self._side):
                self._open = torch.cuda.is_current_stream_capturing()
        return self._open

    def _learn(self, runner: Any, graphs: Any, known: list[tuple[Any, Any]]) -> None:
        """What a warm-up pass has shown. SGLang called us: nothing may go wrong here."""
        with suppress(Exception):
            self.rewritten = not all(torch.equal(*pair) for pair in known)
            whole = type(getattr(graphs, "backend", None)).__name__ == WHOLE
            self._sure = runner if whole and not self.rewritten else None

    def _at_tail(self, runner: Any, read: Iterable[Any] | None = None) -> None:
        """Be called at the end of this pass, once, before the runner's own hooks: they may write
        what the check reads.
        """
        self.forget()
        own, known = getattr(runner, TAIL), [(part, part.clone()) for part in read or ()]

        def ended(graphs: Any, *rest: Any) -> None:
            give_back()
            with self.internal():
                self.join()
            if read is not None:
                self._learn(runner, graphs, known)

        def give_back() -> None:
            self._give_back = None
            if getattr(runner, TAIL, None) is lent:
                own.extend(lent[count:])  # what others have added since
                setattr(runner, TAIL, own)

        lent = [ended, *own]
        count = len(lent)
        self._give_back = give_back
        setattr(runner, TAIL, lent)
