"""Ranks compare their steps: through a real gloo group of two processes, and never waiting."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

import pytest

from ddtree_guard.checks import ALL
from ddtree_guard.hooks.ranks import Digests, digest_of
from ddtree_guard.rule import Finding
from ddtree_guard.step import Step
from ddtree_guard.testing.steps import sound_step

CHILD = """
import json, sys, time
import torch.distributed as dist
from ddtree_guard.hooks import boot
from ddtree_guard.hooks.ranks import Digests
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step
rank, port, fault = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
mine, world, store = boot.world_of(dist)
boot.publish(store, boot.RankReport(mine))
armed = sum(r.armed for r in boot.gather(store, world))
digests, found = Digests(store, mine, world, every=2), []
for step_id in range(1, 9):
    step = sound_step(step_id).replace(who__step_id=step_id)
    if rank == 1 and step_id >= 4 and fault == "tree":
        step = step.replace(tree__tokens=step.tree.tokens + 1)
    if rank == 1 and step_id == 6 and fault == "bucket":
        step = step.replace(padded_bs=8)
    found += digests.exchange(step)
    dist.barrier()
found += digests.exchange(sound_step(1).replace(who__step_id=10))
dist.barrier()
found += digests.exchange(sound_step(1).replace(who__step_id=12))
dist.barrier()
print(json.dumps([armed, [[s.who.step_id, s.peers.digests, s.peers.keys] for s in found]]))
dist.destroy_process_group()
"""


def _step(step_id: int, seed: int = 0) -> Step:
    return sound_step(seed).replace(who__step_id=step_id)


def _findings(steps: list[Step]) -> list[Finding]:
    rules = [rule for rule in ALL if rule.family == "X"]
    found = [rule.check(step) for step in steps for rule in rules]
    return [finding for finding in found if finding is not None]


def test_a_lagging_rank_is_not_waited_for(store: Any) -> None:
    fast, slow = (Digests(store, rank, 2, every=1) for rank in (0, 1))
    for step_id in range(1, 4):
        assert fast.exchange(_step(step_id)) == []
    assert [s.who.step_id for s in slow.exchange(_step(1))] == [1]
    assert [s.who.step_id for s in fast.exchange(_step(4))] == [1]


def test_only_every_nth_step_is_compared(store: Any) -> None:
    digests = Digests(store, 0, 1, every=64)
    for step_id in range(1, 200):
        digests.exchange(_step(step_id))
    assert len(store.held) == 3


@pytest.mark.parametrize("part", ["tree__tokens", "layout__prefix_lens", "outcome__accept_lens"])
def test_the_digest_sees_each_part(part: str) -> None:
    step = _step(1)
    changed = step.get(part.replace("__", ".")).copy()
    changed[-1] += 1
    assert digest_of(step.replace(**{part: changed})) != digest_of(step)


def test_padded_lanes_do_not_count() -> None:
    step = sound_step(0, padded_bs=8)
    lens = step.layout.prefix_lens.copy()
    lens[-1] += 5
    assert digest_of(step.replace(layout__prefix_lens=lens)) == digest_of(step)


def _two_ranks(fault: str) -> list[list[object]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-W", "ignore", "-c", CHILD]
    ranks = [
        subprocess.Popen([*command, str(rank), port, fault], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    answers = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    found: list[list[object]] = []
    for answer in answers:
        armed, steps = json.loads(answer.splitlines()[-1])
        assert armed == 2
        for step_id, digests, keys in steps:
            step = _step(step_id).replace(
                peers__digests={k: tuple(v) for k, v in digests.items()}, peers__keys=tuple(keys)
            )
            found += [[step_id, f.rule, f.equation] for f in _findings([step])]
    return found


@pytest.mark.sglang
@pytest.mark.parametrize("fault", ["none", "tree", "bucket"])
def test_two_gloo_ranks(fault: str) -> None:
    found = _two_ranks(fault)
    if fault == "none":
        assert found == []
    elif fault == "tree":
        assert {(at, rule) for at, rule, _ in found} == {(4, "X1"), (6, "X1"), (8, "X1")}
        assert all("tree[rank 1]" in str(text) for _, _, text in found)
    else:
        assert {(at, rule) for at, rule, _ in found} == {(6, "X4")}
        assert str(found[0][2]).startswith("key[rank 1] = eager/8")
