"""Options, markers, fixtures, and how a session is run: xdist, reruns, unittest, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ddtree_guard.checks import ALL

STEP = """
    import pytest

    def test_sound(ddtree_guard, ddtree_step):
        ddtree_guard.check(ddtree_step(1, lens=(5, 9)))

    def test_fault(ddtree_guard, ddtree_step):
        ddtree_guard.check(ddtree_step(1, fault="mask-offset-gap"))
        assert ddtree_guard.rules == ("W3",)
        assert (ddtree_guard.steps_checked, ddtree_guard.verify_steps) == (1, 1)
"""


def test_off_changes_nothing_and_skips_what_asks_the_guard(
    suite: pytest.Pytester, run: Any
) -> None:
    suite.makepyfile(
        test_it="""
        import os
        import pytest

        def test_plain(request):
            assert "SGLANG_DDTREE_GUARD" not in os.environ
            assert not request.config.pluginmanager.has_plugin("ddtree_guard_session")
        def test_asks(ddtree_guard): pass
        @pytest.mark.ddtree_guard(expect=["W3"])
        def test_expects(): pass
        @pytest.mark.ddtree_guard(steps="required")
        def test_runs(ddtree_step): assert ddtree_step(3).bs == 3
    """
    )
    result = run("-rs", mode=None)
    result.assert_outcomes(passed=2, skipped=2)
    assert "ddtree_guard: mode=" not in result.stdout.str()
    result.stdout.fnmatch_lines(["*expects findings and the guard is off: pytest --ddtree-guard=*"])


def test_findings_fail_and_the_environment_is_put_back(
    suite: pytest.Pytester, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    monkeypatch.setenv("SGLANG_DDTREE_GUARD_DEPTH", "full")
    before = dict(os.environ)
    suite.makepyfile(test_it=STEP)
    result = run("--junitxml=j.xml")
    result.assert_outcomes(passed=1, failed=1)
    checked = f"checked 2 of 2 verify steps in 1 process, {len(ALL)} rules*"
    result.stdout.fnmatch_lines([checked, "*W3 x1"])
    changed = {k for k in {*before, *os.environ} if before.get(k) != os.environ.get(k)}
    assert {k for k in changed if k.startswith("SGLANG")} == set()
    suite_properties = ElementTree.parse(suite.path / "j.xml").iter("property")
    values = {p.get("name"): p.get("value") for p in suite_properties}
    assert values["ddtree_guard_findings"] == "1"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--ddtree-guard=warn"], "--ddtree-guard=warn is not a mode. Use one of: off, log, raise"),
        (["--ddtree-guard=log", "--ddtree-guard-rules=W33"], "no rule is called 'W33'"),
        (["--ddtree-guard=log", "--ddtree-guard-rules=-P1@soon"], "ends on 'SOON'"),
        (
            ["--ddtree-guard=log", "--ddtree-guard-shadow-every=x"],
            "guard-shadow-every=x is not a whole number",
        ),
        (["--ddtree-guard-block=two"], "is not a block size"),
    ],
)
def test_a_wrong_option_is_one_sentence(
    suite: pytest.Pytester, run: Any, args: list[str], words: str
) -> None:
    suite.makepyfile(test_it="def test_b(ddtree_budgets): pass")
    result = run(*args, mode=None)
    assert result.ret in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERRUPTED)
    text = (result.stdout.str() + result.stderr.str()).replace("soon", "SOON")
    assert words in text
    assert "Traceback" not in text


def test_settings_come_from_ini_and_pyproject(suite: pytest.Pytester, run: Any) -> None:
    suite.makepyfile(test_it=STEP)
    (suite.path / "tox.ini").unlink()
    (suite.path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\nddtree_guard = "log"\n'
        'ddtree_guard_rules = ["-W3@2020-01-31", "-M", "-P1"]\nddtree_guard_dump_dir = "here"\n'
        'ddtree_guard_report = "out/r.json"\nddtree_guard_shadow_every = "3"\n'
    )
    result = run(mode=None)
    result.assert_outcomes(passed=1, failed=1)  # the ignoring of W3 has ended
    result.stdout.fnmatch_lines(["ddtree_guard: mode=log, rules=*W3 (until 2020-01-31)*"])
    report = json.loads((suite.path / "out" / "r.json").read_text())
    assert report["rules"] == "-W3@2020-01-31,-M,-P1"
    assert Path(report["dumps"][0]).is_relative_to(suite.path / "here")
    run("--ddtree-guard-rules=-W3", mode=None).stdout.no_fnmatch_line("*W3 x1*")


def test_expect_as_a_block(suite: pytest.Pytester, run: Any) -> None:
    suite.makepyfile(
        test_it="""
        import pytest

        def test_block(ddtree_guard, ddtree_step):
            with ddtree_guard.expect("W3"):
                ddtree_guard.check(ddtree_step(1, fault="W3"))
            ddtree_guard.check(ddtree_step(1))
        def test_outside(ddtree_guard, ddtree_step):
            with ddtree_guard.expect("W3"):
                ddtree_guard.check(ddtree_step(1, fault="W3"))
            ddtree_guard.check(ddtree_step(1, fault="W3"))
        def test_none(ddtree_guard, ddtree_step):
            with ddtree_guard.expect("W3"):
                ddtree_guard.check(ddtree_step(1))
        def test_other(ddtree_guard, ddtree_step):
            with ddtree_guard.expect("W3"):
                ddtree_guard.check(ddtree_step(1, fault="K2"))
        def test_forgotten_with(ddtree_guard, ddtree_step):
            ddtree_guard.expect("W3")
            ddtree_guard.check(ddtree_step(1, fault="W3"))
        def test_own_error_in_the_block(ddtree_guard, ddtree_step):
            with ddtree_guard.expect("W3"):
                raise ValueError("own error")
        def test_forgotten_and_sound(ddtree_guard, ddtree_step):
            ddtree_guard.expect("W3")
            ddtree_guard.check(ddtree_step(1))
    """
    )
    result = run()
    result.assert_outcomes(passed=1, failed=6)
    assert result.stdout.str().count("expect(W3) was called without `with`") >= 2
    run("-k", "block and not own", mode="raise").assert_outcomes(passed=1)
    assert "own error" in result.stdout.str()


def test_a_storm_in_one_test_leaves_the_words_of_the_next(
    suite: pytest.Pytester, report: Any
) -> None:
    suite.makepyfile(
        test_it="""
        def test_storm(ddtree_guard, ddtree_step):
            step = ddtree_step(1, fault="W3")
            for _ in range(100):
                ddtree_guard.check(step)
        def test_next(ddtree_guard, ddtree_step):
            ddtree_guard.check(ddtree_step(1, fault="W1"))
    """
    )
    storm, after = report()["tests"]
    assert sum(f["count"] for f in storm["findings"]) == 100
    assert {f["rule"] for f in storm["findings"]} == {"W3"}
    assert all(f["text"].startswith(f["rule"] + " ") for f in after["findings"])
    assert "W1" in {f["rule"] for f in after["findings"]}


def test_a_session_without_steps_fails_and_says_why(suite: pytest.Pytester, run: Any) -> None:
    suite.makepyfile(test_it="def test_nothing(): pass")
    result = run("--junitxml=j.xml")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["guard saw no verify step in 1 test: *"])
    assert "guard saw no verify step" in (suite.path / "j.xml").read_text()


@pytest.mark.parametrize("mode", ["log", None])
def test_without_a_gpu_tests_are_skipped_with_the_reason(
    suite: pytest.Pytester, run: Any, monkeypatch: pytest.MonkeyPatch, mode: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    suite.makepyfile(
        test_it="""
        import unittest
        import pytest

        @pytest.mark.ddtree_guard(device="cuda", steps="required")
        class TestServer(unittest.TestCase):
            @classmethod
            def setUpClass(cls): raise RuntimeError("a server would start here")
            def test_gpu(self): pass
        def test_cpu(): pass
    """
    )
    result = run("-rs", mode=mode)
    assert result.ret == 0
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*no CUDA device: CUDA_VISIBLE_DEVICES=-1 hides them all*"])


UNITTEST = """
    import unittest
    import pytest

    class TestIt(unittest.TestCase):
        @pytest.fixture(autouse=True)
        def _guard(self, ddtree_guard, ddtree_step):
            self.guard, self.step = ddtree_guard, ddtree_step

        def check(self, fault=None):
            self.guard.check(self.step(1, fault=fault))
        def test_sound(self): self.check()
        def test_fault(self): self.check("W3")
        def test_both(self):
            self.check("W3")
            self.fail("its own")
        def test_skip_after(self):
            self.check("W3")
            self.skipTest("changed its mind")
        def test_skip(self): self.skipTest("changed its mind")
        @unittest.expectedFailure
        def test_expected(self):
            self.check()
            self.fail("its own")
        def test_sub(self):
            with self.subTest(i=1):
                self.check("K2")
"""


def test_unittest_classes(suite: pytest.Pytester, report: Any) -> None:
    suite.makepyfile(test_it=UNITTEST)
    found = {t["test"].rpartition("::")[2]: t for t in report()["tests"]}
    assert {name: test["outcome"] for name, test in found.items()} == {
        "test_sound": "passed", "test_fault": "failed", "test_both": "failed",
        "test_skip_after": "failed", "test_skip": "skipped", "test_expected": "skipped",
        "test_sub": "failed",
    }  # fmt: skip


def test_a_test_that_fails_itself_keeps_its_own_words(suite: pytest.Pytester, run: Any) -> None:
    suite.makepyfile(test_it=UNITTEST)
    result = run("-k", "both")
    result.stdout.fnmatch_lines(
        [
            "*AssertionError: its own",
            "*Captured ddtree_guard call*",
            "ddtree_guard: 1 finding (W3)*",
        ]
    )


@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["here", "xdist"])
def test_a_finding_in_a_run_that_is_run_again_fails_the_session(
    suite: pytest.Pytester, report: Any, workers: tuple[str, ...]
) -> None:
    pytest.importorskip("pytest_rerunfailures")
    if workers:
        pytest.importorskip("xdist")
    suite.makepyfile(
        test_it="""
        runs = []
        def test_flaky(ddtree_guard, ddtree_step):
            runs.append(1)
            ddtree_guard.check(ddtree_step(1, fault="W3" if len(runs) == 1 else None))
    """
    )
    value = report("--reruns=2", *workers, apart=bool(workers))
    (test,), (attempt,) = value["tests"], value["attempts"]
    assert (test["outcome"], test["findings"], test["steps_checked"]) == ("passed", [], 1)
    assert [f["rule"] for f in attempt["findings"]] == ["W3"]
    assert value["exit"] == 1
    assert value["failure"] == (
        "test_it.py::test_flaky passed when it was run again, but an earlier run had findings: W3; "
        "a broken rule is no flake"
    )


def test_what_is_no_finding_may_be_run_again(suite: pytest.Pytester, report: Any) -> None:
    pytest.importorskip("pytest_rerunfailures")
    suite.makepyfile(
        test_it="""
        import pytest
        runs = []
        def test_flaky(ddtree_guard, ddtree_step):
            runs.append(1)
            ddtree_guard.check(ddtree_step(1))
            assert len(runs) > 1

        seen = []
        @pytest.mark.ddtree_guard(expect=["W3"])
        def test_expects(ddtree_guard, ddtree_step):
            seen.append(1)
            ddtree_guard.check(ddtree_step(1, fault="W3"))
            assert len(seen) > 1
    """
    )
    value = report("--reruns=2")
    assert [test["outcome"] for test in value["tests"]] == ["passed", "passed"]
    assert (len(value["attempts"]), value["failure"], value["exit"]) == (2, "", 0)


def test_a_test_that_fails_in_every_run_says_so_itself(suite: pytest.Pytester, report: Any) -> None:
    pytest.importorskip("pytest_rerunfailures")
    suite.makepyfile(
        test_it="""
        def test_broken(ddtree_guard, ddtree_step):
            ddtree_guard.check(ddtree_step(1, fault="W3"))
    """
    )
    value = report("--reruns=1")
    assert (value["tests"][0]["outcome"], value["failure"]) == ("failed", "")


def test_workers_of_xdist_are_added_up(suite: pytest.Pytester, report: Any) -> None:
    pytest.importorskip("xdist")
    suite.makepyfile(test_one=STEP, test_two=STEP)
    value = report("-n2", apart=True)
    assert sorted(t["outcome"] for t in value["tests"]) == ["failed", "failed", "passed", "passed"]
    assert (value["steps_checked"], value["exit"]) == (4, 1)
    assert all(Path(dump).is_relative_to(value["folder"]) for dump in value["dumps"])
    (suite.path / "test_one.py").unlink()
    (suite.path / "test_two.py").write_text("def test_nothing(): pass")
    value = report("-n2", apart=True)
    assert (value["exit"], value["steps_checked"]) == (1, 0)
    assert value["failure"].startswith("guard saw no verify step in 1 test")


def test_budgets_are_widths_around_the_block_and_at_tile_borders(
    suite: pytest.Pytester, run: Any
) -> None:
    suite.makepyfile(test_it="def test_w(ddtree_budgets): assert ddtree_budgets > 1")
    for args, count in (
        ((), 8),
        (("--ddtree-guard-block=16",), 6),
        (("--ddtree-guard-sweep",), 256),
    ):
        run(*args, mode=None).assert_outcomes(passed=count)
    result = run("-v", mode=None)
    result.stdout.fnmatch_lines(
        [f"*test_w[[]w{w}] PASSED*" for w in (7, 8, 9, 16, 17, 33, 65, 257)]
    )


def test_foreign_evidence_is_named_and_fails_the_test(suite: pytest.Pytester, run: Any) -> None:
    suite.makepyfile(
        test_it="""
        import os
        from pathlib import Path
        def test_x(ddtree_guard, ddtree_step):
            ddtree_guard.check(ddtree_step(1))
            folder = Path(os.environ["SGLANG_DDTREE_GUARD_DUMP_DIR"]) / "run-1"
            folder.mkdir()
            (folder / "evidence_TP0_pid1.jsonl").write_text("no evidence\\n")
    """
    )
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*evidence_TP0_pid1.jsonl, line 1: expected evidence of *"])


Loaded = Callable[[str], set[str]]


def test_loading_the_plugin_imports_nothing_heavy() -> None:
    import subprocess
    import sys

    code = (
        "import pytest, sys; before = set(sys.modules); import ddtree_guard.pytest_plugin; "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root,
        env={"PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.stdout.split() == ["ddtree_guard"]
