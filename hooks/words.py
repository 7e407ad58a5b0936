"""What an armed process says of itself in its dumps, beside the boot line: hooks and reasons.

The boot line has room for rule ids only. A dump is read on another machine, where nobody can ask
the doctor, so it carries the doctor's words of the process that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ddtree_guard import render
from ddtree_guard.hooks.boot import tested
from ddtree_guard.hooks.hook import HookStatus
from ddtree_guard.step import Contract

_MOST = 300  # characters of a line


def armed_words(
    hooks: Iterable[HookStatus], contract: Contract | None, release: str
) -> tuple[str, ...]:
    """Lines for `Notes.doctor`: the release, every hook, every reason for a rule not checked."""
    lines = [f"SGLang {release}: {tested(release)}"]
    lines += [
        f"hook {state.hook.site} {'in place' if state.ok else 'NOT in place'}: {state.detail}"
        for state in hooks
    ]
    exempt = {} if contract is None else contract.not_checked
    lines += [f"not checked {', '.join(ids)}: {why}" for why, ids in by_reason(exempt).items()]
    return tuple(render.plain(line)[:_MOST] for line in lines)


def by_reason(exempt: Mapping[str, str]) -> dict[str, list[str]]:
    """Reason to the rules that it exempts."""
    reasons: dict[str, list[str]] = {}
    for rule, why in sorted(exempt.items()):
        reasons.setdefault(why, []).append(rule)
    return reasons
