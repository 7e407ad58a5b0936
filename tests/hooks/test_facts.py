"""The version table: chosen by what a class looks like, never by a version string."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_guard.errors import IncompatibleError
from ddtree_guard.hooks import facts as table
from ddtree_guard.hooks.contracts import PAD_LANES, contract_of
from ddtree_guard.hooks.facts import GENERATIONS, MATRIX, facts_of, stated_width


class _Old:
    """Shaped like 0.5.13 to 0.5.16: nothing reads the batch's width."""

    def __init__(self) -> None:
        self.num_draft_tokens = 8

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.cuda_graph_custom_mask: Any = None
        self.cuda_graph_num_kv_splits: Any = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.num_draft_tokens = forward_batch.batch_size

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool) -> None: ...

    def get_verify_buffers_to_fill_after_draft(self) -> None: ...


class _FollowsBatch(_Old):
    """A fork of it that reads the spec info but was not renamed in any other way."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.num_draft_tokens = forward_batch.spec_info.draft_token_num


class _New(_FollowsBatch):
    """Shaped like 0.5.17 to 0.5.20."""

    verify_mask = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._verify_mask: Any = None


class _Wrapped(_New):
    """A plugin's subclass that only passes through."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)


@pytest.mark.parametrize(
    ("shape", "name"), [(_Old, "out-graph"), (_New, "spec-info"), (_Wrapped, "spec-info")]
)
def test_generation_follows_the_shape(shape: type, name: str) -> None:
    assert facts_of(shape).name == name


def test_a_fork_with_any_version_string_gets_the_row_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "release", lambda: "0.5.17+corp.42")
    assert facts_of(_Old).name == "out-graph"
    assert facts_of(_New).name == "spec-info"


class _RenamedWidth:
    """0.5.16 with its width under another name: what we would set, nobody would read."""

    def __init__(self) -> None:
        self.n_draft = 8

    init_forward_metadata_out_graph = _Old.init_forward_metadata_out_graph
    get_verify_buffers_to_fill_after_draft = _Old.get_verify_buffers_to_fill_after_draft
    init_cuda_graph_state = _Old.init_cuda_graph_state

    def init_forward_metadata(self, forward_batch: Any) -> None: ...


@pytest.mark.parametrize("shape", [object, _FollowsBatch, _RenamedWidth])
def test_unknown_shape_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, shape: type
) -> None:
    monkeypatch.setattr(table, "release", lambda: "0.5.9")
    with pytest.raises(IncompatibleError) as caught:
        facts_of(shape)
    text = str(caught.value)
    assert "found SGLang 0.5.9" in text
    assert "0.5.21 to 0.5.23" in text
    assert "SGLANG_DDTREE_GUARD_BACKEND=stock" in text
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("facts", GENERATIONS, ids=lambda f: f.name)
def test_stated_width(facts: Any) -> None:
    first, second = facts.stated[:2]
    assert stated_width(facts, SimpleNamespace(**{first: 17, second: 8})) == 17
    assert stated_width(facts, SimpleNamespace(**{first: -1, second: 8})) == 8
    assert stated_width(facts, SimpleNamespace(**{first: None})) is None
    assert stated_width(facts, None) is None


def test_a_ragged_batch_states_no_width() -> None:
    ragged = SimpleNamespace(draft_token_num=8, ragged_verify_layout=object())
    assert all(stated_width(facts, ragged) is None for facts in GENERATIONS)


def test_every_generation_says_what_padded_lanes_hold() -> None:
    assert set(PAD_LANES) == {facts.name for facts in GENERATIONS}


def test_matrix_versions_are_unique_and_pinned() -> None:
    assert len({r.version for r in MATRIX}) == len(MATRIX)
    assert all("==" in pin for r in MATRIX for pin in r.pins)


@pytest.mark.parametrize(
    ("algorithm", "path", "length"),
    [
        ("DDTREE", "eager", "exact"),
        ("DDTREE", "graph", "capacity"),
        ("EAGLE", "eager", "capacity"),  # a buffer for the full context under overlap
        ("EAGLE3", "eager", "capacity"),
        ("ngram", "eager", "exact"),
    ],
)
def test_mask_length(algorithm: str, path: str, length: str) -> None:
    assert contract_of(algorithm, GENERATIONS[1], path).mask_length == length


def test_dflash_is_a_chain_without_a_mask() -> None:
    contract = contract_of("DFLASH", GENERATIONS[1], "graph")
    assert contract.chain
    assert "causality by row" in contract.not_checked["M2"]


def test_only_the_oldest_generation_leaves_positions_stale() -> None:
    stale = [f.name for f in GENERATIONS if "positions.values" not in PAD_LANES[f.name]]
    assert stale == ["capture-replay"]
    assert contract_of("DDTREE", GENERATIONS[0], "eager").pad_lanes == {}


def test_an_algorithm_without_a_row_says_what_is_not_checked() -> None:
    contract = contract_of("MINE", GENERATIONS[2], "eager")
    assert "MINE has no row" in contract.not_checked["M9"]


def test_a_buffer_that_no_release_has_is_noticed() -> None:
    class Later(_Old):
        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            self.cuda_graph_row_splits: Any = None

    assert table.unknown_buffers(_Old) == frozenset()
    assert table.unknown_buffers(Later) == {"cuda_graph_row_splits"}
