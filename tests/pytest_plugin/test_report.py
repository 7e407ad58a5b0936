"""A report that cannot be written: said before the first test, and never passed over."""

from typing import Any

import pytest

STEP = """
    def test_sound(ddtree_guard, ddtree_step):
        ddtree_guard.check(ddtree_step(1, lens=(5, 9)))
"""


@pytest.mark.parametrize(
    ("name", "why"), [("file/r.json", "*file is no folder"), ("folder", "a folder")]
)
def test_a_report_that_cannot_be_written_ends_the_session_at_its_start(
    suite: pytest.Pytester, run: Any, name: str, why: str
) -> None:
    suite.makepyfile(test_it="def test_x(): open('ran', 'w').close()")
    (suite.path / "file").write_text("")
    (suite.path / "folder").mkdir()
    result = run(f"--ddtree-guard-report={name}", apart=True)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--ddtree-guard-report: *cannot be written to *{name} ({why}*"])
    assert not (suite.path / "ran").exists()


def test_a_report_that_is_lost_at_the_end_fails_the_session(
    suite: pytest.Pytester, run: Any
) -> None:
    suite.makepyfile(test_it=f"{STEP}        open('out/r.json.part', 'w').close()\n")
    assert run("--ddtree-guard-report=out/r.json").ret == pytest.ExitCode.OK
    suite.makepyfile(test_it=f"{STEP}        __import__('os').mkdir('out/r.json.part')\n")
    result = run("--ddtree-guard-report=out/r.json")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["the report was not written to *out/r.json: *"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_nothing_is_written_where_the_guard_is_off(suite: pytest.Pytester, run: Any) -> None:
    suite.makepyfile(test_it="def test_x(): pass")
    run("--ddtree-guard-report=out/r.json", mode=None).assert_outcomes(passed=1)
    assert not (suite.path / "out").exists()
