"""`Deployment`: the configuration of a server, whether parsed here or told by `/server_info`.

Only the named fields are taken from what a server says. It also tells its API keys and paths, and
those are not looked at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtree_guard.doctor.model import Model
from ddtree_guard.hooks.contracts import row_of
from ddtree_guard.hooks.facts import ALGORITHM, BUDGET, VARIES

# What the doctor reads of SGLang's server arguments. Nothing else leaves the child that parses.
FIELDS = (
    "attention_backend", "prefill_attention_backend", "decode_attention_backend",
    "speculative_attention_mode", "speculative_algorithm", "speculative_num_draft_tokens",
    "speculative_dflash_block_size", "speculative_num_steps", "speculative_eagle_topk",
    "speculative_adaptive", "speculative_draft_window_size", "page_size", "context_length",
    "cuda_graph_max_bs", "cuda_graph_max_bs_decode", "cuda_graph_bs", "cuda_graph_config",
    "disable_cuda_graph", "max_running_requests", "tp_size", "dp_size", "pp_size", "dcp_size",
    "enable_dp_attention", "enable_lora", "lora_paths", "disaggregation_mode",
    "enable_two_batch_overlap", "enable_pdmux", "triton_attention_num_kv_splits", "kv_canary",
    "skip_tokenizer_init", "disable_radix_cache", "grammar_backend", BUDGET, VARIES,
)  # fmt: skip
MOST = 1 << 31
MOST_ROWS = 1 << 13  # rows of a request, as in `checks.common.MAX_WIDTH`
MOST_LANES = 1 << 14  # requests of a batch: a stranger's number must not become an array
_BLOCK = ("DFLASH", "DSPARK", ALGORITHM)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A configuration; None where it is not known, with the reason in `unknown`.

    `w` is the number of rows that a verify step has per request, `declared` SGLang's D. `lanes` is
    the largest captured batch. `graphs` False means that nothing is captured. `arguments` are the
    raw values of FIELDS.
    """

    release: str
    algorithm: str = ""
    backend: str | None = None
    w: int | None = None
    declared: int | None = None
    block: int | None = None
    budget: int | None = None
    steps: int | None = None
    topk: int | None = None
    varies: bool = False
    page_size: int | None = None
    context: int | None = None
    draft_context: int | None = None
    lanes: int | None = None
    graphs: bool | None = None
    kv_splits: int = 8
    kv_canary: str = "none"
    tp_size: int = 1
    model: Model = field(default_factory=Model)
    model_known: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def ddtree(self) -> bool:
        """Whether it runs a DDTree algorithm: SGLang's name may carry a fork's prefix."""
        return ALGORITHM in self.algorithm

    @property
    def tree(self) -> bool | None:
        """Whether a verify step can have branches; None where that is not known."""
        if not self.algorithm or row_of(self.algorithm).chain:
            return False
        if self.ddtree or self.algorithm == "NGRAM":
            return True
        return None if self.topk is None else self.topk > 1

    @property
    def heads_per_rank(self) -> int | None:
        """Attention heads of one tensor-parallel rank."""
        heads = self.model.heads
        return None if heads is None else max(heads // max(self.tp_size, 1), 1)


def deployment_of(
    values: Mapping[str, Any],
    release: str,
    model: Model | None = None,
    draft: Model | None = None,
) -> Deployment:
    """The deployment of server arguments by name. Values of a wrong type count as not known."""
    read = _Reader(values)
    algorithm = read.word("speculative_algorithm").upper()
    algorithm = {"NEXTN": "EAGLE", "NONE": ""}.get(algorithm, algorithm)
    budget = read.whole(BUDGET, MOST_ROWS)
    block = read.whole("speculative_dflash_block_size", MOST_ROWS)
    if block is None and draft is not None and algorithm in _BLOCK:
        block = draft.block
    declared = read.whole("speculative_num_draft_tokens", MOST_ROWS)
    if declared is None and algorithm in ("DFLASH", ALGORITHM):
        declared = block  # SGLang's DFLASH handler makes it so
    lanes, graphs = _graphs(read)
    made = Deployment(
        release=release,
        algorithm=algorithm,
        backend=_verify_backend(read),
        declared=declared,
        block=block,
        budget=budget,
        steps=read.whole("speculative_num_steps"),
        topk=read.whole("speculative_eagle_topk"),
        varies=values.get(VARIES) is True,
        page_size=read.whole("page_size"),
        context=read.whole("context_length") or (model.context if model else None),
        draft_context=draft.context if draft else None,
        lanes=lanes,
        graphs=graphs,
        kv_splits=read.whole("triton_attention_num_kv_splits") or 8,
        kv_canary=read.word("kv_canary") or "none",
        tp_size=read.whole("tp_size") or 1,
        model=model or Model(),
        model_known=model is not None,
        arguments={name: values[name] for name in FIELDS if name in values},
    )
    w = _width(made)
    return dataclasses.replace(made, w=w, unknown=_unknown(made, w, read.odd))


class _Reader:
    """Reads values of a stranger. `odd` notes what was there and could not be used."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.odd: dict[str, str] = {}

    def whole(self, name: str, most: int = MOST) -> int | None:
        """A positive whole number below `most`."""
        value = self.values.get(name)
        if value is None or value is False:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < most:
            self.odd[name] = f"{name}={str(value)[:40]!r} is no whole number from 1 to {most - 1}"
            return None
        return value

    def word(self, name: str) -> str:
        """A short name, or an empty string."""
        value = self.values.get(name)
        if value is None:
            return ""
        if not isinstance(value, str) or len(value) > 60:
            self.odd[name] = f"{name}={str(value)[:40]!r} is not a name"
            return ""
        return value


def _verify_backend(read: _Reader) -> str | None:
    """The attention backend that verifies: with two of them, the one that speculation is set to."""
    decode = read.word("speculative_attention_mode") == "decode"
    side = "decode_attention_backend" if decode else "prefill_attention_backend"
    return (read.word(side) or read.word("attention_backend") or None) or None


def _graphs(read: _Reader) -> tuple[int | None, bool | None]:
    """(largest captured batch, whether decode graphs are captured)."""
    config = read.values.get("cuda_graph_config")
    decode = config.get("decode") if isinstance(config, Mapping) else None
    sizes: list[int] = []
    off = read.values.get("disable_cuda_graph") is True
    if isinstance(decode, Mapping):
        inner = _Reader(decode)
        off = off or decode.get("backend") == "disabled"
        sizes += _sizes(decode.get("bs")) or [inner.whole("max_bs", MOST_LANES) or 0]
    else:
        sizes += _sizes(read.values.get("cuda_graph_bs"))
        names = ("cuda_graph_max_bs", "cuda_graph_max_bs_decode")
        sizes = sizes or [read.whole(name, MOST_LANES) or 0 for name in names]
    if off:
        return None, False
    most = max(sizes, default=0)
    running = read.whole("max_running_requests")
    if most and running:
        most = min(most, running)
    return most or None, True if most else None


def _sizes(value: Any) -> list[int]:
    fine = isinstance(value, (list, tuple)) and len(value) < 100_000
    return [n for n in value if type(n) is int and 0 < n < MOST_LANES] if fine else []


def _width(made: Deployment) -> int | None:
    """Rows per request of a verify step, None where the configuration does not say."""
    if not made.algorithm:
        return None
    if not made.ddtree:
        return made.declared
    if made.budget is not None:
        return made.budget + 1
    # D = max(B + 1, b): a server of this package that keeps its budget to itself
    if made.declared is not None and made.block is not None and made.declared > made.block:
        return made.declared
    return None


def _unknown(made: Deployment, w: int | None, odd: Mapping[str, str]) -> dict[str, str]:
    """Field to the reason why it is not known, for fields that a prediction would need."""
    found = dict(odd)
    if not made.algorithm:
        return found
    if made.backend is None:
        found["attention_backend"] = "not stated; SGLang chooses it by GPU and model"
    if w is None:
        found["verify width"] = (
            "no tree budget is stated" if made.ddtree else "no number of draft tokens is stated"
        )
    if made.context is None:
        found["context_length"] = "neither the arguments nor a local config.json state it"
    if made.graphs is None:
        found["captured batch"] = "SGLang chooses it by GPU memory"
    if not made.model_known:
        found["model"] = "no config.json to read: sliding window, recurrent layers, heads"
    return found
