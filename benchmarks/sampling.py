"""Sampled text of DDTREE against plain sampling: `python benchmarks/sampling.py MODEL OUT`.

1. The kernels: 524,288 requests draw two tokens over a vocabulary of 24 through the tree
   search, SGLang's own sampler, and the walk; one in four requests of a batch is greedy, the others
   have temperature, top-k, top-p or min-p of their own. Chi-square against the exact distribution.
2. The engines: plain and DDTREE continue one prompt thousands of times in mixed batches; a
   two-sample chi-square test compares the tokens at each place, and greedy texts must be equal.
3. Seeds: with --enable-deterministic-inference a seeded request gives the text that plain decoding
   gives for that seed. In float32, because rounding in half precision moves near ties.

Bounds are those of p = 0.001 for one test; `p` says how likely a larger statistic is. Rows go to
OUT/sampling.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engines import Setup, run_all, save, start, text_prompts

PROMPT = list(b"    def __init__(self, ")
PLACES, WAVE, SEEDED = 12, 256, 48
PLAIN, TREE = Setup(max_bs=64), Setup("DDTREE", 16, max_bs=64)
EXACT = replace(PLAIN, deterministic=True, dtype="float32")  # half precision moves near ties
SETUPS = (PLAIN, TREE, EXACT, replace(EXACT, algorithm="DDTREE", budget=16))
KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.2},
    "top_k": {"temperature": 1.3, "top_k": 5},
    "top_p": {"temperature": 1.2, "top_p": 0.9},
    "greedy": {"temperature": 0.0},
}
DRAWS, VOCAB, DEVICE = 1 << 19, 24, "cuda"


# --- kernels ---
def kernel_rows() -> list[dict[str, Any]]:
    """One row per kind of request in a mixed batch, and one for seeds."""
    import torch

    from ddtree_guard.ddtree import tree_kernel, verify_kernel
    from ddtree_guard.ddtree.choose import choose

    torch.manual_seed(3)
    target = torch.randn(VOCAB + 1, VOCAB, device=DEVICE) * 1.5  # after a token; last: the root
    logp = torch.log_softmax(torch.randn(2, VOCAB, device=DEVICE), -1).sort(descending=True)
    shape = (DRAWS, 2, VOCAB)
    trees = tree_kernel.build(
        logp.indices.expand(shape).contiguous(), logp.values.expand(shape).contiguous(),
        torch.full((DRAWS,), VOCAB, device=DEVICE), 16,
    )  # fmt: skip
    logits = target[trees.tokens.clamp(max=VOCAB)].view(-1, VOCAB)
    lens, sampler = torch.zeros(DRAWS, dtype=torch.int64, device=DEVICE), sglang_sampler()
    rows = []
    for seeded in (False, True):
        info = mixed(seeded)
        positions = (lens[:, None] + trees.depths).reshape(-1)
        predict = choose(logits, info, trees.width, positions, sampler).contiguous()
        again = choose(logits, info, trees.width, positions, sampler)
        accepted = verify_kernel.walk(trees, predict, lens, 3)
        for kind in range(5):
            probs = filtered(target, info, kind)
            rows.append(judge_kernel(accepted, probs, kind, seeded))
            rows[-1]["repeatable"] = bool((predict == again).all()) if seeded else None
    return rows


NAMES = ("temperature", "top_k", "top_p", "top_k_and_top_p", "greedy")


def sglang_sampler() -> Any:
    """SGLang's sampler without a server around it: its PyTorch path asks for one argument only."""
    from sglang.srt.layers import sampler

    sampler.get_server_args = lambda: SimpleNamespace(sampling_backend="pytorch")
    draw = sampler.Sampler._sample_from_probs
    return SimpleNamespace(
        _sample_from_probs=lambda probs, info, positions, plain: draw(
            None, probs, info, positions, plain
        )
    )


def mixed(seeded: bool) -> SimpleNamespace:
    """SGLang's sampling info of a batch: request i is of kind i modulo 5."""
    import torch

    def column(values: list[float], dtype: Any) -> Any:
        one = torch.tensor(values, dtype=dtype, device=DEVICE)
        return one.repeat(DRAWS // 5 + 1)[:DRAWS]

    return SimpleNamespace(
        is_all_greedy=False, need_top_p_sampling=True, need_top_k_sampling=True,
        need_min_p_sampling=False, min_ps=column([0.0] * 5, torch.float32),
        temperatures=column([0.8, 1.3, 1.0, 0.9, 1.0], torch.float32)[:, None],
        top_ks=column([1 << 30, 5, 1 << 30, 9, 1], torch.int32),
        top_ps=column([1.0, 1.0, 0.8, 0.9, 1.0], torch.float32),
        sampling_seed=torch.arange(DRAWS, device=DEVICE) * 7919 if seeded else None,
    )  # fmt: skip


def filtered(target: Any, info: SimpleNamespace, kind: int) -> Any:
    """The exact distribution after every token, written without SGLang's sampler. (V + 1, V)"""
    import torch

    probs = torch.softmax(target.double() / info.temperatures[kind, 0].double(), -1)
    order = probs.argsort(-1, descending=True)
    ranked = probs.gather(-1, order)
    before = ranked.cumsum(-1) - ranked
    rank = torch.arange(probs.shape[-1], device=probs.device)
    keep = (rank < info.top_ks[kind]) & (before <= info.top_ps[kind])
    kept = torch.zeros_like(probs).scatter(-1, order, ranked * keep)
    return kept / kept.sum(-1, keepdim=True)


def judge_kernel(accepted: Any, probs: Any, kind: int, seeded: bool) -> dict[str, Any]:
    """Pairs of tokens of one kind of request. A step that ends after one token drew only one."""
    import torch

    mine = torch.arange(len(accepted.lens), device=DEVICE) % 5 == kind
    lens, tokens = accepted.lens[mine], accepted.committed[mine]
    two = lens > 1
    rest = torch.multinomial(probs[tokens[:, 0]].float(), 1)[:, 0]
    second = torch.where(two, tokens[:, 1], rest)
    seen = torch.bincount(tokens[:, 0] * VOCAB + second, minlength=VOCAB * VOCAB).double()
    expected = (probs[VOCAB][:, None] * probs[:VOCAB]).reshape(-1) * len(lens)
    value, free = pooled(seen.tolist(), expected.tolist())
    return {"case": f"kernel {NAMES[kind]}" + (" seeded" if seeded else ""), "place": "2 tokens",
            "draws": int(lens.clamp(max=2).sum()), **verdict(value, free),
            "second_from_tree": float(two.double().mean())}  # fmt: skip


def pooled(seen: list[float], expected: list[float]) -> tuple[float, int]:
    """Statistic and degrees of freedom; cells with fewer than five expected are put together."""
    big = [(s, e) for s, e in zip(seen, expected, strict=True) if e >= 5]
    rare = [(s, e) for s, e in zip(seen, expected, strict=True) if e < 5]
    total = [sum(column) for column in zip(*rare, strict=True)] if rare else [0.0, 0.0]
    if total[1] < 1e-9 and total[0]:
        return float("inf"), max(len(big) - 1, 1)  # a token that plain sampling never draws
    big += [(total[0], total[1])] if total[1] >= 5 else []
    return sum((s - e) ** 2 / e for s, e in big), len(big) - 1


def verdict(value: float, free: int) -> dict[str, Any]:
    """The statistic beside its bound (Wilson and Hilferty), and its p by the same approximation."""
    from statistics import NormalDist

    if free <= 0:
        return {"chi_square": value, "degrees": free, "bound": 0.0, "p": 1.0, "passed": value == 0}
    spread = (2 / (9 * free)) ** 0.5
    bound = free * (1 - spread**2 + 3.09 * spread) ** 3
    z = ((value / free) ** (1 / 3) - (1 - spread**2)) / spread if value < 1e9 else 99.0
    p = 1 - NormalDist().cdf(z)
    return {"chi_square": value, "degrees": free, "bound": bound, "p": p, "passed": value < bound}


# --- engines ---
def cell(setup: Setup, model: Path, folder: Path, seconds: float) -> None:
    """Draw until the time is up; counts per place are saved after every wave."""
    begun, engine = time.monotonic(), start(setup, model)
    if setup.deterministic:
        save(folder / f"{setup.name}.json", seeded_texts(engine))
        engine.shutdown()
        return
    kinds = list(KINDS.items())
    counts = {kind: [Counter[int]() for _ in range(PLACES)] for kind in KINDS}
    greedy: set[tuple[int, ...]] = set()
    params = [{"max_new_tokens": PLACES, "ignore_eos": True, **kinds[i % len(kinds)][1]}
              for i in range(WAVE)]  # fmt: skip
    while time.monotonic() - begun < seconds:
        outs = engine.generate(input_ids=[PROMPT] * WAVE, sampling_params=params)
        for i, one in enumerate(outs):
            kind = kinds[i % len(kinds)][0]
            if kind == "greedy":
                greedy.add(tuple(one["output_ids"]))
            for place, token in enumerate(one["output_ids"]):
                counts[kind][place][token] += 1
        save(folder / f"{setup.name}.json",
             {"counts": {k: [dict(c) for c in v] for k, v in counts.items()},
              "greedy": sorted(greedy)})  # fmt: skip
    engine.shutdown()


def seeded_texts(engine: Any) -> list[list[int]]:
    """Texts of seeded requests, in one mixed batch, then again one by one (the first few)."""
    prompts = text_prompts(SEEDED, seed=9)
    params = [
        {"max_new_tokens": 64, "ignore_eos": True, "temperature": 0.9, "sampling_seed": 1000 + i,
         **({"top_p": 0.95} if i % 2 else {})}
        for i in range(SEEDED)
    ]  # fmt: skip
    outs = engine.generate(input_ids=prompts, sampling_params=params)
    few = [engine.generate(input_ids=p, sampling_params=q)
           for p, q in zip(prompts[:6], params, strict=False)]  # fmt: skip
    return [one["output_ids"] for one in (*outs, *few)]


def chi_square(left: dict[str, int], right: dict[str, int]) -> tuple[float, int]:
    """Two-sample statistic and degrees of freedom; tokens seen fewer than ten times are pooled."""
    both = Counter(left) + Counter(right)
    keys = [key for key, n in both.items() if n >= 10]
    rare = [sum(n for key, n in side.items() if both[key] < 10) for side in (left, right)]
    pairs = [(left.get(key, 0), right.get(key, 0)) for key in keys]
    pairs += [(rare[0], rare[1])] if sum(rare) >= 10 else []
    total = [sum(p[k] for p in pairs) for k in (0, 1)]
    value = 0.0
    for pair in pairs:
        for k in (0, 1):
            expected = sum(pair) * total[k] / sum(total)
            value += (pair[k] - expected) ** 2 / expected
    return value, len(pairs) - 1


def engine_rows(folder: Path) -> list[dict[str, Any]]:
    """One row per kind of request and place."""
    plain, tree = (json.loads((folder / f"{s.name}.json").read_text()) for s in (PLAIN, TREE))
    rows = []
    for kind in KINDS:
        pairs = zip(plain["counts"][kind], tree["counts"][kind], strict=True)
        for place, (a, b) in enumerate(pairs):
            value, free = chi_square(a, b)
            rows.append({"case": f"engine {kind}", "place": place,
                         "draws": [sum(a.values()), sum(b.values())],
                         **verdict(value, free)})  # fmt: skip
            if kind == "greedy":
                rows[-1]["passed"] = plain["greedy"] == tree["greedy"]
    return rows


def seed_row(folder: Path) -> dict[str, Any]:
    """How far seeded texts of both engines agree, and batched with single ones."""
    plain, tree = (json.loads((folder / f"{s.name}.json").read_text()) for s in SETUPS[2:])
    same = [a == b for a, b in zip(plain, tree, strict=True)]
    agree = [next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
             for a, b in zip(plain, tree, strict=True)]  # fmt: skip
    alone = [tree[i] == tree[SEEDED + i] for i in range(len(tree) - SEEDED)]
    return {"case": "engine seeds", "texts": len(same), "equal": sum(same),
            "tokens": sum(len(t) for t in plain), "tokens_before_difference": sum(agree),
            "single_equals_batched": sum(alone), "singles": len(alone),
            "different_seeds_differ": len({tuple(t) for t in tree[:SEEDED]})}  # fmt: skip


def main() -> None:
    """Kernels first, then all engines at once, then the tests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--seeds-only", action="store_true", help="of the engines")
    parser.add_argument("--cell")
    args = parser.parse_args()
    folder = args.out / "sampling"
    if args.cell:
        cell(Setup(**json.loads(args.cell)), args.model, folder, args.seconds - 15)
        return
    rows: list[dict[str, Any]] = []
    for make in (kernel_rows, lambda: engines(args, folder), lambda: [seed_row(folder)]):
        try:
            rows += make()
        except Exception as error:  # the other parts are worth having
            rows.append({"case": "failed", "error": f"{type(error).__name__}: {error}"})
        save(args.out / "sampling.json", {"rows": rows})
    for row in rows:
        print(json.dumps(row))


def engines(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run the engines; rows of those that sample without seeds."""
    extra = [str(args.model), str(args.out), "--seconds", str(args.seconds)]
    run_all(__file__, SETUPS[2:] if args.seeds_only else SETUPS, folder, args.seconds, extra)
    return [] if args.seeds_only else engine_rows(folder)


if __name__ == "__main__":
    sys.exit(main())
