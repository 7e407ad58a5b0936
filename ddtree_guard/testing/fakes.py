"""What SGLang's Triton backend asks of the server around it, small enough for a CPU.

SGLang's own classes are used wherever they can be built without a GPU (ForwardBatch, the spec
inputs, the KV index translator); only the model runner, the pools and the process-wide contexts
are stand-ins. None of them computes anything under test.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

TRITON_BACKEND = "sglang.srt.layers.attention.triton_backend"
BUDGET_FIELD = "speculative_ddtree_budget"


def sglang(name: str) -> Any:
    """A module of SGLang by its name below `sglang.srt`, without its import-time warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"sglang.srt.{name}")


class _Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `sgl_kernel` and everything below it; the modules answer any name with a mock."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """A spec for sgl_kernel and its submodules only."""
        if name.partition(".")[0] != "sgl_kernel":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        """An empty module that makes up its attributes."""
        return _Made(spec.name)

    def exec_module(self, module: Any) -> None:
        """Nothing to run."""


class _Made(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


def sglang_with_kernels(name: str) -> Any:
    """Like `sglang`, for modules that import SGLang's compiled kernels and run none of them here.

    The stand-in kernels are gone again when this returns.
    """
    if importlib.util.find_spec("sgl_kernel") is not None:
        return sglang(name)
    finder = _Kernels()
    sys.meta_path.append(finder)
    try:
        return sglang(name)
    finally:
        sys.meta_path.remove(finder)
        for loaded in [m for m in sys.modules if m.partition(".")[0] == "sgl_kernel"]:
            del sys.modules[loaded]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a stand-in server. `width` is D, the server argument; `rows` the pool's requests."""

    rows: int
    context: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    slots: int
    room: int  # columns of req_to_token beyond the context
    block: int = 8
    topk: int = 1
    steps: int = 1
    budget: int | None = None
    algorithm: str = "DFLASH"


class ReqToTokenPool:
    """Token slots per request: a table of `size` rows."""

    def __init__(self, sizes: Sizes) -> None:
        self.size = sizes.rows
        self.req_to_token = torch.zeros(
            (sizes.rows + 1, sizes.context + sizes.room), dtype=torch.int32
        )


class KVPool:
    """Keys and values of one layer. Slot 0 is the one that padding may write."""

    start_layer = 0

    def __init__(self, sizes: Sizes) -> None:
        shape = (sizes.slots, sizes.kv_heads, sizes.head_dim)
        self.k, self.v = torch.zeros(shape), torch.zeros(shape)

    def get_key_buffer(self, layer_id: int) -> Any:
        """The whole key buffer."""
        return self.k

    def get_value_buffer(self, layer_id: int) -> Any:
        """The whole value buffer."""
        return self.v

    def set_kv_buffer(self, layer: Any, loc: Any, k: Any, v: Any, *scales: Any) -> None:
        """Store rows at their slots; newer releases wrap the slots in a KVWriteLoc."""
        slots = getattr(loc, "loc", loc)
        self.k[slots], self.v[slots] = k, v


def model_runner(sizes: Sizes, draft: bool = False) -> Any:
    """A stand-in model runner with fresh pools, of the target or of the draft model."""
    args = server_args(sizes)
    requests, kv = ReqToTokenPool(sizes), KVPool(sizes)
    runner = SimpleNamespace(
        req_to_token_pool=requests,
        token_to_kv_pool=kv,
        token_to_kv_pool_allocator=SimpleNamespace(size=sizes.slots),
        sliding_window_size=None,
        page_size=1,
        server_args=args,
        spec_algorithm=SimpleNamespace(
            name=sizes.algorithm,
            is_dspark=lambda: False,
            is_none=lambda: False,
        ),
        model_config=_model_config(sizes),
        kv_cache_dtype=torch.float32,
        device="cpu",
        gpu_id=0,
        is_draft_worker=draft,
        hybrid_gdn_config=None,
        kimi_linear_config=None,
        linear_attn_model_spec=None,
        decode_num_tokens_per_req=lambda: sizes.width,
    )
    with host_context(args):
        runner.kv_index_translator = _translator(requests.req_to_token, kv)
    return runner


def server_args(sizes: Sizes) -> Any:
    """The server arguments that attention backends read; the budget only where there is one."""
    args = SimpleNamespace(
        speculative_algorithm=sizes.algorithm,
        speculative_num_draft_tokens=sizes.width,
        speculative_dflash_block_size=sizes.block,
        speculative_num_steps=sizes.steps,
        speculative_eagle_topk=sizes.topk,
        triton_attention_num_kv_splits=8,
        triton_attention_split_tile_size=None,
        enable_deterministic_inference=False,
        enable_lean_attention=False,
        disable_cuda_graph=False,
        chunked_prefill_size=-1,
        page_size=1,
    )
    if sizes.budget is not None:
        setattr(args, BUDGET_FIELD, sizes.budget)
    return args


def _model_config(sizes: Sizes) -> Any:
    return SimpleNamespace(
        attention_arch=sglang("configs.model_config").AttentionArch.MHA,
        context_len=sizes.context,
        vocab_size=50_000,
        num_attention_heads=sizes.heads,
        get_max_num_attention_heads=lambda: sizes.heads,
        get_num_kv_heads=lambda *parallel: sizes.kv_heads,
        head_dim=sizes.head_dim,
        v_head_dim=sizes.head_dim,
        swa_v_head_dim=sizes.head_dim,
        is_encoder_decoder=False,
        hf_config=SimpleNamespace(architectures=[]),
    )


def _translator(req_to_token: Any, kv: KVPool) -> Any:
    """SGLang's own slot translator (0.5.18 on), or None where there is none."""
    try:
        module = sglang("mem_cache.kv_index_translator")
    except ImportError:
        return None
    with mock.patch.object(module, "get_parallel", _parallel):
        return module.KVIndexTranslator(
            req_to_token=req_to_token,
            token_to_kv_pool_allocator=SimpleNamespace(),
            token_to_kv_pool=kv,
            page_size=1,
            device="cpu",
        )


def _parallel() -> Any:
    return SimpleNamespace(attn_tp_size=1, attn_dcp_size=1, attn_dcp_rank=0, dcp_enabled=False)


@contextmanager
def host_context(args: Any) -> Iterator[None]:
    """One rank on a host without a GPU: what the Triton backend's module asks process-wide.

    A name that this release's module does not have is left alone; everything is restored. What
    SGLang's code and Triton's interpreter warn about inside is ignored.
    """
    module = sglang(TRITON_BACKEND.removeprefix("sglang.srt."))
    execution = SimpleNamespace(
        kernel=args, deterministic=args, dllm=SimpleNamespace(dllm_algorithm=None)
    )
    answers = {
        "get_parallel": _parallel,
        "get_attention_tp_size": lambda: 1,
        "get_spec": lambda: args,
        "get_exec": lambda: execution,
        "get_schedule": lambda: args,
        "get_device_core_count": lambda gpu_id: 16,
        "cuda_graph_fully_disabled": lambda: args.disable_cuda_graph,
        "check_cuda_graph_backend": lambda phase, backend: False,
        "hybrid_gdn_config": lambda config: None,
        "kimi_linear_config": lambda config: None,
        "linear_attn_model_spec": lambda config: None,
        "mambaish_config": lambda config: None,
    }
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for name, answer in answers.items():
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, answer))
        yield


@contextmanager
def fork_with_budget() -> Iterator[None]:
    """A fork of SGLang whose ServerArgs has the tree budget, for as long as the block lasts."""
    args = sglang("server_args").ServerArgs
    with mock.patch.object(args, BUDGET_FIELD, None, create=True):
        yield


def attention_layer(sizes: Sizes, layer_id: int = 0) -> Any:
    """The attention layer whose rows are computed: causal, no window, no scales."""
    return SimpleNamespace(
        layer_id=layer_id,
        tp_q_head_num=sizes.heads,
        tp_k_head_num=sizes.kv_heads,
        tp_v_head_num=sizes.kv_heads,
        qk_head_dim=sizes.head_dim,
        v_head_dim=sizes.head_dim,
        head_dim=sizes.head_dim,
        scaling=sizes.head_dim**-0.5,
        logit_cap=0.0,
        logit_capping_method="tanh",
        k_scale=None,
        v_scale=None,
        k_scale_float=1.0,
        v_scale_float=1.0,
        sliding_window_size=-1,
        is_cross_attention=False,
        attn_type=sglang("layers.radix_attention").AttentionType.DECODER,
        xai_temperature_len=-1,
        pos_encoding_mode="NONE",
    )
