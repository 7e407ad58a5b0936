"""Settings that must hold before Triton is imported, and skips that say why."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import hypothesis
import pytest

# A loaded machine draws slowly; that is no fault of a test.
hypothesis.settings.register_profile(
    "loaded", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("loaded")

if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # no GPU: Triton kernels run on the CPU


@pytest.fixture(autouse=True)
def unfolded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests read whole sentences. How they are folded, test_fold.py asks."""
    monkeypatch.setenv("COLUMNS", "1000")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU or SGLang where there is none."""
    if not Path("/dev/nvidia0").exists():
        no_gpu = pytest.mark.skip(reason="no CUDA device (/dev/nvidia0) on this machine")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(no_gpu)
    if importlib.util.find_spec("sglang") is not None:
        return
    skip = pytest.mark.skip(reason="SGLang is not installed: pip install '.[sglang]'")
    for item in items:
        if item.get_closest_marker("sglang") or item.get_closest_marker("matrix"):
            item.add_marker(skip)
