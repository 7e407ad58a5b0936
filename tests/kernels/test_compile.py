"""The kernels compile to machine code for an H200. No GPU needed; the interpreter forgives more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from ddtree_guard.attention.shadow import prefix_kernel, shadow_kernel
from ddtree_guard.ddtree import tree_kernel, verify_kernel
from ddtree_guard.device import edges, kernel as device
from ddtree_guard.device.protocol import HAS_BITS
from ddtree_guard.device.ring_program import PACKED
from ddtree_guard.device.tree import parents_kernel

OTHERS = {"logp_ptr": "*fp32", "lens_ptr": "*i64", "mask_ptr": "*u8", "buffers_ptr": "*u64"}
OTHERS |= {"child": "*i64", "sibling": "*i64", "parents": "*i32", "depths": "*i32"}
NUMBERS = device.VERIFY_ARGS[device.VERIFY_ARGS.index("lanes"):]
CHECKED = dict.fromkeys(device.VERIFY_ARGS, "*i64") | dict.fromkeys(NUMBERS, "i32")
CHECKED |= dict.fromkeys(NUMBERS[NUMBERS.index("len_max"):NUMBERS.index("ring")], "i64")
CHECKED |= {"mask": "*u8", "kv": "*i32", "ring": "*i64"}
TILE = {"LANES": 32, "BITS": 8, "DEEP": 4, "COLS": 4, "WARPS": 4}
TILE |= {"ROWS": 64, "WORDS": 16, "PACK": 8, "WIDE": 1024}
EVERYTHING = sum(HAS_BITS.values()) - HAS_BITS["outcome"]

def build(kernel, constants, others=OTHERS, **options):
    kinds = {}
    for name in kernel.arg_names:
        pointer = "*i64" if name.endswith("_ptr") or name.startswith("out_") else "i32"
        kinds[name] = "constexpr" if name in constants else others.get(name, pointer)
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=values)
    built = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    # Beyond 48 KB in all a launch has to opt in; Triton looks at its own part alone.
    tables = re.findall(r"\\.shared \\S+ \\d+ \\.b32 \\w+\\[(\\d+)\\]", built.asm["ptx"])
    if built.metadata.shared < 49152 < built.metadata.shared + 4 * sum(map(int, tables)):
        print("too much shared memory:", kernel, constants, built.metadata.shared, tables)
    return len(tables)

build(tree_kernel._search_kernel, {"ROWS": 16, "PADDED": 32}, num_warps=1)
build(tree_kernel._search_kernel, {"ROWS": 1024, "PADDED": 2048}, num_warps=4)
build(tree_kernel._mask_kernel, {"COLUMNS": 256, "LANES": 16, "WITH_MASK": True})
build(verify_kernel._walk_kernel, {"PADDED": 32, "COLUMNS": 8})
build(verify_kernel._move_kernel, {"COLUMNS": 8, "TILE": 1024})
build(parents_kernel, {"W": 16, "ROUNDS": 4})
build(parents_kernel, {"W": 2048, "ROUNDS": 11})
EDGES = dict.fromkeys(("one", "two", "three", "kvi", "out", "pool_rows", "lens"), "*i64")
EDGES |= dict.fromkeys(("state", "slots", "tokens"), "*i64")
EDGES |= dict.fromkeys(("kv", "live_count", "sizes", "parents", "depths", "table"), "*i32")
EDGES |= dict.fromkeys(("predict", "accept", "accept_lens", "greedy", "cut"), "*i32")
EDGES |= dict.fromkeys(("kvi_numel", "chunk", "table_rows", "table_cols", "table_stride"), "i64")
EDGES |= dict.fromkeys(("room", "reserved", "most"), "i64")
KNOWN = HAS_BITS["tree"] | HAS_BITS["kv_indices"]
for trees, width, rounds in ((0, 1, 1), (1, 8, 3), (1, 2048, 11), (2, 1, 1), (5, 64, 6)):
    constants = {"HAS": KNOWN, "COLS": 512, "TREES": trees, "W": width, "ROUNDS": rounds}
    build(edges.before_kernel, constants, EDGES, num_warps=4)
for has, path in ((0, 1), (HAS_BITS["outcome"], 16)):
    build(edges.close_kernel, {"HAS": has, "PATH": path, "COLS": 128}, EDGES, num_warps=1)
for ring in (0, sum(PACKED.values())):
    constants = {"HAS": EVERYTHING, "RING": ring, **TILE}
    assert build(device.verify_kernel, constants, CHECKED, num_warps=4, launch_pdl=True) == 1
NARROW = CHECKED | dict.fromkeys(("tokens", "parents", "depths", "sizes"), "*i32")
for pack in (2, 4):
    constants = {"HAS": EVERYTHING, "RING": 0, **TILE, "WORDS": 4, "PACK": pack}
    build(device.verify_kernel, constants, NARROW, num_warps=4, maxnreg=80)

OTHERS |= {f"{name}_ptr": "*bf16" for name in "qokv"} | {"scale": "fp32", "errors_ptr": "*i32"}
OTHERS |= {"slots_ptr": "*i32", "loc_ptr": "*i64", "parents_ptr": "*i32", "length_ptr": "*i64"}
OTHERS |= {"parts_ptr": "*fp32"}
for dim in (64, 128, 256):
    for kernel in (prefix_kernel, shadow_kernel):
        build(kernel, {"M": 16, "C": 32, "D": dim}, num_warps=4)
print("compiled")
"""


def test_kernels_compile_for_sm90() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False
    )
    assert "compiled" in done.stdout, done.stderr[-2000:]
    assert "too much" not in done.stdout, done.stdout
