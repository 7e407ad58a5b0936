"""The README's tables are what the raw results say, and its links lead somewhere."""

from __future__ import annotations

import importlib.util
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


def test_many_generations_are_a_range() -> None:
    spec = importlib.util.spec_from_file_location("readme", ROOT / "tools/readme.py")
    assert spec is not None
    assert spec.loader is not None
    readme = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(readme)
    assert readme._generations(()) == "-"
    assert readme._generations((0.99, 1.0)) == "0.9900, 1.0000"
    many = [1.0, 0.98, 0.99, 1.02, 1.01]
    assert readme._generations(many) == "0.9800 to 1.0200, half in 0.9900 to 1.0100 (5)"
