"""Everything about the device checker that needs a GPU, in one run that survives failures.

    PYTHONPATH=.:<sglang> python benchmarks/gpu_all.py --out benchmarks/results --seconds 560

Each section is a process of its own with a time limit. Those that measure time run first and
alone, the others side by side; `gpu_all.json` is written after each. `--only NAME,NAME` picks
sections.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import environment, write

HERE = Path(__file__).parent
TIMED = ("tune", "device_check")
SECTIONS: dict[str, tuple[list[str], int]] = {
    "selftest": (
        [
            "-c",
            "import sys; from types import SimpleNamespace as N; from ddtree_guard.device.selftest "
            "import selftest_main; sys.exit(selftest_main(N(device='cuda')))",
        ],
        90,
    ),
    "graph_faults": ([str(HERE / "graph_faults.py")], 120),
    "tune": ([str(HERE / "device_check.py"), "--tune"], 90),
    "device_check": ([str(HERE / "device_check.py"), "--seconds", "110"], 130),
    "pairs": ([str(HERE / "device_pairs.py"), "--most", "800"], 100),
    "equality": ([str(HERE / "device_equality.py")], 190),
    "memcheck": ([str(HERE / "memcheck_device.py"), "--sanitize"], 120),
}


def run(name: str, out: Path, left: float) -> dict[str, Any]:
    """One section: its exit code, seconds and the end of what it printed."""
    command, limit = SECTIONS[name]
    command = [sys.executable, *command, *(["--out", str(out)] if command[0] != "-c" else [])]
    paths = f"{HERE.parent}{os.pathsep}{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": paths},
            timeout=max(10, min(limit, left)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        code, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, text = 124, error.stdout or b""
    seconds = round(time.perf_counter() - begin, 1)
    return {"exit_code": code, "seconds": seconds, "tail": text.decode(errors="replace")[-4000:]}


def main() -> int:
    """Run the sections; exit code 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--seconds", type=float, default=570)
    options = parser.parse_args()
    end = time.perf_counter() + options.seconds
    result: dict[str, Any] = {}
    chosen = options.only.split(",")
    alone = [name for name in TIMED if name in chosen]
    together = [name for name in chosen if name not in TIMED]

    def one(name: str) -> tuple[str, dict[str, Any]]:
        left = end - time.perf_counter()
        if left < 15:
            return name, {"exit_code": None, "tail": "not started: no time left"}
        return name, run(name, options.out, left)

    def keep(name: str, section: dict[str, Any]) -> None:
        result[name] = section
        print(f"== {name}: exit {section['exit_code']} in {section.get('seconds')} s")
        print(section["tail"][-1500:], flush=True)
        write(options.out / "gpu_all.json", {"environment": environment(), "sections": result})

    for name in alone:
        keep(*one(name))
    with ThreadPoolExecutor(max(1, len(together))) as pool:
        for name, section in pool.map(one, together):
            keep(name, section)
    return 1 if any(section["exit_code"] for section in result.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
