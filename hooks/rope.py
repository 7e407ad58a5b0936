"""The rotary tables of a model: how many positions can be looked up in them."""

from __future__ import annotations

import weakref
from typing import Any

_TABLES: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def rope_rows(runner: Any) -> int | None:
    """Rows of the shortest rotary table beside an attention layer of the runner's model; None where
    none is seen. Tables of a vision tower stand beside no such layer.
    """
    model = getattr(runner, "model", None)
    if not callable(getattr(model, "modules", None)):
        return None
    # the tables themselves are asked anew: SGLang lets them grow
    tables = [getattr(part, "cos_sin_cache", None) for part in _holders(model)]
    return min((int(table.shape[0]) for table in tables if table is not None), default=None)


def _holders(model: Any) -> list[Any]:
    """The rotary embeddings, which layers share. Looked for once: a model has many parts."""
    try:
        if model in _TABLES:
            return _TABLES[model]
        found = _TABLES[model] = _search(model)
    except TypeError:  # not hashable: no torch module
        return _search(model)
    return found


def _search(model: Any) -> list[Any]:
    beside = [
        getattr(part, "rotary_emb", None)
        for part in model.modules()
        if any(type(child).__name__ == "RadixAttention" for child in part.children())
    ]
    return list({id(part): part for part in beside if part is not None}.values())
