"""The tree kernels against enumeration: `python benchmarks/tree_cases.py OUT [--cases 5000]`.

Every prefix over a small vocabulary is enumerated; the tree must hold the best of them, and mask,
positions, walk and KV moves must be what the enumeration says. No rule of the product is shared:
nodes are token strings here, not rows. Runs compiled on a GPU and in Triton's interpreter without
one. Writes OUT/tree_cases.json.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from common import environment, write

from ddtree_guard.ddtree import tree_kernel, verify_kernel

BATCH, VOCAB = 8, 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Case:
    """A batch of drafts, and what must come out of it, by enumeration."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.depth, self.top_k = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        shape = (BATCH, self.depth, self.top_k)
        ties = seed % 2 == 1
        logp = -(rng.integers(0, 3, shape) if ties else rng.exponential(1.5, shape))
        self.logp = -np.sort(-logp.astype(np.float32), axis=-1)
        order = rng.random((BATCH, self.depth, VOCAB)).argsort(-1)
        self.tokens = np.ascontiguousarray(order[..., : self.top_k])
        self.roots, self.lens = rng.integers(0, VOCAB, BATCH), rng.integers(0, 12, BATCH)
        self.budget = self.depth if seed % 10 == 0 else int(rng.integers(1, 20))
        self.trees = tree_kernel.build(*map(_on, (self.tokens, self.logp, self.roots)), self.budget)
        self.w = self.budget + 1

    def scores(self, i: int) -> dict[tuple[int, ...], np.float32]:
        """Score of every token string that the drafts of request i allow, the empty one too."""
        found: dict[tuple[int, ...], np.float32] = {(): np.float32(0)}
        for level in range(self.depth):
            ranks = range(self.top_k)
            for path in itertools.product(ranks, repeat=level + 1):
                text = tuple(int(self.tokens[i, at, r]) for at, r in enumerate(path))
                found[text] = found[text[:-1]] + self.logp[i, level, path[-1]]
        return found

    def texts(self, i: int) -> list[tuple[int, ...]]:
        """The token string of every real row of request i."""
        tokens, parents = (_off(part)[i] for part in (self.trees.tokens, self.trees.parents))
        found: list[tuple[int, ...]] = [()]
        for row in range(1, int(self.trees.sizes[i])):
            found.append((*found[int(parents[row])], int(tokens[row])))
        return found


def _on(value: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(value)).to(DEVICE)


def _off(value: Any) -> Any:
    return value.cpu().numpy()


def tree_is_best(case: Case, i: int) -> bool:
    """The spine first, then the best strings that are left, each once, parents before children."""
    scores, texts = case.scores(i), case.texts(i)
    spine = [tuple(int(t) for t in case.tokens[i, :d, 0]) for d in range(case.depth + 1)]
    spine = spine[: case.budget + 1]
    rest = sorted((scores[t] for t in set(scores) - set(spine)), reverse=True)
    chosen = [scores[t] for t in texts[len(spine) :]]
    whole = len(set(texts)) == len(texts) == min(case.w, len(scores))
    return texts[: len(spine)] == spine and chosen == rest[: len(chosen)] and whole


def links_are_children(case: Case, i: int) -> bool:
    """First child and next sibling lead to every child of every row, and to nothing else."""
    child, sibling = (_off(part)[i] for part in (case.trees.next_token, case.trees.next_sibling))
    texts = case.texts(i)
    for row, text in enumerate(texts):
        found, at = set(), int(child[row])
        while at >= 0:
            found.add(at)
            at = int(sibling[at])
        if found != {r for r, t in enumerate(texts) if len(t) == len(text) + 1 and t[:-1] == text}:
            return False
    return True


def mask_is_ancestry(case: Case) -> list[bool]:
    """Rows see the prefix and the strings that theirs begins with; positions are s + depth."""
    total = int((case.w * (case.lens + case.w)).sum())
    mask = torch.full((total + 3,), 7, dtype=torch.uint8, device=DEVICE)
    places = torch.empty(BATCH * case.w, dtype=torch.int64, device=DEVICE)
    tree_kernel.paint(case.trees, _on(case.lens), places, mask)
    cells, places, at, good = _off(mask), _off(places).reshape(BATCH, -1), 0, []
    for i in range(BATCH):
        s, texts = int(case.lens[i]), case.texts(i)
        rows = cells[at : at + case.w * (s + case.w)].reshape(case.w, -1)
        at += rows.size
        wanted = np.ones_like(rows)
        for r, c in itertools.product(range(case.w), repeat=2):
            both = r < len(texts) and c < len(texts)
            wanted[r, s + c] = texts[r][: len(texts[c])] == texts[c] if both else r == c
        depths = [len(t) for t in texts] + [0] * (case.w - len(texts))
        good.append(bool((rows == wanted).all() and (places[i] == s + np.array(depths)).all()))
    return [ok and bool((cells[total:] == 7).all()) for ok in good]


def walk_is_longest(case: Case) -> tuple[list[bool], Any]:
    """Committed is the longest predicted string of the tree, and the token after it."""
    predict = case.rng.integers(0, VOCAB, (BATCH, case.w))
    texts = [case.texts(i) for i in range(BATCH)]
    for i, known in enumerate(texts):  # follow the tree where it goes, most of the time
        for text in case.rng.permutation(np.arange(1, len(known))):
            if case.rng.random() < 0.8:
                predict[i, known.index(known[text][:-1])] = known[text][-1]
    block = case.depth + 1
    found = verify_kernel.walk(case.trees, _on(predict), _on(case.lens), block)
    good = []
    for i, known in enumerate(texts):
        text: tuple[int, ...] = ()
        while (*text, int(predict[i, known.index(text)])) in known:
            text = (*text, int(predict[i, known.index(text)]))
        path = [known.index(text[:d]) for d in range(len(text) + 1)]
        bonus = int(predict[i, path[-1]])
        n = len(path)
        good.append(
            _off(found.committed)[i, :n].tolist() == [*text, bonus]
            and _off(found.accept_index)[i].tolist() == path + [-1] * (block - n)
            and int(found.lens[i]) == n
            and int(found.bonus[i]) == bonus
            and int(found.new_lens[i]) == case.lens[i] + n
        )
    return good, found


def moves_are_the_path(case: Case, found: Any) -> list[bool]:
    """After the move slot j of the request holds what the path's j-th row wrote."""
    slots = case.rng.permutation(BATCH * case.w).reshape(BATCH, case.w)
    pool = torch.zeros((BATCH * case.w, 2, 8), device=DEVICE)
    row_of = np.empty(BATCH * case.w, np.int64)
    row_of[slots.reshape(-1)] = np.arange(BATCH * case.w)
    pool[:] = _on(row_of.astype(np.float32))[:, None, None]
    address = torch.tensor([pool.data_ptr()], dtype=torch.uint64, device=DEVICE)
    stride = torch.tensor([64], device=DEVICE)
    verify_kernel.move_kv(address, stride, 64, found, _on(slots), case.depth + 1)
    after, paths = _off(pool), _off(found.accept_index)
    return [
        bool((after[slots[i, j]] == i * case.w + row).all())
        for i in range(BATCH)
        for j, row in enumerate(paths[i])
        if row >= 0
    ]


def degenerate_is_the_chain(case: Case) -> list[bool]:
    """With one candidate per position and a budget of the depth the tree is the chain."""
    if case.budget != case.depth:
        return []
    one = np.ascontiguousarray(case.tokens[..., :1]), np.ascontiguousarray(case.logp[..., :1])
    trees = tree_kernel.build(*map(_on, (*one, case.roots)), case.depth)
    chain = np.concatenate([case.roots[:, None], case.tokens[..., 0]], 1)
    steps = np.arange(case.w)
    return [
        bool((_off(trees.tokens)[i] == chain[i]).all())
        and bool((_off(trees.parents)[i] == steps - 1).all())
        and bool((_off(trees.depths)[i] == steps).all())
        for i in range(BATCH)
    ]


def main() -> int:
    """Count what was compared and what was wrong; exit code 1 if anything was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", type=int, default=5000)
    args = parser.parse_args()
    compared, wrong, begun = Counter[str](), Counter[str](), time.monotonic()
    for seed in range(-(-args.cases // BATCH)):
        case = Case(seed)
        walked, found = walk_is_longest(case)
        results = {
            "tree": [tree_is_best(case, i) for i in range(BATCH)],
            "links": [links_are_children(case, i) for i in range(BATCH)],
            "mask and positions": mask_is_ancestry(case),
            "walk": walked,
            "commit": moves_are_the_path(case, found),
            "degenerate tree": degenerate_is_the_chain(case),
        }
        for name, good in results.items():
            compared[name] += len(good)
            wrong[name] += len(good) - sum(map(bool, good))
    where = environment() | {"interpreter": DEVICE == "cpu"}
    result = {"environment": where, "seconds": round(time.monotonic() - begun, 1),
              "compared": dict(compared), "wrong": dict(wrong)}  # fmt: skip
    write(args.out / "tree_cases.json", result)
    print(result)
    return 1 if sum(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
