"""The plugin on real servers that tests start as child processes: one class, one server."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.sglang, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]


def test_a_planted_fault_fails_its_test_and_only_its_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(os.environ.get("TINY", ""))
    if not (model / "target" / "config.json").exists():
        pytest.skip("no model: set TINY to what `python benchmarks/tiny_model.py OUT` has written")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    suite = importlib.import_module("pytest_gpu")
    assert suite.wrong(suite.measure(model, tmp_path)) == []
