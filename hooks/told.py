"""What the check inside a graph knows without being told before each replay.

A replay, and the GPU, wait for whatever is launched just before it. NGRAM's links stay where they
are from step to step: once their addresses lie on the device, a graph finds the trees itself, and
nothing is launched as long as bs is the last step's. A step that turns out to be otherwise, when
its replay is queued, is checked again.
"""

from __future__ import annotations

from typing import Any

import torch

# where SGLang says that a forward pass has read the slot table, and that others may write it
READ_DONE = ("shared_read_done_event", "war_fastpath_read_done_event")


class Told:
    """`cell` (2,) int64 on the device: addresses of first children and next siblings; 0 until they
    are known. `live` is how many requests the device knows of, while nothing has to be launched for
    as many; else 0.
    """

    def __init__(self, device: torch.device) -> None:
        self.cell = torch.zeros(2, dtype=torch.int64, device=device)
        self.live = 0
        self.w = 0  # of the graphs that look there
        self._held: tuple[Any, Any] | None = None  # so that nobody else gets their memory
        self._newest: tuple[Any, Any] = (None, None)

    def keeps(self, links: tuple[Any, Any]) -> bool:
        """Whether the trees lie where the device looks for them."""
        return self._held is not None and _same(self._held, links)

    def learn(self, links: tuple[Any, Any], live: int) -> None:
        """A step was launched with these links. Where the one before it had the very same tensors,
        they are there to stay. Queued on the current stream.
        """
        before, self._newest = self._newest, links
        if self.keeps(links):
            self.live = live
        elif before[0] is links[0] and before[1] is links[1] and all(map(_fits, links)):
            for at in (1, 0):  # the graph looks at the first one, and then at both
                self.cell[at].fill_(links[at].data_ptr())
            self._held, self.live = links, live

    def forget(self) -> None:
        """From now on the device has to be told of each step. Queued on the current stream."""
        self.live, self._newest = 0, (None, None)
        if self._held is not None:
            self._held = None
            self.cell.zero_()


def reads_to_the_end(runner: Any) -> bool:
    """Whether SGLang writes no slot of the table until this forward pass has ended: it has not said
    of the newest replay that it may.
    """
    events = [getattr(runner, name) for name in READ_DONE if hasattr(runner, name)]
    return bool(events) and all(event is None for event in events)


def _same(held: tuple[Any, Any], links: tuple[Any, Any]) -> bool:
    return all(
        one is other or (one.data_ptr() == other.data_ptr() and _fits(other))
        for one, other in zip(held, links, strict=True)
    )


def _fits(part: Any) -> bool:
    """Whether the graph can read it by its address alone."""
    return bool(part.dtype == torch.int64 and part.is_contiguous())
