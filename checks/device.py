"""The guard's own checkers against each other."""

from __future__ import annotations

from ddtree_guard.rule import Cost, Finding, Rule, Scope, Site, rule
from ddtree_guard.step import Step


@rule(
    "DG1", "checkers-disagree", site=Site.VERIFY, cost=Cost.HOST, scope=Scope.SERVER,
    needs=("device.hot", "device.cold"),
)  # fmt: skip
def checkers_disagree(step: Step) -> Finding | None:
    """The fused device kernel and the NumPy rules reach the same verdict on a step.

    Holds when: every rule that both could judge is broken for both or for neither. Rules that the
    device samples may be broken for NumPy alone.
    Breaks as: nothing in the output: one of the two checkers is wrong, or the arrays changed
    between the device check and the copy to the host.
    Usual cause: a buffer was overwritten while the host took the step (then the finding is about
    the copy), or a defect of the guard.
    Seen in: none reported: it is about the guard itself.
    """
    hot, cold = set(step.device.hot or ()), set(step.device.cold or ())
    only_hot = sorted(hot - cold)
    only_cold = sorted(cold - hot - set(step.device.partial))
    if not only_hot and not only_cold:
        return None
    name = (only_hot or only_cold)[0]
    who, other = ("device", "host") if only_hot else ("host", "device")
    request, row = step.device.first.get(name, (None, None))
    return Finding(
        headline=f"{name} is broken for the {who} checker only",
        equation=f"device: {_names(hot)}; host: {_names(cold)}",
        expected=f"{name} broken for both or for neither",
        actual=f"not broken for the {other} checker",
        request=request,
        row=row,
        cause="the step's buffers changed before the host took them, or the guard has a defect",
        confidence="possible",
        next_step="keep the dump and report it: ddtree-guard explain DG1",
    )


def _names(rules: set[str]) -> str:
    return ", ".join(sorted(rules)) or "clean"


RULES: tuple[Rule, ...] = (checkers_disagree,)
