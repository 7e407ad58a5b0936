"""Width and stride: every offset must follow from the w of this launch."""

from __future__ import annotations

import numpy as np

from ddtree_guard.checks.common import first, lens_text
from ddtree_guard.rule import Cost, Finding, Rule, Scope, Site, rule
from ddtree_guard.step import Step

_STALE_WIDTH = (
    "the attention backend took num_draft_tokens from the server argument (the draft block size) "
    "instead of from the batch; use the corrected backend"
)


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
    w, padded = step.w, step.padded_bs
    actual = step.layout.qo_indptr.astype(np.int64)
    at = first(actual != np.arange(padded + 1, dtype=np.int64) * w)
    if at is not None:
        request = max(at - 1, 0)
        stride = int(actual[at] - actual[at - 1]) if at else int(actual[0])
        return Finding(
            headline=f"request {request} covers {stride} query rows, not {w}",
            equation=f"qo_indptr[{at}] = {int(actual[at])}, expected {at}*w = {at * w}",
            expected=str(at * w),
            actual=str(int(actual[at])),
            request=request,
            row=min(max(stride, 0), w - 1) if at else 0,
            cause=_STALE_WIDTH,
        )
    for name, rows in sorted(step.layout.rows.items()):
        if rows != padded * w:
            return Finding(
                headline=f"{name} holds {rows} rows, not {padded * w}",
                equation=f"{name}.shape[0] = {rows}, expected BS*w = {padded}*{w} = {padded * w}",
                expected=str(padded * w),
                actual=str(rows),
                request=min(rows // w, padded - 1),
                cause=f"{name} was sized for another width or another batch",
            )
    return None


@rule(
    "W3", "mask-offset-gap", site=Site.BUILD, cost=Cost.REQUESTS, scope=Scope.BATCH, bit=2,
    needs=("layout.mask_indptr", "layout.prefix_lens"),
)  # fmt: skip
def mask_offset_gap(step: Step) -> Finding | None:
    """Mask offsets step by w*(s+w) cells per request.

    Holds when: `mask_indptr[0] = 0` and `mask_indptr[i+1] - mask_indptr[i] = w*(s_i+w)`.
    Breaks as: request i reads mask cells of request i-1, or of the wrong row; some nodes see
    rejected branches, others do not see their ancestors. All reads stay in bounds.
    Usual cause: the offsets were derived from the draft block size, or element 0 of a persistent
    buffer was never written.
    Seen in: I01, I05, I10, H3.
    """
    w = step.w
    lens = step.layout.prefix_lens.astype(np.int64)
    actual = step.layout.mask_indptr.astype(np.int64)
    expected = np.concatenate([[0], np.cumsum(w * (lens + w))])
    at = first(actual != expected)
    if at is None:
        return None
    if at == 0:
        return Finding(
            headline="the first mask offset is not 0",
            equation=f"mask_indptr[0] = {int(actual[0])}, expected 0",
            expected="0",
            actual=str(int(actual[0])),
            request=0,
            row=0,
            cause="element 0 of a persistent buffer was never written",
        )
    i, gap, want = at - 1, int(actual[at] - actual[at - 1]), int(w * (lens[at - 1] + w))
    after = at < step.padded_bs
    return Finding(
        headline=f"request {at if after else i} reads mask cells that are not its own",
        equation=f"mask_indptr[{at}] - mask_indptr[{i}] = {gap}, expected w*(s+w) = "
        f"{lens_text(w, int(lens[i]))} = {want}",
        expected=str(want),
        actual=str(gap),
        request=i,
        row=0,
        victims=(at,) if after else (),
        cause=_STALE_WIDTH,
    )


RULES: tuple[Rule, ...] = (query_offset_stride, mask_offset_gap)
