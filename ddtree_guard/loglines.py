"""What the guard writes into a server's log, and what each line means: read by `ddtree-guard
explain`. The tables of docs/operations.md are held against it by a test.

The texts are Markdown of that page: a link without a file leads to one of its headings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

OPERATIONS = "docs/operations.md"
UNLISTED = f"This is a line of ddtree-guard without a rule; {OPERATIONS} says what it means."
_OURS = re.compile(r"(?<![\w/.-])ddtree_guard[ :]")  # no part of a path
_LINK = re.compile(r"\[([^]]+)\]\(([^)]+)\)")


@dataclass(frozen=True, slots=True)
class Line:
    """A line by its head, in which ` ... ` stands for a value."""

    head: str
    level: str
    means: str

    @property
    def row(self) -> str:
        """Its row of the table."""
        return f"| `{self.head}` | {self.level} | {self.means} |"


LINES = (
    Line(
        "ddtree_guard armed=",
        "warning",
        "[The boot line](#the-boot-line): what each field must say, and what if not.",
    ),
    Line(
        "ddtree_guard boot mode=",
        "info",
        "A process loaded the plugin and the choice of backend is installed. Wait for "
        "`ddtree_guard armed=`.",
    ),
    Line(
        "ddtree_guard idle",
        "info",
        "No speculation, nothing to guard.",
    ),
    Line(
        "ddtree_guard NOT ACTIVE",
        "error",
        "The plugin could not be loaded; nothing is checked. The sentence in the line says "
        "what to change.",
    ),
    Line(
        "NOT GUARDED",
        "error",
        "A rank or a site is not guarded: serving goes on, unchecked there. "
        "[NOT GUARDED](#not-guarded) has what to do, by reason.",
    ),
    Line(
        "ddtree_guard finding",
        "error",
        "The first finding of a rule, with its dump; `ddtree-guard explain` takes both. "
        "Fields below.",
    ),
    Line(
        "ddtree_guard repeated",
        "error",
        "More findings of a rule, at most every 30 s: how many (`count`), since the start "
        "(`total`), in which steps, some request ids.",
    ),
    Line(
        "ddtree_guard tainted",
        "error",
        "A request reuses KV of a step that had a finding: its answer is suspect. Cure the "
        "cause, then empty the cache: [tainted requests](#tainted-requests).",
    ),
    Line(
        "ddtree_guard step=",
        "warning",
        "A verify step was not checked, and why; once a reason. `no hook saw its metadata` "
        "and `the check failed` are to be reported: [alerts](#alerts).",
    ),
    Line(
        "ddtree_guard shadow every=",
        "warning",
        "What [shadow mode](shadow.md) compares: layers, and the one that each captured batch "
        "size records.",
    ),
    Line(
        "ddtree_guard shadow does not compare layer",
        "warning",
        "A layer that shadow mode leaves out, and why; once a reason.",
    ),
    Line(
        "ddtree_guard shadow step=",
        "warning",
        "A comparison of shadow mode or its rows are missing, and why; once a reason.",
    ),
    Line(
        "ddtree_guard shadow is off",
        "error",
        "The self-test of shadow mode failed on this device. The other rules are not affected.",
    ),
    Line(
        "ddtree_guard internal",
        "error",
        "An exception inside the guard, with its traceback. The server is not affected. "
        "Report the traceback.",
    ),
    Line(
        "ddtree_guard: no dump was written",
        "warning",
        "Evidence is lost: the folder and the reason; once a reason. Free or mount the folder.",
    ),
    Line(
        "ddtree_guard: no evidence is written to",
        "warning",
        "The folder of dumps cannot be written: `ci-report` and the pytest plugin will call "
        "this process not armed. Checks go on.",
    ),
    Line(
        "ddtree_guard: the evidence thread failed",
        "warning",
        "As for a folder that cannot be written, by a fault of ours. Report the traceback.",
    ),
    Line(
        "ddtree_guard: metrics of rank",
        "warning",
        "The metrics client failed; this rank exports nothing more. Checks go on.",
    ),
    Line(
        "ddtree_guard: backend=",
        "warning",
        "A process loaded the plugin twice with different settings; the first one holds. "
        "Restart it for the other one.",
    ),
    Line(
        "ddtree_guard: SGLANG_DDTREE_INCIDENT is on",
        "warning",
        "The server produces garbage on purpose. For demonstrations.",
    ),
    Line(
        "ddtree_guard request",
        "info, or warning",
        "A request ended a minute ago: `rid`, its `name` in dumps, the `verdict` on its "
        "steps, the longest `run` of one token. Info where it is clean, on rank TP0 only. "
        "`ddtree-guard request NAME` tells more.",
    ),
    Line(
        "ddtree_guard dump trigger=",
        "warning",
        "The flight recorder wrote a dump without a finding, and why. `ddtree-guard check "
        "DUMP` checks its steps again.",
    ),
    Line(
        "ddtree_guard: no dump for",
        "warning",
        "A dump was asked for twice within 30 s; the line says when to ask again.",
    ),
    Line(
        "ddtree_guard: the recorder failed",
        "warning",
        "The recorder failed once; nothing else is affected.",
    ),
    Line(
        "ddtree_guard: the flight recorder is left alone",
        "error",
        "The recorder failed 8 times and records nothing any more. Checks go on.",
    ),
    Line(
        "ddtree_guard: not in the main thread",
        "warning",
        "This fork builds its scheduler in another thread: `dump --pid` does not work there.",
    ),
    Line(
        "ddtree_guard: nothing to dump yet",
        "warning",
        "A dump was asked for before the first verify step.",
    ),
    Line(
        "ddtree_guard: ... is not a variable of the guard",
        "warning",
        "A misspelt variable; the nearest name is given.",
    ),
)

# reasons of a NOT GUARDED line, in which ` S ` stands for a value, and what to do
REASONS = {
    "no report; is the plugin installed and loaded there": (
        "Install the same version on that node; look at its `SGLANG_PLUGINS`; read its log."
    ),
    "the guard could not start": ("An exception above it is a defect of the guard: report it."),
    "site S is not hooked": (
        "This SGLang, or fork, looks unlike the supported releases: see the README, and "
        "`register_adapter` for forks."
    ),
    "no attention backend of the target was seen": (
        "The fork builds its backends elsewhere: report it with the release."
    ),
    "lets SGLang build a step's metadata on a stream of its own": (
        "Unset `SGLANG_ENABLE_OVERLAP_PLAN_STREAM`: metadata is then built where it can be "
        "compared."
    ),
    "lets SGLang replay a step's metadata from a graph": (
        "Unset `SGLANG_ENABLE_METADATA_GLUE_GRAPH`: SGLang then builds each step's metadata in a "
        "call that can be seen."
    ),
    "self-test": (
        "A checker missed a planted fault or saw one that was not there. Run `ddtree-guard "
        "selftest` on that machine and report it."
    ),
    "site S failed 3 times and is disarmed": (
        "The guard failed there while serving. Report the exception behind `ddtree_guard "
        "internal`; restart to arm again."
    ),
}


def meaning(text: str) -> str:
    """What a pasted log line means, for a terminal; empty where it is none of the guard's."""
    found = _first(text)
    if found is None:
        return UNLISTED if _OURS.search(text) else ""
    todo = [do for why, do in REASONS.items() if _pattern(why).search(text)]
    told = [found.means, *(todo if found.head == "NOT GUARDED" else [])]
    return f"{found.head} ({found.level}): {_terminal(' '.join(told))}"


def head(text: str) -> str:
    """The head of the guard's line that stands first in the text; empty where there is none."""
    found = _first(text)
    return found.head if found else ""


def _first(text: str) -> Line | None:
    """The line whose head stands first in the text, the longest one of those."""
    hits = [(hit.start(), -len(x.head), x) for x in LINES if (hit := _pattern(x.head).search(text))]
    return min(hits, key=lambda hit: hit[:2])[2] if hits else None


def _pattern(head: str) -> re.Pattern[str]:
    return re.compile(re.escape(head).replace(r"\ \.\.\.\ ", " .+? ").replace(r"\ S\ ", r" \S+ "))


def _terminal(text: str) -> str:
    """Links as words with the file that they lead to."""
    return _LINK.sub(lambda link: f"{link[1]} ({_file(link[2])})", text)


def _file(target: str) -> str:
    return f"{OPERATIONS}{target}" if target.startswith("#") else f"docs/{target}"
