"""A fork's own backend under the guard: `pytest --ddtree-guard=log examples/test_fork_backend.py`.

SGLang's Triton backend and its subclasses need none of this. Another kind is described and watched.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace as NS
from typing import Any

import numpy as np
import pytest

from ddtree_guard.hooks.adapters import register_adapter, unregister_adapter
from ddtree_guard.hooks.view import View
from ddtree_guard.step import Layout, Step, Widths

RUNNER = NS(is_draft_worker=False, server_args=NS(speculative_num_draft_tokens=8))
VERIFY, LENS = NS(is_target_verify=lambda: True), np.array([40, 12])
BATCH = NS(forward_mode=VERIFY, req_pool_indices=np.array([1, 2]), seq_lens=LENS, spec_info=None)


class CorpBackend:
    """The fork's backend: its query offsets step by a width of its own."""

    def __init__(self, width: int) -> None:
        self.width = width

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.offsets = np.arange(len(forward_batch.seq_lens) + 1) * self.width


def read(view: View) -> Step:
    """Two requests of 17 rows each, and the offsets as the backend made them."""
    layout = Layout(qo_indptr=view.backend.offsets, rows={"q": 34})
    return Step(bs=2, padded_bs=2, widths=Widths(w=17, budget=16), layout=layout)


@pytest.fixture
def launch(ddtree_guard: Any) -> Iterator[Callable[[int], None]]:
    """Builds a watched backend of a width and prepares a launch."""
    adapter = register_adapter("corp", lambda cls: cls is CorpBackend, read)

    def run(width: int) -> None:
        backend = CorpBackend(width)
        ddtree_guard.watch(backend, RUNNER)
        backend.init_forward_metadata(BATCH)

    yield run
    unregister_adapter(adapter)


@pytest.mark.ddtree_guard(steps="required")
def test_the_offsets_follow_the_tree(launch: Callable[[int], None]) -> None:
    launch(17)


@pytest.mark.ddtree_guard(expect=["W1"])
def test_the_block_size_is_caught(launch: Callable[[int], None]) -> None:
    launch(8)
