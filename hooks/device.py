"""The device check inside SGLang's graphs: operands from its buffers, birth certificates, replays.

SGLang calls `init_forward_metadata_in_graph(forward_batch)` of the attention backend inside the
captured region; the check goes there and reads the very buffers that the attention kernel reads.
Everything else happens eagerly: warm-up before capture, and trees, K3 and K4 before a replay. Where
SGLang records "read done" for `req_to_token` before the replay, a read inside races; where it does
not and the trees stay in their place, the graph does that too (told.py).

How a graph knows bs: the guard's own `live_count`, one int32 on the device, that what is launched
before a replay writes. SGLang has no such buffer; it pads lanes by value (length 1, slot 0).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ddtree_guard.device.before import Before
from ddtree_guard.device.launch import DeviceCheck
from ddtree_guard.device.operands import Buffers, Operands, Shape
from ddtree_guard.device.pack import Pack
from ddtree_guard.hooks.branch import Branch
from ddtree_guard.hooks.certificates import Certificate

TREE = (
    "tokens", "parents", "depths", "sizes", "retrieve_index", "retrieve_next_token",
    "retrieve_next_sibling",
)  # fmt: skip


def buffers_of_backend(
    metadata: Any, batch: Any, live_count: Any, tree: Mapping[str, Any]
) -> Buffers:
    """What SGLang's Triton backend is about to read for a verify batch.

    `metadata` is the backend's ForwardMetadata, `batch` its ForwardBatch; `tree` maps names of
    `step.Tree` to static tensors of BS lanes.
    """
    return Buffers(
        live_count=live_count,
        lens=batch.seq_lens,
        qo_indptr=metadata.qo_indptr,
        kv_indptr=metadata.kv_indptr,
        mask_indptr=metadata.mask_indptr,
        mask=metadata.custom_mask,
        positions=batch.positions,
        out_cache_loc=batch.out_cache_loc,
        kv_indices=metadata.kv_indices,
        **{name: tree.get(name) for name in TREE},
    )


@dataclass(slots=True)
class GraphChecks:
    """The device check of one worker's verify graphs, by SGLang's graph key."""

    check: DeviceCheck
    live_count: Any = None
    certificates: dict[Hashable, Certificate] = field(default_factory=dict)
    branch: Branch = field(init=False)
    _operands: dict[Hashable, Operands] = field(default_factory=dict)
    _inside: dict[Hashable, Operands] = field(default_factory=dict)
    _befores: dict[Hashable, Before] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.live_count = torch.zeros(1, dtype=torch.int32, device=self.check.device)
        self.branch = Branch(self.check.device)

    def before_capture(
        self, key: Hashable, parts: Mapping[str, Any], buffers: Buffers, shape: Shape,
        table: tuple[Any, Any] | None = None, pack: Pack | None = None,
        inside: Operands | None = None,
    ) -> None:  # fmt: skip
        """Bind, compile and warm the kernels, and take the certificate. Outside the capture.

        `parts` is the key as names and values; `table` is (req_to_token, its rows per lane); `pack`
        is what the check packs for the recorder; `inside` goes before the check, into the graph. A
        graph captured again replaces its certificate.
        """
        self._operands[key] = self.check.bind(buffers, shape, pack=pack)
        self._inside.pop(key, None)
        if inside is not None:
            self._inside[key] = inside
        if table is not None:
            self._befores[key] = self.check.bind_before(buffers, shape, *table)
            self._befores[key](0)
        self.check.check(self._operands[key])
        self.check.close()
        tensors = {name: getattr(buffers, name) for name in Buffers.__dataclass_fields__}
        self.certificates[key] = Certificate.of(parts, tensors, constant=("live_count",))

    def in_graph(self, key: Hashable) -> None:
        """Record the check; call it from `init_forward_metadata_in_graph`."""
        if key in self._inside:
            self._inside[key].launch()
        self.check.check(self._operands[key])

    def captured(self) -> None:
        """All graphs are captured: forget what warm-up batches left in the verdict, and what a
        capture left that died.
        """
        self.check.reset()
        self.branch.forget()

    def before_replay(self, key: Hashable, bs: int) -> None:
        """Tell the graph how many requests are live, and check slots against the table."""
        self._befores[key](bs)

    def forget(self) -> None:
        """Drop all graphs: weight update, resume, or another speculation width."""
        self.certificates.clear()
        self._operands.clear()
        self._inside.clear()
        self._befores.clear()
