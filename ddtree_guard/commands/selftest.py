"""`ddtree-guard selftest`: the device checker against one seeded bad step per device rule.

On a GPU each step also runs inside a captured graph; without one the same kernels run in Triton's
interpreter.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from ddtree_guard.config import export
from ddtree_guard.errors import IncompatibleError


def run(args: argparse.Namespace) -> int:
    """Print one line a step; 0 if every bad step alarmed and the sound one did not, else 1."""
    missing = [name for name in ("torch", "triton") if find_spec(name) is None]
    if missing:
        raise IncompatibleError(
            f"the self-test runs the device checker and needs torch and triton, found no "
            f"{' and no '.join(missing)}; run it in the environment that serves."
        )
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        raise IncompatibleError(
            "--device cuda expects a GPU, found none that torch can use; leave --device out to run "
            "the same kernels on the CPU."
        )
    if args.device == "cpu" or not torch.cuda.is_available():
        export(TRITON_INTERPRET="1")  # read when Triton is imported
    from ddtree_guard.device.selftest import selftest_main

    return selftest_main(args)
