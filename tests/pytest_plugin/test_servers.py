"""Suites that start servers as child processes. Most children leave evidence without SGLang."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Report = Callable[..., dict[str, Any]]
ARMED = """
    import unittest
    import pytest
    from helper import Server

    class Case(unittest.TestCase):
        @classmethod
        def setUpClass(cls):
            cls.server = Server().ask("arm")
        @classmethod
        def tearDownClass(cls):
            cls.server.stop()

    class TestOne(Case):
"""


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {test["test"].rpartition("::")[2]: test for test in report["tests"]}


def rules(test: dict[str, Any]) -> list[str]:
    return [finding["rule"] for finding in test.get("findings", [])]


def test_a_finding_fails_its_test_and_not_its_neighbours(
    suite: pytest.Pytester, report: Report
) -> None:
    suite.makepyfile(
        test_servers=ARMED
        + """
        def test_1(self):
            self.server.ask("step 3")
        def test_2(self):
            self.server.ask("step 2", "find W3")
        def test_3(self):
            self.server.ask("slow K2")
        def test_4(self):
            self.server.ask("step 4")
        def test_5(self):
            self.server.ask("step 1", *["find W3"] * 30)

    class TestElsewhere(Case):
        def test_6(self):
            self.server.ask("step 1")
    """
    )
    found = by_name(report())
    outcomes = {name: test["outcome"] for name, test in found.items()}
    assert outcomes == {
        "test_1": "passed", "test_2": "failed", "test_3": "failed", "test_4": "passed",
        "test_5": "failed", "test_6": "passed",
    }  # fmt: skip
    assert (rules(found["test_2"]), rules(found["test_3"])) == (["W3"], ["K2"])
    assert [found[f"test_{n}"]["steps_checked"] for n in (1, 2, 3, 4, 5, 6)] == [3, 2, 1, 4, 1, 1]
    assert sum(f["count"] for f in found["test_5"]["findings"]) == 30
    assert found["test_2"]["findings"][0]["text"] == "W3 in words"


def test_a_late_finding_is_charged_to_the_class_and_names_its_test(
    suite: pytest.Pytester, report: Report
) -> None:
    suite.makepyfile(
        test_servers=ARMED
        + """
        def test_1(self):
            self.server.ask("step 3", "after W3")
        def test_2(self):
            import time
            time.sleep(1.0)
            self.server.ask("step 1")

    class TestLast(Case):
        def test_3(self):
            self.server.ask("step 1")
    """
    )
    found = by_name(report())
    assert [found[f"test_{n}"]["findings"] for n in (1, 2, 3)] == [[], [], []]
    assert found["test_1"]["outcome"] == "passed"  # it was reported when the finding came
    (late,) = found["test_2"]["late"]
    assert (late["rule"], late["cause"]) == ("W3", "test_servers.py::TestOne::test_1")
    assert (found["test_2"]["outcome"], found["test_3"]["outcome"]) == ("error", "passed")


def test_what_a_class_does_at_its_end_is_charged_to_it(
    suite: pytest.Pytester, report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    suite.makepyfile(
        test_servers="""
        import time
        import unittest
        import pytest
        from helper import Server

        class TestOne(unittest.TestCase):
            @classmethod
            def setUpClass(cls):
                cls.server = Server().ask("arm")
            @classmethod
            def tearDownClass(cls):
                cls.server.ask("step 1", "find W3")
                time.sleep(0.5)
                cls.server.stop()
                raise RuntimeError("its own teardown fails too")
            def test_1(self):
                self.server.ask("step 1")
            @pytest.mark.ddtree_guard(mode="off")
            def test_2(self):
                self.server.ask("step 1")
            def test_3(self):
                self.server.ask("step 1")

        def test_4(): pass
    """
    )
    found = by_name(report())
    outcomes = [found[f"test_{n}"]["outcome"] for n in (1, 2, 3, 4)]
    assert outcomes == ["passed", "passed", "error", "passed"]
    (late,) = found["test_3"]["late"]
    assert (late["rule"], late["cause"]) == ("W3", None)
    text = capsys.readouterr().out
    assert "its own teardown fails too" in text
    assert "charged to test_servers.py::TestOne: 1 finding, of no test in particular" in text


NOT_ARMED = {
    "refused": ('Server().ask("refuse site build is not hooked")', "site build is not hooked"),
    "one_rank": (
        'Server().ask("missing no report", "step 1")', "1 of 2 ranks are armed: rank 1: no report"
    ),
    "excluded": ('Server(script="{bare}", SGLANG_PLUGINS="a,b")', "SGLANG_PLUGINS=a,b; add ddtree"),
    "no_environment": ('Server(script="{bare}", SGLANG_DDTREE_GUARD="")', "hand the test"),
    "other_folder": (
        'Server(script="{bare}", SGLANG_DDTREE_GUARD_DUMP_DIR="/tmp")', "not that of this session"
    ),
    "no_plugin": ('Server(script="{bare}")', "NOT GUARDED: a server was started"),
}  # fmt: skip


def test_a_child_that_is_not_armed_fails_its_test_with_the_reason(
    suite: pytest.Pytester, report: Report
) -> None:
    (suite.mkdir("bare") / "launch_server.py").write_text("print('ANSWER'); input()")
    lines = ["from helper import Server"]
    for name, (call, _) in NOT_ARMED.items():
        made = call.format(bare="bare/launch_server.py")
        lines += [f"def test_{name}():", f"    server = {made}", "    server.stop()"]
    suite.makepyfile(test_servers="\n".join(lines))
    found = by_name(report())
    for name, (_, words) in NOT_ARMED.items():
        test = found[f"test_{name}"]
        assert test["outcome"] == "failed", name
        assert words in "".join(test["complaints"]), name
        assert len(test["problems"]) == 1, name


STARTS = {  # how a test may start the unguarded server of `bare`, without `helper.Server`
    "system": "os.system(f'{sys.executable} {BARE} </dev/null')",
    "system_of_two": "os.system(f'pkill -f {BARE}x; exec {sys.executable} {BARE} </dev/null')",
    "spawn": "os.waitpid(os.posix_spawn(sys.executable, [sys.executable, BARE], os.environ), 0)",
    "popen": "subprocess.Popen([sys.executable, BARE], close_fds=False, stdin=-3).wait()",
    "environ": "subprocess.run([sys.executable, BARE], env=os.environ, stdin=-3)",
    "shell": "subprocess.run(f'{sys.executable} {BARE}', shell=True, stdin=-3)",
}
NO_STARTS = {
    "kill": "os.system('pkill -f sglang.launch_server')",
    "list": "subprocess.run(['pgrep', '-f', 'sglang.launch_server'])",
    "armed": "os.system(f'echo arm | {sys.executable} launch_server.py')",
}


def test_a_server_is_noticed_however_it_is_started(suite: pytest.Pytester, report: Report) -> None:
    (suite.mkdir("bare") / "launch_server.py").write_text("print('ANSWER')")
    lines = ["import os, subprocess, sys", "BARE = 'bare/launch_server.py'"]
    for name, call in {**STARTS, **NO_STARTS}.items():
        lines += [f"def test_{name}():", f"    {call}"]
    suite.makepyfile(test_servers="\n".join(lines))
    found = by_name(report())
    for name in STARTS:
        (problem,) = found[f"test_{name}"]["problems"]
        assert "a server was started and left no evidence" in problem, name
    assert [name for name in NO_STARTS if found[f"test_{name}"]["problems"]] == []


def test_an_unguarded_server_fails_every_test_while_it_runs(
    suite: pytest.Pytester, report: Report
) -> None:
    (suite.mkdir("bare") / "launch_server.py").write_text("print('ANSWER'); input()")
    suite.makepyfile(
        test_servers="""
        import pytest
        from helper import Server

        @pytest.fixture(scope="module")
        def server():
            made = Server(script="bare/launch_server.py")
            yield made
            made.stop()

        def test_1(server): pass
        def test_2(server): pass
    """
    )
    found = by_name(report())
    assert [len(found[f"test_{n}"]["problems"]) for n in (1, 2)] == [1, 1]


def test_a_killed_server_counts_what_it_wrote_and_a_hanging_one_is_named(
    suite: pytest.Pytester, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddtree_guard.pytest_plugin import collect

    monkeypatch.setattr(collect, "ANSWER_S", 0.5)
    suite.makepyfile(
        test_servers="""
        import time
        from helper import Server

        def test_killed():
            server = Server().ask("arm", "step 5", "find W3")
            time.sleep(1.3)
            server.stop()

        def test_hangs():
            server = Server().ask("arm", "hang")
            try:
                server.ask("step 1")
            finally:
                test_hangs.server = server

        def test_after():
            test_hangs.server.stop()
    """
    )
    found = by_name(report())
    assert (rules(found["test_killed"]), found["test_killed"]["steps_checked"]) == (["W3"], 5)
    assert "did not account for its steps" in "".join(found["test_hangs"]["complaints"])
    assert found["test_after"]["outcome"] == "passed"


def test_unchecked_steps_fail_their_test(suite: pytest.Pytester, report: Report) -> None:
    suite.makepyfile(
        test_servers="""
        from helper import Server

        def test_skips():
            server = Server().ask("arm", "step 5", "skip no hook saw its metadata")
            import time; time.sleep(0.5)
            server.stop()
    """
    )
    (test,) = report()["tests"]
    assert test["outcome"] == "failed"
    assert "1 verify step ran unchecked (1: no hook saw its metadata)" in test["complaints"][0]


def test_two_ranks_and_two_servers_are_added_up(suite: pytest.Pytester, report: Report) -> None:
    suite.makepyfile(
        test_servers="""
        from helper import Server

        def test_ranks(ddtree_guard):
            servers = [Server(f"TP{n}").ask("arm", f"step {n + 1}") for n in (0, 1)]
            servers[1].ask("find K2")
            assert ddtree_guard.steps_checked == 3
            assert ddtree_guard.rules == ("K2",)
            for server in servers:
                server.stop()
    """
    )
    value = report()
    assert len(value["processes"]) == 3
    assert value["tests"][0]["findings"][0]["process"].startswith("run-1 TP1 pid ")


def test_expect_counts_findings_of_children(suite: pytest.Pytester, run: Any) -> None:
    suite.makepyfile(
        test_servers=ARMED
        + """
        @pytest.mark.ddtree_guard(expect=["W3"])
        def test_fires(self):
            self.server.ask("step 1", "find W3")
        @pytest.mark.ddtree_guard(expect=["W3"])
        def test_does_not(self):
            self.server.ask("step 1")
        @pytest.mark.ddtree_guard(mode="off")
        def test_off(self):
            self.server.ask("step 1", "find W3")
    """
    )
    run().assert_outcomes(passed=2, failed=1)


@pytest.mark.sglang
def test_a_child_with_the_real_hooks(suite: pytest.Pytester, report: Report) -> None:
    suite.makepyfile(
        launch_server="""
        import sys
        from ddtree_guard.testing.child import main
        main(*sys.argv[1:])
    """,
        test_servers="""
        import unittest
        from helper import Server

        class TestNgram(unittest.TestCase):
            @classmethod
            def setUpClass(cls):
                cls.server = Server("corrected", "NGRAM")
            @classmethod
            def tearDownClass(cls):
                cls.server.stop()
            def test_1(self):
                self.server.ask("step 3")
            def test_2(self):
                self.server.ask("plant W3", "late 2")
            def test_3(self):
                self.server.ask("step 1")
    """,
    )
    value = report()
    found = by_name(value)
    assert [found[f"test_{n}"]["outcome"] for n in (1, 2, 3)] == ["passed", "failed", "passed"]
    assert [found[f"test_{n}"]["steps_checked"] for n in (1, 2, 3)] == [3, 1, 2]
    (finding,) = found["test_2"]["findings"]
    assert (finding["rule"], finding["step"]) == ("W3", 4)
    assert Path(finding["dump"]).is_dir()
    assert value["processes"][1]["boot"].startswith("ddtree_guard armed=1/1 mode=log")
