"""What an armed process says of itself in its dumps, beside the boot line: hooks and reasons.

The boot line has room for rule ids only. A dump is read on another machine, where nobody can ask
the doctor, so it carries the doctor's words of the process that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ddtree_guard import render
from ddtree_guard.hooks.boot import tested
from ddtree_guard.hooks.hook import HookStatus

_MOST = 300  # characters of a line


def armed_words(
    hooks: Iterable[HookStatus], exempt: Mapping[str, str], release: str, shadow: str = ""
) -> tuple[str, ...]:
    """Lines for `Notes.doctor`: the release, every hook, what shadow mode compares, and every
    reason for a rule that is not checked; `exempt` gives it by rule.
    """
    lines = [f"SGLang {release}: {tested(release)}"]
    lines += [
        f"hook {state.hook.site} {'in place' if state.ok else 'NOT in place'}: {state.detail}"
        for state in hooks
    ]
    lines += [shadow] if shadow else []
    lines += [f"not checked {', '.join(ids)}: {why}" for why, ids in by_reason(exempt).items()]
    return tuple(render.plain(line)[:_MOST] for line in lines)


def by_reason(exempt: Mapping[str, str]) -> dict[str, list[str]]:
    """Reason to the rules that it exempts."""
    reasons: dict[str, list[str]] = {}
    for rule, why in sorted(exempt.items()):
        reasons.setdefault(why, []).append(rule)
    return reasons
