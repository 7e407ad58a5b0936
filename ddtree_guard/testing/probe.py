"""A plugin for tests in a real server: reports the guard's counters, and plants one fault.

Loaded by SGLang through an entry point of its own (group `sglang.srt.plugins`), only where a test
or a benchmark puts one on the path; it is no part of an installed guard. It reads

    DDTREE_GUARD_PROBE=FILE          where the scheduler's counters are written, twice a second;
                                     without a guard only the GPU memory that it holds
    DDTREE_GUARD_PROBE_ASKED=on      ... and only while there is no FILE: delete it to ask
    DDTREE_GUARD_PROBE_PLANT=W3@50   the fault of W3 in the first verify step from the 50th on that
                                     can hold it: bs >= 2, on the last request; W3@50+ in all
                                     steps from then on

Further faults: each line added to the file that is named like FILE, ending in .plant, is a rule,
planted at once.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ddtree_guard.config import setting
from ddtree_guard.hooks import arm
from ddtree_guard.testing.live import plant_at

PERIOD_S = 0.5


def load() -> None:
    """Start the probe's thread in this process; it waits until the process has a guard."""
    if setting("DDTREE_GUARD_PROBE"):
        threading.Thread(target=_run, name="ddtree-guard-probe", daemon=True).start()


def _run() -> None:
    target = Path(setting("DDTREE_GUARD_PROBE"))
    rule, _, step = setting("DDTREE_GUARD_PROBE_PLANT").partition("@")
    always = step.endswith("+")
    first = [(rule, int(step.rstrip("+") or 1))] if rule else []
    plans: list[dict[str, Any]] = []
    asked = bool(setting("DDTREE_GUARD_PROBE_ASKED"))
    while True:
        time.sleep(PERIOD_S)
        if asked and target.exists():
            continue
        if not arm.GUARDS:
            if gpu_bytes():  # a scheduler without a guard
                _write(target, {"gpu_bytes": gpu_bytes(), "gpu_allocated": gpu_allocated()})
            continue
        guard = arm.GUARDS[-1]
        for rule, step_id in [*first, *((name, 1) for name in _asked(target))][len(plans) :]:
            plans.append({"rule": rule, "from": step_id, "at": None})
            plans[-1] |= {"always": True} if always and len(plans) == 1 else {}
            plant_at(guard, plans[-1])
        _write(target, {**counters(guard), "planted": plans[0] if plans else None, "plants": plans})


def _asked(target: Path) -> list[str]:
    """Rules that were asked for while the server runs."""
    path = target.with_suffix(".plant")
    return path.read_text().split() if path.exists() else []


def counters(guard: Any) -> dict[str, Any]:
    """The guard's counters and state, as JSON values."""
    coverage = guard.coverage
    return {
        "verify_steps": coverage.verify_steps,
        "steps_checked": coverage.steps_checked,
        "findings": coverage.findings,
        "latent": coverage.latent,
        "skipped": dict(coverage.skipped),
        "faults": dict(guard.fuses.faults),
        "checker": guard.checker.kind,
        "hooks": {name: state.ok for (name, _), state in guard.hooks.items()},
        "shadow": {
            "compared": guard.shadow.compared,
            "skipped": dict(guard.shadow.skipped),
            "worst": getattr(guard.shadow, "worst", None),
        },
        "pinned_bytes": pinned_bytes(guard),
        "recorder": recorder(guard.flight.recorder),
        "gpu_bytes": gpu_bytes(),
        "gpu_allocated": gpu_allocated(),
    }


def recorder(made: Any) -> dict[str, Any]:
    """The flight recorder's counters, and the process that takes SIGUSR2."""
    ring = made.ring
    held = {} if ring is None else {
        "steps": ring.steps, "written": ring.written, "dropped": ring.dropped,
        "lanes": ring.lanes, "bytes": ring.nbytes,
    }  # fmt: skip
    return {"pid": os.getpid(), "dumps": made.dumps, "faults": made.faults, "ring": held}


def gpu_bytes() -> int:
    """GPU memory that this process's allocator holds, graphs included; 0 without a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_reserved())


def gpu_allocated() -> int:
    """GPU memory of the tensors that this process holds; 0 without a GPU."""
    return int(sys.modules["torch"].cuda.memory_allocated()) if gpu_bytes() else 0


def pinned_bytes(guard: Any) -> int:
    """Host memory that is pinned: verdicts, and the copies of the shadow and of the recorder."""
    graphs = getattr(guard.checker, "graphs", None)
    held = [] if graphs is None else [*graphs.check._ring]
    held.append(getattr(getattr(guard.shadow, "_check", None), "_host", None))
    held.append(getattr(getattr(guard.flight.recorder.ring, "fetch", None), "_host", None))
    return sum(int(part.numel() * part.element_size()) for part in held if part is not None)


def _write(target: Path, value: dict[str, Any]) -> None:
    part = target.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.replace(target)
