"""Ways in which a wrong or unchecked step could end in a green run: each must turn it red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Report = Callable[..., dict[str, Any]]
GOOD = """
    import pytest
    from helper import Server
    def test_good(ddtree_guard, ddtree_step):
        ddtree_guard.check(ddtree_step(1))
"""


def test_what_a_fixture_asks_at_its_end_is_judged(suite: pytest.Pytester, run: Any) -> None:
    suite.makepyfile(
        test_it="""
        import pytest
        @pytest.fixture
        def asks(ddtree_guard, ddtree_step):
            yield
            ddtree_guard.check(ddtree_step(1, fault="W3"))
            assert ddtree_guard.steps_checked == 1
        def test_x(asks): pass
    """
    )
    result = run()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*charged to this test: 1 finding*"])


@pytest.mark.parametrize("words", ['"skip no hook saw it"', '"step 1", "find W3"'])
def test_what_a_last_fixture_causes_is_told(suite: pytest.Pytester, run: Any, words: str) -> None:
    suite.makepyfile(
        test_it=GOOD
        + f"""
    @pytest.fixture
    def server():
        server = Server().ask("arm", "step 1")
        yield server
        server.ask({words})
        import time
        time.sleep(0.4)
        server.stop()
    def test_x(server): pass
    """
    )
    result = run()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*ran unchecked*" if "skip" in words else "*1 finding*"])


def test_a_finding_after_the_last_test_fails_the_session(suite: pytest.Pytester, run: Any) -> None:
    suite.makepyfile(
        conftest="""
        import pytest
        kept = []
        @pytest.hookimpl(wrapper=True)
        def pytest_runtestloop():
            result = yield
            for server in kept:
                server.ask("step 1", "find W3")
                import time
                time.sleep(0.4)
                server.stop()
            return result
    """,
        test_it=GOOD
        + """
    def test_x(request):
        request.config.pluginmanager.get_plugin(str(request.path.with_name("conftest.py"))) \\
            .kept.append(Server().ask("arm", "step 1"))
    """,
    )
    result = run()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["charged to the session: 1 finding, of no test in particular", "W3 in words"]
    )


def test_a_finding_in_a_test_that_may_fail_is_no_expected_failure(
    suite: pytest.Pytester, run: Any
) -> None:
    suite.makepyfile(
        test_it="""
        import pytest
        @pytest.mark.xfail(reason="slow")
        def test_finding(ddtree_guard, ddtree_step):
            ddtree_guard.check(ddtree_step(1, fault="W3"))
        @pytest.mark.xfail(reason="slow")
        def test_both(ddtree_guard, ddtree_step):
            ddtree_guard.check(ddtree_step(1, fault="W3"))
            assert False
        @pytest.mark.xfail(reason="slow")
        def test_own(ddtree_guard, ddtree_step):
            ddtree_guard.check(ddtree_step(1))
            assert False
    """
    )
    run().assert_outcomes(failed=2, xfailed=1)


def test_unchecked_steps_of_a_test_that_skips_are_told(suite: pytest.Pytester, run: Any) -> None:
    suite.makepyfile(
        test_it=GOOD
        + """
    def test_x(request):
        server = Server()
        request.addfinalizer(server.stop)
        server.ask("arm", "skip no hook saw it")
        pytest.skip("changed its mind")
    """
    )
    run().assert_outcomes(passed=1, failed=1)


def test_one_finding_before_a_storm_of_expected_ones(suite: pytest.Pytester, run: Any) -> None:
    suite.makepyfile(
        test_it="""
        import pytest
        @pytest.mark.ddtree_guard(rules="W3,K2", expect=["W3"])
        def test_x(ddtree_guard, ddtree_step):
            ddtree_guard.check(ddtree_step(1, fault="K2"))
            for seed in range(70):
                ddtree_guard.check(ddtree_step(seed, fault="W3"))
    """
    )
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*K2 fired and was not expected*"])


def test_a_step_that_no_rule_could_judge_is_unchecked(suite: pytest.Pytester, run: Any) -> None:
    suite.makepyfile(
        test_it="""
        from ddtree_guard.checks import ALL
        def test_x(ddtree_guard, ddtree_step):
            exempt = {rule.id: "a reason" for rule in ALL}
            ddtree_guard.check(ddtree_step(1).replace(contract__not_checked=exempt))
    """
    )
    result = run()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*1 verify step ran unchecked*no rule*"])


def test_a_guarded_server_does_not_vouch_for_an_unguarded_one(
    suite: pytest.Pytester, run: Any
) -> None:
    suite.makepyfile(
        serve=(suite.path / "launch_server.py").read_text(),
        test_it="""
        from helper import Server
        def test_x():
            one = Server(SGLANG_DDTREE_GUARD="off", script="launch_server.py")
            two = Server(script="serve.py").ask("arm", "step 1")
            one.stop()
            two.stop()
    """,
    )
    (suite.path / "launch_server.py").write_text("print('ANSWER', flush=True); input()")
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*NOT GUARDED: a server was started and left no evidence*"])


@pytest.mark.parametrize("rules", ["W,-W", "W3,-W3@2999-12-31"])
def test_a_selection_without_a_rule_is_refused(
    suite: pytest.Pytester, run: Any, rules: str
) -> None:
    suite.makepyfile(test_it=GOOD)
    result = run(f"--ddtree-guard-rules={rules}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "no rule is left" in result.stderr.str()


def test_a_finding_of_a_neighbour_is_not_lost_in_an_unguarded_test(
    suite: pytest.Pytester, run: Any
) -> None:
    suite.makepyfile(
        test_it=GOOD
        + """
    @pytest.fixture(scope="module")
    def server():
        server = Server().ask("arm")
        yield server
        server.stop()
    def test_1(server): server.ask("step 2", "after W3")
    @pytest.fixture
    def waits():
        yield
        import time
        time.sleep(1.6)
    @pytest.mark.ddtree_guard(mode="off")
    def test_2(server, waits): pass
    """
    )
    assert run().ret == pytest.ExitCode.TESTS_FAILED


def test_faults_of_the_guard_in_a_child_fail_the_test(suite: pytest.Pytester, run: Any) -> None:
    text = (suite.path / "launch_server.py").read_text()
    (suite.path / "launch_server.py").write_text(
        text.replace('"faults": {}', '"faults": {"judge": 3}')
    )
    suite.makepyfile(
        test_it=GOOD
        + """
    def test_x(request):
        server = Server()
        request.addfinalizer(server.stop)
        server.ask("arm", "step 1")
    """
    )
    result = run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*guard itself failed*judge*"])


@pytest.mark.parametrize("workers", [(), ("-n1",)])
def test_a_folder_that_cannot_be_made_is_one_sentence(
    suite: pytest.Pytester, run: Any, workers: tuple[str, ...]
) -> None:
    if workers:
        pytest.importorskip("xdist")
    suite.makepyfile(test_it=GOOD)
    (suite.path / "file").write_text("")
    result = run("--ddtree-guard-dump-dir=file", *workers, apart=True)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = result.stdout.str() + result.stderr.str()
    assert "Traceback" not in text
    assert "INTERNALERROR" not in text
    assert "--ddtree-guard-dump-dir" in text


@pytest.mark.parametrize(
    ("words", "serves"),
    [
        (["/bin/sh", "-c", "exec sglang serve --model-path m"], True),
        (["/bin/sh", "-c", "python3 -m sglang.launch_server 'x"], True),
        (["/bin/sh", "-c", "echo sglang"], False),
        (["grep", "serve", "sglang.log"], False),
    ],
)
def test_servers_behind_a_shell_are_seen(words: list[str], serves: bool) -> None:
    from ddtree_guard.pytest_plugin.servers import is_server

    assert is_server(words) == serves
