"""A guarded server for tests on a CPU, in a process of its own: `MiniServer` behind a pipe.

    python -m ddtree_guard.testing.child [stock|corrected] [ALGORITHM]

Answers each line on its standard input with `ANSWER ...` on its standard output: `step N` runs N
verify steps, `late N` runs them and leaves the last result unresolved until the next command,
`plant W3` plants that rule's fault in the next step, `hang` never answers. Ends with its input.
The guard reads the environment, as in a server.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from ddtree_guard.config import Config, Mode, setting
from ddtree_guard.hooks import arm
from ddtree_guard.hooks.boot import excluded_by
from ddtree_guard.testing.cases import VerifyCase
from ddtree_guard.testing.on_demand import plant_next
from ddtree_guard.testing.server import MiniServer

SIZES: dict[str, dict[str, Any]] = {
    "DDTREE": {"budget": 16},
    "NGRAM": {"budget": 15, "draft_tokens": 16},
    "DFLASH": {"budget": 7, "draft_tokens": 8, "kind": "chain"},
}


def build(choice: Any, algorithm: str) -> MiniServer:
    """A server of three requests of unequal lengths."""
    case = VerifyCase(
        algorithm=algorithm, lens=(19, 11, 26), head_dim=16, heads=2, kv_heads=1, **SIZES[algorithm]
    )
    return MiniServer(case, choice)


def main(choice: str = "corrected", algorithm: str = "DDTREE") -> None:
    """Arm, answer, end with the input."""
    server, config = build(choice, algorithm), Config.from_env()
    excluded = excluded_by({"SGLANG_PLUGINS": setting("SGLANG_PLUGINS")})
    if config.mode is Mode.OFF or excluded:
        server.init_model_worker(None)
    else:
        server.arm(config)
    print("ANSWER ready", flush=True)
    pending: list[Any] = []
    for line in sys.stdin:
        what, _, value = line.strip().partition(" ")
        while pending:
            server.resolve(*pending.pop())
        if what == "plant":
            plant_next(arm.GUARDS[-1], value)
        elif what == "hang":
            time.sleep(600)
        else:
            for _ in range(int(value) - (what == "late")):
                server.step()
            if what == "late":
                pending.append(server.step(overlap=True))
        print(f"ANSWER {server.steps}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
