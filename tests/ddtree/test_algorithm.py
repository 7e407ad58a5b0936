"""DDTREE's registration, arguments and refusals, on SGLang's own classes."""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("sglang")

from ddtree_guard.attention.backend import needs_correction
from ddtree_guard.ddtree import algorithm
from ddtree_guard.errors import GuardError, IncompatibleError, UsageError
from ddtree_guard.hooks.facts import facts_of
from ddtree_guard.hooks.patching import apply
from ddtree_guard.testing.fakes import sglang

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]
QWEN = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 64, "vocab_size": 64,
    "max_position_embeddings": 256, "torch_dtype": "bfloat16",
}  # fmt: skip
DRAFT = {
    "architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "block_size": 8,
    "dflash_config": {"mask_token_id": 63, "target_layer_ids": [1, 2]},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("BUDGET", "TOPK", "INCIDENT"):
        monkeypatch.delenv(f"SGLANG_DDTREE_{name}", raising=False)
    report = algorithm.install()
    assert report is not None
    yield
    report.restore()


@pytest.fixture
def resolve(tmp_path: Path) -> Callable[..., Any]:
    """Resolve real server arguments for a DDTREE server. No GPU is asked."""
    for name, settings in (
        ("target", {**QWEN, "architectures": ["Qwen3ForCausalLM"]}),
        ("draft", {**QWEN, **DRAFT}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(settings))

    def make(**options: Any) -> Any:
        return sglang("server_args").ServerArgs(**{
            "model_path": str(tmp_path / "target"), "device": "cuda", "skip_tokenizer_init": True,
            "attention_backend": "triton", "sampling_backend": "pytorch",
            "grammar_backend": "none", "mem_fraction_static": 0.1,
            "speculative_algorithm": "DDTREE",
            "speculative_draft_model_path": str(tmp_path / "draft"), **options,
        })  # fmt: skip

    return make


@pytest.mark.parametrize(("budget", "widest"), [(3, 8), (7, 8), (16, 17), (1024, 1025)])
def test_arguments_hold_block_budget_and_the_wider_of_both(
    resolve: Callable[..., Any], budget: int, widest: int
) -> None:
    args = pickle.loads(pickle.dumps(resolve(speculative_ddtree_budget=budget)))
    assert args.speculative_ddtree_budget == budget
    assert args.speculative_dflash_block_size == 8
    assert args.speculative_num_draft_tokens == widest


def test_draft_worker_keeps_the_block_size(resolve: Callable[..., Any]) -> None:
    from ddtree_guard.ddtree.worker import draft_arguments

    args = resolve(speculative_ddtree_budget=16)
    assert args.max_speculative_num_draft_tokens == 17
    draft = draft_arguments(args)
    assert draft.speculative_num_draft_tokens == draft.max_speculative_num_draft_tokens == 8
    assert args.speculative_num_draft_tokens == 17


def test_an_eager_server_gets_a_backend_that_follows_each_step(resolve: Callable[..., Any]) -> None:
    args = resolve(speculative_ddtree_budget=16, disable_cuda_graph=True)
    runner = SimpleNamespace(
        server_args=args, is_draft_worker=False, model_config=SimpleNamespace(context_len=256)
    )
    facts = facts_of(sglang("layers.attention.triton_backend").TritonAttnBackend)
    assert facts.follows_batch or needs_correction(runner, facts)


def test_budget_comes_from_the_environment_too(
    resolve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DDTREE_BUDGET", "33")
    assert resolve().speculative_ddtree_budget == 33
    assert resolve(speculative_ddtree_budget=5).speculative_ddtree_budget == 5


def test_flag_reaches_the_server_arguments(resolve: Callable[..., Any]) -> None:
    args = resolve(speculative_ddtree_budget=4)
    parser = argparse.ArgumentParser()
    type(args).add_cli_args(parser)
    line = [
        "--model-path", args.model_path, "--device", "cuda", "--skip-tokenizer-init",
        "--attention-backend", "triton", "--grammar-backend", "none",
        "--mem-fraction-static", "0.1", "--speculative-algorithm", "DDTREE",
        "--speculative-draft-model-path", args.speculative_draft_model_path,
        "--speculative-ddtree-budget", "21",
    ]  # fmt: skip
    assert type(args).from_cli_args(parser.parse_args(line)).speculative_ddtree_budget == 21


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({}, "--speculative-ddtree-budget"),
        ({"speculative_ddtree_budget": 1025}, "--speculative-ddtree-budget"),
        ({"speculative_ddtree_budget": 0}, "--speculative-ddtree-budget"),
        ({"speculative_ddtree_budget": 16, "page_size": 16}, "--page-size 1"),
        ({"speculative_ddtree_budget": 16, "attention_backend": "flashinfer"}, "triton"),
        ({"speculative_ddtree_budget": 16, "enable_dp_attention": True}, "--enable-dp-attention"),
        ({"speculative_ddtree_budget": 16, "speculative_dflash_block_size": 64}, "block"),
        ({"speculative_ddtree_budget": 16, "enable_two_batch_overlap": True}, "two-batch"),
        ({"speculative_ddtree_budget": 16, "enable_strict_thinking": True}, "--enable-strict"),
        ({"speculative_ddtree_budget": 16, "enable_return_routed_experts": True}, "--enable-ret"),
        ({"speculative_ddtree_budget": 16, "kv_canary": "log"}, "--kv-canary"),
        ({"speculative_ddtree_budget": 16, "enable_page_major_kv_layout": True}, "--enable-page"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_flag_to_change(
    resolve: Callable[..., Any], options: dict[str, Any], flag: str
) -> None:
    with pytest.raises(GuardError, match=flag) as refusal:
        resolve(**options)
    assert str(refusal.value).count(". ") == 0
    assert isinstance(refusal.value, (UsageError, IncompatibleError))


def test_an_untested_release_is_refused_by_name(
    resolve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(algorithm, "release", lambda: "0.5.23")
    with pytest.raises(IncompatibleError, match=r"0\.5\.16 and 0\.5\.17, found 0\.5\.23"):
        resolve(speculative_ddtree_budget=16)


def test_incident_is_refused_where_the_kernel_would_write_out_of_bounds(
    resolve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DDTREE_INCIDENT", "on")
    monkeypatch.setattr(algorithm, "release", lambda: "0.5.16")
    assert resolve(speculative_ddtree_budget=7).speculative_num_draft_tokens == 8
    with pytest.raises(IncompatibleError, match="out of bounds"):
        resolve(speculative_ddtree_budget=6)


def test_incident_is_refused_where_the_release_has_no_such_fault(
    resolve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DDTREE_INCIDENT", "on")
    monkeypatch.setattr(algorithm, "release", lambda: "0.5.17")
    with pytest.raises(IncompatibleError, match=r"0\.5\.16, found 0\.5\.17"):
        resolve(speculative_ddtree_budget=16)


def test_algorithm_is_of_the_dflash_family_and_wider_on_the_target(
    resolve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = sglang("speculative.spec_info").SpeculativeAlgorithm.from_string("ddtree")
    assert spec.is_dflash()
    assert spec.is_dflash_family()
    assert spec.supports_overlap
    assert not spec.need_topk()
    assert not spec.carries_draft_hidden_states()
    args = resolve(speculative_ddtree_budget=3)
    monkeypatch.setattr(sglang("runtime_context"), "get_server_args", lambda: args)
    for given in (8, 17):  # 0.5.17 gives the draft the target's number
        assert spec.get_num_tokens_per_req_for_target_verify(given, is_draft_worker=True) == 8
    assert spec.get_num_tokens_per_req_for_target_verify(8, is_draft_worker=False) == 4


def request(**changes: Any) -> Any:
    params = {
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
        "min_new_tokens": 0, "json_schema": None, "regex": None, "ebnf": None,
        "structural_tag": None, "custom_params": None,
    }  # fmt: skip
    plain = {"return_logprob": False, "return_hidden_states": False}
    params |= {k: v for k, v in changes.items() if k in params}
    plain |= {k: v for k, v in changes.items() if k not in params}
    return SimpleNamespace(sampling_params=SimpleNamespace(**params), **plain)


@pytest.mark.parametrize(
    "change",
    [
        {"return_logprob": True}, {"return_hidden_states": True}, {"json_schema": "{}"},
        {"regex": "a+"}, {"frequency_penalty": 0.1}, {"presence_penalty": -1.0},
        {"repetition_penalty": 1.1}, {"min_new_tokens": 2}, {"custom_logit_processor": "x"},
        {"custom_params": {"ddtree_budget": "many"}}, {"custom_params": {"ddtree_budget": 0}},
        {"custom_params": ["ddtree_budget", 4]}, {"custom_params": "ddtree_budget"},
    ],
)  # fmt: skip
def test_requests_that_a_tree_cannot_serve_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    args = SimpleNamespace(speculative_algorithm="DDTREE")
    monkeypatch.setattr(sglang("runtime_context"), "get_server_args", lambda: args)
    report = apply(algorithm.SERVER).require()
    try:
        validate = sglang("managers.scheduler").validate_dflash_request
        assert validate(request(), True) is None
        assert next(iter(change)) in (validate(request(**change), True) or "").replace(" ", "_")
        assert not sglang("speculative.spec_utils").spec_need_hidden_states(args)
    finally:
        report.restore()


def test_other_algorithms_keep_their_own_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    args = SimpleNamespace(speculative_algorithm="EAGLE", enable_multi_layer_eagle=False)
    monkeypatch.setattr(sglang("runtime_context"), "get_server_args", lambda: args)
    report = apply(algorithm.SERVER).require()
    try:
        assert sglang("speculative.spec_utils").spec_need_hidden_states(args)
        assert sglang("managers.scheduler").validate_dflash_request(request(), False) is None
    finally:
        report.restore()
    assert "dflash" in sglang("managers.scheduler").validate_dflash_request.__module__


def test_verify_graphs_are_captured_with_the_backend_s_own_mask() -> None:
    class Runner:
        def get_spec_info(self, num_tokens: int) -> Any:
            return SimpleNamespace(custom_mask=None)

    wrapped = algorithm._get_spec_info(algorithm.Original(Runner.get_spec_info))
    stock = sglang("layers.attention.triton_backend").TritonAttnBackend
    backend = object.__new__(stock)
    backend.cuda_graph_custom_mask = backend._verify_mask = "the buffer"
    for draft, name, mask in ((False, "DDTREE", "the buffer"), (True, "DDTREE", None),
                              (False, "DFLASH", None)):  # fmt: skip
        runner = Runner()
        runner.attn_backend = backend  # type: ignore[attr-defined]
        runner.model_runner = SimpleNamespace(  # type: ignore[attr-defined]
            spec_algorithm=SimpleNamespace(name=name), is_draft_worker=draft
        )
        assert wrapped(runner, 4).custom_mask == mask


@pytest.mark.parametrize(("draft", "rows"), [(False, 4), (True, 8)])
def test_warm_up_states_the_tree_s_rows(
    resolve: Callable[..., Any], draft: bool, rows: int
) -> None:
    args = resolve(speculative_ddtree_budget=3)
    spec = sglang("speculative.spec_info").SpeculativeAlgorithm.from_string("DDTREE")
    report = apply(algorithm.SERVER).require()
    try:
        make = sglang("model_executor.runner.base_runner").create_dummy_verify_input
        dummy = make(spec, args, None, 4, draft)
    finally:
        report.restore()
    assert dummy.draft_token_num == dummy.num_tokens_per_req == rows


def test_only_a_ddtree_server_gets_another_backend_factory() -> None:
    registry = sglang("layers.attention.attention_registry").ATTENTION_BACKENDS
    algorithms = sglang("speculative.spec_info").SpeculativeAlgorithm
    stock, validate = registry["triton"], sglang("managers.scheduler").validate_dflash_request
    spec = algorithms.from_string("DDTREE")
    assert registry["triton"] is stock
    spec.create_worker(SimpleNamespace(disable_overlap_schedule=False))
    assert registry["triton"] is not stock
    algorithm.uninstall()
    assert registry["triton"] is stock
    assert sglang("managers.scheduler").validate_dflash_request is validate
    with pytest.raises(ValueError, match="DDTREE"):
        algorithms.from_string("DDTREE")
