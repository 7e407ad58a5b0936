"""Width and stride: every offset must follow from the w of this launch."""

from __future__ import annotations

import numpy as np

from ddtree_guard.checks.common import (
    MAX_LEN,
    MAX_WIDTH,
    first,
    ints,
    lens_text,
    mask_columns,
    mask_offsets,
    optional_ints,
    sizes_of_batch,
    width_cause,
    width_from_cells,
)
from ddtree_guard.rule import Cost, Finding, Rule, Scope, Site, rule
from ddtree_guard.step import ARRAY_SHAPES, Step

_FIRST_ELEMENT = "element 0 of a persistent buffer was never written"


@rule(
    "W1", "query-offset-stride", site=Site.BUILD, cost=Cost.REQUESTS, scope=Scope.BATCH, bit=0,
    needs=("layout.qo_indptr", "layout.rows"),
)  # fmt: skip
def query_offset_stride(step: Step) -> Finding | None:
    """Query offsets step by w, and the last one equals the rows of every per-row operand.

    Holds when: `qo_indptr = [0, w, 2w, .., BS*w]`, and q, out_cache_loc, positions and input_ids
    each hold `BS*w` rows.
    Breaks as: the last rows of the output are never written, and request i attends with rows of
    request i-1. The text starts well and turns into one repeated token.
    Usual cause: the attention backend took `num_draft_tokens` from the draft block size while the
    batch carries budget + 1 rows per request.
    Seen in: I01, I02, I03, I06.
    """
    w, lanes = sizes_of_batch(step)
    actual = ints(step, "layout.qo_indptr")
    at = first(actual != np.arange(lanes + 1, dtype=np.int64) * w)
    if at is not None:
        return _query_offset(step, at, [int(n) for n in actual[max(at - 1, 0) : at + 1]])
    for name, rows in sorted(step.layout.rows.items()):
        if rows != lanes * w:
            return Finding(
                headline=f"{name} holds {rows} rows, not {lanes * w}",
                equation=f"{name}.shape[0] = {rows}, expected BS*w = {lanes}*{w} = {lanes * w}",
                expected=str(lanes * w),
                actual=str(rows),
                request=min(max(rows, 0) // w, lanes - 1) if lanes else None,
                row=max(rows, 0) % w if rows < lanes * w else None,
                cause=f"{name} was sized for another width or another batch",
                confidence="possible",
            )
    return None


def _query_offset(step: Step, at: int, around: list[int]) -> Finding:
    """The finding for qo_indptr[at]; `around` holds the offset before it, if any, and itself."""
    w, request = step.w, max(at - 1, 0)
    stride = around[-1] - around[0]
    cause, confidence = width_cause(step, stride) if at else (_FIRST_ELEMENT, "likely")
    return Finding(
        headline=f"request {request} covers {stride} query rows, not {w}"
        if at
        else "the first query offset is not 0",
        equation=f"qo_indptr[{at}] = {around[-1]}, expected {at}*w = {at * w}",
        expected=str(at * w),
        actual=str(around[-1]),
        request=request if step.padded_bs else None,
        row=min(max(stride, 0), w - 1),
        victims=(at,) if 0 < at < step.bs else (),
        cause=cause,
        confidence=confidence,
    )


@rule(
    "W2", "kv-offset-gap", site=Site.BUILD, cost=Cost.REQUESTS, scope=Scope.BATCH, bit=1,
    needs=("layout.kv_indptr", "layout.prefix_lens"),
)  # fmt: skip
def kv_offset_gap(step: Step) -> Finding | None:
    """KV offsets step by the committed length of each request, and the lengths are possible.

    Holds when: `0 <= s_i <= C + w` (a step may run ahead of the one that ends the request),
    `kv_indptr[0] = 0` and `kv_indptr[i+1] - kv_indptr[i] = s_i` (`s_i + w` where the kernel's KV
    range counts the draft; `min(s_i, W)` under a sliding window).
    Breaks as: request i reads keys of request i-1, or misses the end of its own prefix.
    Usual cause: offsets of an earlier batch, a length taken from an optimistic mirror, or element 0
    of a persistent buffer that was never written.
    Seen in: I05, I13, I21, H3.
    """
    w, lanes = sizes_of_batch(step)
    lens, actual = ints(step, "layout.prefix_lens"), ints(step, "layout.kv_indptr")
    most = min(MAX_LEN if step.limits.context is None else step.limits.context + w, MAX_LEN)
    bad = first((lens < 0) | (lens > most))
    if bad is not None:
        return _impossible_length(bad, int(lens[bad]), most)
    kept = lens if step.mask.window is None else np.minimum(lens, step.mask.window)
    kept = kept + w if step.contract.kv_includes_draft else kept
    at = first(actual != np.concatenate([[0], np.cumsum(kept)]))
    if at is None:
        return None
    if at == 0:
        return _first_offset("kv", int(actual[0]), lanes)
    i, gap = at - 1, int(actual[at]) - int(actual[at - 1])
    text = "s+w" if step.contract.kv_includes_draft else "s"
    return Finding(
        headline=f"the KV range of request {i} has {gap} tokens, not {int(kept[i])}",
        equation=f"kv_indptr[{at}] - kv_indptr[{i}] = {gap}, expected {text} = {int(kept[i])}",
        expected=str(int(kept[i])),
        actual=str(gap),
        request=i,
        row=0,
        victims=(at,) if at < step.bs else (),
        cause="the offsets were built from other lengths than this step's",
    )


def _impossible_length(request: int, length: int, most: int) -> Finding:
    return Finding(
        headline=f"request {request} has prefix length {length}",
        equation=f"prefix_lens[{request}] = {length}, expected 0 <= s <= {most}",
        expected=f"0..{most}",
        actual=str(length),
        request=request,
        row=0,
        cause="a length was subtracted twice, overflowed, or never written",
        confidence="possible",
    )


def _first_offset(name: str, actual: int, lanes: int) -> Finding:
    return Finding(
        headline=f"the first {name} offset is not 0",
        equation=f"{name}_indptr[0] = {actual}, expected 0",
        expected="0",
        actual=str(actual),
        request=0 if lanes else None,
        row=0 if lanes else None,
        cause=_FIRST_ELEMENT,
    )


@rule(
    "W3", "mask-offset-gap", site=Site.BUILD, cost=Cost.REQUESTS, scope=Scope.BATCH, bit=2,
    needs=("layout.mask_indptr", "layout.prefix_lens"),
)  # fmt: skip
def mask_offset_gap(step: Step) -> Finding | None:
    """Mask offsets step by w*(s+w) cells per request.

    Holds when: `mask_indptr[0] = 0` and `mask_indptr[i+1] - mask_indptr[i] = w*(s_i+w)`.
    Breaks as: request i reads mask cells of request i-1, or of the wrong row; some nodes see
    rejected branches, others do not see their ancestors. All reads stay in bounds.
    Usual cause: the offsets were derived from the draft block size, element 0 of a persistent
    buffer was never written, or a 32-bit running sum overflowed.
    Seen in: I01, I05, I10, I17, H3.
    """
    w, lanes = sizes_of_batch(step)
    lens, expected = mask_columns(step), mask_offsets(step)
    actual = ints(step, "layout.mask_indptr")
    at = first(actual != expected)
    if at is None:
        return None
    if at == 0:
        return _first_offset("mask", int(actual[0]), lanes)
    i, gap = at - 1, int(actual[at]) - int(actual[at - 1])
    s, want = int(lens[i]), int(expected[at] - expected[i])
    if expected[at] > MAX_LEN and step.layout.mask_indptr.dtype.itemsize == 4:
        cause = "the 32-bit running sum overflowed; offsets of this batch need 64 bits"
        confidence = "very likely"
    else:
        cause, confidence = width_cause(step, width_from_cells(gap, s))
    after = at < lanes
    return Finding(
        headline=f"request {at if after else i} reads mask cells that are not its own",
        equation=f"mask_indptr[{at}] - mask_indptr[{i}] = {gap}, expected w*(s+w) = "
        f"{lens_text(w, s)} = {want}",
        expected=str(want),
        actual=str(gap),
        request=i,
        row=0,
        victims=(at,) if at < step.bs else (),
        cause=cause,
        confidence=confidence,
    )


@rule(
    "W4", "mask-row-stride", site=Site.BUILD, cost=Cost.REQUESTS, scope=Scope.BATCH, bit=3,
    needs=("layout.qo_indptr", "layout.kv_indptr", "mask.row_stride"),
)  # fmt: skip
def mask_row_stride(step: Step) -> Finding | None:
    """The kernel walks the mask with the row length that the builder wrote.

    Holds when: for each live request the kernel's row stride, its query rows plus its KV range (the
    KV range alone where that counts the draft), plus the columns it skips under a sliding window,
    equals the builder's row stride.
    Breaks as: row r is read r times the difference away from its place: node 0 is right, later
    nodes see a shifted mask.
    Usual cause: the query offsets follow another width than the mask, or the kernel reads
    window-clipped keys with a full-prefix mask.
    Seen in: I01, I13.
    """
    sizes_of_batch(step)
    bs = step.bs
    query = np.diff(ints(step, "layout.qo_indptr"))[:bs]
    kv = np.diff(ints(step, "layout.kv_indptr"))[:bs]
    skipped = optional_ints(step, "mask.window_start")
    kernel = kv + (0 if step.contract.kv_includes_draft else query)
    kernel = kernel if skipped is None else kernel + skipped
    builder = ints(step, "mask.row_stride")
    i = first(kernel != builder)
    if i is None:
        return None
    terms = [f"kv {int(kv[i])}"]
    terms += [] if step.contract.kv_includes_draft else [f"query {int(query[i])}"]
    terms += [] if skipped is None else [f"skipped {int(skipped[i])}"]
    cause, confidence = width_cause(step, int(query[i]))
    if step.mask.window is not None:
        cause, confidence = "the mask row was not re-laid for the window-clipped keys", "likely"
    return Finding(
        headline=f"request {i}: the kernel steps {int(kernel[i])} cells, not {int(builder[i])}",
        equation=f"kernel row stride = {' + '.join(terms)} = {int(kernel[i])}, "
        f"expected the builder's {int(builder[i])}",
        expected=str(int(builder[i])),
        actual=str(int(kernel[i])),
        request=i,
        row=min(1, step.w - 1),  # row 0 starts at the same cell with any stride
        cause=cause,
        confidence=confidence,
    )


@rule(
    "W5", "operand-shape", site=Site.LAUNCH, cost=Cost.HOST, scope=Scope.BATCH,
)  # fmt: skip
def operand_shape(step: Step) -> Finding | None:
    """Every array has its declared shape and type, and every launch grid covers its operands.

    Holds when: `1 <= w`, `0 <= bs <= BS`, each array has the shape and the kind of elements
    declared for it, each launch grid equals the extent of its operands, accept_index has room for
    the longest path, no length of the scheduler is negative, and every mode that the contract and
    the step name is a known one.
    Breaks as: rows or lanes that no program writes, or programs that write beyond the operand.
    Usual cause: a buffer was allocated for another width, or per-request arrays have bs entries
    where the captured launch has BS lanes.
    Seen in: I05, I10, I39.
    """
    if not 1 <= step.w <= MAX_WIDTH:
        return _shape_finding("w", str(step.w), f"1..{MAX_WIDTH}")
    if not 0 <= step.bs <= step.padded_bs:
        return _shape_finding("bs", str(step.bs), f"0..BS = {step.padded_bs}")
    misfits = step.misfits()
    for path, text in misfits.items():
        return _misfit_finding(path, text, len(misfits) - 1)
    for name, (extent, needed) in sorted((step.layout.grids or {}).items()):
        if extent != needed:
            return _shape_finding(f"grid of {name}", str(extent), str(needed))
    accept, depth = step.outcome.accept_index, step.widths.depth_max
    if accept is not None and depth is not None and accept.shape[1] < depth + 1:
        return _shape_finding(
            "outcome.accept_index.shape[1]", str(accept.shape[1]), f">= depth_max+1 = {depth + 1}"
        )
    return _impossible_mirror(step) or _unknown_word(step)


def _misfit_finding(path: str, text: str, more: int) -> Finding:
    found, _, wanted = text.partition(", expected ")
    if found.startswith("has shape "):
        return _shape_finding(f"{path}.shape", found.removeprefix("has shape "), wanted, more)
    actual = found.removeprefix("holds ")
    what = "max()" if actual.isdigit() else "dtype"
    return Finding(
        headline=f"{path} does not hold what is declared",
        equation=f"{path}.{what} = {actual}, expected {wanted}"
        + (f" (and {more} more arrays)" if more else ""),
        expected=wanted,
        actual=actual,
        cause="it was converted on its way here, or filled from another array",
        confidence="possible",
    )


def _impossible_mirror(step: Step) -> Finding | None:
    """The scheduler's mirror may run ahead of the device, but no length is below 0."""
    mirror = optional_ints(step, "layout.prefix_lens_cpu")
    i = None if mirror is None else first(mirror < 0)
    if i is None:
        return None
    return Finding(
        headline=f"the scheduler's length of request {i} is negative",
        equation=f"prefix_lens_cpu[{i}] = {int(mirror[i])}, expected at least 0",
        expected=">= 0",
        actual=str(int(mirror[i])),
        request=i,
        cause="a length was subtracted twice, overflowed, or never written",
        confidence="possible",
    )


_WORDS: dict[str, tuple[object, ...]] = {
    "contract.mask_length": ("exact", "capacity"),
    "contract.mask_unit": (1, 8),
    "contract.pad_rows": ("self", "masked", "none"),
    "outcome.walk": (None, "tree", "chain"),
    "who.path": ("eager", "graph"),
}


def _unknown_word(step: Step) -> Finding | None:
    """A finding for a mode of no meaning: a rule that only looks for the others would be looser."""
    for path, known in _WORDS.items():
        if step.get(path) not in known:
            wanted = f"one of {', '.join(str(word) for word in known if word is not None)}"
            return _word_finding(path, str(step.get(path)), wanted)
    for path in sorted(set(step.contract.pad_lanes or ()) - set(ARRAY_SHAPES)):
        return _word_finding("contract.pad_lanes", path, "paths of a step's arrays")
    return None


def _word_finding(path: str, actual: str, wanted: str) -> Finding:
    return Finding(
        headline=f"{path} has no known meaning",
        equation=f"{path} = {actual}, expected {wanted}",
        expected=wanted,
        actual=actual,
        cause="it is misspelt, or of another version of the guard",
        confidence="very likely",
    )


def _shape_finding(name: str, actual: str, wanted: str, more: int = 0) -> Finding:
    return Finding(
        headline=f"{name.removesuffix('.shape')} does not fit this launch",
        equation=f"{name} = {actual}, expected {wanted}"
        + (f" (and {more} more arrays)" if more else ""),
        expected=wanted,
        actual=actual,
        cause="it was sized for another width or another batch",
        confidence="possible",
    )


@rule(
    "W6", "captured-stride-stale", site=Site.REPLAY, cost=Cost.HOST, scope=Scope.BATCH,
    needs=("graph.born", "graph.live"),
)  # fmt: skip
def captured_stride_stale(step: Step) -> Finding | None:
    """The strides that a graph captured are the strides that this step's builder uses.

    Holds when: for every static buffer the stride stored at capture equals the live one.
    Breaks as: row 0 is right and row r is read r strides off: one request of the batch turns to
    nonsense in mid-generation, never the first.
    Usual cause: capture laid the buffer out for the maximum length, replay for the current batch.
    Seen in: I08.
    """
    for name in sorted(step.graph.born.keys() & step.graph.live.keys()):
        born, live = step.graph.born[name].stride, step.graph.live[name].stride
        if born != live:
            return Finding(
                headline=f"{name} is laid out with another stride than captured",
                equation=f"{name}.stride = {live}, expected the captured {born}",
                expected=str(born),
                actual=str(live),
                cause="the builder lays the buffer out for the current batch",
            )
    return None


@rule(
    "W7", "token-count-not-a-batch", site=Site.REPLAY, cost=Cost.HOST, scope=Scope.BATCH,
    needs=("graph.num_tokens",),
)  # fmt: skip
def token_count_not_a_batch(step: Step) -> Finding | None:
    """The graph was chosen by requests: its tokens are BS*w, and BS is a captured size.

    Holds when: `num_tokens = BS*w`, and BS is one of the captured batch sizes where those are
    known.
    Breaks as: a graph for another batch size is replayed, or none is found eligible although one
    fits and every step runs eager.
    Usual cause: tokens were compared with a batch size without dividing by w.
    Seen in: I06.
    """
    w, lanes = sizes_of_batch(step)
    tokens, buckets = step.graph.num_tokens, step.graph.batch_sizes
    if tokens != lanes * w:
        return Finding(
            headline=f"the graph holds {tokens} tokens, not {lanes * w}",
            equation=f"num_tokens = {tokens}, expected BS*w = {lanes}*{w} = {lanes * w}",
            expected=str(lanes * w),
            actual=str(tokens),
            cause="the graph was chosen by tokens, or with another width",
        )
    if buckets and lanes not in buckets:
        return Finding(
            headline=f"no graph was captured for {lanes} lanes",
            equation=f"BS = {lanes}, expected one of {', '.join(map(str, buckets))}",
            expected=f"one of {', '.join(map(str, buckets))}",
            actual=str(lanes),
            cause="a token count was used as a batch size",
            confidence="likely" if lanes % w == 0 else "possible",
        )
    return None


@rule(
    "W8", "extend-length", site=Site.BUILD, cost=Cost.HOST, scope=Scope.BATCH, bit=4,
    needs=("layout.max_extend_len",),
)  # fmt: skip
def extend_length(step: Step) -> Finding | None:
    """The launch covers w rows per request.

    Holds when: `max_extend_len = w`.
    Breaks as: too short, and the kernel's grid leaves the last rows of every request unwritten; too
    long, and programs run for rows that do not exist.
    Usual cause: it was taken from the draft block size, as the query offsets were.
    Seen in: I01.
    """
    w, lanes = sizes_of_batch(step)
    actual = step.layout.max_extend_len
    if actual == w:
        return None
    cause, confidence = width_cause(step, actual)
    return Finding(
        headline=f"the launch covers {actual} rows per request, not {w}",
        equation=f"max_extend_len = {actual}, expected w = {w}",
        expected=str(w),
        actual=str(actual),
        request=0 if lanes else None,
        row=min(max(actual, 0), w - 1) if lanes else None,
        cause=cause,
        confidence=confidence,
    )


RULES: tuple[Rule, ...] = (
    query_offset_stride,
    kv_offset_gap,
    mask_offset_gap,
    mask_row_stride,
    operand_shape,
    captured_stride_stale,
    token_count_not_a_batch,
    extend_length,
)
