"""Configuration: one canonical width, and limits that it must respect."""

from __future__ import annotations

from ddtree_guard.checks.common import SERVER_WIDTH
from ddtree_guard.rule import Cost, Finding, NotApplicable, Rule, Scope, Site, rule
from ddtree_guard.step import Step


@rule(
    "CFG1", "width-copies-differ", site=Site.INIT, cost=Cost.HOST, scope=Scope.SERVER,
    needs=("widths.holders",),
)  # fmt: skip
def width_copies_differ(step: Step) -> Finding | None:
    """Every holder of the verify width holds the w that the batch states.

    Holds when: backend, graph runner, logits buffer, sampler and every other holder of "rows per
    request" equal the w of the batch's spec info; for a DDTREE target also `w = B + 1`.
    Breaks as: whatever is derived from the odd copy (offsets, buffers, graph sizes) is in bounds
    and wrong, so the output is wrong without an error.
    Usual cause: one component reads `speculative_num_draft_tokens` (the draft block size), another
    the tree budget.
    Seen in: I01, I05, I06.
    """
    w = step.w
    for name, held in sorted(step.widths.holders.items()):
        if held != w:
            return Finding(
                headline=f"{name} holds width {held}, not {w}",
                equation=f"{name}.w = {held}, expected w = {w}",
                expected=str(w),
                actual=str(held),
                cause=SERVER_WIDTH if held == step.widths.block else f"{name} has its own width",
                confidence="very likely" if held == step.widths.block else "possible",
            )
    budget = step.widths.budget
    ddtree = step.contract.algorithm == "DDTREE" and step.who.worker == "target"
    if ddtree and budget is not None and w != budget + 1:
        return Finding(
            headline=f"the batch states {w} rows, the budget needs {budget + 1}",
            equation=f"w = {w}, expected B + 1 = {budget} + 1 = {budget + 1}",
            expected=str(budget + 1),
            actual=str(w),
            cause="the spec info was built from the draft block size instead of the tree budget",
        )
    return None


@rule(
    "CFG2", "draft-width-inherited", site=Site.INIT, cost=Cost.HOST, scope=Scope.SERVER,
    needs=("widths.draft_width", "widths.draft_rows"),
)  # fmt: skip
def draft_width_inherited(step: Step) -> Finding | None:
    """The draft worker's width is the number of rows that its proposer emits.

    Holds when: the draft backend's width equals the rows per request of the draft forward.
    Breaks as: the draft metadata walks too many rows per request: an index assertion on the first
    request, or request i drafts from rows of request i-1 and acceptance drops.
    Usual cause: the draft worker was built from a copy of the target's server arguments.
    Seen in: I02, I03.
    """
    width, rows = step.widths.draft_width, step.widths.draft_rows
    if width == rows:
        return None
    inherited = width == step.w
    return Finding(
        headline=f"the draft backend expects {width} rows, gets {rows}",
        equation=f"draft width = {width}, expected rows emitted per request = {rows}",
        expected=str(rows),
        actual=str(width),
        cause="the draft worker inherited the target's verify width"
        if inherited
        else "the draft backend's width was derived from another argument than the proposer's",
        confidence="very likely" if inherited else "possible",
    )


@rule(
    "CFG3", "tree-exceeds-limits", site=Site.INIT, cost=Cost.HOST, scope=Scope.SERVER,
    needs=("widths.block", "widths.budget", "widths.depth_max"),
)  # fmt: skip
def tree_exceeds_limits(step: Step) -> Finding | None:
    """Block, budget and depth fit together, and every kernel can take w rows.

    Holds when: `B >= 1`, `depth_max <= b-1`, and w is at most the limit of every kernel that states
    one.
    Breaks as: nodes deeper than the draft block have no distribution to come from; a kernel with a
    row limit cuts the tree off or packs two nodes into one bit.
    Usual cause: the budget was raised without looking at the draft block size or at the kernels.
    Seen in: I34.
    """
    block, budget, depth = step.widths.block, step.widths.budget, step.widths.depth_max
    if budget < 1:
        return _limit("B", budget, ">= 1", "the tree budget is not positive")
    if depth > block - 1:
        return _limit(
            "depth_max", depth, f"<= b-1 = {block}-1", "the tree is deeper than the draft block"
        )
    for name, rows in sorted(step.limits.kernel_rows.items()):
        if step.w > rows:
            return _limit("w", step.w, f"<= {rows} ({name})", f"{name} takes at most {rows} rows")
    return None


@rule(
    "CFG4", "draft-token-count", site=Site.INIT, cost=Cost.HOST, scope=Scope.SERVER,
    needs=("widths.num_draft_tokens", "widths.num_steps", "widths.topk"),
)  # fmt: skip
def draft_token_count(step: Step) -> Finding | None:
    """The number of draft tokens is one that the draft steps and topk can produce.

    Holds when: chain (`k = 1`): `D = n + 1`; tree: `D <= 1 + k + .. + k^n` and `k <= V`.
    Breaks as: rows without a candidate are filled with stale or repeated tokens, or the draft
    metadata is laid out for n+1 rows while the runner lays out D.
    Usual cause: one of the three arguments was set by hand and the others were not.
    Seen in: I03.
    """
    count, steps, topk = step.widths.num_draft_tokens, step.widths.num_steps, step.widths.topk
    vocab = step.limits.vocab
    if topk < 1 or (vocab is not None and topk > vocab):
        return _limit("k", topk, f">= 1 and <= V = {vocab}", "topk is not a number of tokens")
    if topk == 1:
        if count == steps + 1:
            return None
        return _limit("D", count, f"n + 1 = {steps + 1}", "a chain drafts one token per step")
    most = _nodes(topk, steps, count)
    if count <= most:
        return None
    return _limit("D", count, f"<= {most}", f"{steps} steps of top-{topk} give {most} nodes")


@rule(
    "CFG5", "unsupported-feature", site=Site.INIT, cost=Cost.HOST, scope=Scope.SERVER,
    needs=("limits.supports",),
)  # fmt: skip
def unsupported_feature(step: Step) -> Finding | None:
    """The backend declares support for every feature that this deployment needs.

    Holds when: each needed feature (custom mask, width other than the block, branches in recurrent
    layers, sliding window with a tree, pages above 1, non-greedy requests) is declared.
    Breaks as: the backend falls through to its causal or single-token path without an error.
    Usual cause: an algorithm was combined with a backend it was never tried on.
    Seen in: I01, I13, I44, I49.
    """
    if not step.limits.needs:
        raise NotApplicable("limits.needs is empty: no needed feature was stated")
    supports = step.limits.supports or ()
    missing = [name for name in step.limits.needs if name not in supports]
    if not missing:
        return None
    return Finding(
        headline=f"{step.who.backend} does not support {missing[0]}",
        equation=f"needed: {', '.join(step.limits.needs)}; "
        f"supported: {', '.join(supports) or 'none'}",
        expected=missing[0],
        actual="not supported",
        cause=f"{step.contract.algorithm} was combined with a backend without {missing[0]}",
        confidence="certain",
    )


@rule(
    "CFG6", "context-beyond-reach", site=Site.INIT, cost=Cost.HOST, scope=Scope.SERVER,
    needs=("limits.context", "limits.draft_context", "limits.draft_rope_rows"),
)  # fmt: skip
def context_beyond_reach(step: Step) -> Finding | None:
    """The draft context and the rotary tables reach every position of a verify step.

    Holds when: the draft model's context is at least C, and every rotary table has at least C rows
    plus the longest tree path: `depth_max + 1`, at most w.
    Breaks as: near the end of the context rotary rows are read out of bounds, or the drafter stops
    matching; only long requests are affected.
    Usual cause: the draft checkpoint was trained for a shorter context than the target's.
    Seen in: none reported; I11 is the same slip in a mask buffer.
    """
    limits = step.limits
    if limits.draft_context < limits.context:
        return _limit(
            "draft context", limits.draft_context, f">= C = {limits.context}",
            "the draft model has a shorter context than the target",
        )  # fmt: skip
    depth = step.widths.depth_max
    path = step.w if depth is None else min(step.w, depth + 1)
    tables = (("rope rows", limits.rope_rows), ("draft rope rows", limits.draft_rope_rows))
    for name, rows in tables:
        if rows is not None and rows < limits.context + path:
            return _limit(
                name, rows, f">= C + path = {limits.context}+{path} = {limits.context + path}",
                "the rotary table was not extended for speculative rows",
            )  # fmt: skip
    return None


def _limit(name: str, actual: int, wanted: str, cause: str) -> Finding:
    return Finding(
        headline=f"{name} is {actual}, outside its limit",
        equation=f"{name} = {actual}, expected {wanted}",
        expected=wanted,
        actual=str(actual),
        cause=cause,
    )


def _nodes(topk: int, steps: int, enough: int) -> int:
    """1 + k + .. + k^n, summed no further than `enough`; topk is at least 2."""
    total, level, depth = 1, 1, 0
    while depth < steps and total < enough:
        level *= topk
        total += level
        depth += 1
    return total


RULES: tuple[Rule, ...] = (
    width_copies_differ,
    draft_width_inherited,
    tree_exceeds_limits,
    draft_token_count,
    unsupported_feature,
    context_beyond_reach,
)
