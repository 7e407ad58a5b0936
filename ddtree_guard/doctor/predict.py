"""Which rules of the catalogue a configuration would break, on SGLang's own backend and on ours.

The configuration becomes Steps: one of the init site, one eager launch of two requests, and one
replay of the largest captured batch. Offsets and buffers are what that release's backend makes of
its width; whether they are right is for the rules to say. Needs no GPU and no SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from ddtree_guard.attention.backend import needs_correction
from ddtree_guard.doctor.deployment import Deployment
from ddtree_guard.doctor.faults import Match
from ddtree_guard.guard import Guard, NotChecked, Report
from ddtree_guard.hooks.contracts import contract_elsewhere, contract_of, row_of
from ddtree_guard.hooks.facts import BUDGET, VARIES, Facts
from ddtree_guard.rule import Finding, Site
from ddtree_guard.step import Contract, Graph, Layout, Limits, Mask, Slots, Step, Who, Widths

LENS = (37, 21)  # of the eager launch: unequal, and short enough for any context
# Sites at which a configuration alone decides; the others need a batch.
SITES = (Site.INIT, Site.BUILD, Site.LAUNCH, Site.CAPTURE, Site.REPLAY)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the rules say of one backend. `findings` holds each rule once, with its step."""

    backend: str  # stock or corrected
    findings: tuple[tuple[Step, Finding], ...]
    checked: tuple[str, ...]
    not_checked: tuple[NotChecked, ...]
    exempt: Mapping[str, str]  # rules that this algorithm and backend leave nothing to judge, why

    @property
    def wrong(self) -> bool:
        """Whether some output would be wrong."""
        return any(not finding.latent for _, finding in self.findings)

    @property
    def rules(self) -> tuple[str, ...]:
        """Ids of the rules that would be broken now, not only at the limit of a buffer."""
        return tuple(finding.rule for _, finding in self.findings if not finding.latent)


def predict(
    d: Deployment, facts: Facts | None, known: tuple[Match, ...] = (), corrected: bool = False
) -> Prediction:
    """Run the rules on what this deployment would build. `facts` None: not a Triton backend."""
    guard, steps = Guard(), steps_of(d, facts, known, corrected)
    reports = [(step, guard.check(step, SITES)) for step in steps]
    findings: dict[str, tuple[Step, Finding]] = {}
    for step, report in reports:
        for finding in report.findings:
            held = findings.get(finding.rule)
            if held is None or (held[1].latent and not finding.latent):
                findings[finding.rule] = (step, finding)
    checked = {rule for _, report in reports for rule in report.checked}
    return Prediction(
        "corrected" if corrected else "stock",
        tuple(findings.values()),
        tuple(rule.id for rule in guard.rules if rule.id in checked),
        _skipped(guard, [report for _, report in reports], checked),
        dict(steps[-1].contract.not_checked) if steps else {},
    )


def _skipped(guard: Guard, reports: list[Report], checked: set[str]) -> tuple[NotChecked, ...]:
    """Every rule that was not checked, also those of sites that only a running server has."""
    said = {n.rule: n for report in reports for n in report.not_checked}
    late = "a configuration alone has nothing that it judges"
    rest = (rule.id for rule in guard.rules if rule.id not in checked)
    return tuple(said.get(rule) or NotChecked(rule, late) for rule in rest)


def corrected_here(d: Deployment, facts: Facts | None) -> bool | None:
    """Whether backend choice `auto` would give the target the corrected backend; None: not known.

    What is not stated is what SGLang could not resolve, as for a model that is not on this machine.
    """
    if facts is None or not d.ddtree:
        return False
    sure = d.varies or d.declared not in (None, d.w)  # then the context decides nothing
    if d.w is None or (d.declared is None and not d.varies):
        return None
    if d.context is None and (facts.follows_batch or not sure):
        return None
    args = SimpleNamespace(
        speculative_algorithm=d.algorithm,
        speculative_num_draft_tokens=d.declared,
        disable_cuda_graph=d.graphs is False,
        **{BUDGET: d.w - 1, VARIES: d.varies},
    )
    model = SimpleNamespace(context_len=d.context or 0)
    runner = SimpleNamespace(server_args=args, is_draft_worker=False, model_config=model)
    return needs_correction(runner, facts)


def steps_of(
    d: Deployment, facts: Facts | None, known: tuple[Match, ...], corrected: bool
) -> list[Step]:
    """The steps that can be built from what is known of the deployment."""
    if not d.algorithm or d.w is None:
        return []
    steps = [_configuration(d, facts, known, corrected)]
    if facts is None:
        return steps
    steps.append(_launch(d, facts, corrected, d.w, LENS, "eager"))
    if d.varies and d.w > 2:
        steps.append(_launch(d, facts, corrected, d.w // 2, LENS, "eager"))
    if d.graphs and d.lanes and d.context and d.context > d.w:
        most = (d.context - d.w,) * d.lanes
        steps.append(_launch(d, facts, corrected, d.w, most, "graph"))
    return steps


def _held(d: Deployment, facts: Facts, corrected: bool, w: int) -> int:
    """The width from which the backend builds its offsets."""
    follows = corrected or facts.follows_batch or d.declared is None
    return w if follows or d.declared is None else d.declared


def _configuration(
    d: Deployment, facts: Facts | None, known: tuple[Match, ...], corrected: bool
) -> Step:
    assert d.w is not None
    eagle = row_of(d.algorithm).owns_buffer
    holders = {} if facts is None else {"backend": _held(d, facts, corrected, d.w)}
    return Step(
        bs=0,
        padded_bs=0,
        widths=Widths(
            w=d.w,
            holders=holders,
            block=d.block,
            budget=d.budget if d.ddtree else None,
            depth_max=d.block - 1 if d.ddtree and d.block else None,
            num_draft_tokens=d.declared if eagle else None,
            num_steps=d.steps if eagle else None,
            topk=d.topk if eagle else None,
        ),
        limits=_limits(d, facts, known, corrected),
        who=_who(d, corrected, "eager"),
        contract=_contract(d, facts, "eager"),
    )


def _limits(
    d: Deployment, facts: Facts | None, known: tuple[Match, ...], corrected: bool
) -> Limits:
    """CFG5's side: what a tree needs, and what this release's known faults take away from it."""
    needs, supports = [], ["custom_mask"]
    if d.tree:
        needs.append("custom_mask")
    if d.ddtree:
        needs.append("width_not_block")
        follows = facts is not None and facts.follows_batch
        if follows or corrected or (facts is not None and d.w == d.declared and not d.varies):
            supports.append("width_not_block")
    for match in known:
        if match.sure and match.fault.feature and match.fault.feature not in needs:
            needs.append(match.fault.feature)
    return Limits(
        vocab=d.model.vocab,
        context=d.context,
        draft_context=d.draft_context,
        supports=tuple(supports) if d.backend is not None else None,
        needs=tuple(needs),
    )


def _launch(
    d: Deployment, facts: Facts, corrected: bool, w: int, lens: tuple[int, ...], path: str
) -> Step:
    """What the backend builds for requests of these committed lengths, each with w rows."""
    held, lanes = _held(d, facts, corrected, w), len(lens)
    s = np.array(lens, np.int64)
    contract = _contract(d, facts, path)
    masked = "W3" not in contract.not_checked and "M5" not in contract.not_checked
    capacity = _capacity(d, facts, corrected, lanes) if path == "graph" else None
    eager = int((w * (s + w)).sum())
    return Step(
        bs=lanes,
        padded_bs=lanes,
        widths=Widths(w=w, holders={"backend": held}, block=d.block),
        layout=Layout(
            qo_indptr=np.arange(lanes + 1, dtype=np.int64) * held,
            kv_indptr=_offsets(s),
            mask_indptr=_offsets(held * (s + held)) if masked else None,
            prefix_lens=s,
            max_extend_len=held,
            offset_bits=64,  # SGLang keeps both in int64 on this backend
            rows=dict.fromkeys(("q", "out_cache_loc", "positions", "input_ids"), lanes * w),
        ),
        mask=Mask(
            present=masked or None,
            capacity=(eager if capacity is None else capacity) if masked else None,
            row_stride=s + w if masked else None,
        ),
        graph=Graph(num_tokens=lanes * w) if path == "graph" else Graph(),
        slots=Slots(page_size=d.page_size, kernel_page_size=d.page_size),
        limits=Limits(context=d.context),
        who=_who(d, corrected, path),
        contract=contract,
    )


def _capacity(d: Deployment, facts: Facts, corrected: bool, lanes: int) -> int | None:
    if d.context is None or d.w is None or d.declared is None:
        return None
    if corrected:
        return lanes * d.w * (d.context + d.w)
    return lanes * facts.mask_cells(d.declared, d.context)


def _offsets(lengths: object) -> object:
    return np.concatenate([[0], np.cumsum(lengths)])  # type: ignore[call-overload]


def _contract(d: Deployment, facts: Facts | None, path: str) -> Contract:
    if facts is None:
        return contract_elsewhere(d.algorithm, d.backend or "unknown", path)
    return contract_of(d.algorithm, facts, path)


def _who(d: Deployment, corrected: bool, path: str) -> Who:
    return Who(
        algorithm=d.algorithm,
        backend=d.backend or "unknown",
        backend_kind="corrected" if corrected else "stock",
        release=d.release,
        path=path,
    )
