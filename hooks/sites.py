"""Every place where the guard hooks into SGLang, as data: target, expected signature, why.

A site has alternatives because releases differ; it is hooked when one of them is. Classes that
are only known at run time (the live backend, the live worker) get their patches when they appear,
so a fork's own classes are hooked like SGLang's.

Wrappers call the original first or last and return what it returned, always; the guard's part
runs inside `ServerGuard`, which keeps its faults to itself.
"""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

from ddtree_guard.hooks.flight import crash_hook
from ddtree_guard.hooks.hook import Hook
from ddtree_guard.hooks.patching import Original, Patch
from ddtree_guard.hooks.runtime import ServerGuard

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.init_model_worker"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_SPEC = "sglang.srt.speculative"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor"
_RESULTS_V1 = "sglang.srt.managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin"


def scheduler_hooks(guard: ServerGuard) -> tuple[Hook, ...]:
    """Sites whose targets exist before any model is built."""
    return (_init_hook(guard), *_resolve_hooks(guard), crash_hook(guard))


def _init_hook(guard: ServerGuard) -> Hook:
    def built(original: Original) -> Any:
        @functools.wraps(original.value)
        def init_attention_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original.value(self, *args, **kwargs)
            for backend in leaves(self.attn_backend):
                adopt(guard, backend, self)
            return result

        return init_attention_backend

    def created(original: Original) -> Any:
        @functools.wraps(original.value)
        def get_attention_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
            backend = original.value(self, *args, **kwargs)
            for leaf in leaves(backend):
                adopt(guard, leaf, self)
            return backend

        return get_attention_backend

    why = "learns which backend works for which runner, before graphs are captured"
    adaptive = "adaptive speculation builds further backends for other widths at run time"
    return Hook(
        "init",
        (
            Patch(f"{_RUNNER}.init_attention_backends", why, built, ("self",), False),
            Patch(f"{_RUNNER}.init_attention_backend", why, built, ("self",), False),
            Patch(f"{_RUNNER}._get_attention_backend", adaptive, created, ("self",), False),
        ),
    )


def leaves(backend: Any) -> list[Any]:
    """The backends that build metadata: those below a prefill/decode or two-batch wrapper."""
    inner = [
        getattr(backend, name, None) for name in ("prefill_backend", "decode_backend", "primary")
    ]
    found = [leaf for part in inner if part is not None for leaf in leaves(part)]
    return found or [backend]


def adopt(guard: ServerGuard, backend: Any, runner: Any) -> None:
    """Let the guard see this backend's launches."""
    guard.adopt(backend, runner)
    with guard.fuses.internal("init"):
        if not runner.is_draft_worker:
            guard.install(backend_hooks(guard, type(backend)))
            if guard.shadow.on:
                guard.install(shadow_hooks(guard, type(backend), type(runner)))


def backend_hooks(guard: ServerGuard, backend_class: type) -> tuple[Hook, ...]:
    """Sites of a live backend's class, on the class that SGLang (or the fork) made."""
    return hooks_at(guard, _owner(backend_class))


def hooks_at(guard: ServerGuard, path: str) -> tuple[Hook, ...]:
    """Sites of the backend class at a dotted path."""
    return (
        Hook("build", (_eager(guard, path),)),
        Hook("replay", (_out_graph(guard, path), _replay_0512(guard, path))),
        Hook("capture", (_in_graph(guard, path), _capture_0512(guard, path)), required=False),
    )


def _owner(made: type) -> str:
    """The dotted name of a class, or of its first base that is not this package's."""
    owner = next(c for c in made.__mro__ if not c.__module__.startswith("ddtree_guard."))
    return f"{owner.__module__}.{owner.__qualname__}"


def shadow_hooks(guard: ServerGuard, backend_class: type, runner_class: type) -> tuple[Hook, ...]:
    """Sites of shadow mode: a layer's attention, and the end of a forward pass."""

    def attention(original: Original) -> Any:
        @functools.wraps(original.value)
        def forward_extend(
            self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kw: Any
        ) -> Any:
            out = original.value(self, q, k, v, layer, forward_batch, *args, **kw)
            if forward_batch.forward_mode.is_target_verify():
                given = {**kw, **dict(zip(("save_kv_cache", "sinks"), args, strict=False))}
                guard.shadow.attend(self, q, k, layer, forward_batch, out, given)
            return out

        return forward_extend

    def forward_pass(original: Original) -> Any:
        @functools.wraps(original.value)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original.value(self, *args, **kwargs)
            guard.shadow.ran(self)
            return result

        return forward

    layer = "has a layer's queries and rows in hand, in eager steps and while graphs are captured"
    after = "a replay is queued, and nothing is committed yet: the recorded layer is compared"
    names = ("self", "q", "k", "v", "layer", "forward_batch")
    return (
        Hook(
            "attend",
            (Patch(f"{_owner(backend_class)}.forward_extend", layer, attention, names, False),),
            required=False,
        ),
        Hook(
            "ran",
            (Patch(f"{_owner(runner_class)}.forward", after, forward_pass, ("self",), False),),
            required=False,
        ),
    )


def _eager(guard: ServerGuard, path: str) -> Patch:
    def wrap(original: Original) -> Any:
        @functools.wraps(original.value)
        def init_forward_metadata(self: Any, forward_batch: Any, *args: Any, **kw: Any) -> Any:
            guard.depth += 1
            try:
                result = original.value(self, forward_batch, *args, **kw)
            finally:
                guard.depth -= 1
            if not guard.depth:
                guard.built(self, forward_batch, "eager")
            return result

        return init_forward_metadata

    why = "offsets, mask and KV indices of an eager launch are complete"
    return Patch(f"{path}.init_forward_metadata", why, wrap, ("self", "forward_batch"), False)


def _out_graph(guard: ServerGuard, path: str) -> Patch:
    def wrap(original: Original) -> Any:
        @functools.wraps(original.value)
        def init_forward_metadata_out_graph(
            self: Any, forward_batch: Any, in_capture: bool = False, *args: Any, **kw: Any
        ) -> Any:
            guard.depth += 1
            try:
                result = original.value(self, forward_batch, in_capture, *args, **kw)
            finally:
                guard.depth -= 1
            if not guard.depth and in_capture:
                guard.captured(self, forward_batch)
            elif not guard.depth:
                guard.built(self, forward_batch, "graph")
            return result

        return init_forward_metadata_out_graph

    return Patch(
        f"{path}.init_forward_metadata_out_graph",
        "the static buffers of a captured graph hold this replay's batch",
        wrap,
        ("self", "forward_batch", "in_capture"),
        False,
    )


def _in_graph(guard: ServerGuard, path: str) -> Patch:
    def wrap(original: Original) -> Any:
        @functools.wraps(original.value)
        def init_forward_metadata_in_graph(self: Any, forward_batch: Any) -> Any:
            result = original.value(self, forward_batch)
            guard.in_graph(self, forward_batch)
            return result

        return init_forward_metadata_in_graph

    return Patch(
        f"{path}.init_forward_metadata_in_graph",
        "SGLang calls it inside the captured region, so a check queued here runs in every replay",
        wrap,
        ("self", "forward_batch"),
        False,
    )


_CAPTURE_0512 = (
    "self", "bs", "num_tokens", "req_pool_indices", "seq_lens", "encoder_lens", "forward_mode",
    "spec_info",
)  # fmt: skip
_REPLAY_0512 = (
    "self", "bs", "req_pool_indices", "seq_lens", "seq_lens_sum", "encoder_lens", "forward_mode",
    "spec_info", "seq_lens_cpu",
)  # fmt: skip


def _capture_0512(guard: ServerGuard, path: str) -> Patch:
    def wrap(original: Original) -> Any:
        @functools.wraps(original.value)
        def capture(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original.value(self, *args, **kwargs)
            given = _named(_CAPTURE_0512, args, kwargs)
            guard.captured(self, SimpleNamespace(**given))
            return result

        return capture

    return Patch(
        f"{path}.init_forward_metadata_capture_cuda_graph",
        "the metadata that every replay of this batch size reads exists",
        wrap,
        _CAPTURE_0512,
        False,
    )


def _replay_0512(guard: ServerGuard, path: str) -> Patch:
    def wrap(original: Original) -> Any:
        @functools.wraps(original.value)
        def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original.value(self, *args, **kwargs)
            guard.replayed(self, _named(_REPLAY_0512, args, kwargs))
            return result

        return replay

    return Patch(
        f"{path}.init_forward_metadata_replay_cuda_graph",
        "the static buffers of a captured graph hold this replay's batch",
        wrap,
        _REPLAY_0512,
        False,
    )


def _named(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, without self."""
    return {**dict(zip(names[1:], args, strict=False)), **kwargs}


def worker_hook(guard: ServerGuard, worker: Any) -> Hook:
    """The live worker's step: who is in the batch, and what came out."""
    owner = next(c for c in type(worker).__mro__ if "forward_batch_generation" in vars(c))

    def wrap(original: Original) -> Any:
        @functools.wraps(original.value)
        def forward_batch_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
            guard.begin(args[0] if args else next(iter(kwargs.values()), None))
            result = original.value(self, *args, **kwargs)
            guard.end(result)
            return result

        return forward_batch_generation

    target = f"{owner.__module__}.{owner.__qualname__}.forward_batch_generation"
    why = "knows the requests of a step without asking the device, and ends the step"
    return Hook("worker", (Patch(target, why, wrap, ("self",), False),))


def verify_hook(guard: ServerGuard, worker: Any) -> Hook:
    """The tree walk, where the live worker's modules call one. DFLASH has none: its accepted
    lengths come with the worker's result.
    """

    def wrap(original: Original) -> Any:
        @functools.wraps(original.value)
        def eagle_sample(*args: Any, **kwargs: Any) -> Any:
            result = original.value(*args, **kwargs)
            batch = args[1] if len(args) > 1 else kwargs.get("batch")
            guard.accepted(batch, *result)
            return result

        return eagle_sample

    why = "sees the accepted path and the target's tokens before anything is committed"
    names = ("verify_input", "batch", "logits_output")
    modules = [c.__module__ for c in type(worker).__mro__]
    # only what the process has imported: a walk that is not loaded is not used
    modules += [f"{_SPEC}.eagle_worker_common"]
    found = [
        Patch(f"{name}.eagle_sample", why, wrap, names, False)
        for name in dict.fromkeys(modules)
        if hasattr(sys.modules.get(name), "eagle_sample")
    ]
    method = f"{_SPEC}.eagle_info_v2.EagleVerifyInputV2Mixin.sample"
    if f"{_SPEC}.eagle_info_v2" in sys.modules:
        found.append(Patch(method, why, wrap, ("self", "batch", "logits_output"), False))
    return Hook("verify", tuple(found), required=False)


def _resolve_hooks(guard: ServerGuard) -> tuple[Hook, ...]:
    why = "SGLang has waited for the step's tokens here and has sent none of them"

    def resolve(commits: bool) -> Any:
        def wrap(original: Original) -> Any:
            @functools.wraps(original.value)
            def resolve_tokens(self: Any, result: Any, batch: Any) -> Any:
                record = guard.resolve(result)
                tokens = original.value(self, result, batch)
                if record is not None:
                    guard.flight.accepted(record, tokens)
                    if commits:
                        guard.commit(record, tokens)
                return tokens

            return resolve_tokens

        return wrap

    def one_by_one(original: Original) -> Any:
        @functools.wraps(original.value)
        def process_batch_result_decode(self: Any, batch: Any, result: Any) -> Any:
            if not getattr(batch, "is_spec_v2", False):
                guard.resolve(result)
            return original.value(self, batch, result)

        return process_batch_result_decode

    names = ("self", "result", "batch")
    v2 = f"{_RESULTS}.SchedulerBatchResultProcessor._resolve_spec_v2_tokens"
    # 0.5.12 counts the bonus token of committed KV one step earlier, so lengths are not compared
    v1 = f"{_RESULTS_V1}._resolve_spec_overlap_tokens"
    return (
        Hook(
            "resolve",
            (
                Patch(v2, why, resolve(commits=True), names, False),
                Patch(v1, why, resolve(commits=False), names, False),
            ),
        ),
        Hook(
            "resolve-v1",
            (
                Patch(
                    f"{_RESULTS_V1}.process_batch_result_decode",
                    "workers of 0.5.12 without overlap have waited themselves",
                    one_by_one,
                    ("self", "batch", "result"),
                    False,
                ),
            ),
            required=False,
        ),
    )
