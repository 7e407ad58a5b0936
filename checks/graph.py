"""CUDA graphs: what was captured is what is replayed.

`graph.born_*` is the birth certificate taken at capture, `graph.live_*` what is true at replay.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_guard.checks.common import first, first_cell, ints, optional_ints, sizes_of_batch
from ddtree_guard.rule import Cost, Finding, NotEvaluable, Rule, Scope, Site, rule
from ddtree_guard.step import Step

_ABSENT = "absent"


@rule(
    "G1", "wrong-graph-key", site=Site.REPLAY, cost=Cost.HOST, scope=Scope.BATCH,
    needs=("graph.born_key", "graph.live_key"),
)  # fmt: skip
def wrong_graph_key(step: Step) -> Finding | None:
    """The graph that is replayed was captured for a batch of this kind.

    Holds when: every part of the key at capture (BS, w, regime, mask present, and whatever else a
    Python branch looked at) has the value that this batch implies.
    Breaks as: branches taken at capture are replayed for a batch that would take others: a tree is
    verified without its mask, or with buffers that only the other regime fills.
    Usual cause: the graph is looked up by batch size alone, and the step's tree is a chain, has no
    mask, or has another width.
    Seen in: I06, I40.
    """
    born, live = step.graph.born_key or {}, step.graph.live_key or {}
    for name in sorted(born.keys() | live.keys()):
        was, now = born.get(name, _ABSENT), live.get(name, _ABSENT)
        if was != now:
            return Finding(
                headline=f"the graph was captured for another {name}",
                equation=f"{name} at capture = {was}, in this batch = {now}",
                expected=str(was),
                actual=str(now),
                cause=f"the graph was chosen without looking at {name}",
            )
    return None


@rule(
    "G2", "stale-graph-input", site=Site.REPLAY, cost=Cost.HOST, scope=Scope.BATCH,
    needs=("graph.born", "graph.live", "graph.generation"),
)  # fmt: skip
def stale_graph_input(step: Step) -> Finding | None:
    """Every buffer that the graph reads was written in this step.

    Holds when: the generation of every static buffer is this step's generation, except buffers
    that were declared constant at capture.
    Breaks as: the step is computed with positions, slots or tree of an earlier batch. All values
    are plausible, so nothing else looks wrong.
    Usual cause: a step of another regime skips a buffer that the captured graph reads, or a
    buffer is replaced instead of written.
    Seen in: I25, I26, I40.
    """
    now = int(step.graph.generation)
    for name, live in sorted(step.graph.live.items()):
        born = step.graph.born.get(name)
        if born is None or born.generation < 0 or live.generation == now:
            continue
        age = now - live.generation
        return Finding(
            headline=f"the graph reads {name} of an earlier step",
            equation=f"generation of {name} = {live.generation}, expected this step's {now}",
            expected=str(now),
            actual=str(live.generation),
            cause=f"{name} was last written {age} step{'' if age == 1 else 's'} ago: this step's "
            "builder skipped it"
            if age > 0
            else f"{name} was already overwritten by a later step",
        )
    return None


@rule(
    "G3", "moved-graph-input", site=Site.REPLAY, cost=Cost.HOST, scope=Scope.SERVER,
    needs=("graph.born", "graph.live"),
)  # fmt: skip
def moved_graph_input(step: Step) -> Finding | None:
    """The buffers that the batch was written to are the ones that the graph reads.

    Holds when: every static buffer of the birth certificate is still there, with the address, the
    type and at least the capacity that it had at capture.
    Breaks as: the graph keeps reading the old memory: the captured batch, an earlier step, or
    whatever was allocated there since. Right without graphs, wrong with them.
    Usual cause: a buffer was reallocated or replaced after capture (growth, weight update, resume)
    and the graphs were not captured again.
    Seen in: I25.
    """
    for name, born in sorted(step.graph.born.items()):
        live = step.graph.live.get(name)
        if live is None:
            return _moved(name, "buffer", "captured", _ABSENT)
        if born.pointer != live.pointer:
            return _moved(name, "address", f"{born.pointer:#x}", f"{live.pointer:#x}")
        if born.dtype != live.dtype:
            return _moved(name, "type", born.dtype, live.dtype)
        if live.capacity < born.capacity:
            return _moved(name, "capacity", f">= {born.capacity}", str(live.capacity))
    return None


def _moved(name: str, what: str, born: str, live: str) -> Finding:
    return Finding(
        headline=f"{name} is not the buffer that was captured",
        equation=f"{what} of {name} = {live}, expected {born}",
        expected=born,
        actual=live,
        cause=f"{name} was replaced after capture, and the graph was not captured again",
    )


@rule(
    "G4", "stale-pad-lane", site=Site.REPLAY, cost=Cost.ROWS, scope=Scope.BATCH, bit=17,
    needs=("contract.pad_lanes",),
)  # fmt: skip
def stale_pad_lane(step: Step) -> Finding | None:
    """Lanes without a request hold the declared pad values.

    Holds when: in lanes `bs <= i < BS` of a captured batch, every buffer that the contract lists
    has its pad value.
    Breaks as: padded lanes read and write what finished requests left behind: rotary rows out of
    range, slots that belong to somebody else by now.
    Usual cause: after a larger batch only the first bs lanes are rewritten.
    Seen in: I26, I39, H4.
    """
    _, lanes = sizes_of_batch(step)
    stale = [_stale_cell(step, path, pad) for path, pad in sorted(step.contract.pad_lanes.items())]
    found = [cell for cell in stale if cell is not None]
    if not found:
        return None
    lane, row, path, value, pad = min(found)
    name = path.rpartition(".")[2]
    return Finding(
        headline=f"padded lane {lane}: {name} is stale",
        equation=f"{name}[{lane},{row}] = {value}, expected the pad value {pad} in lanes "
        f"{step.bs}..{lanes - 1}",
        expected=str(pad),
        actual=str(value),
        request=lane,
        row=row,
        cause="an earlier, larger batch wrote the lane and nothing cleared it",
    )


def _stale_cell(step: Step, path: str, pad: int) -> tuple[int, int, str, int, int] | None:
    """Lane, row and value of the first padded cell of a buffer that is not `pad`."""
    cells = _by_lane(step, path)
    if cells is None:
        return None
    at = first_cell((cells[:, step.bs :] != pad).any(axis=0))
    if at is None:
        return None
    lane, row = at[0] + step.bs, at[1]
    values = cells[:, lane, row]
    return lane, row, path, int(values[np.argmax(values != pad)]), pad


def _by_lane(step: Step, path: str) -> Any:
    """A buffer as (sections, BS, rows), or None if the step lacks it or its shape is wrong (W5)."""
    w, lanes = sizes_of_batch(step)
    values = optional_ints(step, path)
    if values is None or values.size == 0:
        return None
    sections = step.positions.sections if path == "positions.values" else 1
    for rows in (w, 1):
        if values.size == sections * lanes * rows:
            return values.reshape(sections, lanes, rows)
    return None


@rule(
    "G5", "pad-lane-shares-slot", site=Site.REPLAY, cost=Cost.ROWS, scope=Scope.SERVER,
    needs=("slots.out_cache_loc", "contract.pad_lanes"),
)  # fmt: skip
def pad_lane_shares_slot(step: Step) -> Finding | None:
    """No lane without a request writes a KV slot of a live request.

    Holds when: the slots of lanes `bs <= i < BS` are neither written by a live row of this step nor
    listed in a live request's table row up to its length.
    Breaks as: the padded lane overwrites keys of the victim, which stays wrong for the rest of its
    life; the outputs of the padded lane itself are never looked at.
    Usual cause: the lane keeps the slots of a finished request, which were given to another one.
    Seen in: I39.
    """
    w, lanes = sizes_of_batch(step)
    out = ints(step, "slots.out_cache_loc")
    if out.size != lanes * w:
        raise NotEvaluable(f"out_cache_loc holds {out.size} slots, expected BS*w = {lanes * w}")
    out = out.reshape(lanes, w)
    victims = _slot_owners(step, out[: step.bs])
    for lane in range(step.bs, lanes):
        row = first(np.isin(out[lane], list(victims)))
        if row is None:
            continue
        slot = int(out[lane, row])
        return Finding(
            headline=f"padded lane {lane} writes a slot of request {victims[slot]}",
            equation=f"out_cache_loc[{lane},{row}] = {slot}, expected the reserved slot "
            f"{step.slots.reserved}",
            expected=str(step.slots.reserved),
            actual=str(slot),
            request=lane,
            row=row,
            victims=(victims[slot],),
            cause="the lane keeps the slots of a finished request, given to another since",
        )
    return None


def _slot_owners(step: Step, out: Any) -> dict[int, int]:
    """Live request per slot that it writes now or has written, without the reserved slot."""
    table, lens = (optional_ints(step, p) for p in ("slots.req_to_token", "layout.prefix_lens"))
    owners: dict[int, int] = {}
    for i in range(step.bs - 1, -1, -1):
        owners |= dict.fromkeys(out[i].tolist(), i)
        if table is not None and lens is not None:
            owners |= dict.fromkeys(table[i, : max(int(lens[i]), 0)].tolist(), i)
    owners.pop(step.slots.reserved, None)
    return owners


@rule(
    "G6", "verify-graph-in-prompt", site=Site.REPLAY, cost=Cost.HOST, scope=Scope.REQUEST,
    needs=("graph.prompt_left",),
)  # fmt: skip
def verify_graph_in_prompt(step: Step) -> Finding | None:
    """A verify graph is replayed only for requests that are past their prompt.

    Holds when: no live request of a replayed verify graph has prompt tokens left to process.
    Breaks as: rows of prompt are verified as a draft tree: stale prefill fields are read, and
    prompt tokens are accepted or rejected.
    Usual cause: the graph is eligible by batch size, and a request in chunked prefill is in the
    batch.
    Seen in: I40.
    """
    left = ints(step, "graph.prompt_left")
    i = first(left > 0)
    if i is None:
        return None
    return Finding(
        headline=f"request {i} is verified inside its prompt",
        equation=f"prompt tokens left[{i}] = {int(left[i])}, expected 0",
        expected="0",
        actual=str(int(left[i])),
        request=i,
        cause="the graph was chosen by batch size while a request was still in prefill",
    )


@rule(
    "G7", "overwritten-output", site=Site.VERIFY, cost=Cost.REQUESTS, scope=Scope.SERVER,
    needs=("graph.output_marks",),
)  # fmt: skip
def overwritten_output(step: Step) -> Finding | None:
    """What a graph computed is still there when it is used.

    Holds when: for every output the fingerprint taken right after the replay equals the one taken
    before its last use.
    Breaks as: logits or hidden rows belong to whatever ran in between, usually the drafter's
    graph: indices become huge numbers, or tokens of another request are accepted.
    Usual cause: two graphs share a memory pool, and the first one's output is read after the second
    one's replay.
    Seen in: I41.
    """
    for name, (after, at_use) in sorted(step.graph.output_marks.items()):
        if after != at_use:
            return Finding(
                headline=f"{name} changed between replay and use",
                equation=f"fingerprint of {name} = {at_use:#x}, expected {after:#x}",
                expected=f"{after:#x}",
                actual=f"{at_use:#x}",
                cause="another graph on the same memory pool was replayed in between",
            )
    return None


RULES: tuple[Rule, ...] = (
    wrong_graph_key,
    stale_graph_input,
    moved_graph_input,
    stale_pad_lane,
    pad_lane_shares_slot,
    verify_graph_in_prompt,
    overwritten_output,
)
