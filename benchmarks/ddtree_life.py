"""Requests of a DDTREE server besides greedy text: `python benchmarks/ddtree_life.py MODEL OUT`.

Plain decoding and DDTREE serve the same requests in float32, so their texts must be equal: stop
tokens inside an accepted path, small limits of new tokens, prompts whose KV an earlier answer left
in the radix cache, requests that keep running while others are aborted, and requests that SGLang
takes back and prefills again because the pool is full. It checks its KV pool for leaks whenever it
is idle and ends the server if it finds one, which would show here.
With --tp the same on two GPUs against plain decoding on one. Rows go to OUT/ddtree_life.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines import Setup, run_all, save, start, text_prompts

PLAIN = Setup(dtype="float32")
TREE = Setup("DDTREE", 16, dtype="float32")
SETUPS = (PLAIN, TREE, replace(TREE, graphs=False, overlap=False), replace(TREE, pool=2600))
TWO = (PLAIN, replace(TREE, tp=2), replace(TREE, tp=2, graphs=False))
NEWLINE, SPACE = 10, 32


def cell(setup: Setup, model: Path, folder: Path) -> None:
    """All chapters of one engine; what it has is saved after each."""
    begun, engine = time.monotonic(), start(setup, model)
    prompts = text_prompts(12, seed=21)
    found: dict[str, Any] = {"started_s": time.monotonic() - begun}
    for chapter in (stops, limits, reuse, aborts, idle):
        found[chapter.__name__] = chapter(engine, prompts)
        save(folder / f"{setup.name}.json", found)
    engine.shutdown()


def ask(engine: Any, prompts: list[list[int]], params: Any) -> list[list[int]]:
    """Answers in order."""
    outs = engine.generate(input_ids=prompts, sampling_params=params)
    return [[*out["output_ids"], out["meta_info"]["finish_reason"]["type"]] for out in outs]


def stops(engine: Any, prompts: list[list[int]]) -> Any:
    """Stop tokens, which often lie inside the accepted path."""
    params = [{"temperature": 0.0, "max_new_tokens": 80, "stop_token_ids": [at]}
              for at in (NEWLINE, SPACE, ord("e"))]  # fmt: skip
    return [ask(engine, prompts, [one] * len(prompts)) for one in params]


def limits(engine: Any, prompts: list[list[int]]) -> Any:
    """Every number of new tokens from 1 to 12 in one batch."""
    params = [{"temperature": 0.0, "max_new_tokens": n + 1, "ignore_eos": True}
              for n in range(len(prompts))]  # fmt: skip
    return ask(engine, prompts, params)


def reuse(engine: Any, prompts: list[list[int]]) -> Any:
    """Each answer continues, its prompt being what the last one was and said."""
    params = {"temperature": 0.0, "max_new_tokens": 23, "ignore_eos": True}
    texts = [list(prompt) for prompt in prompts]
    for _ in range(4):
        for text, more in zip(texts, ask(engine, texts, [params] * len(texts)), strict=True):
            text += more[:-3]  # drops the word, and two tokens: the cache holds more than is asked
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def aborts(engine: Any, prompts: list[list[int]]) -> Any:
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


def idle(engine: Any, prompts: list[list[int]]) -> Any:
    """SGLang looks for leaks while it idles; then it must still answer."""
    time.sleep(2.0)
    params = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
    return ask(engine, prompts, [params] * len(prompts))


def report(folder: Path, setups: tuple[Setup, ...]) -> list[dict[str, Any]]:
    """One row per engine and chapter: answers that differ from plain decoding's."""
    rows = []
    reference = json.loads((folder / f"{PLAIN.name}.json").read_text())
    for setup in setups[1:]:
        path = folder / f"{setup.name}.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        for chapter in (stops, limits, reuse, aborts, idle):
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
    parser.add_argument("--cell")
    args = parser.parse_args()
    name = "ddtree_tp" if args.tp else "ddtree_life"
    folder, setups = args.out / name, TWO if args.tp else SETUPS
    if args.cell:
        cell(Setup(**json.loads(args.cell)), args.model, folder)
        return
    extra = [str(args.model), str(args.out), *(["--tp"] if args.tp else [])]
    run_all(__file__, setups, folder, args.seconds, extra)
    rows = report(folder, setups)
    save(args.out / f"{name}.json", {"rows": rows})
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    sys.exit(main())
