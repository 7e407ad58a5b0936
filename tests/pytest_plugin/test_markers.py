"""The marker `ddtree_guard`: what it asks for, and one sentence for each that asks for nothing."""

from __future__ import annotations

from typing import Any

import pytest

WRONG = {
    'mode="warn"': "is not a mode",
    'expect=["W99"]': "no rule is called 'W99'",
    'steps="some"': "Write 'required'",
    "rule=1": "has the argument 'rule'",
    '"log"': "has an argument without a name",
    "expect=3": "expect=",
    "rules=3": "rules=",
    "rules=[3]": "rules=",
    "expect=[3]": "expect=",
    'device="cud"': "device=",
    'mode="off", expect=["W3"]': "off",
    'mode="off", steps="required"': "off",
    'rules="W3,-W3"': "no rule is left",
}


@pytest.mark.parametrize("marker", WRONG)
def test_a_wrong_marker_is_one_sentence(suite: pytest.Pytester, run: Any, marker: str) -> None:
    suite.makepyfile(
        test_it=f"import pytest\n@pytest.mark.ddtree_guard({marker})\ndef test_x(): pass\n"
    )
    result = run()
    result.assert_outcomes(errors=1)
    text = result.stdout.str()
    assert "marker" in text
    assert WRONG[marker] in text
    assert "Traceback" not in text
    assert "INTERNALERROR" not in text


def test_the_closest_marker_wins(suite: pytest.Pytester, run: Any) -> None:
    suite.makepyfile(
        test_it="""
        import pytest
        pytestmark = pytest.mark.ddtree_guard(rules="-W3", expect=["K2", "K3"])

        def test_ignored(ddtree_guard, ddtree_step):
            ddtree_guard.check(ddtree_step(1, fault="W3"))
            ddtree_guard.check(ddtree_step(1, fault="K2"))
        @pytest.mark.ddtree_guard(rules=["W"], expect=["W3"])
        def test_selected(ddtree_guard, ddtree_step):
            ddtree_guard.check(ddtree_step(1, fault="W3"))
            ddtree_guard.check(ddtree_step(1, fault="K2"))
    """
    )
    run().assert_outcomes(passed=2)


def test_steps_can_be_required_of_a_test(suite: pytest.Pytester, run: Any) -> None:
    suite.makepyfile(
        test_it="""
        import pytest
        pytestmark = pytest.mark.ddtree_guard(steps="required")

        def test_some(ddtree_guard, ddtree_step):
            ddtree_guard.check(ddtree_step(1))
        def test_none(): pass
        def test_skipped(): pytest.skip("no reason")
    """
    )
    result = run()
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    result.stdout.fnmatch_lines(["*guard saw no verify step in this test*"])
