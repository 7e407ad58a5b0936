"""Write the README's tables from the raw results: `python tools/readme.py [--check]`.

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`. With `--check` nothing is written and
the exit code says whether the README is current. Standard library only.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def load(name: str) -> Any:
    """A result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def device_check() -> str:
    """GPU time per clean step inside a graph, against its floor."""
    found = load("device_check")
    rows = [
        [
            row["bs"],
            row["w"],
            row["context"],
            row["depth"],
            "{median:.1f} ({min:.1f}-{max:.1f})".format(**row["gpu_us"]),
            f"{row['gpu_us']['median'] / row['floor_us']['median']:.1f}",
        ]
        for row in found["rows"]
        if row["mode"] == "graph" and (row["bs"], row["w"]) in ((8, 17), (8, 65), (32, 257))
    ]
    where = found["environment"]
    note = f"{where['device']}, torch {where['torch']}, Triton {where['triton']}; microseconds."
    head = ("requests", "w", "context", "depth", "GPU time, median (range)", "times the floor")
    return f"{table(head, rows)}\n\n{note}"


def ring_cost() -> str:
    """What the flight recorder adds to a checked step."""
    found = load("ring_cost")
    rows = [
        [
            row["bs"],
            row["w"],
            f"{row['ring_mib']:.1f} MiB, {row['ring_steps']} slots",
            *(
                "{median_us:.1f} ({q1_us:.1f}-{q3_us:.1f})".format(
                    **{key: round(value, 1) + 0.0 for key, value in row[name].items()}
                )  # no -0.0
                for name in ("gpu", "host_graph", "host_eager")
            ),
        ]
        for row in found["shapes"]
    ]
    head = ("requests", "w", "ring", "GPU", "host, graphs", "host, eager")
    note = (
        f"{found['gpu']}, torch {found['torch']}; microseconds a step on top of the check, median"
    )
    return f"{table(head, rows)}\n\n{note} (quartiles)."


def engines() -> str:
    """Guarded engines under mixed traffic."""
    found = load("soak")
    rows = [
        [
            row["release"],
            "plain decoding" if row["algorithm"] == "NONE" else row["algorithm"],
            "-" if row["algorithm"] == "NONE" else row["w"],
            "on" if row["graphs"] else "off",
            "on" if row["overlap"] else "off",
            f"{row['steps_checked']} of {row['verify_steps']}",
            row["findings"],
            {True: "yes", False: "no", None: "not compared"}[row["outputs_identical"]],
        ]
        for row in found["rows"]
    ]
    head = (
        "SGLang",
        "algorithm",
        "w",
        "graphs",
        "overlap",
        "steps checked",
        "findings",
        "same text",
    )
    total = found["totals"]
    note = f"{total['steps_checked']:,} steps, {total['findings']} findings"
    if total["rate_below"]:
        note += f": the rate of false alarms is below {total['rate_below']:.1e} a step (95 %)"
    by: dict[str, int] = {}
    for row in found["rows"]:
        version = (row.get("guard") or {}).get("device", "an earlier one")
        by[version] = by.get(version, 0) + row["steps_checked"]
    said = ", ".join(f"{steps:,} by {name}" for name, steps in sorted(by.items()) if steps)
    note += f". Version of the device check (hash of ddtree_guard/device): {said}"
    return f"{table(head, sorted(rows, key=str))}\n\n{note}. Same text: as an unguarded engine's."


def planted() -> str:
    """Faults planted in the same engines, one line an engine."""
    groups: dict[tuple[str, ...], list[Any]] = {}
    for row in load("soak_planted")["rows"]:
        modes = ("on" if row["graphs"] else "off", "on" if row["overlap"] else "off")
        groups.setdefault((row["release"], row["algorithm"], *modes), []).append(row)
    lines = []
    for key, rows in sorted(groups.items()):
        verdicts = [row["plant_verdict"] for row in rows]
        names = [
            row["planted"]["rule"]
            + (
                f" (as {found})"
                if (found := v["found_as"] or "nothing") != row["planted"]["rule"]
                else ""
            )
            for row, v in zip(rows, verdicts, strict=True)
        ]
        lines.append([
            *key, ", ".join(names),
            f"{sum(v['right_step'] for v in verdicts)} of {len(rows)}",
            f"{sum(v['right_rid'] for v in verdicts)} of {len(rows)}",
            f"{sum(v['tokens_left'] == 'no' for v in verdicts)} of {len(rows)}",
        ])  # fmt: skip
    head = (
        "SGLang", "algorithm", "graphs", "overlap", "faults of", "found in their step",
        "right request", "before tokens left",
    )  # fmt: skip
    return table(head, lines)


def server_overhead() -> str:
    """Speed of a guarded server beside an unguarded one, a second unguarded one, SGLang's tools."""
    sys.path.insert(0, str(RESULTS.parent))
    from server_overhead import met

    found = load("server_overhead")
    by = {(row["w"], row["concurrency"], row["tool"]): row for row in found["rows"]}
    lines = []
    for w, requests in sorted({key[:2] for key in by}):
        row, bare = (by[w, requests, tool] for tool in ("guard", "off"))
        others = (by.get((w, requests, name)) for name in ("control", "kv_canary", "async_assert"))
        within = met(row)
        lines.append([
            w, requests, f"{row['engines']}, {row['blocks']}",
            f"{_ratio(row)}{', within' if within else ''}",
            _generations(row.get("by_generation", ())),
            _ratio(row, "step"), *map(_ratio, others),
            f"{row['p99_ms']:.1f} / {bare['p99_ms']:.1f}",
        ])  # fmt: skip
    head = (
        "w", "requests", "engines a side, rounds", "guard, tokens/s to unguarded (95 %)",
        "by generation of engines", "its steps", "control",
        "`--kv-canary log`", "async-assert", "p99 ms a token, guard / off",
    )  # fmt: skip
    made = table(head, lines)
    tools = [row["blocks"] for key, row in by.items() if key[2] in ("kv_canary", "async_assert")]
    few = f" SGLang's own checkers ran in {min(tools)} to {max(tools)} rounds." if tools else ""
    return f"{made}\n\n{found['environment']['note']}{few} {_footprint(by)}"


def _generations(ratios: Sequence[float]) -> str:
    """What each generation says; of more than four, their range, its middle half, and how many."""
    if len(ratios) <= 4:
        return ", ".join(f"{ratio:.4f}" for ratio in ratios) or "-"
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return (
        f"{min(ratios):.4f} to {max(ratios):.4f}, half in {low:.4f} to {high:.4f} ({len(ratios)})"
    )


def _ratio(row: dict[str, Any] | None, of: str = "ratio") -> str:
    if row is None or f"{of}_to_off" not in row:
        return "-"
    if row[f"{of}_low"] is None:
        return f"{row[f'{of}_to_off']:.4f}"
    return f"{row[f'{of}_to_off']:.4f} ({row[f'{of}_low']:.4f}-{row[f'{of}_high']:.4f})"


def _footprint(by: dict[Any, Any]) -> str:
    """Memory and start-up of the guard, per width."""
    parts = []
    for w in sorted({key[0] for key in by}):
        row, bare = (next(r for key, r in by.items() if (key[0], key[2]) == (w, tool))
                     for tool in ("guard", "off"))  # fmt: skip
        held, reserved = (
            ((row.get(name) or 0) - (bare.get(name) or 0)) / 2**20
            for name in ("gpu_allocated", "gpu_bytes")
        )
        pinned = (row["pinned_bytes"] or 0) / 2**20
        parts.append(
            f"w={w}: {held:+.0f} MiB of GPU memory in tensors, {reserved:+.0f} MiB with what the "
            f"allocator reserves, {pinned:.1f} MiB pinned, started in {row['start_s']:.0f} s "
            f"against {bare['start_s']:.0f} s in the newest run"
        )
    return "Guarded, at " + "; at ".join(parts) + "."


def spans(numbers: Iterable[int]) -> str:
    """Whole numbers with runs written as `1-32`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{low}-{high}" if high > low else str(low) for low, high in runs)


def lossless() -> str:
    """DDTREE against plain decoding by precision, block and mode; then the incident by budget."""
    rows, groups = load("losslessness")["rows"], dict[tuple[Any, ...], list[Any]]()
    for row in rows:
        kind = "DFLASH" if row["algorithm"] == "DFLASH" else "DDTREE"
        kind += ", stock backend" if row["incident"] else ""
        kind += f", SGLang {row['release']}" if row["release"] != "0.5.16" else ""
        key = (row["incident"], row["dtype"], kind, row["block"], row["graphs"])
        groups.setdefault((*key, row["budget"] if row["incident"] else 0), []).append(row)
    lines = [
        [
            key[2],
            key[1],
            key[3],
            "on" if key[4] else "off",
            spans(row["budget"] for row in group) if group[0]["budget"] else "-",
            f"{sum(row['compared'] for row in group):,}",
            sum(row["sequences_differing"] for row in group),
            sum(row["differing"] for row in group),
            f"{max(row['max_logit_gap_of_differing'] or 0 for row in group):.3f}",
        ]
        for key, group in sorted(groups.items(), key=lambda item: (item[0][0], *map(str, item[0])))
    ]
    head = (
        "algorithm",
        "precision",
        "block",
        "graphs",
        "budgets",
        "tokens compared",
        "texts that differ",
        "beyond ties",
        "largest logit gap",
    )
    return table(head, lines)


def acceptance() -> str:
    """Mean accept length, and the gain on DFLASH over the same prompts."""
    rows = [
        [
            row["algorithm"],
            row["block"],
            row["budget"] or "-",
            row["steps"],
            "{:.2f} ({:.2f}-{:.2f})".format(row["mean"], *row["interval"]),
            "{:+.2f} to {:+.2f}".format(*row["gain_on_dflash"]),
        ]
        for row in load("losslessness")["acceptance"]
        if row["block"] == 8 and row["budget"] in (0, 7, 16, 32, 64)
    ]
    head = ("algorithm", "block", "budget", "steps", "accepted (95 %)", "gain on DFLASH (95 %)")
    return table(head, sorted(rows, key=lambda row: (row[0] == "DDTREE", row[2] == "-", row[2])))


def watch() -> str:
    """The guard on live DDTREE workers: sound ones, planted ones, and the incident."""
    found, rows = load("losslessness"), []
    for graphs in (False, True):
        sound = [row for row in found["guarded"] if row["graphs"] is graphs]
        checked, steps = (sum(row[n] for row in sound) for n in ("steps_checked", "verify_steps"))
        budgets = spans(row["budget"] for row in sound) if graphs else "1-32, 48, 64, 128, 256"
        named = f"{sum(row['findings'] for row in sound)} findings"
        rows.append(["sound", budgets, "on" if graphs else "off", f"{checked} of {steps}", named])
    for row in load("ddtree_watch")["rows"]:
        real = [p for p in row["planted"].values() if not {"not_checked", "error"} & set(p)]
        good = sum(p["found"] and p["tokens_left"] is False for p in real)
        mode, steps = "on" if row["graphs"] else "off", row["verify_steps"]
        checked = f"{row['steps_checked']} of {steps}"
        rows.append(["planted", row["budget"], mode, checked, f"{good} of {len(real)} faults"])
    for row in found["incidents"]:
        first, mode = row["first_step"], "on" if row["graphs"] else "off"
        named = "nothing broken"
        if first is not None and first["rule"] == "M5":
            named += " (M5, latent: only requests of full length would be)"
        elif first is not None:
            named = f"{first['rule']} at step {first['step']}, tokens left: {first['tokens_left']}"
        rows.append(["incident", row["budget"], mode, "-", named])
    return table(("DDTREE engine", "budgets", "graphs", "steps checked", "named"), rows)


def speed() -> str:
    """Tokens per second on the tiny model, by requests at once."""
    import statistics

    found: dict[tuple[str, int], dict[int, list[float]]] = {}
    for row in load("ddtree_speed")["engines"]:
        cell = found.setdefault((row["algorithm"], row["budget"]), {})
        cell.setdefault(row["bs"], []).append(row["tokens_per_second"])
    sizes = sorted({bs for cell in found.values() for bs in cell})
    rows = [
        [
            name,
            budget or "-",
            *(
                f"{statistics.median(cell[bs]):,.0f} ({min(cell[bs]):,.0f}-{max(cell[bs]):,.0f})"
                for bs in sizes
            ),
        ]
        for (name, budget), cell in found.items()
    ]
    return table(("algorithm", "budget", *(f"{bs} at once" for bs in sizes)), rows)


def shaped() -> str:
    """GPU time of the target's forward on a dummy of Qwen3-8B's shape."""
    rows = [
        [
            row["algorithm"],
            row["budget"] or "-",
            row["bs"],
            "{median:.2f} ({p10:.2f}-{p90:.2f})".format(**row["forward_ms"]),
        ]
        for row in load("ddtree_speed")["shaped"]
        if row["forward_ms"]
    ]
    return table(("algorithm", "budget", "requests", "forward, ms (middle 80 %)"), rows)


def trees() -> str:
    """Building trees on the device against a heap on the host."""
    rows = [
        [
            row["budget"],
            row["bs"],
            f"{row['search']['median_us']:.0f}",
            f"{row['host_heap']['median_us']:.0f}",
            f"{row['speedup']:.0f}",
        ]
        for row in load("ddtree_speed")["trees"]
    ]
    head = ("budget", "requests", "device search, us", "host heap, us", "ratio")
    return table(head, rows)


def shadow_cost() -> str:
    """One comparison of shadow mode, by size."""
    found = load("shadow")
    rows = [
        [
            row["w"],
            row["s"],
            "{median:.0f} ({min:.0f}-{max:.0f})".format(**row["gpu_us"]),
            "{median:.0f} ({min:.0f}-{max:.0f})".format(**row["host_us"]),
        ]
        for row in found["cost"]
    ]
    head = ("w", "committed tokens", "GPU time, median (range)", "host time")
    return f"{table(head, rows)}\n\n{found['environment']['device']}; microseconds."


def shadow_engines() -> str:
    """Engines with every fourth step shadowed."""
    rows = [
        [
            row["release"],
            row["algorithm"] + (", stock backend" if row["incident"] else ""),
            "on" if row["graphs"] else "off",
            row["planted"] or "-",
            row["verify_steps"],
            row["steps_shadowed"],
            f"{row['shadow']['worst']:.2f}",
            ", ".join(row["rules"]) or "none",
        ]
        for row in load("shadow")["rows"]
    ]
    head = (
        "SGLang", "algorithm", "graphs", "planted", "verify steps", "shadowed",
        "largest error of a right step, of what is allowed", "rules found",
    )  # fmt: skip
    return table(head, sorted(rows, key=str))


TABLES: dict[str, Callable[[], str]] = {
    "device_check": device_check,
    "engines": engines,
    "lossless": lossless,
    "planted": planted,
    "server_overhead": server_overhead,
    "ring_cost": ring_cost,
    "acceptance": acceptance,
    "watch": watch,
    "speed": speed,
    "shaped": shaped,
    "trees": trees,
}
SHADOW: dict[str, Callable[[], str]] = {
    "shadow_cost": shadow_cost,
    "shadow_engines": shadow_engines,
}
PLACES = {README: TABLES, ROOT / "docs" / "shadow.md": SHADOW}


def render(path: Path) -> str:
    """A document's text with every table made anew."""
    text = path.read_text()
    for name, make in PLACES[path].items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.S)
        if not place.search(text):
            raise SystemExit(f"{path.name} has no place for the table {name}")
        made = make()
        text = place.sub(lambda match, made=made: f"{match[1]}{made}\n{match[2]}", text)
    return text


def main() -> int:
    """Write the documents, or compare them."""
    made = {path: render(path) for path in PLACES}
    if "--check" in sys.argv:
        return 0 if all(text == path.read_text() for path, text in made.items()) else 1
    for path, text in made.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
