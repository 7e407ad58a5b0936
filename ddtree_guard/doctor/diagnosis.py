"""`Diagnosis`: everything that was looked at, and the one sentence that sums it up.

Exit codes: 1 where output would be wrong or is garbled, 2 for arguments that SGLang does not
understand, 3 where this environment cannot be armed or the server cannot be asked, else 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtree_guard.config import PREFIX
from ddtree_guard.ddtree.algorithm import TESTED as DDTREE_RELEASES
from ddtree_guard.doctor.canary import Judgement
from ddtree_guard.doctor.deployment import Deployment
from ddtree_guard.doctor.faults import Match
from ddtree_guard.doctor.memory import Memory
from ddtree_guard.doctor.predict import Prediction
from ddtree_guard.hooks.boot import PLUGIN, excluded_line
from ddtree_guard.hooks.facts import SUPPORTED, Facts
from ddtree_guard.runbook import advice_on

FINE, WRONG, USAGE, ENVIRONMENT = 0, 1, 2, 3
BARE, ARGUMENTS, URL = "bare", "arguments", "url"
_KIND = "whether the corrected backend would be used, which the model decides"
_WIDTH_RULES = frozenset(("CFG1", "W1", "W3", "W4", "W8", "M5"))


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that keeps this environment from being armed, and the remedy."""

    what: str
    change: str


@dataclass
class Diagnosis:
    """What the doctor saw. `uses` is the backend kind of the server in question: stock, corrected
    or unknown. `refused` is SGLang's word where it would not start; `refusal_code` its exit code.
    """

    way: str
    survey: Mapping[str, Any] | None = None
    url: str | None = None
    deployment: Deployment | None = None
    facts: Facts | None = None
    stock: Prediction | None = None
    corrected: Prediction | None = None
    uses: str = "stock"
    known: tuple[Match, ...] = ()
    memory: Memory | None = None
    refused: str = ""
    refusal_code: int = 0
    canary: Judgement | None = None
    silent: str = ""  # why a running server gave no output to judge
    armed_there: str = ""
    notes: list[str] = field(default_factory=list)
    not_checked: list[tuple[str, str]] = field(default_factory=list)

    @property
    def troubles(self) -> list[Trouble]:
        """What is wrong with this environment; nothing where it was not looked at."""
        return [] if self.survey is None else troubles(self.survey)

    @property
    def predicted_wrong(self) -> bool:
        """Whether the backend that the server uses would give wrong output."""
        seen = {"stock": self.stock, "corrected": self.corrected}.get(self.uses)
        return (seen is not None and seen.wrong) or any(match.wrong for match in self.known_here)

    @property
    def known_here(self) -> tuple[Match, ...]:
        """The known faults that are not cured by the backend in use."""
        if self.uses == "stock":
            return self.known
        return tuple(m for m in self.known if not _WIDTH_RULES.issuperset(m.fault.rules))

    @property
    def garbled(self) -> bool:
        """Whether the running server's output is garbled."""
        return self.canary is not None and self.canary.garbled is True

    @property
    def exit_code(self) -> int:
        """See the module docstring."""
        if self.garbled or (self.predicted_wrong and not self.refused):
            return WRONG
        if self.refused:
            return ENVIRONMENT if _unknown_flag(self.refused) else self.refusal_code
        return ENVIRONMENT if self.troubles or self.undecided else FINE

    @property
    def undecided(self) -> str:
        """What must be known before this deployment can be called right; empty where all is."""
        made = self.deployment
        if made is None or not made.algorithm:
            return self.silent
        if self.silent:
            return self.silent
        if self.canary is not None and self.canary.garbled is False:
            return ""
        if made.w is None:
            return "verify width"
        if made.backend is None:
            return "attention backend"
        if self.uses == "unknown":
            ours = self.way == ARGUMENTS
            return _KIND if ours else "its backend's kind, and no output was judged"
        if made.varies:  # DDTREE of this package refuses at start what it cannot serve
            return ""
        open_ = [m for m in self.known_here if not m.sure and m.fault.effect.startswith("wrong")]
        names = {name for match in open_ for name in match.open if not name.startswith("release")}
        return ", ".join(sorted(names))


def troubles(survey: Mapping[str, Any]) -> list[Trouble]:
    """Why a server that is started in this environment would not be guarded, the worst first."""
    if survey.get("ended"):
        return [Trouble(f"the survey stopped at {survey['ended']}", "repair SGLang there")]
    sglang, plugin = survey["sglang"], survey["plugin"]
    if not sglang["installed"]:
        return [Trouble("SGLang is not installed here", "run the doctor where the server runs")]
    found = []
    if sglang["why"]:
        found.append(
            Trouble(sglang["why"], f"install a supported SGLang ({SUPPORTED}) that imports")
        )
    if plugin["excluded_by"] is not None:
        listed = plugin["excluded_by"]
        found.append(
            Trouble(
                excluded_line(listed),
                f"SGLANG_PLUGINS={listed},{PLUGIN}",
            )
        )
    if not plugin["found"]:
        found.append(
            Trouble(
                "SGLang cannot find the plugin: no entry point of ddtree-guard in this environment",
                "`pip install .` in a checkout of ddtree-guard, into the environment that serves",
            )
        )
    if plugin.get("setting"):
        found.append(Trouble(plugin["setting"], _right_value(plugin["setting"])))
    elif plugin["found"] and plugin["excluded_by"] is None and not plugin["loaded"]:
        why = plugin["why"] or "SGLang did not call it"
        found.append(Trouble(f"the plugin does not load: {why}", "correct that"))
    blocked = [h for h in survey["hooks"] if h["blocking"] and relevant(h, survey)]
    for hook in blocked[:3]:
        found.append(
            Trouble(
                f"hook {hook['site']} ({hook['part']}) is {hook['status']}: {hook['detail']}",
                "use a release of the README's table, or write an adapter for this fork",
            )
        )
    return found


def _right_value(complaint: str) -> str:
    """A variable and one of the values that the complaint about it lists."""
    name, given, _ = complaint.partition("=")
    if not given:
        name = f"{PREFIX}_RULES"  # complaints about a rule name the rule alone
    right = complaint.partition("Use one of: ")[2]
    values = right.rstrip(".").split(", ") if right else []
    return f"{name}={'log' if 'log' in values else values[0]}" if values else f"correct {name}"


def relevant(hook: Mapping[str, Any], survey: Mapping[str, Any]) -> bool:
    """Whether a hook matters on this release: DDTREE of this package runs on two of them only."""
    release = str(survey["sglang"]["release"] or "")
    return hook["part"] != "DDTREE" or release.startswith(DDTREE_RELEASES)


def headline(d: Diagnosis) -> tuple[str, str]:
    """(one sentence, the one change that helps; empty where nothing is to be changed)."""
    if d.garbled:
        assert d.canary is not None
        return f"GARBLED: {d.canary.why[0]}", change(d)
    if d.refused:
        said, change_to = _start(d)
        return f"WILL NOT START: {said}", change_to
    if d.predicted_wrong:
        return f"WRONG: {_cause(d)}", change(d)
    if d.troubles:
        return f"NOT GUARDED: {d.troubles[0].what}", d.troubles[0].change
    return _fine(d)


def _fine(d: Diagnosis) -> tuple[str, str]:
    if d.way == BARE:
        assert d.survey is not None
        mode = d.survey["plugin"].get("mode", "off")
        if mode == "off":
            return "READY, AND OFF: a server started here is not checked", f"{PREFIX}=log"
        return f"READY: a server started here with a tree is guarded in mode {mode}", ""
    made = d.deployment
    if d.silent:
        return f"UNDECIDED: no output to judge: {d.silent}", ""
    if made is None or not made.algorithm:
        clean = "; the canaries are clean" if d.canary is not None and d.canary.canaries else ""
        return f"NOTHING TO VERIFY: no speculative algorithm is configured{clean}", ""
    if d.undecided:
        return f"UNDECIDED: not known: {d.undecided}", _decide(d.undecided)
    judged = d.canary is not None and d.canary.garbled is False
    if d.uses == "unknown":
        rules = ", ".join(d.stock.rules) if d.stock is not None else ""
        stock = f"; on a stock backend {rules} would be broken" if rules else ""
        return f"NOTHING WRONG FOUND: the canaries are clean{stock}", ""
    what = f"no rule of {_count(d)} would be broken" if _count(d) else "no rule could be checked"
    seen = " (on the corrected backend)" if d.uses == "corrected" else ""
    seen = ", and the canaries are clean" if judged else seen
    but, change_to = _besides(d)
    return f"NOTHING WRONG FOUND: {what}{seen}{but}", change_to


def _besides(d: Diagnosis) -> tuple[str, str]:
    """The faults that this deployment has for certain and that come out now and then only: near the
    context limit, for one. In words, and what to change.
    """
    has = [match for match in d.known_here if match.sure]
    if not has:
        return "", ""
    first, more = has[0].fault, f" (and {len(has) - 1} more, below)" if has[1:] else ""
    return f", but it has a known fault{more}: {first.effect}: {first.title}", first.change


def _unknown_flag(refused: str) -> bool:
    """Whether SGLang's parser does not know DDTREE: a matter of what is installed here."""
    return refused.startswith(("unrecognized", "argument --spec")) and "ddtree" in refused.lower()


def _decide(what: str) -> str:
    """The flag that would decide."""
    if "attention backend" in what:
        return "give --attention-backend, as the server is given it"
    if what == _KIND or "sliding-window" in what or "recurrent" in what:
        return "give --model-path as a local folder with its config.json"
    return ""


def _count(d: Diagnosis) -> int:
    seen = d.corrected if d.uses == "corrected" else d.stock
    return 0 if seen is None else len(seen.checked)


def _cause(d: Diagnosis) -> str:
    """What would be wrong, in the words of the widths or of the known fault."""
    made, seen = d.deployment, d.corrected if d.uses == "corrected" else d.stock
    assert made is not None
    rules = () if seen is None else seen.rules
    where = f"SGLang {made.release} on {made.backend or 'this backend'}"
    if "CFG1" in rules and made.declared is not None:
        if made.declared == made.w:
            return f"{where} verifies requests with a smaller budget of their own as {made.w} rows"
        return (
            f"{where} verifies {made.w} rows per request (budget {made.budget}) with a width of "
            f"{made.declared}"
        )
    wrong = [match for match in d.known_here if match.wrong]
    if wrong:
        return f"{where}: {wrong[0].fault.title}"
    assert seen is not None
    finding = next(f for _, f in seen.findings if not f.latent)
    return f"{where}: {finding.rule} {finding.name}: {finding.headline}"


def change(d: Diagnosis) -> str:
    """The one change that makes this deployment right."""
    made, seen = d.deployment, d.corrected if d.uses == "corrected" else d.stock
    if made is not None and not made.algorithm:
        return "no draft is configured: look at the model, its quantization and its KV cache"
    rules = set() if seen is None else set(seen.rules)
    if made is not None and (rules & _WIDTH_RULES or (d.garbled and made.ddtree)):
        return _width_change(d, made)
    wrong = [match for match in d.known_here if match.wrong] if made is not None else []
    if wrong:
        return wrong[0].fault.change
    if "CFG4" in rules and made is not None and made.topk == 1 and made.steps:
        return f"--speculative-num-draft-tokens {made.steps + 1}"
    if seen is not None and seen.rules:
        return advice_on(seen.rules[0]).cures[0].value.partition(".")[0]
    return "drop --speculative-algorithm until the cause is known"


def _width_change(d: Diagnosis, made: Deployment) -> str:
    """Back to a width that stock gets right, or to the backend that is right with any."""
    plugin = {} if d.survey is None else d.survey.get("plugin", {})
    if plugin.get("incident"):
        return "SGLANG_DDTREE_INCIDENT=off"
    if plugin.get("loaded") and d.way == ARGUMENTS:
        return f"{PREFIX}_BACKEND=auto"
    if d.troubles and d.way == ARGUMENTS and d.survey and d.survey["sglang"]["installed"]:
        return d.troubles[0].change
    if made.ddtree and made.block:
        return f"--speculative-ddtree-budget {made.block - 1}"
    if made.ddtree:
        return "--speculative-ddtree-budget BLOCK-1 (BLOCK is the drafter's block size)"
    return "drop --speculative-algorithm until the cause is known"


def _start(d: Diagnosis) -> tuple[str, str]:
    """(what SGLang or DDTREE says, what to change). DDTREE's own sentences end with the change."""
    if _unknown_flag(d.refused):
        releases = f"SGLang {' or '.join(DDTREE_RELEASES)}, which DDTREE of this package runs on"
        return d.refused, d.troubles[0].change if d.troubles else releases
    said, _, last = d.refused.rstrip(".").rpartition("; ")
    return (said, last) if d.refused.startswith(("DDTREE ", "the incident ")) else (d.refused, "")
