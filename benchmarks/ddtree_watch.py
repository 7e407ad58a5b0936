"""The guard on live DDTREE workers: `python benchmarks/ddtree_watch.py MODEL OUT`.

Planted engines get the fault of every active rule, one after another, and each must be named on its
own step, before the step's tokens leave. A rule whose fault is not planted has a row that says why.
Sound ones (`--only sound`; losslessness.py has more) run at depth `full` until enough steps are
checked, and must give no finding. On the way every step says what DFLASH's chain, which is the
spine of its tree, would have committed from the same state. Rows go to OUT/ddtree_watch.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines import Setup, generate, run_all, save, start, text_prompts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ddtree_guard.guard import find_rule
from ddtree_guard.render import parse_line
from ddtree_guard.rule import Scope
from ddtree_guard.testing.faults import FAULTS

TREE = Setup("DDTREE", 16, guard="log", depth="full")
SOUND = (
    TREE,
    replace(TREE, graphs=False),
    replace(TREE, budget=64),
    replace(TREE, budget=7, overlap=False),
)
SPOILT = replace(TREE, plant="on", shadow=8)
PLANTED = (SPOILT, replace(SPOILT, graphs=False))
LINE = "ddtree_guard finding"
_OWN = "cannot occur: "
# Faults that are not planted into a live DDTREE engine.
ABSENT = {
    "CFG4": _OWN + "EAGLE's arithmetic of steps and top-k, which DDTREE does not have; planted in "
    "an EAGLE server by tests/hooks/test_configuration.py",
    "K9": _OWN + "DDTREE refuses KV pages of more than one token; tests/ddtree/test_limits.py",
    "K10": _OWN + "DDTREE refuses models with a sliding window; tests/ddtree/test_limits.py",
    "L4": _OWN + "DDTREE refuses requests with a grammar; tests/ddtree/test_algorithm.py",
    "X1": "one rank has no peers: see ddtree_tp.json",
    "X4": "one rank has no peers: see ddtree_tp.json",
}
NO_GRAPH = "cannot occur: no graph is replayed in eager mode"


def cell(setup: Setup, model: Path, folder: Path, steps: int, seconds: float) -> None:
    """Traffic on one engine: batches of 1 to 16, until enough steps were verified."""
    begun, engine = time.monotonic(), start(setup, model)
    started = time.monotonic() - begun
    prompts, path = text_prompts(64, seed=3), folder / f"{setup.name}.json"
    live, texts, sent = folder / f"{setup.name}.live.json", [], 0
    while time.monotonic() - begun < seconds:
        bs = (16, 2, 7, 1, 12, 4)[sent % 6]
        at = (sent * 11) % (len(prompts) - bs)
        outs = generate(engine, prompts[at : at + bs], 160)
        texts, sent = texts or [out["ids"] for out in outs], sent + 1
        found = json.loads(live.read_text()) if live.exists() else {}
        save(path, {"texts": texts, "batches": sent, "started_s": started})
        if found.get("verify_steps", 0) >= steps and not found.get("left"):
            break
    time.sleep(1.5)  # the live file is written twice a second
    engine.shutdown()


def report(folder: Path, setups: tuple[Setup, ...]) -> list[dict[str, Any]]:
    """One row per engine."""
    return [watched(setup, folder) for setup in setups if live_file(setup, folder).exists()]


def live_file(setup: Setup, folder: Path) -> Path:
    """Where testing/tree_probe.py writes about this engine."""
    return folder / f"{setup.name}.live.json"


def watched(setup: Setup, folder: Path) -> dict[str, Any]:
    """Counters, the first finding in the log, chain against tree, and the planted faults."""
    live = json.loads(live_file(setup, folder).read_text())
    log = (folder / f"{setup.name}.log").read_text(errors="replace").splitlines()
    lines = [found for line in log if LINE in line and (found := parse_line(line))]
    lines = [{name: line[name] for name in line if name != "dump"} for line in lines]
    boot = [line.partition(" dumps=")[0] for line in log if "ddtree_guard armed=" in line]
    row: dict[str, Any] = {
        "budget": setup.budget, "graphs": setup.graphs, "overlap": setup.overlap,
        "block": setup.block, "depth": setup.depth, "boot": boot[:1],
        "release": "0.5.17" if setup.site else "0.5.16",
        **{name: live[name] for name in ("verify_steps", "steps_checked", "findings", "latent",
                                         "skipped", "faults", "checker")},
        "lines": lines[:12],
        "chain": {} if setup.plant else compared(live.get("chain", []), live.get("tree", [])),
    }  # fmt: skip
    if setup.plant:
        row |= {"left": live["left"], "active": live["active"]}
        planted = {rule: plan for rule, plan in live["planted"].items() if rule not in ABSENT}
        row["planted"] = {rule: judged(rule, plan) for rule, plan in planted.items()}
        row["absent"] = {
            rule: ABSENT.get(rule) or ("not reached" if rule in live["left"] else NO_GRAPH)
            for rule in FAULTS if rule not in row["planted"]
        }  # fmt: skip
    return row


def compared(chain: list[int], tree: list[int]) -> dict[str, Any]:
    """Tokens per request and step of the tree and of the chain in it, on the same states."""
    if not chain:
        return {}
    worse = sum(t < c for c, t in zip(chain, tree, strict=True))
    more = sum(t > c for c, t in zip(chain, tree, strict=True))
    return {"requests_times_steps": len(chain), "tree_shorter": worse, "tree_longer": more,
            "mean_chain": sum(chain) / len(chain), "mean_tree": sum(tree) / len(tree)}  # fmt: skip


def judged(rule: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Whether the planted rule was named on its own step, and before the tokens left."""
    own = [found for found in plan["found"] if found["rule"] == rule]
    others = sorted({found["rule"] for found in plan["found"]} - {rule})
    return {
        **{
            name: plan[name]
            for name in ("at", "path", "how", "device", "changed", "layer", "not_checked", "error")
            if name in plan
        },
        "found": bool(own),
        "right_request": any(found["rid"] in (plan["rid"], None) for found in own)
        if find_rule(rule).scope is Scope.REQUEST
        else None,
        "tokens_left": own[0]["tokens_left"] if own else None,
        "headline": own[0]["headline"] if own else None,
        "also": others,
    }


def main() -> None:
    """All engines, a few at a time; the results so far after each wave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=5500)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--parallel", type=int, default=9)
    parser.add_argument("--only", choices=("sound", "planted"))
    parser.add_argument("--cell")
    args = parser.parse_args()
    folder = args.out / "ddtree_watch"
    if args.cell:
        setup = Setup(**json.loads(args.cell))
        cell(setup, args.model, folder, args.steps, args.seconds - 12)
        return
    groups = {"planted": PLANTED, "sound": SOUND}
    setups = groups[args.only] if args.only else sum(groups.values(), ())
    extra = [str(args.model), str(args.out), "--steps", str(args.steps)]
    extra += ["--seconds", str(args.seconds)]
    for at in range(0, len(setups), args.parallel):
        run_all(__file__, setups[at : at + args.parallel], folder, args.seconds, extra)
        rows = report(folder, setups)
        save(args.out / "ddtree_watch.json", {"rows": rows})
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    sys.exit(main())
