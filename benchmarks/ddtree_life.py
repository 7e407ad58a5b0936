"""Requests of a DDTREE server besides greedy text: `python benchmarks/ddtree_life.py MODEL OUT`.

Plain decoding and DDTREE serve the same requests in float32, so their texts must be equal: stop
tokens inside an accepted path, small limits of new tokens, prompts whose KV an earlier answer left
in the radix cache, requests that keep running while others are aborted, and requests that SGLang
takes back and prefills again because the pool is full. It checks its KV pool for leaks whenever it
is idle and ends the server if it finds one, which would show here. The guard watches, and reads
every third step to the host: no rule may take any of this for a fault.
Rows go to OUT/ddtree_life.json.

With --tp the same on two GPUs against plain decoding on one, rows to OUT/ddtree_tp.json. The tokens
of the model are renumbered first, so that both ranks own tokens of every text, and its vocabulary
is cut to a size that SGLang pads. The guard runs on both ranks and compares what they saw; in one
engine the digests of the last rank tell another story on purpose.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines import Setup, run_all, save, start, text_prompts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ddtree_guard.render import parse_line

PLAIN = Setup(dtype="float32")
TREE = Setup("DDTREE", 16, dtype="float32", max_bs=12, guard="log", depth="full")  # all prompts
ONE = replace(TREE, read=3)
SETUPS = (PLAIN, ONE, replace(ONE, graphs=False, overlap=False), replace(ONE, pool=2600))
PAIR = replace(TREE, tp=2)
TWO = (
    PLAIN, PAIR, replace(PAIR, graphs=False), replace(PAIR, overlap=False, plant="X1,X4"),
)  # fmt: skip
NEWLINE, SPACE = 10, 32
CONTEXT = 2048  # of the tiny model
VOCAB, STRIDE = 290, 7  # of the shuffled model: token t becomes STRIDE * t modulo VOCAB


def shuffle(model: Path, out: Path) -> Path:
    """Write the model with another numbering of its tokens. Only padding is cut off."""
    import torch
    from safetensors.torch import load_file, save_file

    ids = torch.arange(VOCAB) * STRIDE % VOCAB
    for name in ("target", "draft"):
        (out / name).mkdir(parents=True, exist_ok=True)
        config = json.loads((model / name / "config.json").read_text()) | {"vocab_size": VOCAB}
        if "dflash_config" in config:
            mask = config["dflash_config"]["mask_token_id"]
            config["dflash_config"]["mask_token_id"] = renamed(mask)
        weights = load_file(model / name / "model.safetensors")
        for key in ("model.embed_tokens.weight", "lm_head.weight"):
            if key in weights:
                weights[key] = torch.empty_like(weights[key][:VOCAB]).index_copy_(
                    0, ids, weights[key][:VOCAB]
                )
        save_file(weights, out / name / "model.safetensors", metadata={"format": "pt"})
        (out / name / "config.json").write_text(json.dumps(config))
    return out


def renamed(token: int) -> int:
    """A token of the tiny model in the shuffled one."""
    return token * STRIDE % VOCAB


def cell(setup: Setup, model: Path, folder: Path, two: bool) -> None:
    """All chapters of one engine; what it has is saved after each."""
    begun, engine = time.monotonic(), start(setup, model)
    prompts, place = text_prompts(12, seed=21), renamed if two else int
    prompts = [[place(token) for token in prompt] for prompt in prompts]
    ends = [place(token) for token in (NEWLINE, SPACE, ord("e"))]
    found: dict[str, Any] = {"started_s": time.monotonic() - begun}
    for chapter in CHAPTERS:
        found[chapter.__name__] = chapter(engine, prompts, ends)
        save(folder / f"{setup.name}.json", found)
    time.sleep(1.2)  # the live file is written twice a second
    engine.shutdown()


def ask(engine: Any, prompts: list[list[int]], params: Any) -> list[list[int]]:
    """Answers in order."""
    outs = engine.generate(input_ids=prompts, sampling_params=params)
    return [[*out["output_ids"], out["meta_info"]["finish_reason"]["type"]] for out in outs]


def stops(engine: Any, prompts: list[list[int]], ends: list[int]) -> Any:
    """Stop tokens, which often lie inside the accepted path."""
    params = [{"temperature": 0.0, "max_new_tokens": 80, "stop_token_ids": [at]}
              for at in ends]  # fmt: skip
    return [ask(engine, prompts, [one] * len(prompts)) for one in params]


def limits(engine: Any, prompts: list[list[int]], ends: list[int]) -> Any:
    """Every number of new tokens from 1 to 12 in one batch."""
    params = [{"temperature": 0.0, "max_new_tokens": n + 1, "ignore_eos": True}
              for n in range(len(prompts))]  # fmt: skip
    return ask(engine, prompts, params)


def brim(engine: Any, prompts: list[list[int]], ends: list[int]) -> Any:
    """Long prompts, answered until the context is full. Slots are reserved beyond its end."""
    whole = [token for prompt in prompts for token in prompt] * 3
    long = [whole[61 * n : 61 * n + CONTEXT - 24 - 5 * n] for n in range(len(prompts))]
    params = [{"temperature": 0.0, "max_new_tokens": CONTEXT - len(prompt), "ignore_eos": True}
              for prompt in long]  # fmt: skip
    return ask(engine, long, params)


def reuse(engine: Any, prompts: list[list[int]], ends: list[int]) -> Any:
    """Each answer continues, its prompt being what the last one was and said."""
    params = {"temperature": 0.0, "max_new_tokens": 23, "ignore_eos": True}
    texts = [list(prompt) for prompt in prompts]
    for _ in range(4):
        for text, more in zip(texts, ask(engine, texts, [params] * len(texts)), strict=True):
            text += more[:-3]  # drops the word, and two tokens: the cache holds more than is asked
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def aborts(engine: Any, prompts: list[list[int]], ends: list[int]) -> Any:
    """Half of the requests are aborted while the others run."""
    params = {"temperature": 0.0, "max_new_tokens": 400, "ignore_eos": True}

    async def one(i: int) -> Any:
        job = engine.async_generate(
            input_ids=prompts[i], sampling_params=params, rid=f"life-{i:03d}"
        )
        if i % 2:
            asyncio.get_running_loop().call_later(
                0.05 + 0.02 * i, engine.tokenizer_manager.abort_request, f"life-{i:03d}"
            )
        return (await job)["output_ids"]

    async def all_of() -> list[Any]:
        return list(await asyncio.gather(*(one(i) for i in range(len(prompts)))))

    loop = getattr(engine, "loop", None) or asyncio.new_event_loop()
    return loop.run_until_complete(all_of())[::2]  # the aborted half ends where it may


def idle(engine: Any, prompts: list[list[int]], ends: list[int]) -> Any:
    """SGLang looks for leaks while it idles; then it must still answer."""
    time.sleep(2.0)
    params = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
    return ask(engine, prompts, [params] * len(prompts))


CHAPTERS = (stops, limits, brim, reuse, aborts, idle)


def report(folder: Path, setups: tuple[Setup, ...]) -> list[dict[str, Any]]:
    """One row per engine and chapter: answers that differ from plain decoding's."""
    rows = []
    reference = json.loads((folder / f"{PLAIN.name}.json").read_text())
    for setup in setups[1:]:
        path = folder / f"{setup.name}.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        for chapter in CHAPTERS:
            name = chapter.__name__
            wanted, got = flat(reference.get(name)), flat(found.get(name))
            rows.append({
                "budget": setup.budget, "graphs": setup.graphs, "overlap": setup.overlap,
                "pool": setup.pool,
                "tp": setup.tp, "chapter": name, "answers": len(got),
                "differing": sum(a != b for a, b in zip(wanted, got, strict=False))
                if len(got) == len(wanted) and got else None,
            })  # fmt: skip
    return rows


def guarded(folder: Path, setup: Setup) -> dict[str, Any]:
    """What the guard of an engine did and found, by rank."""
    log = (folder / f"{setup.name}.log").read_text(errors="replace").splitlines()
    boot = [line.partition(" dumps=")[0] for line in log if "ddtree_guard armed=" in line]
    lines = [
        found for line in log if "ddtree_guard finding" in line and (found := parse_line(line))
    ]
    row: dict[str, Any] = {"setup": setup.name, "boot": boot[:1], "lines": lines[:8], "ranks": {}}
    for rank in ("", ".TP1")[: setup.tp]:
        path = folder / f"{setup.name}.live{rank}.json"
        live = json.loads(path.read_text()) if path.exists() else {}
        kept = ("verify_steps", "steps_checked", "findings", "skipped", "faults", "ranks_compared")
        row["ranks"][rank[1:] or "TP0"] = {name: live.get(name) for name in kept}
        if not rank:
            row["planted"] = live.get("planted", {})
    return row


def upper_half(folder: Path) -> float:
    """Share of plain decoding's tokens that the second of two ranks owns."""
    found = json.loads((folder / f"{PLAIN.name}.json").read_text())["aborts"]
    tokens = [token for answer in found for token in answer]
    return sum(token >= 160 for token in tokens) / len(tokens)  # 290 is padded to 2 * 160


def flat(value: Any) -> list[Any]:
    """The answers of a chapter in one list."""
    value = value or []
    nested = value and value[0] and isinstance(value[0][0], list)
    return [answer for group in value for answer in group] if nested else list(value)


def main() -> None:
    """All engines at once, then the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tp", action="store_true", help="needs two GPUs")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--only", default="", help="a pattern of engine names; plain one always")
    parser.add_argument("--cell")
    args = parser.parse_args()
    name = "ddtree_tp" if args.tp else "ddtree_life"
    folder, setups = args.out / name, TWO if args.tp else SETUPS
    setups = (PLAIN, *(s for s in setups[1:] if re.search(args.only, s.name)))
    if args.cell:
        cell(Setup(**json.loads(args.cell)), args.model, folder, args.tp)
        return
    model = shuffle(args.model, folder / "model") if args.tp else args.model
    extra = [str(model), str(args.out), *(["--tp"] if args.tp else [])]
    run_all(__file__, setups, folder, args.seconds, extra)
    rows = report(folder, setups)
    result: dict[str, Any] = {"rows": rows}
    result["guarded"] = [guarded(folder, setup) for setup in setups[1:]]
    if args.tp:
        result["tokens_of_second_rank"] = upper_half(folder)
    save(args.out / f"{name}.json", result)
    for row in [*rows, *result["guarded"]]:
        print(json.dumps(row))


if __name__ == "__main__":
    sys.exit(main())
