"""The parts of a Step that say what came of it: acceptance, attention rows, and what was measured.

`ddtree_guard.step` has the other parts and their symbols, and gives these names, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddtree_guard.shape import REAL, Array, Int
from ddtree_guard.shape import array as _array


@dataclass(frozen=True, slots=True)
class Outcome:
    """What verification decided. Row indices are within the request, -1 pads.

    `predict` is the target's token per row; `accept_index` the accepted path from the root;
    `accept_lens` = number of committed tokens (path beyond the root, plus the bonus token).
    `committed` holds the committed tokens. `delta_*` are length changes by holder. `hidden_rows`
    are the rows whose hidden states go to the drafter. `stop_ids` end a request.
    """

    predict: Array = _array("bs", "w")
    accept_index: Array = _array("bs", "*")
    accept_lens: Array = _array("bs")
    committed: Array = _array("bs", "*")
    truncated: Array = _array("bs")  # tokens cut behind a stop token
    delta_seq_lens: Array = _array("bs")
    delta_seq_lens_cpu: Array = _array("bs")
    delta_output: Array = _array("bs")
    delta_kv: Array = _array("bs")
    hidden_rows: Array = _array("bs", "*")
    draft_lens: Array = _array("bs")
    target_lens: Array = _array("bs")
    draft_anchor: Array = _array("bs")
    last_committed: Array = _array("bs")
    masked_walk: Array = _array("bs")  # 1 where the tree walk ran for the request
    walk: str | None = None  # "tree" or "chain"
    greedy_kernel: bool | None = None
    greedy: Array = _array("bs")
    target_probs: Array = _array(
        "bs", "*", kind=REAL
    )  # target probability of each accepted draft token
    coins: Array = _array("bs", "*", kind=REAL)
    allowed: Array = _array("bs", "*")  # grammar allowed the committed token in its node's row
    finite: Array = _array("bs", "w")
    row_min: Array = _array("bs", "w", kind=REAL)  # smallest and largest logit of each row
    row_max: Array = _array("bs", "w", kind=REAL)


@dataclass(frozen=True, slots=True)
class Attention:
    """The operands and rows of the verify attention of one layer (capture `qkv` only).

    `q` and `output` are (bs*w, heads, dim), `k` and `v` (bs*w, kv_heads, dim); `k_prefix` and
    `v_prefix` (sum of s, kv_heads, dim) hold the committed tokens, requests end to end. bfloat16
    is kept as float32, which holds it exactly. `requests` are the requests whose rows these are,
    ascending; None means all bs.
    """

    q: Array = _array("*", "*", "*", kind=REAL)
    k: Array = _array("*", "*", "*", kind=REAL)
    v: Array = _array("*", "*", "*", kind=REAL)
    k_prefix: Array = _array("*", "*", "*", kind=REAL)
    v_prefix: Array = _array("*", "*", "*", kind=REAL)
    output: Array = _array("*", "*", "*", kind=REAL)
    requests: Array = _array("*")
    scale: float | None = None
    layer: Int = None


@dataclass(frozen=True, slots=True)
class Shadow:
    """How far one request's attention rows at one layer were from dense answers (shadow mode).

    Errors are relative (`attention.shadow`): infinite where a row was NaN, negative where it was
    not compared. `dense` by the tree's visibility, `chain` as the end of each node's ancestors,
    `decode` the root as in plain decoding. `tolerance` is what rounding to `dtype` may cost,
    `length` the prefix length that the device used.
    """

    dense: Array = _array("w", kind=REAL)
    chain: Array = _array("w", kind=REAL)
    decode: float | None = None
    tolerance: float | None = None
    request: Int = None
    layer: Int = None
    length: Int = None
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """What both checkers said of this step: ids of broken rules that both could judge.

    `hot` by the device kernel, `cold` by the NumPy rules; `partial` are rules of which the device
    reads a sample; `first` is the device's first offender (request, row) per rule.
    """

    hot: tuple[str, ...] | None = None
    cold: tuple[str, ...] | None = None
    partial: tuple[str, ...] = ()
    first: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Peers:
    """What each rank of the tensor-parallel group said of this step; absent on one rank.

    `digests` maps a part of the step to one short hash per rank; `keys` holds the path and padded
    batch size per rank, such as "graph/8".
    """

    digests: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    keys: tuple[str, ...] | None = None
