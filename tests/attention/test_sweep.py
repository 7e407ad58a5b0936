"""Every width, both paths, on SGLang's real backend and kernel: stock and corrected.

w runs over 2..65 and 129; the other factors walk through all their combinations, so every pair of
them occurs. The committed lengths differ within a batch.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest

from ddtree_guard.guard import Guard, Report
from ddtree_guard.testing.cases import VerifyCase

pytestmark = pytest.mark.sglang

WIDTHS = (*range(2, 66), 129)
# stock's captured mask has no room for the w tree columns (I11), at any width
LATENT: dict[str, set[str]] = {"eager": set(), "graph": {"M5"}}
FACTORS = list(itertools.product((2, 1, 3, 4), ("random", "chain", "star"), (1, 2, 4), (8, 16)))


def _case(w: int, path: str) -> VerifyCase:
    # 5 and 72 share no factor, so consecutive widths differ in most factors and all 72 occur
    bs, kind, group, block = FACTORS[(5 * w + (path == "graph") * 36) % len(FACTORS)]
    return VerifyCase(
        lens=tuple(3 + (7 * w + 11 * i) % 29 for i in range(bs)),
        budget=w - 1,
        block=block,
        seed=w,
        kind=kind,
        heads=group * (1 + w % 2),
        kv_heads=1 + w % 2,
        head_dim=16,
        padded_bs=bs + w % 3 if path == "graph" else None,
    )


def _run(case: VerifyCase, choice: str, path: str) -> Any:
    from ddtree_guard.testing.standins import build_backend, run_verify

    return run_verify(build_backend(case, choice), case, path)


def _check(run: Any) -> Report:
    return Guard().check(run.step)


def test_factor_pairs_all_occur() -> None:
    cases = [_case(w, path) for w in WIDTHS for path in ("eager", "graph")]
    seen = {(c.bs, c.kind, c.heads // c.kv_heads, c.block) for c in cases}
    for a, b in itertools.combinations(range(4), 2):
        wanted = {(f[a], f[b]) for f in FACTORS}
        assert {(s[a], s[b]) for s in seen} == wanted


@pytest.mark.parametrize("w", WIDTHS)
@pytest.mark.parametrize("path", ["eager", "graph"])
def test_corrected_is_right_on_every_row(w: int, path: str) -> None:
    run = _run(_case(w, path), "corrected", path)
    assert run.right
    assert run.max_error <= 1e-5
    assert _check(run).findings == ()


@pytest.mark.parametrize("w", [w for w in WIDTHS if w > 8])
@pytest.mark.parametrize("path", ["eager", "graph"])
def test_stock_is_wrong_above_the_block_and_the_guard_says_so(w: int, path: str) -> None:
    case = _case(w, path)
    run = _run(case, "stock", path)
    if w == case.block:
        assert run.right
        assert set(_check(run).rules) <= LATENT[path]
    elif w > case.block:
        assert run.ran
        assert run.wrong_rows != ()
        assert {"W1", "W3"} <= set(_check(run).rules)
    else:
        assert not run.ran
        assert {"W1", "W3"} <= set(_check(run).rules)


@pytest.mark.parametrize("w", range(2, 9))
@pytest.mark.parametrize("path", ["eager", "graph"])
def test_stock_up_to_the_block(w: int, path: str) -> None:
    """Below the block the kernel would write out of bounds: the metadata alone must tell."""
    case = VerifyCase(budget=w - 1, block=8, padded_bs=3 if path == "graph" else None, head_dim=16)
    run = _run(case, "stock", path)
    if w == 8:
        assert run.right
        assert set(_check(run).rules) <= LATENT[path]
    else:
        assert not run.ran
        assert {"W1", "W3"} <= set(_check(run).rules)


def test_rows_that_stock_never_writes_are_seen_as_such() -> None:
    """bs * (w - b) rows: memory that is reused could hold the right answer there."""
    run = _run(VerifyCase(budget=16, head_dim=16), "stock", "eager")
    assert run.unwritten_rows == 2 * (17 - 8)
    assert len(run.wrong_rows) == 33  # only the first row of the batch is right


def test_stock_writes_out_of_bounds_below_the_block() -> None:
    script = (
        "from ddtree_guard.testing.standins import VerifyCase, overrun_rows\n"
        "print('rows', overrun_rows(VerifyCase(budget=3, head_dim=16)))"
    )
    child = subprocess.run(  # a launch like this can crash its process
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "rows 8" in child.stdout  # 2 requests x (8 - 4) rows of somebody else
