"""Rows that meet in a table in shared memory, which Triton has no operation for.

Only compiled kernels can do it. In the interpreter launches go without (`operands.HAS_BITS`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ddtree_guard.device.protocol import load_wide

PLACES = 2048


def _meeting(count: int) -> str:
    """Store `count` values a thread at their addresses, wait for the program's other threads, and
    load what the places then hold. A negative address takes no part.
    """
    at, value = range(count, 2 * count), range(2 * count, 3 * count)
    lines = [".reg .pred p;", "bar.sync 0;"]  # who looked the memory up before has done so
    for k in range(count):
        lines.append(f"setp.ge.s32 p, ${at[k]}, 0; @p st.shared.u32 [${at[k]}], ${value[k]};")
    lines.append("bar.sync 0;")
    for k in range(count):
        lines.append(f"setp.ge.s32 p, ${at[k]}, 0; mov.u32 ${k}, ${value[k]};")
        lines.append(f"@p ld.shared.u32 ${k}, [${at[k]}];")
    return "{ " + "\n".join(lines) + " }"


def _walking(count: int) -> str:
    """Follow the links to parents of one row a thread. Output: number of rows on its path, -1 where
    one of their cells is 0. Operands: the row; what it is (0 nothing, 1 a row without a node, 2 a
    node); the address of its cells; the thread's number t; and the parents, negative for none, of
    the rows 1 + t, 129 + t and so on, `count` of them; the address of the program's memory.

    Three tables have the nodes that are one, two and four links on, so that sixteen are met in five
    steps. A node is the address of its place in the first one; behind the last row is a place that
    leads to itself, where every path ends, as links lead to smaller rows.
    """
    far = 4 * (128 * count + 1)
    size = far + 4
    lines = [
        ".reg .pred p, on, node; .reg .u32 base, end, i, there, at<17>; .reg .u64 wide, line;",
        f".reg .u32 place<{count}>, up<{count}>; .reg .b32 all, want, cell<16>;",
        f"mov.u32 base, ${5 + count};",
        f"add.u32 end, base, {far}; shr.u32 i, base, 2; cvt.u64.u32 wide, i;",
        "sub.u64 line, $3, wide; mov.b32 all, 1; mov.b32 want, 0;",
    ]
    for table in range(3):
        lines.append(f"st.shared.b32 [end+{table * size}], end;")
        lines.append(f"st.shared.b32 [base+{table * size}], end;")
    for k in range(count):
        lines += [
            f"shl.b32 place{k}, $4, 2; add.u32 place{k}, place{k}, base;",
            f"add.u32 place{k}, place{k}, {4 + 512 * k};",
            f"shl.b32 up{k}, ${5 + k}, 2; add.u32 up{k}, up{k}, base;",
            f"setp.lt.s32 p, ${5 + k}, 0; @p mov.b32 up{k}, end;",
            f"st.shared.b32 [place{k}], up{k};",
        ]
    for table in range(2):
        lines.append("bar.sync 0;")
        lines += [f"ld.shared.b32 up{k}, [up{k}+{table * size}];" for k in range(count)]
        lines += [f"st.shared.b32 [place{k}+{(table + 1) * size}], up{k};" for k in range(count)]
    lines += [
        "bar.sync 0; shl.b32 at0, $1, 2; add.u32 at0, at0, base; setp.eq.s32 node, $2, 2;",
        "setp.ge.s32 on, $2, 1;",
        "WALK: @!on bra DONE; mov.b32 i, at0; @!node mov.b32 at0, end;",
        *(f"mov.b32 cell{n}, 1;" for n in range(16)),
        "ld.shared.b32 at1, [at0];",
        *(f"ld.shared.b32 at{n + 2}, [at{n}+{size}];" for n in range(2)),
        *(f"ld.shared.b32 at{n + 4}, [at{n}+{2 * size}];" for n in range(13)),
        "mov.b32 at0, i;",
    ]
    for n in range(16):
        lines += [
            f"setp.ne.u32 p, at{n}, end; shr.u32 i, at{n}, 2; cvt.u64.u32 wide, i;",
            f"add.u64 wide, wide, line; @p ld.global.u8 cell{n}, [wide];",
            "@p add.s32 want, want, 1;",
        ]
    lines += [
        *(f"and.b32 all, all, cell{n};" for n in range(16)),
        "mov.b32 at0, at16; setp.ne.u32 on, at0, end; bra WALK;",
        "DONE: and.b32 all, all, 1; setp.eq.s32 p, all, 1; @!p mov.b32 want, -1;",
        "mov.b32 $0, want;",
    ]
    return "{ " + "\n".join(lines) + " }"


def _reaching(count: int) -> str:
    """Which of `count` rows a thread no link leads to. Outputs: 1 for those, else 0. Operands: the
    rows' places, then those of the rows that the first and the second link of each lead to,
    negative for none.
    """
    row, links = range(count, 2 * count), range(2 * count, 4 * count)
    lines = [".reg .pred p; .reg .b32 none, seen;", "mov.b32 none, 1; mov.b32 seen, 0;"]
    lines += [f"st.shared.b32 [${k}], none;" for k in row]
    lines.append("bar.sync 0;")
    lines += [f"setp.ge.s32 p, ${k}, 0; @p st.shared.b32 [${k}], seen;" for k in links]
    lines.append("bar.sync 0;")
    lines += [f"ld.shared.b32 ${k - count}, [${k}];" for k in row]
    return "{ " + "\n".join(lines) + " }"


cREACH_1, cREACH_2, cREACH_4 = (tl.constexpr(_reaching(n)) for n in (1, 2, 4))
cFROM_1, cFROM_2, cFROM_4 = (tl.constexpr(",".join(["=&r"] * n + ["r"] * 3 * n)) for n in (1, 2, 4))
cWALK_1, cWALK_2, cWALK_4 = (tl.constexpr(_walking(n)) for n in (1, 2, 4))
cALONG_1, cALONG_2, cALONG_4 = (
    tl.constexpr(",".join(["=&r", "r", "r", "l", "r"] + ["r"] * (n + 1))) for n in (1, 2, 4)
)
cMEET_1, cMEET_2, cMEET_4, cMEET_8 = (tl.constexpr(_meeting(n)) for n in (1, 2, 4, 8))
cWITH_1, cWITH_2, cWITH_4, cWITH_8 = (
    tl.constexpr(",".join(["=&r"] * n + ["r"] * 2 * n)) for n in (1, 2, 4, 8)
)


# One piece for all kinds of programs: what each declares for itself would add up.
cSCRATCH = tl.constexpr(f"{{ .shared .align 4 .b32 scratch[{PLACES}]; mov.u32 $0, scratch; }}")


@triton.jit
def scratch_of(like: tl.tensor) -> tl.tensor:
    """Address of the program's shared memory, PLACES words. For one call a kernel."""
    return tl.inline_asm_elementwise(
        cSCRATCH, "=r,r", [like], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def meet(
    scratch: tl.tensor, place: tl.tensor, value: tl.tensor, PACK: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """What each place of a new table holds after all threads have left their values there, PACK
    of them a thread; its own value where a place is negative. All threads of the program must come
    here. The places that nobody filled hold anything; they are not read.
    """
    place = tl.where(place < 0, -1, scratch + place)
    if PACK == 1:
        found = tl.inline_asm_elementwise(
            cMEET_1, cWITH_1, [place, value], dtype=tl.int32, is_pure=False, pack=1
        )
    elif PACK == 2:
        found = tl.inline_asm_elementwise(
            cMEET_2, cWITH_2, [place, value], dtype=tl.int32, is_pure=False, pack=2
        )
    elif PACK == 4:
        found = tl.inline_asm_elementwise(
            cMEET_4, cWITH_4, [place, value], dtype=tl.int32, is_pure=False, pack=4
        )
    else:
        found = tl.inline_asm_elementwise(
            cMEET_8, cWITH_8, [place, value], dtype=tl.int32, is_pure=False, pack=8
        )
    return found


@triton.jit
def walk(
    scratch: tl.tensor, rows: tl.tensor, kind: tl.tensor, line: tl.tensor, parents: tl.tensor,
    first: tl.tensor,
    w: tl.tensor, PACK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """How many rows the path of each row from itself to the root has: one for a row of kind 1, none
    for kind 0, all for kind 2; -1 where the lowest bit of one of their cells, which are at the
    addresses `line`, is not 1.

    A row a thread, and 64 * PACK of them at most. A link to no smaller row ends a path. All threads
    of the program must come here.
    """
    thread = tl.arange(0, 128)
    if PACK == 2:
        met = tl.inline_asm_elementwise(
            cWALK_1, cALONG_1,
            [rows, kind, line, thread, _smaller(parents, first, 1 + thread, w), scratch],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    elif PACK == 4:
        met = tl.inline_asm_elementwise(
            cWALK_2, cALONG_2,
            [rows, kind, line, thread, _smaller(parents, first, 1 + thread, w),
             _smaller(parents, first, 129 + thread, w), scratch],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        met = tl.inline_asm_elementwise(
            cWALK_4, cALONG_4,
            [rows, kind, line, thread, _smaller(parents, first, 1 + thread, w),
             _smaller(parents, first, 129 + thread, w), _smaller(parents, first, 257 + thread, w),
             _smaller(parents, first, 385 + thread, w), scratch],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return met


@triton.jit
def _smaller(
    parents: tl.tensor, first: tl.tensor, rows: tl.tensor, w: tl.tensor
) -> tl.tensor:  # fmt: skip
    """The rows' parents; -1 where that is no smaller row."""
    parent = load_wide(parents, first + rows, rows < w)
    return tl.where((rows < w) & (parent >= 0) & (parent < rows), parent, -1).to(tl.int32)


@triton.jit
def unreached(
    scratch: tl.tensor, rows: tl.tensor, down: tl.tensor, side: tl.tensor, PACK: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """1 for the rows that neither link of any row leads to, 0 for the others; a negative link leads
    nowhere. Half of PACK rows a thread. All threads of the program must come here.
    """
    rows, down = scratch + rows * 4, tl.where(down < 0, -1, scratch + down * 4)
    side = tl.where(side < 0, -1, scratch + side * 4)
    if PACK == 2:
        left = tl.inline_asm_elementwise(
            cREACH_1, cFROM_1, [rows, down, side], dtype=tl.int32, is_pure=False, pack=1
        )
    elif PACK == 4:
        left = tl.inline_asm_elementwise(
            cREACH_2, cFROM_2, [rows, down, side], dtype=tl.int32, is_pure=False, pack=2
        )
    else:
        left = tl.inline_asm_elementwise(
            cREACH_4, cFROM_4, [rows, down, side], dtype=tl.int32, is_pure=False, pack=4
        )
    return left
