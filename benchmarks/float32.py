"""A plugin that lets SGLang serve in float32, for the proof that what differs in bfloat16 is ties.

SGLang's fused norm, rotary and activation kernels take half precision only. With DDTREE_FLOAT32=on
their classes run the PyTorch code that SGLang ships beside them. Target, drafter and plain decoding
get the same treatment.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from ddtree_guard.config import setting

LAYERS = "sglang.srt.layers"
CLASSES = (
    (f"{LAYERS}.layernorm", "RMSNorm"),
    (f"{LAYERS}.activation", "SiluAndMul"),
    (f"{LAYERS}.rotary_embedding.base", "RotaryEmbedding"),
)


def load() -> None:
    """Take PyTorch's way in the classes that the tiny model uses."""
    if setting("DDTREE_FLOAT32") != "on":
        return
    for module, name in CLASSES:
        found = getattr(importlib.import_module(module), name)
        found.forward_cuda = found.forward_native
    norms = importlib.import_module("sglang.srt.models.utils")
    norms.can_use_fused_inplace_qknorm = lambda *args, **kwargs: False
    worker = importlib.import_module("sglang.srt.speculative.dflash_worker_v2").DFlashWorkerV2
    worker._init_fused_kv_helper = _without_fused_kv
    draft = importlib.import_module("sglang.srt.models.dflash").DFlashDraftModel
    draft.forward = _in_float32(draft.forward)


def _in_float32(forward: Any) -> Any:
    """SGLang's eager runner hands embeddings over in bfloat16, whatever the model's type is. The
    tiny model's are bfloat16 numbers, so that nothing is lost.
    """

    @functools.wraps(forward)  # SGLang asks for the signature
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("input_embeds") is not None:
            kwargs["input_embeds"] = kwargs["input_embeds"].float()
        return forward(self, *args, **kwargs)

    return wrapped


def _without_fused_kv(self: Any) -> None:
    self._use_fused_kv_materialize, self._fused_kv_helper = False, None
