"""The choice of the backend, its memory, and its life beside other plugins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_guard.attention.backend import (
    VerifyBytes,
    graph_mask,
    needs_correction,
    require_fit,
    tree_width,
    verify_buffer_bytes,
)
from ddtree_guard.errors import IncompatibleError
from ddtree_guard.hooks.facts import GENERATIONS, facts_of


def _runner(draft: bool = False, context: int = 4096, **args: Any) -> Any:
    base = {
        "speculative_algorithm": "DDTREE",
        "speculative_num_draft_tokens": 8,
        "speculative_ddtree_budget": 16,
    }
    return SimpleNamespace(
        is_draft_worker=draft,
        server_args=SimpleNamespace(**{**base, **args}),
        model_config=SimpleNamespace(context_len=context),
    )


def test_width_of_target_and_draft() -> None:
    assert tree_width(_runner()) == 17
    assert tree_width(_runner(draft=True)) is None


@pytest.mark.parametrize("algorithm", ["EAGLE", "DFLASH", "NGRAM", None])
def test_a_budget_without_a_tree_algorithm_changes_nothing(algorithm: str | None) -> None:
    assert tree_width(_runner(speculative_algorithm=algorithm)) is None


@pytest.mark.parametrize("budget", [0, -1, True, 3.5, "16"])
def test_a_budget_that_is_no_number_of_nodes_is_refused(budget: object) -> None:
    with pytest.raises(IncompatibleError, match=r"whole number of at least 1, found"):
        tree_width(_runner(speculative_ddtree_budget=budget))


# budget 16 (w = 17) and 7 (w = 8) against D = 8; then with graphs off
@pytest.mark.parametrize(
    ("facts", "wide", "equal", "equal_eager"),
    [
        (GENERATIONS[0], True, True, False),  # the captured mask lacks w*w cells per request
        (GENERATIONS[1], True, True, False),
        (GENERATIONS[2], True, False, False),
        (GENERATIONS[3], True, False, False),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_auto_per_generation(facts: Any, wide: bool, equal: bool, equal_eager: bool) -> None:
    assert needs_correction(_runner(), facts) is wide
    assert needs_correction(_runner(speculative_ddtree_budget=7), facts) is equal
    eager = _runner(speculative_ddtree_budget=7, disable_cuda_graph=True)
    assert needs_correction(eager, facts) is equal_eager


def test_narrow_trees_need_correction_only_where_the_batch_is_ignored() -> None:
    narrow = _runner(speculative_ddtree_budget=3)
    assert [needs_correction(narrow, facts) for facts in GENERATIONS] == [True, True, False, False]


@pytest.mark.parametrize("graphs", [True, False])
def test_a_worker_that_runs_ahead_needs_room_beyond_the_context(graphs: bool) -> None:
    args = {
        "speculative_num_draft_tokens": 17, "speculative_ddtree_varies": True,
        "disable_cuda_graph": not graphs,
    }  # fmt: skip
    follows = [facts for facts in GENERATIONS if facts.follows_batch]
    assert [needs_correction(_runner(**args), facts) for facts in follows] == [graphs] * 2


def test_memory_of_a_large_deployment() -> None:
    """At 48 x 257 x 32k stock would spend 3.2 GB on KV indices and 1.6 GB on logits more."""
    need = verify_buffer_bytes(48, 257, 32768, heads=32, head_dim=128)
    assert need.mask == 48 * 257 * (32768 + 2 * 257)
    rows = 48 * 257
    assert rows * 32768 * 8 - need.kv_indices == pytest.approx(3.22e9, rel=0.01)
    assert rows * 32 * 8 * 129 * 4 - need.attn_logits == pytest.approx(1.62e9, rel=0.01)
    assert need.total == need.mask + need.kv_indices + need.attn_logits + need.rows


def test_a_width_that_does_not_fit_is_refused_with_the_numbers() -> None:
    need = VerifyBytes(mask=3 << 30, kv_indices=1 << 30, attn_logits=0, rows=0)
    require_fit(need, 4 << 30, 48, 257, 32768)
    with pytest.raises(IncompatibleError) as caught:
        require_fit(need, (4 << 30) - 1, 48, 257, 32768)
    for part in ("4.00 GiB", "48 requests x 257 rows", "context 32768", "lower the tree budget"):
        assert part in str(caught.value)


@pytest.mark.sglang
def test_capture_refuses_before_it_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtree_guard.attention import backend as module
    from ddtree_guard.testing.standins import VerifyCase, build_backend

    backend = build_backend(VerifyCase(), "corrected")
    monkeypatch.setattr(module, "free_bytes", lambda device: 1000)
    with pytest.raises(IncompatibleError, match=r"found 0\.00 GiB"):
        backend.init_cuda_graph_state(4, 68)
    assert getattr(backend, "cuda_graph_kv_indices", None) is None


@pytest.mark.sglang
def test_rows_are_sized_by_the_runner_and_by_the_tree() -> None:
    from ddtree_guard.testing.standins import VerifyCase, build_backend

    for given, rows in ((4 * 8, 4 * 17), (4 * 17, 4 * 17), (100, 100)):
        backend = build_backend(VerifyCase(context=64), "corrected")
        backend.init_cuda_graph_state(4, given)
        assert backend.cuda_graph_num_kv_splits.shape == (rows,)
        assert (backend.cuda_graph_num_kv_splits == backend.max_kv_splits).all()
        assert backend.cuda_graph_kv_indices.shape == (6 * 64,)


@pytest.mark.sglang
def test_a_class_with_an_unknown_buffer_gets_stocks_own_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ddtree_guard.testing.fakes import sglang
    from ddtree_guard.testing.standins import VerifyCase, build_backend

    module = sglang("layers.attention.triton_backend")

    class TritonAttnBackend(module.TritonAttnBackend):
        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *args: Any) -> None:
            super().init_cuda_graph_state(max_bs, max_num_tokens, *args)
            self.cuda_graph_of_a_later_release = self.cuda_graph_num_kv_splits.clone()

    monkeypatch.setattr(module, "TritonAttnBackend", TritonAttnBackend)
    backend = build_backend(VerifyCase(context=64), "corrected")
    backend.init_cuda_graph_state(4, 4 * 8)
    assert backend.cuda_graph_of_a_later_release.shape == (4 * 17,)
    mask = graph_mask(backend, facts_of(TritonAttnBackend))
    assert mask.shape == (4 * 17 * (64 + 2 * 17),)


@pytest.mark.sglang
@pytest.mark.parametrize("choice", ["corrected", "auto"])
def test_a_class_that_was_renamed_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, choice: Any
) -> None:
    from ddtree_guard.testing.fakes import sglang
    from ddtree_guard.testing.standins import VerifyCase, build_backend

    monkeypatch.delattr(sglang("layers.attention.triton_backend"), "TritonAttnBackend")
    with pytest.raises(IncompatibleError, match=r"expected the class .* found none in SGLang"):
        build_backend(VerifyCase(), choice)


@pytest.mark.sglang
def test_a_plugin_that_replaced_the_class_stays_underneath(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtree_guard.testing.fakes import sglang
    from ddtree_guard.testing.standins import VerifyCase, build_backend, run_verify

    module = sglang("layers.attention.triton_backend")
    theirs = type("TritonAttnBackend", (module.TritonAttnBackend,), {"mark": "theirs"})
    monkeypatch.setattr(module, "TritonAttnBackend", theirs)
    backend = build_backend(VerifyCase(head_dim=16), "auto")
    assert isinstance(backend, theirs)
    assert type(backend) is not theirs
    assert run_verify(backend, VerifyCase(head_dim=16)).right
    assert module.TritonAttnBackend is theirs


@pytest.mark.sglang
def test_a_factory_that_ignores_the_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtree_guard.testing.fakes import sglang
    from ddtree_guard.testing.standins import VerifyCase, build_backend

    registry = sglang("layers.attention.attention_registry").ATTENTION_BACKENDS
    monkeypatch.setitem(registry, "triton", lambda runner: object())
    with pytest.raises(IncompatibleError, match=r"found that it created builtins\.object"):
        build_backend(VerifyCase(), "corrected")


@pytest.mark.sglang
def test_sglangs_own_hook_registry_can_wrap_the_methods() -> None:
    from ddtree_guard.testing.fakes import sglang
    from ddtree_guard.testing.standins import VerifyCase, build_backend, run_verify

    hooks = sglang("plugins.hook_registry")
    stock = sglang("layers.attention.triton_backend").TritonAttnBackend
    before, calls = vars(stock)["init_forward_metadata"], []

    def count(original: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    target = f"{stock.__module__}.TritonAttnBackend.init_forward_metadata"
    hooks.HookRegistry.register(target, count, hooks.HookType.AROUND)
    try:
        hooks.HookRegistry.apply_hooks()
        case = VerifyCase(head_dim=16)
        assert run_verify(build_backend(case, "auto"), case).right
    finally:
        stock.init_forward_metadata = before
        hooks.HookRegistry.reset()
    assert calls == [1]
