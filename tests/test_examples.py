"""Every example runs, is short, and says what its docstring promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SAYS = {
    "check_a_step.py": ("W1 query-offset-stride", "request-a", "backend width 17: checked 1 step"),
    "fork_adapter.py": ("W1 query-offset-stride chat-1: qo_indptr[1] = 8",),
    "keep_and_recheck.py": ("W3 mask-offset-gap", "the dump says what the step said"),
}


NEEDS_GPU = {"garbled_poem.py"}


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS) | NEEDS_GPU


@pytest.mark.parametrize("name", SAYS)
def test_example_runs_and_says_what_it_should(name: str, tmp_path: Path) -> None:
    path = EXAMPLES / name
    done = subprocess.run(
        [sys.executable, str(path), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert [text for text in SAYS[name] if text not in done.stdout] == []
    assert len(path.read_text().splitlines()) <= 60
