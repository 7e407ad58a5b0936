"""Engines for the GPU benchmarks: dummy models made on the fly, one child process per engine.

A child is started with `python benchmarks/serving.py CELL_JSON`; it reads commands, one JSON
object a line, from stdin and answers with lines that start with `ANSWER `. Everything else on
stdout and stderr is the server's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import queue
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engines import unused_models
from files import put
from rounds import SIDES

ROOT = Path(__file__).resolve().parents[1]
VOCAB, CONTEXT = 32_000, 8192
ANSWERED_S = 1.3  # until a probe that was asked has written
FEW = 64  # tokens of the EAGLE cells: a random drafter then hits now and then
PLACES = ("in_line", "early")  # of `ddtree_guard.testing.places`
ALGORITHMS = ("NONE", "NGRAM", "DFLASH", "EAGLE", "DDTREE")
SHAPES = {
    "small": {"hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16,
              "num_key_value_heads": 8, "intermediate_size": 3072},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "intermediate_size": 12_288},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine. `tool` is off, guard, control (a second off), twin (a second guard), control2 and
    twin2 (third ones), kv_canary or async_assert; or guarded with the check at another place of the
    graph: in_line, early, and in_line2, early2 (second ones). `w` is the verify width. `site` is a
    folder with another SGLang than the interpreter's, put first on the path; `release` names it.
    `gpu` and `cpus` are what its processes may use; all that there is by default. `pool` is the
    number of KV slots, `sizes` the captured batch sizes; `asked` lets the probe write only when it
    is asked, `times` has it measure the host time of our sites, `turns` what they add to a step,
    `replays` the GPU time of verify replays and the host's around them, also without a guard.
    """

    algorithm: str
    graphs: bool = True
    overlap: bool = True
    tool: str = "guard"
    shape: str = "small"
    w: int = 16
    max_running: int = 16
    depth: str = "fast"
    plant: str = ""
    shadow: int = 0  # every n-th step
    capture: str = "meta"
    incident: bool = False  # DDTREE on the stock backend
    release: str = ""
    site: str = ""
    gpu: str = ""
    cpus: tuple[int, ...] = ()
    pool: int = 0
    sizes: tuple[int, ...] = ()
    asked: bool = False
    times: bool = False
    turns: bool = False
    replays: bool = False
    folder: str = "/tmp/ddtree-guard-bench"

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return FEW if self.algorithm == "EAGLE" else VOCAB

    @property
    def place(self) -> str:
        """Where the check stands in a graph, of PLACES; empty: where the guard puts it."""
        return kind if (kind := kind_of(self.tool)) in PLACES else ""

    @property
    def name(self) -> str:
        """A short name, also of files."""
        parts = [self.algorithm, self.shape, f"w{self.w}", "graphs" if self.graphs else "eager"]
        parts += ["overlap" if self.overlap else "sync", self.tool]
        parts += [f"shadow{self.shadow}"] if self.shadow else []
        parts += [self.capture] if self.capture != "meta" else []
        parts += ["incident"] if self.incident else []
        parts += [self.release] if self.release else []
        return "-".join([*parts, *([self.plant.replace("@", "at")] if self.plant else [])])

    def path(self, name: str) -> Path:
        """A file of this cell."""
        return Path(self.folder) / self.name / name


def kind_of(tool: str) -> str:
    """What a tool does: off, or guard, or one of those that differ from both."""
    kinds = (kind for kind, names in SIDES.items() if tool in names)
    return next(kinds, tool.removesuffix("2"))


def write_model(folder: Path, shape: str, vocab: int = VOCAB) -> dict[str, Path]:
    """Configurations of a target and its drafters; weights are dummies, made by SGLang."""
    common = {
        "head_dim": 128, "vocab_size": vocab, "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 2, **SHAPES[shape],
    }  # fmt: skip
    layers = int(common["num_hidden_layers"])
    drafts = {"num_target_layers": layers, "num_hidden_layers": 2, "block_size": 8}
    taps = sorted({1, layers // 2, layers - 2})  # the last one must be at most layers - 2
    configs = {
        "target": {**common, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        "dflash": {
            **common, **drafts, "model_type": "qwen3", "architectures": ["DFlashDraftModel"],
            "dflash_config": {"mask_token_id": vocab - 1, "target_layer_ids": taps},
        },
        "eagle": {
            **common, "model_type": "llama", "architectures": ["LlamaForCausalLMEagle"],
            "num_hidden_layers": 1,
        },
    }  # fmt: skip
    paths = {}
    for name, config in configs.items():
        paths[name] = folder / f"{shape}-{vocab}" / name
        put(paths[name] / "config.json", json.dumps(config, indent=1))
    return paths


def engine_options(cell: Cell, models: dict[str, Path]) -> dict[str, Any]:
    """Arguments of `sglang.Engine` for a cell. Token ids in, token ids out."""
    options: dict[str, Any] = {
        "model_path": str(models["target"]), "load_format": "dummy", "random_seed": 7,
        "skip_tokenizer_init": True, "attention_backend": "triton",
        "sampling_backend": "pytorch", "grammar_backend": "none", "log_level": "warning",
        # small pools, so that several engines share one GPU
        **({"mem_fraction_static": 0.85, "max_total_tokens": cell.pool or 80_000}
           if cell.shape == "small" else
           {"mem_fraction_static": 0.97, "max_total_tokens": cell.pool or 16_000,
            "context_length": 2048}),
        "max_running_requests": cell.max_running, "disable_cuda_graph": not cell.graphs,
        "disable_overlap_schedule": not cell.overlap, "disable_prefill_cuda_graph": True,
        "sleep_on_idle": True,  # other engines on the machine keep their cores
    }  # fmt: skip
    if cell.sizes:
        options["cuda_graph_bs_decode"] = list(cell.sizes)
    if cell.algorithm == "NGRAM":
        options |= {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": cell.w}
    elif cell.algorithm in ("DFLASH", "DDTREE"):
        options |= {
            "speculative_algorithm": cell.algorithm,
            "speculative_draft_model_path": str(models["dflash"]),
            "speculative_dflash_block_size": 8,
        }
    elif cell.algorithm == "EAGLE":
        options |= {
            "speculative_algorithm": "EAGLE", "speculative_num_steps": 3,
            "speculative_draft_model_path": str(models["eagle"]),
            "speculative_eagle_topk": 4, "speculative_num_draft_tokens": cell.w,
        }  # fmt: skip
    if cell.tool == "kv_canary":
        options["kv_canary"] = "log"
    return options


def environment(cell: Cell) -> dict[str, str]:
    """Variables of a child: the guard's, the probe's, and its plugins on the path."""
    site = write_plugins(Path(cell.folder) / "plugins")
    paths = [cell.site, str(ROOT), str(site), os.environ.get("PYTHONPATH", "")]
    values = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "SGLANG_DDTREE_GUARD": "log" if kind_of(cell.tool) in ("guard", *PLACES) else "off",
        "SGLANG_DDTREE_GUARD_DEPTH": cell.depth,
        "SGLANG_DDTREE_GUARD_DUMP_DIR": str(cell.path("dumps")),
        "SGLANG_DDTREE_GUARD_SHADOW_EVERY": str(cell.shadow),
        "SGLANG_DDTREE_GUARD_CAPTURE": cell.capture,
        "SGLANG_DDTREE_GUARD_REDACT": "off" if cell.capture == "qkv" else "on",
        "SGLANG_DDTREE_INCIDENT": "on" if cell.incident else "off",
        "DDTREE_GUARD_PROBE": str(cell.path("probe.json")),
        "DDTREE_GUARD_PROBE_PLANT": cell.plant,
        "SGLANG_DDTREE_BUDGET": str(cell.w - 1) if cell.algorithm == "DDTREE" else "",
        "DDTREE_GUARD_PROBE_ASKED": "on" if cell.asked else "",
        "DDTREE_GUARD_PROBE_TIMES": "on" if cell.times else "",
        "DDTREE_GUARD_PROBE_TURNS": "on" if cell.turns else "",
        "DDTREE_GUARD_PROBE_REPLAYS": "on" if cell.replays else "",
        **{
            f"DDTREE_GUARD_PROBE_{place.upper()}": "on" if cell.place == place else ""
            for place in PLACES
        },
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
        "SGLANG_DISABLED_MODEL_ARCHS": unused_models({"llama", "llama_eagle"}),
        "OMP_NUM_THREADS": "2",
        "PYTHONHASHSEED": "0",  # the layout of its dicts alone makes a process faster or slower
    }
    if cell.gpu:
        values["CUDA_VISIBLE_DEVICES"] = cell.gpu
    if cell.tool == "async_assert":
        values["SGLANG_ENABLE_ASYNC_ASSERT"] = "1"
    return values


def write_plugins(site: Path) -> Path:
    """Metadata that lets SGLang find the probe, and the guard where it is not installed."""
    names = {"ddtree_guard_probe": "ddtree_guard.testing.probe:load"}
    if not [e for e in entry_points(group="sglang.srt.plugins") if e.name == "ddtree_guard"]:
        names["ddtree_guard"] = "ddtree_guard.hooks.plugin:load"
    info = site / "ddtree_guard_probe-0.dist-info"
    put(info / "METADATA", "Metadata-Version: 2.1\nName: ddtree-guard-probe\nVersion: 0\n")
    if find_spec("deep_gemm") is None:
        # EAGLE's graph runner imports a backend that it does not use here, and that imports this
        put(site / "deep_gemm.py", '"""Stands in for a library that is not installed."""\n')
    lines = [f"{name} = {target}" for name, target in names.items()]
    put(info / "entry_points.txt", "\n".join(["[sglang.srt.plugins]", *lines, ""]))
    return site


# --- parent ---
class Child:
    """An engine in a process of its own."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        cell.path("log.txt").parent.mkdir(parents=True, exist_ok=True)
        cell.path("probe.json").unlink(missing_ok=True)
        self.log = cell.path("log.txt").open("w")
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(asdict(cell))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            env=environment(cell), start_new_session=True,
        )  # fmt: skip
        self._members: dict[int, str] = {}
        self.answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                self.answers.put(json.loads(line.removeprefix("ANSWER ")))
            else:
                self.log.write(line)
        self.answers.put(None)  # the child has ended

    def send(self, **command: Any) -> None:
        """Queue a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next answer. Raises RuntimeError with the end of the log where none comes."""
        try:
            found = self.answers.get(timeout=max(seconds, 0.1))
        except queue.Empty:
            found = None
        if found is None or "error" in found:
            reason = (found or {}).get("error", f"no answer within {seconds:.0f} s")
            raise RuntimeError(f"{self.cell.name}: {reason}\n{self.tail()}")
        return found

    def ask(self, wait_s: float, /, **command: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.send(**command)
        return self.answer(wait_s)

    def probe(self) -> dict[str, Any]:
        """What the guard counted so far; empty without a guard."""
        path = self.cell.path("probe.json")
        return json.loads(path.read_text()) if path.exists() else {}

    def ask_probe(self) -> None:
        """Let a probe that waits to be asked write its file anew, within half a second."""
        self.cell.path("probe.json").unlink(missing_ok=True)

    def fresh_probe(self) -> dict[str, Any]:
        """What the guard has counted by now, of a probe that waits to be asked; takes a second."""
        self.ask_probe()
        time.sleep(ANSWERED_S)
        return self.probe()

    def tail(self, lines: int = 20) -> str:
        """The end of the log."""
        self.log.flush()
        text = self.cell.path("log.txt").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def pin(self, cpus: Sequence[int], scheduler: Sequence[int] = ()) -> None:
        """Let the engine's processes run on these processors from now on; the main thread of its
        scheduler on others where some are given. That process's other threads stay apart from it,
        as they are on a server.
        """
        if not self._members:
            self._members = members(self.process.pid)
        for pid, name in self._members.items():
            for thread in threads_of(pid):
                main = scheduler and "scheduler" in name and thread == pid
                with contextlib.suppress(OSError):  # one may have ended
                    os.sched_setaffinity(thread, scheduler if main else cpus)

    def stop(self, patience: float = 10.0) -> None:
        """End the engine and everything that it started, softly for `patience` seconds."""
        for signal_ in ("TERM", "KILL"):
            if self.process.poll() is None:
                os.killpg(self.process.pid, 15 if signal_ == "TERM" else 9)
                try:
                    self.process.wait(patience)
                except subprocess.TimeoutExpired:
                    continue
        self.reader.join(10)
        for stream in (self.process.stdin, self.process.stdout, self.log):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def threads_of(pid: int) -> list[int]:
    """The threads of a process; none where it has ended."""
    try:
        return [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def members(root: int) -> dict[int, str]:
    """A process and all that it has started, directly or not: what each calls itself, by id."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                path = Path("/proc") / entry
                # the name in brackets may hold anything; the parent is the second field behind it
                parents[int(entry)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                names[int(entry)] = (path / "cmdline").read_text(errors="replace")
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: names.get(pid, "") for pid in sorted(found)}


# --- child ---
@dataclass(slots=True)
class Load:
    """Mixed traffic: between 1 and `most` requests at once, lengths log-uniform from 1 to 4096."""

    seed: int
    vocab: int = VOCAB
    most: int = 16
    longest: int = 4096
    prefixes: list[list[int]] = field(default_factory=list)

    def prompt(self, rng: random.Random) -> list[int]:
        """Token ids; a third of the prompts start with one that was used before (radix cache)."""
        length = max(1, round(math.exp(rng.uniform(0, math.log(self.longest)))))
        if self.prefixes and rng.random() < 0.33:
            head = rng.choice(self.prefixes)
            return [*head[: rng.randint(1, len(head))], *tokens(rng, 1 + length // 8, self.vocab)]
        made = tokens(rng, length, self.vocab)
        self.prefixes = [*self.prefixes[-31:], made]
        return made


def tokens(rng: random.Random, count: int, vocab: int = VOCAB) -> list[int]:
    """Random ids with repetitions, so that n-gram drafts have something to find."""
    words = [[rng.randrange(10, vocab - 10) for _ in range(6)] for _ in range(8)]
    found: list[int] = []
    while len(found) < count:
        found += rng.choice(words)
    return found[:count]


async def soak(engine: Any, load: Load, seconds: float) -> dict[str, Any]:
    """Keep requests running for a while; one in ten is aborted on the way."""
    rng, running, counts = random.Random(load.seed), set(), {"sent": 0, "aborted": 0, "failed": 0}
    end = time.monotonic() + seconds
    while time.monotonic() < end or running:
        target = 0 if time.monotonic() >= end else rng.randint(1, load.most)
        while len(running) < target:
            rid = f"soak-{load.seed}-{counts['sent']:06d}"  # aborts match by prefix
            counts["sent"] += 1
            job = asyncio.ensure_future(_one(engine, rid, load.prompt(rng), rng.randint(8, 192)))
            running.add(job)
            if rng.random() < 0.1:
                counts["aborted"] += 1
                asyncio.get_running_loop().call_later(
                    rng.uniform(0.02, 0.5), engine.tokenizer_manager.abort_request, rid
                )
        if running:
            done, running = await asyncio.wait(
                running, timeout=0.05, return_when=asyncio.FIRST_COMPLETED
            )
            counts["failed"] += sum(job.exception() is not None for job in done)
    return counts


async def _one(engine: Any, rid: str, prompt: list[int], count: int) -> None:
    await engine.async_generate(input_ids=prompt, sampling_params=_greedy(count), rid=rid)


def _greedy(count: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}


def fixed(engine: Any, vocab: int, count: int = 6, length: int = 64) -> list[list[int]]:
    """Greedy continuations of fixed prompts, one at a time: the same on every sound engine."""
    rng = random.Random(11)
    prompts = [tokens(rng, 7 + 61 * i, vocab) for i in range(count)]
    return [
        list(engine.generate(input_ids=prompt, sampling_params=_greedy(length))["output_ids"])
        for prompt in prompts
    ]


async def block(engine: Any, concurrency: int, length: int, warm_s: float = 0.1) -> Any:
    """One block of a benchmark: `concurrency` requests at once, of `length` new tokens each.

    They are sent as one batch, so that the scheduler takes them in one step; the prompts are the
    same in every block, so that after the first one their KV lies in the radix cache and n-grams
    draft the same: blocks differ in time alone. What is measured begins when every stream has its
    first token: prefill is left out. Returns tokens_per_s, tokens, steps (verify steps, summed over
    requests), step_s (the median between two chunks of a stream: one step) and gaps: seconds
    between chunks, by the token.
    """
    rng = random.Random(concurrency)
    prompts = [tokens(rng, 64) for _ in range(concurrency)]
    # an engine that was idle is slower for a moment: not measured
    end = time.perf_counter() + warm_s
    while time.perf_counter() < end:
        await _stream(engine, prompts, 16)
    chunks, steps = await _stream(engine, prompts, length)
    begun = max(now for now, _, gap in chunks if gap is None)
    mine = [(now, fresh) for now, fresh, _ in chunks if now > begun]
    took = max(now for now, _ in mine) - begun
    gaps = [(gap, fresh) for _, fresh, gap in chunks if gap is not None]
    return {
        "tokens_per_s": sum(fresh for _, fresh in mine) / took, "took_s": round(took, 6),
        "tokens": sum(fresh for _, fresh, _ in chunks), "steps": steps,
        "step_s": statistics.median(gap for gap, _ in gaps),
        "gaps": [round(gap / fresh, 6) for gap, fresh in gaps],
    }  # fmt: skip


async def _stream(engine: Any, prompts: list[Any], length: int) -> tuple[list[Any], int]:
    """Per chunk of a stream (when it came, its new tokens, seconds since the stream's last chunk or
    None), and verify steps over all streams.
    """
    last, seen, steps = {}, dict.fromkeys(range(len(prompts)), 0), {}
    found: list[tuple[float, int, float | None]] = []
    chunks = await engine.async_generate(
        input_ids=prompts, sampling_params=_greedy(length), stream=True
    )
    async for chunk in chunks:
        now, at, meta = time.perf_counter(), chunk["index"], chunk["meta_info"]
        fresh = meta["completion_tokens"] - seen[at]
        steps[at] = meta.get("spec_verify_ct", 0)
        if fresh > 0:
            found.append((now, fresh, now - last[at] if at in last else None))
            last[at] = now
            seen[at] += fresh
    return found, sum(steps.values())


def _serve(cell: Cell) -> None:
    """The child's loop: start, answer commands, end when stdin does."""
    if cell.cpus:
        with contextlib.suppress(OSError):  # a container may have taken some away
            os.sched_setaffinity(0, cell.cpus)
    models = write_model(Path(cell.folder) / "models", cell.shape, cell.vocab)
    begun = time.monotonic()
    import sglang

    engine = sglang.Engine(**engine_options(cell, models))
    loop = getattr(engine, "loop", None) or asyncio.new_event_loop()
    _say(ready=True, start_s=round(time.monotonic() - begun, 2), release=sglang.__version__)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            _say(**_obey(engine, loop, command, cell.vocab))
        except Exception as error:
            _say(error=f"{type(error).__name__}: {error}")
    engine.shutdown()


def _obey(engine: Any, loop: Any, command: dict[str, Any], vocab: int) -> dict[str, Any]:
    what = command.pop("do")
    if what == "fixed":
        return {"outputs": fixed(engine, vocab, **command)}
    if what == "soak":
        seconds = command.pop("seconds")
        load = Load(vocab=vocab, **command)
        return dict(loop.run_until_complete(soak(engine, load, seconds)))
    if what == "settled":  # what lives now is no garbage: fewer pauses
        engine.freeze_gc()
        return {"frozen": True}
    if what == "block":
        return dict(loop.run_until_complete(block(engine, **command)))
    raise ValueError(f"unknown command {what}")


def _say(**values: Any) -> None:
    print("ANSWER " + json.dumps(values), flush=True)


if __name__ == "__main__":
    _serve(Cell(**json.loads(sys.argv[1])))
