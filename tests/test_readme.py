"""The README's tables are what the raw results say, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_tables_are_current() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tools/readme.py"), "--check"], check=False)
    assert done.returncode == 0, "run: python tools/readme.py"


def test_the_picture_is_drawn_from_the_text() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tools/poem.py"), "--check"], check=False)
    assert done.returncode == 0, "run: python tools/poem.py"


def test_every_relative_link_exists() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
