"""What the tables say about the release that is installed here."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from ddtree_guard.hooks import facts as table

pytestmark = [pytest.mark.sglang, pytest.mark.matrix]

EXPECTED = {
    "0.5.12": "capture-replay",
    "0.5.16": "out-graph",
    "0.5.17": "spec-info",
    "0.5.20": "spec-info",
    "0.5.23": "runner-width",
}


def _stock() -> Any:
    from ddtree_guard.testing.fakes import sglang

    return sglang("layers.attention.triton_backend").TritonAttnBackend


def test_the_matrix_and_the_expectations_name_the_same_releases() -> None:
    assert [release.version for release in table.MATRIX] == list(EXPECTED)


def test_this_release_has_the_generation_that_the_table_names() -> None:
    if table.release() not in EXPECTED:
        pytest.skip(f"SGLang {table.release()} is not in the matrix")
    assert table.facts_of(_stock()).name == EXPECTED[table.release()]


def test_the_corrected_class_fits_the_same_row() -> None:
    from ddtree_guard.attention.backend import corrected_class

    assert table.facts_of(corrected_class(_stock())) is table.facts_of(_stock())


def test_the_corrected_class_keeps_every_signature() -> None:
    from ddtree_guard.attention.backend import corrected_class

    stock, ours = _stock(), corrected_class(_stock())
    own = [n for n, f in vars(ours).items() if inspect.isfunction(f) and n != "__init__"]
    for name in own:
        theirs = [p.name for p in inspect.signature(getattr(stock, name)).parameters.values()]
        mine = [p.name for p in inspect.signature(vars(ours)[name]).parameters.values()]
        assert mine == theirs or mine[-2:] == ["args", "kwargs"], name
    assert not [n for n in own if not hasattr(stock, n)]  # nothing that stock never calls


def test_the_verify_inputs_hold_the_stated_width() -> None:
    from ddtree_guard.testing.fakes import sglang

    facts = table.facts_of(_stock())
    inputs = {
        "dflash_info": "DFlashVerifyInput",
        "eagle_info": "EagleVerifyInput",
    }
    for module, name in inputs.items():
        fields = {
            f.name for f in dataclasses.fields(getattr(sglang(f"speculative.{module}"), name))
        }
        assert facts.stated[0] in fields


def test_dflash_takes_its_mask_policy_from_the_class_name() -> None:
    from ddtree_guard.testing.fakes import sglang
    from ddtree_guard.testing.standins import VerifyCase, build_backend

    policy = sglang("speculative.dflash_utils").resolve_dflash_verify_mask_policy
    answers = {policy(build_backend(VerifyCase(), choice)) for choice in ("stock", "corrected")}
    assert len(answers) == 1
