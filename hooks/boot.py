"""Armed or refuse: what is hooked, what is not and why, over all ranks, in one line.

Arming is proven, never assumed: SGLang drops plugins silently. Ranks report through the key-value
store of the process group and nobody waits in a collective, so a rank without the guard shows as
missing instead of hanging the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_guard import render
from ddtree_guard.config import Config, Mode
from ddtree_guard.hooks.facts import MATRIX
from ddtree_guard.hooks.ranks import Store

PLUGIN = "ddtree_guard"
WAIT_S = 20.0  # how long rank 0 waits for the other ranks' reports
# A release moves to GPU_TESTED when the soak has run on it without a finding.
GPU_TESTED: tuple[str, ...] = ("0.5.16", "0.5.17")
CPU_TESTED = tuple(release.version for release in MATRIX)


def excluded_by(env: Mapping[str, str]) -> str | None:
    """The value of SGLANG_PLUGINS if it keeps SGLang from loading this plugin, else None."""
    value = env.get("SGLANG_PLUGINS", "")
    names = {name.strip() for name in value.split(",") if name.strip()}
    return value if names and PLUGIN not in names else None


def tested(version: str) -> str:
    """How far a release was tested: gpu-tested, cpu-tested or untested."""
    if version in GPU_TESTED:
        return "gpu-tested"
    return "cpu-tested" if version in CPU_TESTED else "untested"


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's word on itself: `why` is empty where it is armed."""

    rank: int
    why: str = ""

    @property
    def armed(self) -> bool:
        """Whether this rank checks its steps."""
        return not self.why


def publish(store: Store, report: RankReport) -> None:
    """Tell the other ranks."""
    store.set(_key(report.rank), report.why or "armed")


def gather(
    store: Store,
    world: int,
    wait_s: float = WAIT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[RankReport, ...]:
    """What every rank said, waiting at most `wait_s` seconds for all of them."""
    end = clock() + wait_s
    while not store.check([_key(rank) for rank in range(world)]) and clock() < end:
        sleep(0.05)
    return tuple(_read(store, rank) for rank in range(world))


def _read(store: Store, rank: int) -> RankReport:
    if not store.check([_key(rank)]):
        return RankReport(rank, "no report; is the plugin installed and loaded there")
    text = store.get(_key(rank)).decode()
    return RankReport(rank, "" if text == "armed" else text)


def _key(rank: int) -> str:
    return f"ddtree_guard/armed/{rank}"


def not_guarded(report: RankReport, world: int) -> str:
    """The line about a rank that is not armed."""
    return (
        f"NOT GUARDED: rank {report.rank} of {world}, {render.plain(report.why)}; "
        "serving continues unchecked"
    )


def excluded_line(plugins: str) -> str:
    """Why a process without our plugin is not guarded, and the remedy."""
    return f"plugin excluded by SGLANG_PLUGINS={plugins}; add {PLUGIN}"


@dataclass(frozen=True, slots=True)
class Boot:
    """What the boot line says. `skipped` maps a word (the backend or the algorithm that a contract
    exempts) to rule ids; the whole reasons are in `ddtree-guard doctor`.
    """

    config: Config
    release: str
    armed: int
    world: int
    active: int
    rules: int
    skipped: Mapping[str, Sequence[str]]
    backend: str
    ring: str = "off"

    def line(self) -> str:
        """The one line a job. Keys and their order never change."""
        config = self.config
        skipped = ";".join(f"{','.join(ids)}({why})" for why, ids in self.skipped.items())
        parts = {
            "armed": f"{self.armed}/{self.world}",
            "mode": config.mode.value,
            "rules": f"{self.active}/{self.rules}",
            "not_checked": skipped or "none",
            "backend": self.backend,
            "ring": self.ring,
            "dumps": config.dump_dir,
            "release": f"{self.release}({tested(self.release)})",
        }
        return "ddtree_guard " + " ".join(f"{k}={render.quote(v)}" for k, v in parts.items())


def world_of(distributed: Any) -> tuple[int, int, Any]:
    """(rank, world, store) of torch.distributed, or (0, 1, None) where it does not run."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1, None
    world = int(distributed.get_world_size())
    if world == 1:
        return 0, 1, None
    return (
        int(distributed.get_rank()),
        world,
        distributed.distributed_c10d._get_default_store(),
    )


def refuses(config: Config, reports: Sequence[RankReport]) -> str | None:
    """The sentence with which mode raise refuses to start, or None."""
    bad = [report for report in reports if not report.armed]
    if config.mode is not Mode.RAISE or not bad:
        return None
    first = bad[0]
    return (
        f"expected all {len(reports)} ranks to be guarded in mode raise, found rank {first.rank} "
        f"without: {render.plain(first.why)}; fix that, or set SGLANG_DDTREE_GUARD=log to serve "
        "unchecked."
    )
