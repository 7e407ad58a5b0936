"""One SGLang engine on the tiny model, described by a small record; used by every GPU script.

An engine lives in a process of its own, because the incident switch and the guard are read from
the environment and because several engines may share one GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

POEM = "The Zen of Python, by Tim Peters\n\nBeautiful is better than"


@dataclass(frozen=True, slots=True)
class Setup:
    """What to serve. `algorithm` "" is plain decoding; `backend` is the guard's choice."""

    algorithm: str = ""
    budget: int = 0
    block: int = 8
    graphs: bool = True
    incident: bool = False
    backend: str = "auto"
    max_bs: int = 16
    memory: float = 0.7  # the pool is small (max_total_tokens); this leaves room for other engines
    guard: str = "off"
    overlap: bool = True

    @property
    def name(self) -> str:
        """A short name, also a file name."""
        parts = [self.algorithm or "plain"]
        if self.algorithm:
            parts += [f"b{self.block}"]
        if self.budget:
            parts += [f"B{self.budget}"]
        parts += ["graphs" if self.graphs else "eager"]
        parts += ["incident"] if self.incident else []
        return "-".join(parts)

    def environment(self) -> dict[str, str]:
        """Variables that the engine's processes read."""
        return {
            "SGLANG_DDTREE_INCIDENT": "on" if self.incident else "off",
            "SGLANG_DDTREE_GUARD_BACKEND": "auto" if self.incident else self.backend,
            "SGLANG_DDTREE_GUARD": self.guard,
        }


def start(setup: Setup, model: Path) -> Any:
    """Start the engine in this process. Token ids in, token ids out."""
    os.environ.update(setup.environment())
    import sglang

    options: dict[str, Any] = {
        "model_path": str(model / "target"),
        "skip_tokenizer_init": True,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "mem_fraction_static": setup.memory,
        "max_total_tokens": 60_000,
        "max_running_requests": setup.max_bs,
        "disable_cuda_graph": not setup.graphs,
        "disable_overlap_schedule": not setup.overlap,
        "log_level": "warning",
    }
    if setup.graphs:
        # few sizes, so that most batches are padded
        sizes = [bs for bs in (1, 4, 16, 64) if bs < setup.max_bs]
        options |= {"cuda_graph_bs_decode": [*sizes, setup.max_bs]}
        options |= {"disable_prefill_cuda_graph": True}
    if setup.algorithm:
        options |= {
            "speculative_algorithm": setup.algorithm,
            "speculative_draft_model_path": str(model / "draft"),
            "speculative_dflash_block_size": setup.block,
        }
    if setup.budget:
        options["speculative_ddtree_budget"] = setup.budget
    return sglang.Engine(**options)


def generate(
    engine: Any, prompts: list[list[int]], count: int, budget: int = 0, **sampling: Any
) -> list[dict[str, Any]]:
    """Greedy continuations of `count` tokens: `ids`, `steps` (verify steps) per prompt."""
    params: dict[str, Any] = {
        "temperature": 0.0, "max_new_tokens": count, "ignore_eos": True, **sampling
    }  # fmt: skip
    if budget:
        params["custom_params"] = {"ddtree_budget": budget}
    outs = engine.generate(input_ids=prompts, sampling_params=params)
    return [
        {"ids": o["output_ids"], "steps": o["meta_info"].get("spec_verify_ct", 0)} for o in outs
    ]


def text_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """The start of the poem, then pieces of the training text of mixed lengths, as bytes."""
    import random

    from tiny_model import corpus

    text, rng = corpus(400_000).tolist(), random.Random(seed)
    lengths = [rng.choice((12, 30, 61, 128, 250)) + rng.randrange(9) for _ in range(count)]
    starts = [rng.randrange(len(text) - 300) for _ in range(count)]
    prompts = [text[s : s + n] for s, n in zip(starts, lengths, strict=True)]
    return [list(POEM.encode()), *prompts[1:]]


def run_all(
    script: str, setups: Iterable[Setup], folder: Path, seconds: float, extra: list[str]
) -> list[str]:
    """Run `script --cell SETUP` for all setups at once, a log each. Returns names that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    running = []
    for setup in setups:
        log = (folder / f"{setup.name}.log").open("w")
        command = [sys.executable, script, "--cell", json.dumps(asdict(setup)), *extra]
        running.append((setup, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)))
    deadline = time.monotonic() + seconds
    failed = []
    for setup, process in running:
        try:
            code = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()
            code = -1
        if code:
            failed.append(setup.name)
            print(f"{setup.name} failed ({code}):", tail(folder / f"{setup.name}.log"), flush=True)
    return failed


def tail(path: Path, lines: int = 25) -> str:
    """The last lines of a log."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def save(path: Path, value: Any) -> None:
    """Write JSON so that a reader never sees half of it."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.replace(path)
