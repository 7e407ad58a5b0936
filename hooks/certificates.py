"""Birth certificates of the captured verify graphs, and each replay beside its own.

Taken when SGLang has built the metadata of a capture; compared with what the builder of a replay
wrote to: addresses only, no device access. A graph captured again (weight update, resume) replaces
its certificate; adaptive speculation has a backend per width, so each state has its own.

What SGLang does not tell is not compared. It stamps no writes: `stamps` says in some steps which
inputs were written (G2); in the others stale values break P1, K3, K4, M2 or an offset rule.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtree_guard.attention.backend import graph_mask
from ddtree_guard.hooks.facts import Facts, facts_of
from ddtree_guard.hooks.observe import verify_width
from ddtree_guard.hooks.stamps import Stamps
from ddtree_guard.hooks.statics import graph_runner
from ddtree_guard.hooks.view import View, lanes_of
from ddtree_guard.step import Graph, Static

INPUTS = ("input_ids", "positions", "seq_lens", "req_pool_indices", "out_cache_loc")
# what the backend's builder writes to, by the names that the metadata has for it
BUILT = {"qo_indptr": "qo_indptr", "kv_indptr": "kv_indptr", "mask_indptr": "mask_indptr",
         "kv_indices": "cuda_graph_kv_indices"}  # fmt: skip
NAMES = (*INPUTS, *BUILT, "mask")


def static_of(tensor: Any, generation: int = -1) -> Static:
    """A buffer as its birth certificate holds it. Reads no device memory."""
    return Static(
        pointer=tensor.data_ptr(),
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        capacity=tensor.untyped_storage().nbytes() // tensor.element_size(),
        generation=generation,
    )


@dataclass(frozen=True, slots=True)
class Certificate:
    """What one graph was captured for: its key, and each static input. Constants: generation -1."""

    key: Mapping[str, Any]
    statics: Mapping[str, Static]

    @classmethod
    def of(
        cls, key: Mapping[str, Any], tensors: Mapping[str, Any], constant: Iterable[str] = ()
    ) -> Certificate:
        """Take the certificate of a capture from the tensors that it reads."""
        fixed = set(constant)
        statics = {
            name: static_of(tensor, -1 if name in fixed else 0)
            for name, tensor in tensors.items()
            if tensor is not None
        }
        return cls(dict(key), statics)

    def replay(
        self,
        key: Mapping[str, Any],
        tensors: Mapping[str, Any],
        written: Mapping[str, int],
        generation: int | None,
        **more: Any,
    ) -> Graph:
        """The Step part of a replay: this certificate beside the live batch.

        `tensors` are what this step's builder wrote to, `written` the generation in which it wrote
        each (absent: this one), `more` further fields of `step.Graph`. Without generations G2
        cannot be evaluated.
        """
        now = -1 if generation is None else generation
        live = {
            name: static_of(tensor, written.get(name, now))
            for name, tensor in tensors.items()
            if tensor is not None
        }
        return Graph(
            born_key=self.key,
            live_key=dict(key),
            born=self.statics,
            live=live,
            generation=generation,
            **more,
        )


@dataclass(slots=True)  # not frozen, as `View`
class Replay:
    """One replay beside its graph's birth certificate. `held` are what was written, by NAMES;
    `pointers` the addresses of the capture, in the same order. `written` is `Stamps.written`.
    """

    certificate: Certificate
    key: Mapping[str, Any]
    held: tuple[Any, ...]
    pointers: tuple[int | None, ...]
    sizes: tuple[int, ...]
    written: tuple[int, dict[str, int]] | None = None

    @property
    def tensors(self) -> dict[str, Any]:
        """What was written, by name."""
        return dict(zip(NAMES, self.held, strict=True))

    @property
    def same(self) -> bool:
        """Whether key and addresses are those of the capture, where that had any."""
        if self.certificate.key != self.key:
            return False
        for tensor, born in zip(self.held, self.pointers, strict=True):
            if born is not None and (tensor is None or tensor.data_ptr() != born):
                return False
        return True

    def graph(self, num_tokens: int) -> Graph:
        """The Step part, for the rules."""
        born = self.certificate.statics
        held = {name: part for name, part in self.tensors.items() if name in born}
        now, written = self.written or (None, {})
        return self.certificate.replay(
            self.key, held, written, now, num_tokens=num_tokens, batch_sizes=self.sizes
        )


@dataclass(slots=True)
class _Graphs:
    facts: Facts
    by_size: dict[int, tuple[Certificate, tuple[int | None, ...]]] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()


class Certificates:
    """Certificates of the graphs of one process, by backend and captured batch size."""

    def __init__(self) -> None:
        self._held: weakref.WeakKeyDictionary[Any, _Graphs] = weakref.WeakKeyDictionary()
        self.stamps = Stamps()

    def take(self, backend: Any, batch: Any, runner: Any, metadata: Any) -> None:
        """Take the certificate of the graph that is about to be captured for `batch`."""
        if backend not in self._held:
            self._held[backend] = _Graphs(facts_of(type(backend)))
        graphs = self._held[backend]
        # the metadata is what the captured kernels read; later the backend's own buffers are asked
        built = {name: getattr(metadata, name, None) for name in BUILT}
        tensors = {**_inputs(batch), **built, "mask": metadata.custom_mask}
        key = key_of(backend, batch, runner, graphs.facts)
        born = Certificate.of(key, tensors, constant=tensors.keys() - INPUTS)
        pointers = tuple(
            born.statics[name].pointer if name in born.statics else None for name in NAMES
        )
        graphs.by_size[key["BS"]] = born, pointers
        graphs.sizes = tuple(sorted(graphs.by_size))

    def replay(self, backend: Any, batch: Any, runner: Any) -> Replay | None:
        """The replay of `batch`, whose metadata has just been built; None without a certificate."""
        graphs = self._held.get(backend)
        found = None if graphs is None else graphs.by_size.get(lanes_of(batch))
        if graphs is None or found is None:
            return None
        certificate, pointers = found
        try:
            held = (*_INPUTS(batch), *_BUILT(backend), graph_mask(backend, graphs.facts))
        except AttributeError:  # some releases lack some
            held = _held(backend, batch, graphs.facts)
        key = key_of(backend, batch, runner, graphs.facts)
        written = self.stamps.written(dict(zip(NAMES, held, strict=True))) if self.stamps else None
        return Replay(certificate, key, held, pointers, graphs.sizes, written)


def wrong_choice(view: View) -> dict[str, Any] | None:
    """The key of the graph that the runner chose, where it is not this batch's; else None."""
    size = None if view.replay is None else replayed_size(view.runner)
    if view.replay is None or size in (None, view.replay.key["BS"]):
        return None
    return {**view.replay.certificate.key, "BS": size}


def key_of(backend: Any, batch: Any, runner: Any, facts: Facts) -> dict[str, Any]:
    """What the captured code branches on, as this batch has it."""
    return {
        "BS": lanes_of(batch),
        "w": verify_width(backend, runner, facts, batch.spec_info),
        "mask": getattr(batch.spec_info, "custom_mask", None) is not None,
    }


def replayed_size(runner: Any) -> int | None:
    """Batch size of the graph that the runner has chosen; None where it counts otherwise."""
    graphs = graph_runner(runner)
    if graphs is None or getattr(graphs, "ragged_verify_mode", None):
        return None
    size = getattr(getattr(graphs, "_replay_graph_key", None), "size", getattr(graphs, "bs", None))
    return size if isinstance(size, int) else None


_INPUTS, _BUILT = operator.attrgetter(*INPUTS), operator.attrgetter(*BUILT.values())


def _held(backend: Any, batch: Any, facts: Facts) -> tuple[Any, ...]:
    """What a replay's builder wrote to, by NAMES; None for what there is not."""
    built = [getattr(backend, own, None) for own in BUILT.values()]
    return (*_inputs(batch).values(), *built, graph_mask(backend, facts))


def _inputs(batch: Any) -> dict[str, Any]:
    return {name: getattr(batch, name, None) for name in INPUTS}
