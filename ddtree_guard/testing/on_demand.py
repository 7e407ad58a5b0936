"""A plugin for tests in a real server: plants a rule's fault when a file asks for it.

Loaded by SGLang through an entry point of its own (group `sglang.srt.plugins`), only where a test
puts one on the path. `DDTREE_GUARD_PLANT_FILE=FILE`: once FILE exists, the rule that it names is
planted in the last request of the next verify step of two or more, and FILE becomes FILE.done.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from ddtree_guard.config import setting
from ddtree_guard.errors import UsageError
from ddtree_guard.hooks import arm

PERIOD_S = 0.05


def load() -> None:
    """Start the thread in this process; it waits until the process has a guard."""
    if setting("DDTREE_GUARD_PLANT_FILE"):
        target = Path(setting("DDTREE_GUARD_PLANT_FILE"))
        threading.Thread(target=watch, args=(target,), name="on-demand", daemon=True).start()


def watch(target: Path) -> None:
    """Put a planter into every guard of this process, once."""
    seen: set[int] = set()
    while True:
        for guard in arm.GUARDS:
            if id(guard) not in seen:
                seen.add(id(guard))
                planter(guard, target)
        time.sleep(PERIOD_S)


def plant_next(guard: Any, rule: str, stays: bool = False) -> None:
    """Plant the rule's fault in the next launch that a guard judges, or in all that follow."""
    from ddtree_guard.testing.plant import plant

    build, guard.running.quick = guard.checker.build, False

    def planted(record: Any, view: Any) -> None:
        plant(rule, view)
        if not stays:
            guard.checker.build = build
        build(record, view)

    guard.checker.build = planted


def planter(guard: Any, target: Path) -> None:
    """Before the guard's own part of the build site: plant what the file asks for."""
    from ddtree_guard.testing.plant import plant

    build, guard.running.quick = guard.checker.build, False

    def planted(record: Any, view: Any) -> None:
        if target.exists() and view.bs >= 2:
            rule = target.read_text().strip()
            try:
                changed = ",".join(plant(rule, view))
            except UsageError as error:
                changed = str(error)
            done = target.with_name(f"{target.name}.done")
            done.write_text(f"{rule} step={record.step_id} changed={changed}\n")
            os.unlink(target)
        build(record, view)

    guard.checker.build = planted
