"""What the pytest plugin costs a suite that does not use it: `python benchmarks/plugin_load.py`.

Writes `plugin_load.json`: milliseconds of importing the plugin after pytest, in fresh processes,
and of a whole `pytest --collect-only` with and without it, in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import environment, write

ROOT = Path(__file__).resolve().parents[1]
IMPORT = """
import time, pytest, _pytest.config
begin = time.perf_counter()
import ddtree_guard.pytest_plugin
print((time.perf_counter() - begin) * 1e3)
"""


def python(*words: str, cwd: str) -> tuple[float, str]:
    """Milliseconds of a process, and what it printed."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    return (time.perf_counter() - begin) * 1e3, done.stdout


def collect(plugin: bool, cwd: str) -> float:
    """Milliseconds of collecting one test."""
    words = ["-p", "ddtree_guard.pytest_plugin"] if plugin else []
    return python("-m", "pytest", *words, "--collect-only", "-q", cwd=cwd)[0]


def spread(sample: list[float]) -> dict[str, float]:
    """Median and range, in milliseconds."""
    return {
        "median": round(statistics.median(sample), 2),
        "min": round(min(sample), 2),
        "max": round(max(sample), 2),
        "runs": len(sample),
    }


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_one.py").write_text("def test_one(): pass\n")
        python("-c", IMPORT, cwd=folder)  # compiled once
        imports = [float(python("-c", IMPORT, cwd=folder)[1]) for _ in range(options.runs)]
        pairs = [(collect(True, folder), collect(False, folder)) for _ in range(options.runs)]
    result: dict[str, Any] = {
        "environment": environment(),
        "import_ms": spread(imports),
        "collect_ms": {
            "with": spread([a for a, _ in pairs]), "without": spread([b for _, b in pairs]),
            "difference": spread([a - b for a, b in pairs]),
        },
    }  # fmt: skip
    write(options.out / "plugin_load.json", result)
    print(result["import_ms"], result["collect_ms"]["difference"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
