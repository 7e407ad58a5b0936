"""Plant one fault in a running server, at the site where its rule first looks.

Built offsets, mask, tree, positions and slots are changed just before the guard's part of the build
site, or before a replay for which the guard launches nothing; the walk just before its own part; a
length between SGLang's commit and the comparison.
"""

from __future__ import annotations

from typing import Any

from ddtree_guard.guard import find_rule
from ddtree_guard.hooks.adapters import adapter_for
from ddtree_guard.hooks.checker import with_outcome
from ddtree_guard.rule import Site
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.plant import plant


def plant_at(guard: Any, plan: dict[str, Any]) -> None:
    """Plant the fault of `plan["rule"]` once, in the first step from `plan["from"]` on that can
    hold it, on its last request of two or more; with `plan["always"]` in all of them. Fills `at`,
    `rid`, `changed` and `ahead` (`Record.ahead`) of the first, or `error`.
    """
    site, first = find_rule(plan["rule"]).site, plan["from"]
    plan["from"] = 1 << 62  # not yet: a step may be running, and past the place of the change
    if site is Site.VERIFY:
        _before(guard.checker, "walked", _walk, plan)
    elif site is Site.COMMIT:
        _lengths(guard, plan)
    else:
        _before(guard.checker, "build", _launch, plan)
        _replay(guard, plan)
    plan["from"] = max(first, guard.begun + 1)


def _due(plan: dict[str, Any], record: Any, view: Any) -> bool:
    open_: bool = plan["at"] is None or bool(plan.get("always"))
    due = open_ and record.step_id >= plan["from"] and view.bs >= 2
    return due and (plan["rule"] not in ("G4", "G5") or view.bs < len(view.batch.req_pool_indices))


def _before(owner: Any, name: str, change: Any, plan: dict[str, Any]) -> None:
    method = getattr(owner, name)

    def planted(record: Any, *rest: Any) -> None:
        view = (rest[0] if rest else record.view).complete()
        if _due(plan, record, view):
            _plant(plan, change, record, view)
        method(record, *rest)

    setattr(owner, name, planted)


def _replay(guard: Any, plan: dict[str, Any]) -> None:
    """The same for steps that are not built whole: where nothing is launched before the replay, all
    that is changed now is read by the graph alone. Others are built whole from now on.
    """
    running = guard.running
    queue = running.queue

    def planted(*launch: Any) -> bool:
        queued: bool = queue(*launch)
        open_ = plan["at"] is None or plan.get("always")
        if queued and open_ and plan["from"] <= guard.begun:
            record = guard.current
            running.quick = record.ahead or bool(record.ticket.told.live)  # soon, if not now
            if record.ahead and _due(plan, record, record.view.complete()):
                _plant(plan, _launch, record, record.view)
        return queued

    running.queue = planted


def _plant(plan: dict[str, Any], change: Any, record: Any, view: Any) -> None:
    try:
        changed = change(plan["rule"], record, view)
        if plan["at"] is None:
            found = {"rid": view.rids[-1], "changed": changed, "ahead": record.ahead}
            plan.update(at=record.step_id, **found)
    except Exception as error:  # a fault of the plan is none of the guard's
        plan["error"] = f"{type(error).__name__}: {error}"


def _launch(rule: str, record: Any, view: Any) -> tuple[str, ...]:
    return plant(rule, view)


def _walk(rule: str, record: Any, view: Any) -> tuple[str, ...]:
    """The accepted rows or lengths of the last request, in the tensors that SGLang goes on with."""
    walk = record.outcome
    step = with_outcome(adapter_for(type(view.backend)).read_step(view), walk)
    bad = FAULTS[rule](step, step.bs - 1).step.outcome
    if rule == "A3":
        walk.lens[-1] = int(bad.accept_lens[-1])
        return ("outcome.accept_lens",)
    first = (step.bs - 1) * step.w if walk.global_rows else 0
    for column, row in enumerate(bad.accept_index[-1].tolist()):
        walk.index[step.bs - 1, column] = row + first if row >= 0 else -1
    return ("outcome.accept_index",)


def _lengths(guard: Any, plan: dict[str, Any]) -> None:
    """The last request's committed length, put right again behind the comparison."""
    commit = guard.commit

    def drifted(record: Any, tokens: Any) -> None:
        if not _due(plan, record, record.view):
            commit(record, tokens)
            return
        req = record.reqs[-1]
        held = req if hasattr(req, "kv_committed_len") else req.kv
        held.kv_committed_len += 1
        if plan["at"] is None:
            plan.update(at=record.step_id, rid=record.rids[-1], changed=("delta_kv",))
        try:
            commit(record, tokens)
        finally:
            held.kv_committed_len -= 1

    guard.commit = drifted
