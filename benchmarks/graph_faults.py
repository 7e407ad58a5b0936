"""Faults in real captured graphs of SGLang's Triton verify attention, each to be named.

    PYTHONPATH=.:<sglang> python benchmarks/graph_faults.py --out benchmarks/results

Writes `graph_faults.json`: per fault what had to be named, what the device and the host named, and
how far the attention rows are from the dense oracle. Exit code 1 if one is not named correctly.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from common import environment, write

from ddtree_guard.device.verdict import disagreements, explain
from ddtree_guard.guard import Guard
from ddtree_guard.testing.graph_lab import FAULTS, Fault, error_of, long_and_short, run_fault

TOLERANCE = 2e-2  # float32 through tensor cores


def judge(fault: Fault, device: str) -> dict[str, Any]:
    """Plant one fault and say what was named."""
    old, new = long_and_short()
    sound, bad = run_fault(fault, device)
    report = explain(bad.verdict, bad.step, Guard().check, full=True)
    row: dict[str, Any] = {
        "fault": fault.name,
        "wanted_device": fault.device,
        "device": bad.verdict.rules,
        "first": bad.verdict.first,
        "wanted_host": fault.host,
        "host": report.rules,
        "headlines": [finding.headline for finding in report.findings],
        "disagreements": [finding.headline for finding in disagreements(report)],
        "sound_device": sound.verdict.rules,
        "sound_host": Guard().check(sound.step).rules,
        "sound_error": error_of(sound, old),
        "error": error_of(bad, new),
    }
    row["passed"] = (
        set(fault.device) <= set(bad.verdict.rules)
        and set(fault.host) <= set(report.rules)
        and not row["disagreements"]
        and not row["sound_device"]
        and not row["sound_host"]
        and row["sound_error"] < TOLERANCE
    )
    return row


def main() -> int:
    """Every fault in a lab of its own; an error in one does not stop the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[dict[str, Any]] = []
    for fault in FAULTS:
        try:
            rows.append(judge(fault, device))
        except Exception as error:
            rows.append({"fault": fault.name, "passed": False, "exception": repr(error)[:2000]})
        print(rows[-1]["fault"], rows[-1]["passed"], rows[-1].get("device"), flush=True)
        write(options.out / "graph_faults.json", {"environment": environment(), "rows": rows})
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
