"""Sound synthetic Steps: random trees, unequal lengths, every part filled.

Nothing here calls a rule or the code under test: masks are painted by walking each node's
ancestors, offsets by running sums in plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree_guard.step import (
    Contract,
    Graph,
    Layout,
    Limits,
    Mask,
    Outcome,
    Peers,
    Positions,
    Shadow,
    Slots,
    Static,
    Step,
    Tree,
    Who,
    Widths,
)

VOCAB = 50_000
PAD_LEN = 1  # SGLang fills the prefix length of padded lanes with 1
GRAPH_PADS = {"layout.prefix_lens": PAD_LEN, "slots.out_cache_loc": 0, "positions.values": 0}


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a synthetic step. `lens` are the committed lengths of the live requests."""

    lens: tuple[int, ...] = (37, 21, 50)
    w: int = 17
    block: int = 8
    padded_bs: int | None = None  # more lanes than requests: the graph path
    page_size: int = 1
    kind: str = "random"  # "random", "chain" or "star"
    full_trees: bool = False  # every tree has w nodes

    @property
    def bs(self) -> int:
        """Live requests."""
        return len(self.lens)

    @property
    def lanes(self) -> int:
        """Padded requests."""
        return self.padded_bs or self.bs

    @property
    def graph(self) -> bool:
        """Whether this is a step of a captured graph."""
        return self.padded_bs is not None


def sound_step(seed: int = 0, plan: Plan | None = None, **sizes: Any) -> Step:
    """A step on which no rule may fire. `sizes` are fields of Plan."""
    plan = plan or Plan(**sizes)
    rng = np.random.default_rng(seed)
    tree = _trees(rng, plan)
    lens = np.full(plan.lanes, PAD_LEN, np.int64)
    lens[: plan.bs] = plan.lens
    slots, kv_indices = _slots(rng, plan, lens)
    cells, mask_indptr = paint_mask(tree, plan.lens, plan.w, lens)
    depth_max = plan.block - 1
    rows = plan.lanes * plan.w
    context = int(lens.max()) + 4 * plan.w + 64
    step = Step(
        bs=plan.bs,
        padded_bs=plan.lanes,
        widths=Widths(
            w=plan.w,
            holders={"backend": plan.w, "graph_runner": plan.w, "logits_buffer": plan.w},
            block=plan.block,
            budget=plan.w - 1,
            depth_max=depth_max,
            draft_width=plan.block,
            draft_rows=plan.block,
            num_draft_tokens=plan.w,
            num_steps=plan.w - 1 if plan.kind == "chain" else depth_max,
            topk=1 if plan.kind == "chain" else max(2, plan.w),
        ),
        layout=Layout(
            qo_indptr=np.arange(plan.lanes + 1, dtype=np.int64 if plan.graph else np.int32)
            * plan.w,
            kv_indptr=_running(lens).astype(np.int32),
            mask_indptr=mask_indptr,
            kv_indices=kv_indices,
            prefix_lens=lens,
            prefix_lens_cpu=lens[: plan.bs].copy(),
            max_extend_len=plan.w,
            offset_bits=64,
            rows=dict.fromkeys(("q", "out_cache_loc", "positions", "input_ids"), rows),
            grids={"extend_attention": (plan.lanes, plan.lanes)},
        ),
        mask=Mask(
            cells=cells,
            present=True,
            capacity=plan.lanes * plan.w * (context + plan.w) if plan.graph else len(cells),
            row_stride=lens[: plan.bs] + plan.w,
            rids=tuple(f"r{i}" for i in range(plan.bs)),
        ),
        tree=tree,
        positions=Positions(values=_positions(tree, plan, lens)),
        slots=slots,
        graph=_graph(plan) if plan.graph else Graph(),
        outcome=_outcome(rng, plan, tree, depth_max),
        limits=Limits(
            vocab=VOCAB,
            vocab_padded=VOCAB + 64,
            context=context,
            draft_context=context,
            rope_rows=context + 64,
            draft_rope_rows=context + 64,
            kernel_rows={"extend_attention": 1025},
            supports=("custom_mask", "width_not_block"),
            needs=("custom_mask", "width_not_block"),
        ),
        shadow=_shadow(rng, plan, tree),
        peers=Peers(
            digests=dict.fromkeys(("width", "offsets", "tree", "accepted"), ("6f", "6f")),
            keys=("eager/3", "eager/3"),
        ),
        who=Who(
            rids=tuple(f"r{i}" for i in range(plan.bs)),
            release="0.5.16",
            path="graph" if plan.graph else "eager",
        ),
        contract=Contract(
            name="ddtree-triton-graph" if plan.graph else "ddtree-triton-eager",
            mask_length="capacity" if plan.graph else "exact",
            pad_lanes=GRAPH_PADS if plan.graph else {},
        ),
    )
    return _with_evidence(rng, plan, step)


def _running(lengths: Any) -> Any:
    total, out = 0, [0]
    for length in lengths:
        total += int(length)
        out.append(total)
    return np.array(out, np.int64)


def _trees(rng: np.random.Generator, plan: Plan) -> Tree:
    shape = (plan.bs, plan.w)
    tokens, depths = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    parents = np.full(shape, -1, np.int64)
    child, sibling = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
    sizes = np.full(plan.bs, plan.w, np.int64)
    top1 = np.full((plan.bs, plan.block), -1, np.int64)
    for i in range(plan.bs):
        if not plan.full_trees:
            sizes[i] = rng.integers(1, plan.w + 1)
        elif plan.kind == "chain":
            sizes[i] = min(plan.w, plan.block)
        _grow(rng, plan, i, int(sizes[i]), parents, depths)
        sizes[i] = max(r for r in range(plan.w) if r == 0 or parents[i, r] >= 0) + 1
        for r in range(int(sizes[i])):
            taken = {tokens[i, c] for c in range(r) if parents[i, c] == parents[i, r]}
            while (token := int(rng.integers(0, VOCAB))) in taken:
                pass
            tokens[i, r] = token
        _link(i, int(sizes[i]), parents, child, sibling)
        for r in range(1, int(sizes[i])):
            if parents[i, r] == r - 1 and depths[i, r] == r:
                top1[i, r] = tokens[i, r]
    index = np.arange(plan.bs * plan.w, dtype=np.int64).reshape(shape)
    return Tree(tokens, parents, depths, sizes, index, child, sibling, top1)


def _grow(
    rng: np.random.Generator, plan: Plan, i: int, size: int, parents: Any, depths: Any
) -> None:
    """Fill parents and depths of request i: the spine first, then random attachments."""
    spine = 1 if plan.kind == "star" else plan.block - 1
    for r in range(1, size):
        if r <= spine:
            parent = r - 1
        elif plan.kind == "chain":
            return
        elif plan.kind == "star":
            parent = 0
        else:
            room = [p for p in range(r) if depths[i, p] < plan.block - 1]
            parent = int(rng.choice(room))
        parents[i, r], depths[i, r] = parent, depths[i, parent] + 1


def _link(i: int, size: int, parents: Any, child: Any, sibling: Any) -> None:
    """Left-child right-sibling links of request i, children in row order."""
    last: dict[int, int] = {}
    for r in range(1, size):
        parent = int(parents[i, r])
        if parent in last:
            sibling[i, last[parent]] = r
        else:
            child[i, parent] = r
        last[parent] = r


def paint_mask(tree: Tree, live: tuple[int, ...], w: int, lens: Any) -> tuple[Any, Any]:
    """Mask cells and offsets for these trees. Padded lanes hold zeros. See `step.Mask`."""
    offsets = _running([w * (int(s) + w) for s in lens])
    cells = np.zeros(int(offsets[-1]), np.uint8)
    for i, s in enumerate(live):
        for r in range(w):
            start = int(offsets[i]) + r * (s + w)
            cells[start : start + s] = 1
            node = r
            while node >= 0:
                cells[start + s + node] = 1
                node = int(tree.parents[i, node])
    return cells, offsets


def _positions(tree: Tree, plan: Plan, lens: Any) -> Any:
    values = np.zeros((plan.lanes, plan.w), np.int64)
    values[: plan.bs] = lens[: plan.bs, None] + tree.depths
    return values.reshape(-1)


def _slots(rng: np.random.Generator, plan: Plan, lens: Any) -> tuple[Slots, Any]:
    page = plan.page_size
    covered = [-(-(s + plan.w) // page) * page for s in plan.lens]
    pages = rng.permutation(np.arange(1, sum(covered) // page + 8))
    pool = (len(pages) + 1) * page
    width = max(covered) + page
    table = np.zeros((plan.bs, width), np.int64)
    out = np.zeros((plan.lanes, plan.w), np.int64)
    indices: list[Any] = []
    used = 0
    for i, s in enumerate(plan.lens):
        mine = pages[used : used + covered[i] // page]
        used += len(mine)
        ids = (mine[:, None] * page + np.arange(page)).reshape(-1)
        table[i, : covered[i]] = ids
        out[i] = ids[s : s + plan.w]
        indices.append(ids[:s])
    indices += [np.zeros(PAD_LEN, np.int64)] * (plan.lanes - plan.bs)
    owners = np.full((plan.lanes, plan.w), -1, np.int64)
    owners[: plan.bs] = np.arange(plan.bs)[:, None]
    slots = Slots(
        out_cache_loc=out.reshape(-1),
        req_to_token=table,
        refcounts=np.ones(plan.lanes * plan.w, np.int64),
        owners=owners.reshape(-1),
        allocated=np.array(covered, np.int64),
        owned_pages=np.array(covered, np.int64) // page,
        pools={"full": pool},
        page_size=page,
        kernel_page_size=page,
        token_stride=256,
        index_bits=64,
        row_width=width,
        reserve=plan.w,
        capacity={"kv_indices": (sum(plan.lens), plan.lanes * (max(plan.lens) + 64))},
        kept=None,
        freed=None,
    )
    return slots, np.concatenate(indices)


def _outcome(rng: np.random.Generator, plan: Plan, tree: Tree, depth_max: int) -> Outcome:
    bs, w = plan.bs, plan.w
    predict = rng.integers(0, VOCAB, (bs, w))
    accept = np.full((bs, depth_max + 1), -1, np.int64)
    committed = np.full((bs, depth_max + 1), -1, np.int64)
    lens = np.zeros(bs, np.int64)
    for i in range(bs):
        node, path = 0, [0]
        while True:
            kids = [r for r in range(1, int(tree.sizes[i])) if tree.parents[i, r] == node]
            if kids and rng.random() < 0.7:
                predict[i, node] = tree.tokens[i, int(rng.choice(kids))]
            step = [r for r in kids if tree.tokens[i, r] == predict[i, node]]
            if not step:
                break
            node = step[0]
            path.append(node)
        accept[i, : len(path)] = path
        lens[i] = len(path)
        committed[i, : len(path)] = [*tree.tokens[i, path[1:]], predict[i, node]]
    return Outcome(
        predict=predict,
        accept_index=accept,
        accept_lens=lens,
        committed=committed,
        truncated=np.zeros(bs, np.int64),
        delta_seq_lens=lens.copy(),
        delta_seq_lens_cpu=lens.copy(),
        delta_output=lens.copy(),
        delta_kv=lens.copy(),
        hidden_rows=accept.copy(),
        draft_anchor=tree.tokens[:, 0].copy(),
        last_committed=tree.tokens[:, 0].copy(),
        masked_walk=np.ones(bs, np.int64),
        walk="tree",
        greedy_kernel=True,
        greedy=np.ones(bs, np.bool_),
        finite=np.ones((bs, w), np.bool_),
        row_min=np.full((bs, w), -9.0),
        row_max=np.full((bs, w), 9.0),
    )


def _shadow(rng: np.random.Generator, plan: Plan, tree: Tree) -> Shadow:
    """A comparison of the last request: errors as rounding gives them, padding left out."""
    request = plan.bs - 1
    nodes = np.arange(plan.w) < int(tree.sizes[request])
    dense, chain = (
        np.where(nodes, rng.uniform(0.0, 0.005, plan.w), -1.0).astype(np.float32) for _ in range(2)
    )
    return Shadow(
        dense=dense,
        chain=chain,
        decode=0.001,
        tolerance=2.0**-6,
        request=request,
        layer=3,
        length=plan.lens[request],
        dtype="bfloat16",
    )


def _with_evidence(rng: np.random.Generator, plan: Plan, step: Step) -> Step:
    """What rules of tree, slots and acceptance may use beyond the essentials."""
    bs, w, page, pool = plan.bs, plan.w, plan.page_size, step.slots.pools["full"]
    shard, padded = VOCAB // 2, VOCAB // 2 + 24
    columns = np.full((bs, w), -1, np.int64)
    pages = np.zeros((bs, step.slots.row_width // page), np.int64)
    path = (bs, plan.block)
    allowed = np.full(path, -1, np.int64)
    probs, coins = np.full(path, -1.0), np.full(path, -1.0)
    for i, s in enumerate(plan.lens):
        for r in range(1, int(step.tree.sizes[i])):
            rank, within = divmod(int(step.tree.tokens[i, r]), shard)
            columns[i, r] = rank * padded + within
        for n in range(-(-s // page)):
            pages[i, n] = int(step.slots.req_to_token[i, n * page]) // page
        length = int(step.outcome.accept_lens[i])
        allowed[i, :length] = 1
        probs[i, : length - 1] = rng.uniform(0.1, 1.0, length - 1)
        coins[i, :length] = (rng.permutation(length) + 0.5) / length
    kept = int(step.outcome.accept_lens.sum())
    lens = np.array(plan.lens, np.int64)
    return step.replace(
        tree__columns=columns,
        limits__vocab_per_rank=shard,
        limits__vocab_per_rank_padded=padded,
        limits__ring=w + 8,
        limits__window=8,
        limits__write_pad=w,
        slots__page_table=pages,
        slots__ids={"kv_indices": ("full", 0, pool - 1), "swa_indices": ("swa", 0, pool // 2 - 1)},
        slots__pools={"full": pool, "swa": pool // 2},
        slots__kept=kept,
        slots__freed=bs * w - kept,
        slots__idle_owned=page + sum(int(n) for n in step.slots.allocated),
        slots__idle_free=pool - page - sum(int(n) for n in step.slots.allocated),
        outcome__allowed=allowed,
        outcome__target_probs=probs,
        outcome__coins=coins,
        outcome__draft_lens=lens,
        outcome__target_lens=lens.copy(),
    )


def _graph(plan: Plan) -> Graph:
    key = {"BS": plan.lanes, "w": plan.w, "regime": "tree", "mask": True}
    statics = {
        name: Static(4096 * (n + 1), "int64", (plan.lanes * plan.w,), (1,), plan.lanes * plan.w, 7)
        for n, name in enumerate(("positions", "out_cache_loc", "input_ids"))
    }
    return Graph(
        born_key=key,
        live_key=dict(key),
        born=statics,
        live=dict(statics),
        num_tokens=plan.lanes * plan.w,
        batch_sizes=(1, 2, 4, plan.lanes),
        generation=7,
        prompt_left=np.zeros(plan.bs, np.int64),
        output_marks={"logits": (0x1234, 0x1234)},
    )
