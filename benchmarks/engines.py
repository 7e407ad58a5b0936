"""One SGLang engine on the tiny model, described by a small record; used by every GPU script.

An engine lives in a process of its own, because the incident switch and the guard are read from
the environment and because several engines may share one GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Set
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from files import put

# What SGLang loads in an engine of ours. The last two do nothing unless a variable asks them to.
PLUGINS = {
    "ddtree_guard": "ddtree_guard.hooks.plugin:load",
    "ddtree_live": "ddtree_guard.testing.tree_probe:load",
    "ddtree_float32": "float32:load",
}

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
    dtype: str = "auto"  # float32 runs SGLang's own PyTorch code in the place of fused kernels
    chunk: int = 0  # prefill chunk; 0 is SGLang's own
    deterministic: bool = False  # the seeds of requests count
    depth: str = "fast"
    plant: str = ""  # "on" for every rule, or some
    shadow: int = 0  # compare attention in every n-th step
    read: int = 0  # read every n-th step to the host; 0 is the guard's own choice
    time: bool = False  # measure the target's forwards
    tp: int = 1
    pool: int = 60_000  # KV slots; few of them make SGLang take requests back
    site: str = ""  # variable that holds a folder with another SGLang

    @property
    def name(self) -> str:
        """A short name, also a file name."""
        parts = [self.algorithm or "plain"]
        if self.algorithm:
            parts += [f"b{self.block}"]
        if self.budget:
            parts += [f"B{self.budget}"]
        parts += ["graphs" if self.graphs else "eager"]
        extra = {
            "incident": self.incident, self.dtype: self.dtype != "auto",
            "guarded": self.plain_guard,
            f"chunk{self.chunk}": self.chunk, "deterministic": self.deterministic,
            "timed": self.time, "planted": self.plant == "on",
            f"planted-{self.plant.replace(',', '-')}": self.plant not in ("", "on"),
            f"tp{self.tp}": self.tp > 1,
            f"pool{self.pool}": self.pool != 60_000, self.site.lower(): self.site,
            "sync": not self.overlap, f"read{self.read}": self.read,
        }  # fmt: skip
        return "-".join([*parts, *(word for word, on in extra.items() if on)])

    @property
    def plain_guard(self) -> bool:
        """Whether the guard runs and nothing is planted or broken on purpose."""
        return self.guard != "off" and not self.incident and not self.plant

    def environment(self) -> dict[str, str]:
        """Variables that the engine's processes read."""
        values = {
            "SGLANG_DDTREE_INCIDENT": "on" if self.incident else "off",
            "SGLANG_DDTREE_GUARD_BACKEND": "auto" if self.incident else self.backend,
            "SGLANG_DDTREE_GUARD": self.guard,
            "SGLANG_DDTREE_GUARD_DEPTH": self.depth,
            "SGLANG_DDTREE_GUARD_SHADOW_EVERY": str(self.shadow),
            "DDTREE_LIVE_PLANT": self.plant,
            "DDTREE_LIVE_READ": str(self.read or ""),
            "DDTREE_LIVE_TIME": "on" if self.time else "",
        }
        if self.dtype == "float32":
            # three TF32 products make one of nearly float32; a single one would round to 10 bits
            values |= {"DDTREE_FLOAT32": "on", "TRITON_F32_DEFAULT": "tf32x3"}
        if self.tp > 1:  # other engines may hold memory of one of the GPUs
            values["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
        return values


def paths() -> list[str]:
    """Where an engine finds this project, these scripts and the plugins' metadata."""
    here = Path(__file__).resolve().parent
    return [str(here.parent), str(here), str(write_plugins())]


def unused_models(more: Set[str] = frozenset()) -> str:
    """SGLang's model files but those of the tiny model and `more`: an engine imports hundreds
    otherwise.
    """
    spec = find_spec("sglang")
    roots = [] if spec is None else spec.submodule_search_locations or []
    kept = {"qwen2", "qwen3", "dflash", "utils", "registry", "__init__", *more}
    names = {path.stem for root in roots for path in Path(root).glob("srt/models/*.py")}
    return ",".join(sorted(names - kept))


def write_plugins() -> Path:
    """A folder of metadata that lets SGLang find the plugins, those that are not installed."""
    group = "sglang.srt.plugins"
    installed = {entry.name for entry in entry_points(group=group)}
    lines = [f"{name} = {target}" for name, target in PLUGINS.items() if name not in installed]
    site = Path(tempfile.mkdtemp(prefix="ddtree-plugins-"))
    info = site / "ddtree_benchmarks-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ddtree-benchmarks\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    return site


def start(setup: Setup, model: Path, **more: Any) -> Any:
    """Start the engine in this process. Token ids in, token ids out."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the script that started this process
    os.environ.update(setup.environment())
    found = paths()
    sys.path[:0] = found
    os.environ["PYTHONPATH"] = os.pathsep.join([*found, os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", unused_models())
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    import sglang

    options: dict[str, Any] = {
        "model_path": str(model / "target"),
        "skip_tokenizer_init": True,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "mem_fraction_static": setup.memory,
        "max_total_tokens": setup.pool,
        "max_running_requests": setup.max_bs,
        "disable_cuda_graph": not setup.graphs,
        "disable_overlap_schedule": not setup.overlap,
        "enable_deterministic_inference": setup.deterministic,
        "dtype": setup.dtype,
        "tp_size": setup.tp,
        # SGLang takes one that is free just now, as do the engines that start beside this one
        "nccl_port": 20_000 + os.getpid() % 10_000,
        "disable_custom_all_reduce": setup.tp > 1,
        "sleep_on_idle": True,  # engines that wait leave the processors to the one that works
        "log_level": "warning",
    }
    if setup.chunk:
        options["chunked_prefill_size"] = setup.chunk
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
    return sglang.Engine(**{**options, **more})


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
        env = {**os.environ}
        if setup.guard != "off" or setup.time:
            env["DDTREE_LIVE"] = str(folder / f"{setup.name}.live.json")
        env["SGLANG_DDTREE_GUARD_DUMP_DIR"] = str(folder / "dumps" / setup.name)
        if setup.site:
            env["PYTHONPATH"] = os.pathsep.join([env[setup.site], env.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        running.append((setup, process))
    deadline = time.monotonic() + seconds
    failed = []
    for setup, process in running:
        try:
            code = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = -1
        with contextlib.suppress(ProcessLookupError):  # its schedulers outlive a killed engine
            os.killpg(process.pid, signal.SIGKILL)
        if code:
            failed.append(setup.name)
            print(f"{setup.name} failed ({code}):", tail(folder / f"{setup.name}.log"), flush=True)
    return failed


def tail(path: Path, lines: int = 25) -> str:
    """The last lines of a log."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def save(path: Path, value: Any) -> None:
    """Write JSON so that a reader never sees half of it."""
    put(path, json.dumps(value))
