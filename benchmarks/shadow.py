"""Shadow mode in real engines: silent on sound ones, loud in the incident, and what it costs.

    python benchmarks/shadow.py --cost          # on an idle machine
    python benchmarks/shadow.py [--out FILE] [--seconds 20] [--parallel 4] [--only incident]

Engines: DDTREE at budget 16 and NGRAM, eager and with graphs, every 4th step shadowed; the same
DDTREE on the stock backend (the incident); and engines with `CAPTURE=qkv` whose dumps are
recomputed offline. The file is rewritten after each engine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import environment, gpu_us, host_us, spread, write
from serving import ROOT, Cell, Child

sys.path.insert(0, str(ROOT))

from ddtree_guard import render

EVERY = 4
FOLDER = "/tmp/ddtree-guard-shadow"
START_S = 270.0
SIZES = (  # w, query heads, KV heads, committed length
    (17, 32, 8, 512), (17, 32, 8, 4096), (17, 32, 8, 32_768), (65, 32, 8, 4096), (257, 32, 8, 4096),
)  # fmt: skip


def cells() -> list[Cell]:
    """Sound engines, the incident, and engines whose dumps hold rows."""
    sound = [
        Cell(algorithm, graphs, overlap, w=w, shadow=EVERY, folder=FOLDER)
        for graphs, overlap in ((True, True), (False, False))
        for algorithm, w in (("DDTREE", 17), ("NGRAM", 16))
    ]
    kept = [replace(sound[0], capture="qkv", plant="M2@60"), replace(sound[2], plant="M2@60")]
    kept[1] = replace(kept[1], capture="qkv")
    broken = [replace(cell, incident=True, capture="qkv") for cell in (sound[0], sound[2])]
    return [*sound, *broken, *kept]


def measure(cell: Cell, seconds: float) -> dict[str, Any]:
    """Traffic on one engine: what was compared, what was found, what its dumps say."""
    child = Child(cell)
    try:
        start = child.answer(START_S)
        child.ask(120, do="fixed")
        child.ask(seconds + 90, do="soak", seconds=seconds, seed=len(cell.name))
        time.sleep(1.5)  # the probe writes twice a second
        log, probe = cell.path("log.txt").read_text(errors="replace"), child.probe()
    finally:
        child.stop()
    lines = [found for text in log.splitlines() if (found := render.parse_line(text))]
    return {
        "cell": cell.name, "release": start["release"], "algorithm": cell.algorithm, "w": cell.w,
        "graphs": cell.graphs, "overlap": cell.overlap, "incident": cell.incident,
        "planted": cell.plant or None, "capture": cell.capture, "shadow_every": cell.shadow,
        "verify_steps": probe.get("verify_steps"), "steps_checked": probe.get("steps_checked"),
        "steps_shadowed": probe.get("shadow", {}).get("compared"), "shadow": probe.get("shadow"),
        "findings": probe.get("findings"), "faults": probe.get("faults"),
        "rules": sorted({line["rule"] for line in lines}),
        "shadow_lines": [line for line in lines if line["rule"] in ("D1", "D3", "D4")],
        "boot": [t for t in log.splitlines() if "ddtree_guard shadow" in t][:8],
        "dumps": [recomputed(line["dump"]) for line in lines
                  if cell.capture == "qkv" and Path(line.get("dump", "-")).is_dir()],
        "tail": child.tail(6) if probe.get("faults") else None,
    }  # fmt: skip


def recomputed(dump: str) -> dict[str, Any]:
    """What `ddtree-guard recompute` says of a dump."""
    command = [sys.executable, "-m", "ddtree_guard", "recompute", dump, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    found: dict[str, Any] = {"dump": Path(dump).name, "exit": done.returncode}
    try:
        (step,) = json.loads(done.stdout)["steps"]
        wrong = step["wrong"]
        found |= {"rows": step["rows"], "wrong": wrong[:4], "wrong_rows": len(wrong)}
        found["max_error"] = step["max_error"]
    except (ValueError, KeyError, IndexError):
        found["said"] = (done.stdout + done.stderr)[-300:]
    return found


def costs() -> list[dict[str, Any]]:
    """Microseconds of one comparison, on the device and on the host, in bfloat16."""
    return [cost(*size) for size in SIZES]


def cost(w: int, heads: int, kv_heads: int, s: int, dim: int = 128) -> dict[str, Any]:
    """One size: GPU time of the comparison with its copies, and host time to queue it."""
    import torch

    from ddtree_guard.attention.shadow import Rows, ShadowCheck

    device = torch.device("cuda")
    pool = [torch.randn(s + w + 64, kv_heads, dim, dtype=torch.bfloat16, device=device)
            for _ in range(2)]  # fmt: skip
    q, out = (torch.randn(w, heads, dim, dtype=torch.bfloat16, device=device) for _ in range(2))
    order = torch.randperm(s + w, device=device)
    tree = [r - 1 if r < 8 else r % 7 for r in range(w)]  # a spine of a block of 8, then branches
    parents = torch.tensor(tree, dtype=torch.int32)
    check = ShadowCheck(device, w)
    rows = Rows(q, out, *pool, order[:s].int(), order[s:], parents.to(device),
                torch.tensor([s], device=device), dim**-0.5)  # fmt: skip

    def launch() -> None:
        check.launch(rows)

    launch()
    return {
        "w": w, "heads": heads, "kv_heads": kv_heads, "s": s,
        "gpu_us": spread(gpu_us(launch, 5, 5, 2_000_000)),
        "host_us": spread(host_us(launch, 50, 5)),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run everything; 1 if a sound engine had a finding or the incident had none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/shadow.json")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--cost", action="store_true", help="measure the cost only")
    parser.add_argument("--only", default="", help="part of the names of the engines to run")
    options = parser.parse_args(argv)
    result: dict[str, Any] = {"environment": environment(), "rows": [], "cost": [], "failed": {}}
    if options.out.exists():  # the cost is measured on an idle machine, in a run of its own
        result["cost"] = json.loads(options.out.read_text())["cost"]

    def one(cell: Cell) -> None:
        try:
            result["rows"].append(measure(cell, options.seconds))
        except Exception as error:
            result["failed"][cell.name] = str(error)[-3000:]
            print(f"FAILED {cell.name}: {error}", flush=True)
        write(options.out, result)

    if options.cost:
        result["cost"] = costs()
        write(options.out, result)
        return 0
    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(one, [c for c in cells() if options.only in c.name]))
    wrong = [row["cell"] for row in result["rows"] if not _right(row)]
    print("WRONG" if wrong else "right", *wrong, *result["failed"])
    return 1 if wrong or result["failed"] else 0


def _right(row: dict[str, Any]) -> bool:
    shadowed = {line["rule"] for line in row["shadow_lines"]}
    if not row["steps_shadowed"] or row["faults"]:
        return False
    if row["incident"]:
        return "D4" in shadowed
    return not row["findings"] if row["planted"] is None else True


if __name__ == "__main__":
    sys.exit(main())
