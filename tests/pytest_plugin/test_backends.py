"""Suites that build SGLang's real Triton backend in the test process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.sglang

SUITE = """
    import pytest
    from ddtree_guard.testing import standins
    from ddtree_guard.testing.cases import VerifyCase

    CASE = VerifyCase(lens=(9, 5, 12), head_dim=16, heads=2, kv_heads=1)

    @pytest.mark.parametrize("path", ["eager", "graph"])
    def test_verify(path):
        backend = standins.build_backend(CASE, "{choice}")
        case = CASE if path == "eager" else VerifyCase(
            lens=CASE.lens, head_dim=16, heads=2, kv_heads=1, padded_bs=4)
        backend = standins.build_backend(case, "{choice}")
        inputs = standins.make_inputs(case)
        standins.fill_pools(backend, inputs)
        standins.build_metadata(backend, inputs, path)
"""


@pytest.fixture(autouse=True)
def _loaded() -> None:
    """Import what an inner session must not import and drop again."""
    import ddtree_guard.hooks.backends
    import ddtree_guard.pytest_plugin.session
    from ddtree_guard.testing import standins
    from ddtree_guard.testing.cases import VerifyCase

    standins.build_backend(VerifyCase())
    assert ddtree_guard.hooks.backends.BACKEND in sys.modules


def test_the_incident_fails_with_its_rules_and_the_corrected_backend_passes(
    suite: pytest.Pytester, report: Callable[..., dict[str, Any]]
) -> None:
    suite.makepyfile(test_stock=SUITE.format(choice="stock"))
    stock = report()
    rules = [{f["rule"] for f in test["findings"]} for test in stock["tests"]]
    assert [{"W1", "W3", "W8"} <= found for found in rules] == [True, True]
    assert all(test["outcome"] == "failed" for test in stock["tests"])
    assert all(f["dump"] for test in stock["tests"] for f in test["findings"])
    (suite.path / "test_stock.py").unlink()
    suite.makepyfile(test_corrected=SUITE.format(choice="corrected"))
    corrected = report()
    assert [t["outcome"] for t in corrected["tests"]] == ["passed", "passed"]
    assert (corrected["exit"], corrected["steps_checked"], corrected["verify_steps"]) == (0, 2, 2)


def test_the_words_are_those_of_the_log(suite: pytest.Pytester, run: Any) -> None:
    suite.makepyfile(test_stock=SUITE.format(choice="stock"))
    result = run("-k", "eager", "--junitxml=j.xml")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "ddtree_guard: mode=log, rules=*, SGLang 0.5.* with a Triton backend*",
            "ddtree_guard: * findings (*W1, W3, W8), 1 verify step checked",
            "W3 mask-offset-gap: *",
            "*w=17 b=8 B=16 s=9 bs=3 BS=3*",
            "*ddtree_guard finding rule=W3 *",  # the captured log
            "checked 1 of 1 verify steps in 1 process, * rules",
            "findings: *W3 x1*",
            "dump: *_test_pid*_step1_*",
        ],
        consecutive=False,
    )
    xml = (suite.path / "j.xml").read_text()
    assert 'name="ddtree_guard_steps_checked" value="1"' in xml
    assert "W1,W3,W8" in xml


def test_raise_stops_the_launch(suite: pytest.Pytester, run: Any) -> None:
    suite.makepyfile(test_stock=SUITE.format(choice="stock"))
    result = run("-k", "eager", mode="raise")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*W3 mask-offset-gap*", "*server stopped*"])


@pytest.mark.parametrize("mode", ["log", "raise"])
@pytest.mark.parametrize(
    ("expect", "outcome", "words"),
    [
        (["CFG1", "CFG5", "W1", "W3", "W8"], "passed", ""),
        (["W1", "W3", "W8"], "failed", "CFG1, CFG5 fired and was not expected"),
        (["CFG1", "CFG5", "W1", "W3", "W8", "M1"], "failed", "expected M1 to fire, which did not"),
    ],
)
def test_expect_is_exact_both_ways(
    suite: pytest.Pytester, run: Any, mode: str, expect: list[str], outcome: str, words: str
) -> None:
    marker = f"\n    pytestmark = pytest.mark.ddtree_guard(expect={expect!r})\n"
    suite.makepyfile(test_stock=SUITE.format(choice="stock") + marker)
    result = run("-k", "eager", mode=mode)
    result.assert_outcomes(**{outcome: 1})
    assert words in result.stdout.str()


def test_expect_fails_a_sound_backend(suite: pytest.Pytester, run: Any) -> None:
    marker = '\n    pytestmark = pytest.mark.ddtree_guard(expect=["W3"])\n'
    suite.makepyfile(test_sound=SUITE.format(choice="corrected") + marker)
    result = run()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*expected W3 to fire, which did not; 1 verify step checked"])


def test_a_step_that_cannot_be_read_fails_its_test(suite: pytest.Pytester, run: Any) -> None:
    suite.makepyfile(
        test_broken=SUITE.format(choice="corrected").replace(
            "standins.build_metadata(",
            "del standins.runner_of(backend).token_to_kv_pool_allocator\n"
            "        standins.build_metadata(",
        )
    )
    result = run("-k", "eager")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*1 verify step ran unchecked (*AttributeError*)"])


def test_hooks_are_gone_afterwards(suite: pytest.Pytester, run: Any) -> None:
    from ddtree_guard.testing.fakes import sglang

    owner = sglang("layers.attention.triton_backend").TritonAttnBackend
    before = {name: vars(owner).get(name) for name in ("__init__", "init_forward_metadata")}
    suite.makepyfile(test_sound=SUITE.format(choice="corrected"))
    run().assert_outcomes(passed=2)
    assert {name: vars(owner).get(name) for name in before} == before


def test_an_own_backend_is_watched_on_request(suite: pytest.Pytester, run: Any) -> None:
    suite.makepyfile(
        test_own="""
        from types import SimpleNamespace

        import numpy as np
        import torch

        from ddtree_guard.hooks.adapters import register_adapter, unregister_adapter
        from ddtree_guard.step import Layout, Step, Widths

        class OwnBackend:
            def init_forward_metadata(self, forward_batch):
                self.offsets = np.arange(3) * self.stride

        OwnBackend.__module__ = "own_module"

        def read(view):
            return Step(bs=2, padded_bs=2, widths=Widths(w=17, budget=16),
                        layout=Layout(qo_indptr=view.backend.offsets, rows={"q": 34}))

        def test_own(ddtree_guard, monkeypatch):
            import sys
            monkeypatch.setitem(sys.modules, "own_module", SimpleNamespace(OwnBackend=OwnBackend))
            adapter = register_adapter("own", lambda c: c is OwnBackend, read)
            try:
                backend = OwnBackend()
                runner = SimpleNamespace(
                    is_draft_worker=False,
                    server_args=SimpleNamespace(speculative_num_draft_tokens=8))
                ddtree_guard.watch(backend, runner)
                mode = SimpleNamespace(is_target_verify=lambda: True)
                batch = SimpleNamespace(forward_mode=mode, req_pool_indices=torch.tensor([1, 2]),
                                        seq_lens=torch.tensor([5, 6]), spec_info=None)
                backend.stride = 17
                backend.init_forward_metadata(batch)
                assert ddtree_guard.steps_checked == 1
                backend.stride = 8
                with ddtree_guard.expect("W1"):
                    backend.init_forward_metadata(batch)
            finally:
                unregister_adapter(adapter)
        """
    )
    run().assert_outcomes(passed=1)
