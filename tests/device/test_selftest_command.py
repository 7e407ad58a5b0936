"""The command around the self-test: where it can run, and its exit code."""

from __future__ import annotations

import pytest

from ddtree_guard.cli import main

torch = pytest.importorskip("torch")
pytest.importorskip("triton")


@pytest.mark.parametrize("code", [0, 1])
def test_exit_code_is_the_self_tests(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    from ddtree_guard.device import selftest

    monkeypatch.setattr(selftest, "selftest_main", lambda args: code)
    assert main(["selftest", "--device", "cpu"]) == code


def test_no_gpu_is_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["selftest", "--device", "cuda"]) == 3
    assert "expects a GPU, found none" in capsys.readouterr().err
