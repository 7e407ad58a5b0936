"""Redaction: no id survives, equal ids stay equal, the key is nowhere, rules mostly still work."""

from pathlib import Path

import numpy as np
import pytest

from ddtree_guard.checks import ALL
from ddtree_guard.config import Config
from ddtree_guard.dump.read import Dump
from ddtree_guard.dump.redact import (
    HIDDEN,
    RID_FIELDS,
    TOKEN_FIELDS,
    Redactor,
    needs_ids,
    reads_ids,
    unchecked,
)
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.guard import Guard
from ddtree_guard.rule import Finding, Rule
from ddtree_guard.step import ARRAY_SHAPES, Step
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step

KEY = bytes(range(64, 96))


def step(lanes: int | None = None) -> Step:
    return sound_step(5, lens=(37, 21, 50), padded_bs=lanes).replace(
        who__rids=("alice-secret", "bob-secret", "carol-secret"),
        mask__rids=("alice-secret", "bob-secret", "carol-secret"),
    )


def written(root: Path) -> Path:
    finding = Finding("token 4711", "token[2] = 4711", "1", "4711", rid="bob-secret", rule="W3")
    writer = DumpWriter("run", Config(dump_dir=root), Redactor(KEY))
    return writer.write([step()], [(0, finding)])


def test_no_request_id_and_no_key_reach_the_disk(tmp_path: Path) -> None:
    raw = b"".join(file.read_bytes() for file in written(tmp_path).iterdir())
    assert b"secret" not in raw
    assert KEY not in raw
    assert KEY.hex().encode() not in raw


# Written down here on purpose, apart from redact.TOKEN_FIELDS: a new array of Tree or Outcome
# fails `test_every_array_is_known_as_ids_or_not` until somebody decides what it holds.
IDS = {"tree.tokens", "tree.top1", "tree.columns", "outcome.predict", "outcome.committed",
       "outcome.draft_anchor", "outcome.last_committed"}  # fmt: skip
NO_IDS = {"tree.parents", "tree.depths", "tree.sizes", "tree.retrieve_index",
          "tree.retrieve_next_token", "tree.retrieve_next_sibling", "outcome.accept_index",
          "outcome.accept_lens", "outcome.truncated", "outcome.delta_seq_lens",
          "outcome.delta_seq_lens_cpu", "outcome.delta_output", "outcome.delta_kv",
          "outcome.hidden_rows", "outcome.draft_lens", "outcome.target_lens",
          "outcome.masked_walk", "outcome.greedy", "outcome.target_probs", "outcome.coins",
          "outcome.allowed", "outcome.finite", "outcome.row_min", "outcome.row_max"}  # fmt: skip


def test_every_array_is_known_as_ids_or_not() -> None:
    arrays = {path for path in ARRAY_SHAPES if path.startswith(("tree.", "outcome."))}
    assert arrays == IDS | NO_IDS


def test_no_token_id_reaches_the_disk(tmp_path: Path) -> None:
    far, plain = 10**9, step()
    plain = plain.replace(tree__columns=plain.tree.tokens)
    marked = {path: np.where((v := plain.get(path)) >= 0, v + far, v) for path in IDS}
    marked_step = plain.replace(**{path.replace(".", "__"): v for path, v in marked.items()})
    after = Dump(DumpWriter("run", Config(dump_dir=tmp_path)).write([marked_step])).step(0)
    for path, value, _ in after.arrays():
        assert not ((value >= far) & (value < far + 10**6)).any(), path
    for path, old in marked.items():
        assert np.array_equal(after.get(path)[old < 0], old[old < 0]), path


def test_equal_ids_stay_equal_across_fields_and_ranks() -> None:
    one, two = Redactor(KEY).step(step()), Redactor(KEY).step(step())
    assert np.array_equal(one.tree.tokens, two.tree.tokens)
    assert one.who.rids == two.who.rids == one.mask.rids
    assert np.array_equal(one.tree.tokens[:, 0], one.outcome.draft_anchor)
    assert not np.array_equal(Redactor().step(step()).tree.tokens, one.tree.tokens)


def test_hashes_are_int64_whatever_the_ids_were() -> None:
    hashed = Redactor(KEY).tokens(np.array([[7, -1], [7, 8]], np.int32))
    assert hashed.dtype == np.int64
    assert hashed[0, 0] == hashed[1, 0] != hashed[1, 1]
    assert hashed[0, 1] == -1
    assert hashed.max() < 2**62


def test_the_words_of_a_rule_that_reads_ids_are_hidden() -> None:
    rule = Rule(
        "T9", "odd-token", ALL[0].site, ALL[0].cost, ALL[0].scope, ("tree.tokens",), None, None,  # type: ignore[arg-type]
    )  # fmt: skip
    finding = Finding("token 4711", "t = 4711", "1", "4711", request=1, rid="bob", rule="T9")
    hidden = Redactor(KEY).finding(finding, (rule,))
    assert (hidden.headline, hidden.equation, hidden.actual) == (HIDDEN, HIDDEN, HIDDEN)
    assert hidden.rid != "bob"
    assert hidden.request == 1


def test_a_dump_says_what_it_can_no_longer_recheck(tmp_path: Path) -> None:
    dump = Dump(written(tmp_path))
    assert dump.redacted
    assert dump.cannot_recheck == unchecked()
    skipped = {entry.rule for entry in Guard().check(dump.step(0)).not_checked}
    assert set(dump.cannot_recheck) <= skipped


def test_redaction_is_on_unless_turned_off(tmp_path: Path) -> None:
    plain = DumpWriter("run", Config(dump_dir=tmp_path, redact=False)).write([step()])
    assert Dump(plain).step(0).who.rids[0] == "alice-secret"
    assert Config().redact


@pytest.mark.parametrize("lanes", [None, 4])
def test_a_sound_step_stays_sound(lanes: int | None) -> None:
    assert Guard().check(Redactor(KEY).step(step(lanes))).findings == ()


@pytest.mark.parametrize("lanes", [None, 4])
@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_redaction_changes_no_verdict_that_it_claims_to_keep(rule: Rule, lanes: int | None) -> None:
    """Fails when a rule needs true ids and `redact.NEEDS_IDS` or READS_IDS lacks it."""
    planted = FAULTS[rule.id](step(lanes), 2).step
    before = Guard(rules=(rule,)).check(planted)
    after = Guard(rules=(rule,)).check(Redactor(KEY).step(planted))
    if needs_ids(rule):
        assert after.findings == ()
        return
    assert after.checked == before.checked
    assert [(f.request, f.row) for f in after.findings] == [
        (f.request, f.row) for f in before.findings
    ]
    if not reads_ids(rule):
        words = [(f.headline, f.equation, f.expected, f.actual) for f in before.findings]
        assert [(f.headline, f.equation, f.expected, f.actual) for f in after.findings] == words


def test_the_redacted_fields_exist() -> None:
    for path in TOKEN_FIELDS + RID_FIELDS:
        step().get(path)
