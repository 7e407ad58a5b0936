"""Redaction: token ids and request ids are replaced by keyed hashes before anything is written.

Equal ids stay equal and negative ids (padding) stay as they are, so rules that compare ids with
each other still work; rules that compare ids with the vocabulary do not, and the dump says so. The
key belongs to the job and is never stored: without it a hash cannot be turned back by trying every
id of a vocabulary.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from ddtree_guard.checks import ALL
from ddtree_guard.errors import DumpError
from ddtree_guard.rule import Finding, Rule
from ddtree_guard.step import Step

TOKEN_FIELDS = (
    "tree.tokens", "tree.top1", "tree.columns", "outcome.predict", "outcome.committed",
    "outcome.draft_anchor", "outcome.last_committed",
)  # fmt: skip
RID_FIELDS = ("who.rids", "mask.rids")
HIDDEN = "[redacted]"
QKV_REFUSED = (
    "q, k and v rows were expected to stay out of a redacted dump, because prompts can be rebuilt "
    "from them, but this configuration captures them; set SGLANG_DDTREE_GUARD_REDACT=off, or "
    "SGLANG_DDTREE_GUARD_CAPTURE=meta."
)
WHY = "ids are redacted in this dump, so they cannot be compared with the vocabulary"

# Rules that read ids without naming them in `needs`, and rules that need the ids' true values.
# A test plants every fault in a redacted step and fails when a rule belongs here and is missing.
READS_IDS: frozenset[str] = frozenset()
NEEDS_IDS: frozenset[str] = frozenset()


def reads_ids(rule: Rule) -> bool:
    """Whether the words of the rule's finding may contain a token id or a request id."""
    return rule.id in READS_IDS or any(n in TOKEN_FIELDS + RID_FIELDS for n in rule.needs)


def needs_ids(rule: Rule) -> bool:
    """Whether the rule compares token ids with the vocabulary, which hashes do not survive."""
    tokens = any(name in TOKEN_FIELDS for name in rule.needs)
    vocabulary = any(name.startswith("limits.vocab") for name in rule.needs)
    return rule.id in NEEDS_IDS or (tokens and vocabulary)


def unchecked(rules: Iterable[Rule] = ALL) -> dict[str, str]:
    """Rules that a redacted dump can no longer re-check, each with the reason."""
    return {rule.id: WHY for rule in rules if needs_ids(rule)}


class KeyStore(Protocol):
    """The part of a `torch.distributed` store that sharing a key takes. It must live in memory."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` if it holds `expected` or is not there; return what it holds then."""


def job_key(store: KeyStore | None = None) -> bytes:
    """The key of this job: one for all ranks that share a store, else one for this process."""
    mine = secrets.token_hex(32)
    if store is None:
        return bytes.fromhex(mine)
    return bytes.fromhex(store.compare_set("ddtree_guard/redaction", "", mine).decode())


class Redactor:
    """Hashes ids with one key. Ranks that share the key give equal ids equal hashes."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or job_key()

    def step(self, step: Step) -> Step:
        """The step with hashed ids; rules that cannot work on it are exempt in its contract.

        Raises DumpError for a step that holds q, k or v rows.
        """
        if any(path.startswith("attention.") for path, _, _ in step.arrays()):
            raise DumpError(QKV_REFUSED)
        changes: dict[str, Any] = {}
        for path in TOKEN_FIELDS:
            value = step.get(path)
            if value is not None:
                changes[path.replace(".", "__")] = self.tokens(value)
        for path in RID_FIELDS:
            value = step.get(path)
            if value is not None:
                changes[path.replace(".", "__")] = tuple(self.rid(rid) for rid in value)
        exempt = {**step.contract.not_checked, **unchecked()}
        return step.replace(**changes, contract__not_checked=exempt)

    def finding(self, finding: Finding, rules: Iterable[Rule] = ALL) -> Finding:
        """The finding with a hashed rid, and without the words that may contain an id."""
        rid = None if finding.rid is None else self.rid(finding.rid)
        hidden: dict[str, Any] = {}
        if any(rule.id == finding.rule and reads_ids(rule) for rule in rules):
            hidden = dict.fromkeys(("headline", "equation", "expected", "actual"), HIDDEN)
        return dataclasses.replace(finding, rid=rid, **hidden)

    def request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A request's trail with its rid hashed; nothing else in it is an id."""
        return {**request, "rid": self.rid(str(request["rid"]))}

    def tokens(self, ids: Any) -> Any:
        """Hashes of token ids as int64 in [0, 2**62), of the same shape; negative ids stay."""
        ids = ids.detach().cpu().numpy() if hasattr(ids, "detach") else np.asarray(ids)
        known, index = np.unique(ids.reshape(-1), return_inverse=True)
        hashed = [int(i) if i < 0 else self._hash(f"token {int(i)}") >> 2 for i in known]
        return np.array(hashed, np.int64)[index.reshape(-1)].reshape(ids.shape)

    def rid(self, rid: str) -> str:
        """The hash of a request id, as a short name."""
        return f"r-{self._hash(f'rid {rid}') >> 16:012x}"

    def _hash(self, text: str) -> int:
        digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8, key=self._key)
        return int.from_bytes(digest.digest(), "big")
