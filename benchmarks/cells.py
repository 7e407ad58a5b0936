"""Rows of losslessness.py put together: totals, histograms, several runs as one."""

from __future__ import annotations

from typing import Any

EXACT = "float32"


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs as one. Texts were compared with plain decoding of their own run; what is a tie
    is decided anew with the yardstick of all runs.
    """
    whole: dict[str, Any] = {"rows": []}
    for result in results:
        known = {cell_of(row) for row in whole["rows"]}
        whole["rows"] += [dict(row) for row in result["rows"] if cell_of(row) not in known]
        for name in ("plain", "guarded", "incidents", "acceptance"):
            held = whole.setdefault(name, [])
            seen = {cell_of(row) for row in held}
            held += [row for row in result[name] if cell_of(row) not in seen]
        for name in ("plain_gaps", "plain_noise", "ddtree_gaps"):
            whole[name] = added(whole.get(name), result[name])
    whole["yardstick"] = max(result["yardstick"] for result in results)
    for row in whole["rows"]:
        if row["dtype"] != EXACT and row["max_logit_gap_of_differing"] is not None:
            row["differing"] = sum(gap > whole["yardstick"] for gap in row["logit_gaps"])
    return whole


def cell_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells one row of a list from the others."""
    names = (
        "algorithm",
        "dtype",
        "release",
        "block",
        "budget",
        "bs",
        "graphs",
        "incident",
        "chunk",
    )
    return tuple(row.get(name) for name in names)


def added(left: dict[str, Any] | None, right: dict[str, Any]) -> dict[str, Any]:
    """Two histograms as one."""
    if left is None:
        return right
    names = sorted({*left["counts"], *right["counts"]})
    counts = {n: left["counts"].get(n, 0) + right["counts"].get(n, 0) for n in names}
    return {"count": left["count"] + right["count"], "max": max(left["max"], right["max"]),
            "counts": counts}  # fmt: skip


def totals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Plain decoding against its own reference, one row per engine and batch size."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("dtype", "graphs", "chunk", "bs"))
        total = found.setdefault(key, {
            **dict(zip(("dtype", "graphs", "chunk", "bs"), key, strict=True)),
            "tokens": 0, "compared": 0, "sequences_differing": 0, "max_logit_gap": 0.0,
        })  # fmt: skip
        for name in ("tokens", "compared", "sequences_differing"):
            total[name] += row[name]
        total["max_logit_gap"] = max([total["max_logit_gap"], *row["logit_gaps"]])
    return list(found.values())


def histogram(values: list[float], step: float = 1 / 64) -> dict[str, Any]:
    """Counts by multiples of 1/64, and the extremes."""
    counts: dict[str, int] = {}
    for value in sorted(values):
        name = f"{round(value / step) * step:.4f}"
        counts[name] = counts.get(name, 0) + 1
    return {"count": len(values), "max": max(values, default=0.0), "counts": counts}
