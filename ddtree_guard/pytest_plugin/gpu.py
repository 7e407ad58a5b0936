"""Is there a GPU? Decided without importing torch, which would initialise one."""

from __future__ import annotations

from pathlib import Path

from ddtree_guard.config import setting


def no_gpu(dev: Path = Path("/dev")) -> str:
    """Why no GPU can be used here; empty if one can."""
    hidden = setting("CUDA_VISIBLE_DEVICES")
    if hidden in ("-1", "none", "NoDevFiles"):
        return f"no CUDA device: CUDA_VISIBLE_DEVICES={hidden} hides them all"
    if any(dev.glob("nvidia[0-9]*")) or (dev / "dxg").exists() or (dev / "kfd").exists():
        return ""
    return f"no CUDA device ({dev}/nvidia*) on this machine"
