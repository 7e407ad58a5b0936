"""A site and its alternatives, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree_guard.hooks.patching import Patch, PatchReport


@dataclass(frozen=True, slots=True)
class Hook:
    """One site: `required` ones must be in place for the guard to be armed."""

    site: str
    patches: tuple[Patch, ...]
    required: bool = True

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from the others: a site may be hooked in several classes."""
        return self.site, self.patches[0].target if self.patches else ""


@dataclass(frozen=True, slots=True)
class HookStatus:
    """What became of a site: `applied`, or the status of its alternatives in words."""

    hook: Hook
    ok: bool
    detail: str

    @property
    def blocking(self) -> bool:
        """Whether the guard cannot be armed because of it."""
        return self.hook.required and not self.ok


def status(hook: Hook, report: PatchReport) -> HookStatus:
    """The state of a site after its patches were applied."""
    good = [outcome for outcome in report.outcomes if outcome.ok]
    words = [
        f"{outcome.patch.target} {outcome.status}{outcome.detail and ': ' + outcome.detail}"
        for outcome in good or report.outcomes
    ]
    return HookStatus(hook, bool(good), "; ".join(words) or "nothing to hook is loaded")
