"""What to do about a finding: per rule its harm and what cures it, per family what to look at.

Read by `ddtree-guard explain`, by the rule pages and by docs/rules/runbook.md, which is made from
it. A cure is a setting of the server that takes the cause away, not one that hides the symptom.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

GENERAL = """\
What to do about a finding. Alerts, log lines and dumps are explained in
[operations](../operations.md).

**Stop the harm.** Harm "wrong text" or "memory of others": take the replica out of the load
balancer, then restart it with the first cure that its rule names. If that does not help or there
is no time: drop `--speculative-algorithm`. Without it no verify step runs, and none can be wrong;
it is slower, so look at the capacity first. Harm "speed only": nothing has to be stopped. Harm "a
crash on the first request": where the server runs, its text is right and nothing has to be stopped.

**Keep the evidence** before the restart: copy the dump folder that the log line names and the
server's log. Dumps are rotated, and on an `emptyDir` volume they go with the pod.

**Then learn.** `ddtree-guard explain DUMP` says what was found, and `ddtree-guard check DUMP` finds
it again on any machine. `ddtree-guard bundle DUMP` makes a file that is safe for a public issue.

## Cures
"""


class Harm(str, Enum):
    """What a broken rule does to users."""

    TEXT = "wrong text"
    MEMORY = "memory of others, or a crash"
    SPEED = "speed only"
    DRAFT = "a crash on the first request, or lost speed; no wrong text"
    GUARD = "none known"


class Cure(str, Enum):
    """What to change on the server. The best one of a rule comes first."""

    CORRECTED = (
        "Set SGLANG_DDTREE_GUARD_BACKEND=corrected (Triton targets): width, offsets and captured "
        "buffers follow the tree. If the boot line says backend=corrected already, it is a defect "
        "of that backend: report it and take the next cure."
    )
    NARROW = (
        "Set --speculative-ddtree-budget to the draft block minus 1 (7 for a block of 8): the tree "
        "then has as many rows as a stock backend expects."
    )
    SMALLER = "Lower --speculative-ddtree-budget."
    CHAIN = (
        "Verify a chain instead of a tree: for DDTREE --speculative-algorithm DFLASH without the "
        "budget; for EAGLE --speculative-eagle-topk 1 and --speculative-num-draft-tokens one "
        "above --speculative-num-steps."
    )
    EAGER = (
        "Add --disable-cuda-graph: nothing is kept from a capture. Slower, and no cure for a wrong "
        "width."
    )
    SERIAL = (
        "Add --disable-overlap-schedule: the host no longer prepares a step while another runs."
    )
    TRITON = "Set --attention-backend triton, which passes the tree mask."
    PAGE = "Set --page-size 1."
    CONTEXT = "Lower --context-length."
    MARGIN = (
        "Set --speculative-num-draft-tokens to 8 or less, or let clients stay twice that number "
        "below the context limit."
    )
    FEWER = "Lower --max-running-requests: fewer requests share a step."
    COUNTS = (
        "Set --speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens "
        "together; with topk 1 the draft tokens are the steps plus 1."
    )
    RANKS = "Restart all ranks of the job together, never one alone."
    ROUTE = (
        "Send requests with a temperature above 0 or a grammar to a server without "
        "--speculative-algorithm."
    )
    OTHERS = (
        "Look first at the width, mask, position and KV findings of the same step: they cause it."
    )
    SLOW = (
        "Nothing is urgent: the text is right. Compare the throughput with that of a server "
        "without --speculative-algorithm and keep the faster."
    )
    PLAIN = "Drop --speculative-algorithm until it is understood."
    REPORT = "Report it with `ddtree-guard bundle DUMP`: no setting of the server is known to help."

    @property
    def word(self) -> str:
        """The name of the cure in the runbook."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Advice:
    """One rule's row in the runbook."""

    harm: Harm
    cures: tuple[Cure, ...]


def _text(*cures: Cure) -> Advice:
    return Advice(Harm.TEXT, cures)


def _memory(*cures: Cure) -> Advice:
    return Advice(Harm.MEMORY, cures)


def _speed(*cures: Cure) -> Advice:
    return Advice(Harm.SPEED, (*cures, Cure.SLOW))


_WIDTH = _text(Cure.CORRECTED, Cure.NARROW)
_TREE = _text(Cure.CHAIN)
_GRAPH = _text(Cure.EAGER)

ADVICE: Mapping[str, Advice] = {
    "CFG1": _WIDTH,
    "CFG2": Advice(Harm.DRAFT, (Cure.COUNTS, Cure.CHAIN, Cure.PLAIN)),
    "CFG3": _text(Cure.SMALLER),
    "CFG4": _speed(Cure.COUNTS),
    "CFG5": _text(Cure.CORRECTED, Cure.TRITON, Cure.CHAIN, Cure.PAGE),
    "CFG6": _text(Cure.CONTEXT),
    "W1": _WIDTH,
    "W2": _text(Cure.SERIAL, Cure.EAGER),
    "W3": _WIDTH,
    "W4": _WIDTH,
    "W5": _text(Cure.CORRECTED, Cure.EAGER),
    "W6": _text(Cure.EAGER, Cure.CORRECTED),
    "W7": _GRAPH,
    "W8": _WIDTH,
    "M1": _text(Cure.EAGER, Cure.CORRECTED),
    "M2": _text(Cure.CORRECTED, Cure.CHAIN),
    "M3": _text(Cure.CORRECTED, Cure.CHAIN),
    "M4": _TREE,
    "M5": _memory(Cure.CORRECTED, Cure.CONTEXT),
    "M6": _TREE,
    "M7": _text(Cure.TRITON, Cure.CHAIN),
    "M8": _text(Cure.SERIAL, Cure.CHAIN),
    "M9": _text(Cure.CORRECTED, Cure.SERIAL),
    "T1": _TREE,
    "T2": _TREE,
    "T3": _TREE,
    "T4": _speed(Cure.CHAIN),
    "T5": _speed(),
    "T6": _memory(Cure.CHAIN),
    "P1": _text(Cure.CHAIN, Cure.SERIAL),
    "P2": _memory(Cure.EAGER, Cure.CONTEXT),
    "P3": _GRAPH,
    "K1": _memory(Cure.PLAIN),
    "K2": _memory(Cure.EAGER, Cure.SERIAL),
    "K3": _memory(Cure.SERIAL),
    "K4": _text(Cure.EAGER, Cure.PAGE),
    "K5": _memory(Cure.CORRECTED, Cure.EAGER),
    "K6": _memory(Cure.PAGE, Cure.SERIAL, Cure.MARGIN),
    "K9": _text(Cure.TRITON, Cure.PAGE),
    "K10": _text(Cure.SMALLER, Cure.PLAIN),
    "K11": _memory(Cure.FEWER, Cure.CONTEXT, Cure.SMALLER),
    "G1": _GRAPH,
    "G2": _text(Cure.EAGER, Cure.SERIAL),
    "G3": _GRAPH,
    "G4": _GRAPH,
    "G5": _memory(Cure.EAGER),
    "G6": _GRAPH,
    "G7": _text(Cure.EAGER, Cure.SERIAL),
    "A1": _text(Cure.OTHERS, Cure.CHAIN),
    "A2": _speed(),
    "A3": _text(Cure.PLAIN),
    "A4": _text(Cure.SERIAL, Cure.PLAIN),
    "A5": _speed(),
    "A7": _speed(),
    "L1": _text(Cure.OTHERS, Cure.CORRECTED),
    "L2": _text(Cure.OTHERS, Cure.PLAIN),
    "L3": _text(Cure.ROUTE),
    "L4": _text(Cure.ROUTE),
    "X1": _text(Cure.RANKS, Cure.PLAIN),
    "X4": _text(Cure.RANKS, Cure.EAGER),
    "D1": _text(Cure.OTHERS, Cure.CORRECTED, Cure.CHAIN),
    "D3": _text(Cure.OTHERS, Cure.EAGER, Cure.PLAIN),
    "D4": _text(Cure.OTHERS, Cure.CORRECTED, Cure.PLAIN),
    "DG1": Advice(Harm.GUARD, (Cure.REPORT,)),
}


def advice_on(rule: str) -> Advice:
    """The row of a rule; one that has none yet gets the cure that stops every verify step."""
    return ADVICE.get(rule, Advice(Harm.TEXT, (Cure.PLAIN,)))


@dataclass(frozen=True, slots=True)
class Family:
    """What the findings of one family have in common: who is hit, and what shows it best."""

    title: str
    hits: str
    learn: str


FAMILIES: Mapping[str, Family] = {
    "CFG": Family(
        "Configuration",
        "Every step of the server from its first one on. It is found at start-up, before any "
        "traffic, so a canary never has to serve to show it.",
        "Keep the server's whole command line and the boot line with the dump: the dump holds the "
        "widths only. Compare with the table of releases in the README.",
    ),
    "W": Family(
        "Width and stride",
        "All requests of the batch; the first one often looks right. Single requests look better "
        "than batches.",
        "`ddtree-guard show DUMP`: the stride ruler draws expected and actual offsets. A small "
        "budget that is clean beside a large one that is not is the signature of a wrong width.",
    ),
    "M": Family(
        "Mask",
        "Requests whose trees branch; chains often stay right. A finding that is latent does not "
        "reach the output.",
        "`ddtree-guard show DUMP --request N`: tree and mask side by side. `recompute DUMP` shows "
        "whether the attention rows are wrong too, where the dump holds them.",
    ),
    "T": Family(
        "Tree",
        "The request that is named. Its neighbours are not affected.",
        "`ddtree-guard show DUMP --request N` draws the tree; `check DUMP` lists what else it "
        "breaks. The fault is in the drafter or the tree builder, not in attention.",
    ),
    "P": Family(
        "Positions",
        "The request that is named, more the deeper its tree; P2 hits the whole server.",
        "`ddtree-guard show DUMP --request N`. If all rows are off by one amount the length is "
        "wrong; if they are off by row, depth was taken for row.",
    ),
    "K": Family(
        "KV slots",
        "Also requests that were served right (victims), and later ones that reuse their cached "
        "prefix: look for `ddtree_guard tainted`. The harm stays after the step has passed, so "
        "restart the server or flush its cache after the cure.",
        "`ddtree-guard check DUMP`, then `request RID` for the offender and each victim.",
    ),
    "G": Family(
        "Graphs",
        "Batches that replay a graph; eager steps are right. It can begin hours after the start, "
        "with the first batch of another size or after a weight update.",
        "Serve the same prompts with and without --disable-cuda-graph and compare the two dumps "
        "with `ddtree-guard diff A B`.",
    ),
    "A": Family(
        "Acceptance and commit",
        "The request that is named, from this step on: what was committed stays in its text and "
        "its KV.",
        "`ddtree-guard request RID` shows the steps before it. An acceptance length that looks "
        "good proves nothing: a broken verifier can raise it.",
    ),
    "L": Family(
        "Logits and sampling",
        "The request that is named. L1 and L2 are mostly the result of another fault in the same "
        "step.",
        "`ddtree-guard check DUMP --all`: which rules of other families are broken, and which were "
        "not checked.",
    ),
    "X": Family(
        "Ranks",
        "Every request of the job, and a hang may follow.",
        "Collect the dumps of all ranks in one folder: `ddtree-guard ranks DIR` names the first "
        "rank that departs and the field.",
    ),
    "D": Family(
        "Sampled oracles",
        "The request that is named, and most likely others: one request in some steps is looked "
        "at. The rows themselves were wrong, whatever the step said about itself.",
        "Whether the root was right (D3) tells a fault of the tree or its mask from one of the "
        "prefix, the scale or the slots. Serve with SGLANG_DDTREE_GUARD_CAPTURE=qkv, and "
        "`ddtree-guard recompute DUMP` computes the rows again.",
    ),
    "DG": Family(
        "The guard itself",
        "Nobody as far as is known: the two checkers of the guard disagree about a step.",
        "`ddtree-guard selftest` on the same machine, then report it. Do not trust the other "
        "findings of that step before that.",
    ),
}
