"""Configurations against the catalogue: what stock would do, and what ours would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ddtree_guard.doctor.deployment import Deployment
from ddtree_guard.doctor.faults import matches
from ddtree_guard.doctor.memory import verify_memory
from ddtree_guard.doctor.model import Model, model_of
from ddtree_guard.doctor.predict import Prediction, corrected_here, predict
from ddtree_guard.guard import Guard
from ddtree_guard.hooks.facts import MATRIX, generation_of

Make = Callable[..., Deployment]
WIDTH = {"CFG1", "CFG5", "W1", "W3", "W4", "W8"}


def judged(d: Deployment, corrected: bool = False) -> Prediction:
    facts = generation_of(d.release) if d.backend == "triton" else None
    return predict(d, facts, matches(d), corrected)


@pytest.mark.parametrize("release", [r.version for r in MATRIX])
def test_the_incident_is_wrong_on_every_stock_release_and_right_corrected(
    make: Make, release: str
) -> None:
    d = make(release)
    stock = judged(d)
    assert stock.wrong
    assert set(stock.rules) == (WIDTH if release in ("0.5.12", "0.5.16") else {"M5"})
    assert not judged(d, corrected=True).findings
    assert corrected_here(d, generation_of(release))


@pytest.mark.parametrize("release", [r.version for r in MATRIX])
def test_what_a_model_elsewhere_leaves_open_is_not_decided(make: Make, release: str) -> None:
    def auto(**values: Any) -> bool | None:
        made = make(release, model=None, context_length=None, **values)
        return corrected_here(made, generation_of(release))

    unknown = {"speculative_num_draft_tokens": None, "speculative_dflash_block_size": None}
    assert auto(**unknown) is None
    early = release in ("0.5.12", "0.5.16")
    assert auto() is (True if early else None)  # 8 of SGLang's for 17 rows
    assert auto(speculative_num_draft_tokens=17) is None
    assert auto(**unknown, speculative_ddtree_varies=True) is (True if early else None)
    assert auto(speculative_algorithm="EAGLE") is False


@pytest.mark.parametrize("budget", range(1, 33))
def test_stock_up_to_0_5_16_is_right_at_the_block_only(make: Make, budget: int) -> None:
    stock = judged(make(speculative_ddtree_budget=budget))
    assert stock.wrong is (budget != 7)
    assert ("CFG1" in stock.rules) is (budget != 7)
    assert not judged(make(speculative_ddtree_budget=budget), corrected=True).wrong


def test_eager_is_as_wrong_as_graphs(make: Make) -> None:
    assert set(judged(make(cuda_graph_config=None, disable_cuda_graph=True)).rules) == WIDTH


def test_the_finding_names_both_widths(make: Make) -> None:
    found = {f.rule: f for _, f in judged(make()).findings}
    assert found["CFG1"].equation == "backend.w = 8, expected w = 17"
    assert "17*(37+17) = 918" in found["W3"].equation


def test_a_smaller_budget_of_a_request_is_wrong_where_the_server_argument_rules(make: Make) -> None:
    same = {"speculative_num_draft_tokens": 17}
    assert not judged(make(**same)).wrong
    varying = judged(make(**same, speculative_ddtree_varies=True))
    assert {"W1", "W3", "W8"} <= set(varying.rules)
    assert not judged(make(**same, speculative_ddtree_varies=True), corrected=True).wrong
    assert not judged(make("0.5.17", **same, speculative_ddtree_varies=True)).wrong


def test_a_captured_mask_without_tree_columns_is_latent(make: Make) -> None:
    stock = judged(make(speculative_num_draft_tokens=17))
    assert [(f.rule, f.latent) for _, f in stock.findings] == [("M5", True)]
    assert "32*17*(4096+17)" in stock.findings[0][1].equation


@pytest.mark.parametrize(
    ("case", "broken"),
    [
        ({}, set()),
        ({"speculative_num_draft_tokens": 200}, {"CFG4"}),
        ({"speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}, set()),
        ({"speculative_eagle_topk": 1}, {"CFG4"}),
        ({"page_size": 16}, set()),
    ],
)
def test_eagle(make: Make, case: dict[str, Any], broken: set[str]) -> None:
    assert set(judged(make(base="eagle", **case)).rules) == broken


@pytest.mark.parametrize(
    ("release", "model", "case", "fault"),
    [
        ("0.5.12", {}, {"page_size": 16}, "pages-with-topk"),
        ("0.5.12", {}, {"page_size": 1}, None),
        ("0.5.16", {}, {"page_size": 16, "attention_backend": "trtllm_mla"}, "pages-with-topk-mla"),
        ("0.5.16", {"window": 128}, {}, "sliding-window-by-row"),
        ("0.5.23", {"window": 128}, {}, "sliding-window-by-row"),
        ("0.5.16", {"window": 128}, {"speculative_eagle_topk": 1}, None),
        ("0.5.12", {"recurrent": True}, {}, "recurrent-state-of-a-prefix"),
        ("0.5.16", {"recurrent": True}, {}, None),
    ],
)
def test_known_faults_become_cfg5(
    make: Make, release: str, model: dict[str, Any], case: dict[str, Any], fault: str | None
) -> None:
    sizes = {"context": 4096, "recurrent": False, **model}
    d = make(release, Model(**sizes), "eagle", **case)
    wrong = [match.fault.id for match in matches(d) if match.wrong and match.fault.feature]
    assert [name for name in wrong if "draft" not in name] == ([fault] if fault else [])
    if fault:
        assert "CFG5" in judged(d).rules


def test_a_ddtree_with_pages_windows_or_recurrent_layers_is_wrong(make: Make) -> None:
    for changes, model in (
        ({"page_size": 16}, Model(4096, recurrent=False)),
        ({}, Model(4096, window=128, recurrent=False)),
        ({}, Model(4096, recurrent=True)),
    ):
        d = make("0.5.17", model, **changes)
        assert [m for m in matches(d) if m.wrong]
        assert "CFG5" in judged(d, corrected=True).rules  # no backend cures it


def test_mask_offsets_beyond_32_bits(make: Make) -> None:
    sizes = {"base": "eagle", "context_length": 1 << 20, "attention_backend": "flashinfer"}
    most = {"cuda_graph_config": {"decode": {"bs": [512]}}, "max_running_requests": 512}
    d = make(**sizes, **most)
    assert "mask-offsets-32-bit" in [m.fault.id for m in matches(d) if m.wrong]
    assert "mask-offsets-32-bit" not in [m.fault.id for m in matches(make(**sizes))]


def test_what_is_not_known_is_open_and_not_wrong(make: Make) -> None:
    d = make("0.5.16", None, "eagle", attention_backend=None, page_size=16)
    found = {match.fault.id: match for match in matches(d)}
    assert not any(match.wrong for match in found.values())
    assert "attention backend" in found["pages-with-topk-mla"].open
    assert "sliding-window" in found["sliding-window-by-row"].open
    assert found["grammar-mask-on-trees"].open == ("release 0.5.16",)


def test_another_backend_is_judged_by_its_configuration_only(make: Make) -> None:
    seen = judged(make(base="eagle", attention_backend="fa3"))
    assert not seen.findings
    assert not {"W1", "W3", "M5"} & set(seen.checked)
    assert "plan" in seen.exempt["W1"]
    assert "causality by row" in judged(make(speculative_algorithm="DFLASH")).exempt["M2"]


def test_a_release_of_no_row_is_not_judged(make: Make) -> None:
    assert generation_of("0.4.9") is None
    assert generation_of("main") is None
    assert generation_of("0.5.16.post1") is generation_of("0.5.13")
    assert not {"W1", "W3"} & set(predict(make("main"), None).checked)


def test_memory_counts_what_stock_and_ours_allocate(make: Make) -> None:
    memory = verify_memory(make(), generation_of("0.5.16"))
    assert memory is not None
    assert (memory.lanes, memory.w, memory.context) == (32, 17, 4096)
    assert memory.stock.mask == 32 * 8 * 4096
    assert memory.stock.kv_indices == 32 * 8 * 4096 * 8
    assert memory.corrected.mask == 32 * 17 * (4096 + 2 * 17)
    assert memory.corrected.kv_indices == 33 * 4096 * 8  # 32 * (4096 + 17) of them
    assert verify_memory(make(disable_cuda_graph=True), generation_of("0.5.16")) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculative_ddtree_budget", "16"), ("speculative_ddtree_budget", -1),
        ("speculative_ddtree_budget", 10**30), ("page_size", [1]), ("attention_backend", {"a": 1}),
        ("cuda_graph_config", {"decode": {"bs": "x", "max_bs": None}}), ("max_running_requests", 0),
        ("speculative_ddtree_budget", 1 << 20), ("speculative_num_draft_tokens", 1 << 30),
        ("cuda_graph_config", {"decode": {"bs": [1 << 30]}}), ("cuda_graph_config", "full"),
        ("speculative_num_draft_tokens", True),
    ],
)  # fmt: skip
def test_values_of_a_stranger_never_break_the_reader(make: Make, name: str, value: Any) -> None:
    d = make(**{name: value})
    judged(d)
    matches(d)
    assert d.unknown


@pytest.mark.parametrize(
    ("changes", "lanes"),
    [
        ({}, 32), ({"max_running_requests": 20}, 20), ({"cuda_graph_config": None}, None),
        ({"cuda_graph_config": {"decode": {"backend": "full", "max_bs": 64}}}, 48),
        ({"cuda_graph_config": {"decode": {"backend": "disabled", "max_bs": 64}}}, None),
        ({"cuda_graph_config": None, "cuda_graph_bs": [1, 4, 24]}, 24),
        ({"cuda_graph_config": None, "cuda_graph_max_bs": 12}, 12),
        ({"disable_cuda_graph": True}, None),
    ],
)  # fmt: skip
def test_the_largest_captured_batch(make: Make, changes: dict[str, Any], lanes: int | None) -> None:
    assert make(**changes).lanes == lanes


def test_the_backend_that_verifies(make: Make) -> None:
    both = {"prefill_attention_backend": "fa3", "decode_attention_backend": "triton"}
    assert make(**both).backend == "fa3"
    assert make(**both, speculative_attention_mode="decode").backend == "triton"
    assert make(prefill_attention_backend="flashinfer").backend == "flashinfer"


def test_models() -> None:
    text = {"num_attention_heads": 8, "hidden_size": 1024, "max_position_embeddings": 4096}
    assert model_of(text).head_dim == 128
    assert model_of({"text_config": text}).heads == 8
    assert model_of({**text, "sliding_window": 128}).window == 128
    assert model_of({**text, "sliding_window": 128, "use_sliding_window": False}).window is None
    types = ["full_attention", "linear_attention"]
    assert model_of({**text, "sliding_window": 128, "layer_types": types}).window is None
    assert model_of({**text, "layer_types": types}).recurrent
    assert model_of({"dflash_config": {"block_size": 16}}).block == 16
    assert not model_of(text).recurrent


def test_every_rule_is_said_to_be_checked_or_not(make: Make) -> None:
    seen = judged(make(speculative_algorithm="DFLASH"))
    skipped = [entry.rule for entry in seen.not_checked]
    assert len(set(skipped)) == len(skipped)
    assert not set(skipped) & set(seen.checked)
    assert {*skipped, *seen.checked} == {rule.id for rule in Guard().rules}
