"""Shadow mode in real engines: silent on sound ones, loud in the incident, and what it costs.

    python benchmarks/shadow.py --cost          # on an idle machine
    python benchmarks/shadow.py [--out FILE] [--seconds 20] [--parallel 4] [--only incident]
                                [--site 0.5.17=FOLDER] [--again]

Engines: DDTREE at budget 16, NGRAM, DFLASH and EAGLE with topk 4, eager and with graphs, every 4th
step shadowed; the same DDTREE on the stock backend (the incident); engines into whose masks a fault
is planted in every step from the 60th on; and engines with `CAPTURE=qkv` whose dumps are recomputed
offline. The file is rewritten after each engine; engines that it holds are not measured again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
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
ROOM_S = 75.0  # what an engine takes, start and end included
SIZES = (  # w, query heads, KV heads, committed length
    (17, 32, 8, 512), (17, 32, 8, 4096), (17, 32, 8, 32_768), (65, 32, 8, 4096), (257, 32, 8, 4096),
)  # fmt: skip


WIDTHS = {"DDTREE": 17, "NGRAM": 16, "DFLASH": 8, "EAGLE": 8}
ALWAYS = "M2@60+"  # a wrong mask in every step from the 60th on: some are shadowed


def cells(site: tuple[str, str] = ("", "")) -> list[Cell]:
    """Sound engines, the incident, wrong masks, and engines whose dumps hold rows. `site` is the
    release and the folder of a second SGLang, which has no incident.
    """
    sound = [
        Cell(algorithm, graphs, overlap, w=WIDTHS[algorithm], shadow=EVERY, folder=FOLDER)
        for graphs, overlap in ((True, True), (False, False))
        for algorithm in WIDTHS
    ]
    by = {(cell.algorithm, cell.graphs): cell for cell in sound}
    wrong = [replace(by[name, True], plant=ALWAYS) for name in ("DDTREE", "EAGLE")]
    there = [replace(cell, release=site[0], site=site[1]) for cell in (*wrong, *sound)]
    return [*(there if site[1] else ()), *wrong, *sound, *_with_rows(by)]


def _with_rows(by: dict[tuple[str, bool], Cell]) -> list[Cell]:
    """The incident and a wrong mask, eager and with graphs, with attention rows in the dumps."""
    trees = [replace(by["DDTREE", graphs], capture="qkv") for graphs in (True, False)]
    broken = [replace(cell, incident=True) for cell in trees]
    return [*broken, *(replace(cell, plant="M2@60") for cell in trees)]


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
    parser.add_argument("--minutes", type=float, default=60.0, help="no engine starts too late")
    parser.add_argument("--cost", action="store_true", help="measure the cost only")
    parser.add_argument("--site", type=_site, default=("", ""), help="RELEASE=FOLDER, another one")
    parser.add_argument("--again", action="store_true", help="measure all, those of the file too")
    parser.add_argument("--only", default="", help="part of the names of the engines to run")
    options = parser.parse_args(argv)
    result: dict[str, Any] = {"environment": environment(), "rows": [], "cost": [], "failed": {}}
    if options.out.exists():  # the cost is measured on an idle machine, in a run of its own
        held = json.loads(options.out.read_text())
        result |= {name: held[name] for name in ("rows", "cost")}
    lock, end = threading.Lock(), time.monotonic() + 60 * options.minutes

    def one(cell: Cell) -> None:
        if time.monotonic() + ROOM_S > end:
            return  # left for the next call
        try:
            row = measure(cell, options.seconds)
            with lock:
                others = [held for held in result["rows"] if held["cell"] != cell.name]
                result["rows"] = [*others, row]
        except Exception as error:
            result["failed"][cell.name] = str(error)[-3000:]
            print(f"FAILED {cell.name}: {error}", flush=True)
        with lock:
            write(options.out, result)

    if options.cost:
        result["cost"] = costs()
        write(options.out, result)
        return 0
    known = set() if options.again else {row["cell"] for row in result["rows"]}
    chosen = [c for c in cells(options.site) if options.only in c.name and c.name not in known]
    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(one, chosen))
    wrong = [row["cell"] for row in result["rows"] if not _right(row)]
    print("WRONG" if wrong else "right", *wrong, *result["failed"])
    return 1 if wrong or result["failed"] else 0


def _site(text: str) -> tuple[str, str]:
    release, _, folder = text.partition("=")
    return release, folder


def _right(row: dict[str, Any]) -> bool:
    shadowed = {line["rule"] for line in row["shadow_lines"]}
    if not row["steps_shadowed"] or row["faults"]:
        return False
    if row["incident"] or row["planted"] == ALWAYS:
        return "D4" in shadowed
    return not row["findings"] if row["planted"] is None else True


if __name__ == "__main__":
    sys.exit(main())
