"""Switches of SGLang under which the guard cannot judge, or not everything."""

from __future__ import annotations

from ddtree_guard.config import setting

PLAN_STREAM = "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"
GLUE = "SGLANG_ENABLE_METADATA_GLUE_GRAPH"
NOT_GLUED = ("DFLASH", "DSPARK", "DDTREE")  # SGLang ignores the switch for block drafters
SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
WALK = ("A1", "A2", "A3")
_TRUE = ("1", "true", "yes", "y")


def unguardable(algorithm: str = "") -> str:
    """Why no step can be judged under this environment; empty where it can."""
    if _on(GLUE) and algorithm.upper() not in NOT_GLUED:
        return (
            f"{GLUE} lets SGLang replay a step's metadata from a graph, without the call in which "
            "the guard sees it; unset it"
        )
    if _on(PLAN_STREAM):
        return (
            f"{PLAN_STREAM} lets SGLang build a step's metadata on a stream of its own while the "
            "tree is still being drafted, so that neither can be compared; unset it"
        )
    return ""


def _on(name: str) -> bool:
    return setting(name).strip().lower() in _TRUE


def simulated_walk() -> bool:
    """Whether SGLang makes acceptance up, for benchmarks: the walk then proves nothing."""
    try:
        return float(setting(SIMULATED) or -1) > 0
    except ValueError:
        return False
