"""What a model's config.json says, as far as verify steps depend on it. Loads no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_BYTES = 16 << 20
_RECURRENT = ("linear_attention", "mamba", "recurrent", "conv", "gdn", "kda", "lightning")
_STATE_KEYS = (
    "mamba_d_state", "ssm_state_size", "linear_num_key_heads", "linear_conv_kernel_dim",
    "hybrid_override_pattern", "mamba2_d_state", "linear_attn_config",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a model, None where its configuration does not state them. `window` in tokens."""

    context: int | None = None
    vocab: int | None = None
    heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    recurrent: bool | None = None
    block: int | None = None  # of a DFlash drafter


def read_model(folder: str | None) -> Model | None:
    """The model of a local folder, or None where there is no readable config.json in it."""
    try:
        path = Path(folder or "") / "config.json"
        if not folder or not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return None
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return model_of(values) if isinstance(values, dict) else None


def model_of(values: Mapping[str, Any]) -> Model:
    """The model of a configuration. A multimodal one keeps its text model one level down."""
    inner = values.get("text_config")
    text: Mapping[str, Any] = {**values, **inner} if isinstance(inner, dict) else values
    heads, hidden = _whole(text, "num_attention_heads"), _whole(text, "hidden_size")
    dim = _whole(text, "head_dim") or (hidden // heads if hidden and heads else None)
    dim = _whole(text, "v_head_dim") or dim
    drafter = text.get("dflash_config")
    block = _whole(drafter, "block_size") if isinstance(drafter, dict) else None
    return Model(
        context=_whole(text, "max_position_embeddings"),
        vocab=_whole(text, "vocab_size"),
        heads=heads,
        head_dim=dim,
        window=_window(text),
        recurrent=_recurrent(text),
        block=block or _whole(text, "block_size"),
    )


def _whole(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40
    return value if fits else None


def _window(text: Mapping[str, Any]) -> int | None:
    """Tokens of the sliding window, None without one."""
    size = _whole(text, "sliding_window") or _whole(text, "sliding_window_size")
    types = text.get("layer_types")
    if isinstance(types, list) and types:
        return size if any("sliding" in str(kind) for kind in types) else None
    return size if text.get("use_sliding_window", True) else None


def _recurrent(text: Mapping[str, Any]) -> bool:
    types = text.get("layer_types") or text.get("layers_block_type") or ()
    kinds = " ".join(map(str, types)) if isinstance(types, (list, tuple)) else ""
    return any(word in kinds for word in _RECURRENT) or any(text.get(key) for key in _STATE_KEYS)
