"""Triton runs in its interpreter here; tests/gpu runs the same kernels compiled."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported


@pytest.fixture
def interpreter() -> None:
    """Skip where Triton would compile: these tests hand it CPU tensors."""
    if os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("set TRITON_INTERPRET=1 to run Triton kernels on CPU")
