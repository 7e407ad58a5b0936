"""Real servers, one per class, in the style of SGLang's own tests.

Run by `benchmarks/pytest_gpu.py` under the plugin, and without pytest as `python3 servers.py`. The
test that plants a fault in its server does not look for it: it must fail, and its neighbours must
not.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request
from pathlib import Path
from typing import Any, ClassVar

MODEL = Path(os.environ.get("TINY", "/nowhere"))
COMMON = {
    "skip_tokenizer_init": True, "attention_backend": "triton", "sampling_backend": "pytorch",
    "grammar_backend": "none", "max_total_tokens": 60_000, "max_running_requests": 8,
    "mem_fraction_static": 0.7, "log_level": "warning",
}  # fmt: skip
START_S = 240


def prompts() -> list[list[int]]:
    """Three prompts of unequal lengths with repetitions, for n-gram drafts."""
    rng = random.Random(5)
    words = [[rng.randrange(32, 120) for _ in range(5)] for _ in range(6)]
    return [[t for _ in range(n) for t in rng.choice(words)] for n in (5, 9, 14)]


class Http:
    """`python -m sglang.launch_server` and its HTTP interface."""

    def __init__(self, env: dict[str, str], log: Path, **options: Any) -> None:
        self.url = f"http://127.0.0.1:{30_000 + os.getpid() % 9000}"
        flags = {**COMMON, **options, "host": "127.0.0.1", "port": self.url.rpartition(":")[2]}
        command = [
            sys.executable,
            "-m",
            "sglang.launch_server",
            "--model-path",
            str(MODEL / "target"),
        ]
        for name, value in flags.items():
            words = value if isinstance(value, list) else [value]
            flag = f"--{name.replace('_', '-')}"
            command += [flag, *([] if value is True else map(str, words))]
        self.log = log.open("w")
        self.process = subprocess.Popen(
            command, env=env, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).read()
                return
            except OSError:
                time.sleep(0.5)
        self.stop()
        raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}")

    def generate(self, count: int) -> list[list[int]]:
        """Greedy continuations of all prompts, at once."""
        body = {"input_ids": prompts(), "sampling_params": sampling(count)}
        request = urllib.request.Request(
            f"{self.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        answers = json.load(urllib.request.urlopen(request, timeout=120))
        return [answer["output_ids"] for answer in answers]

    def stop(self) -> None:
        """End the server and everything that it started."""
        stop(self.process)
        self.log.close()


class Child:
    """An engine in a child process that reads commands from its standard input."""

    def __init__(self, env: dict[str, str], log: Path, **options: Any) -> None:
        self.log = log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--engine", json.dumps({**COMMON, **options})], env=env,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            start_new_session=True,
        )  # fmt: skip
        if self._answer() != "ready":
            self.stop()
            raise RuntimeError(f"the engine did not start:\n{log.read_text()[-3000:]}")

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        return None

    def generate(self, count: int) -> list[list[int]]:
        """Greedy continuations of all prompts, at once."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        answer: list[list[int]] = self._answer()
        return answer

    def stop(self) -> None:
        """End the engine and everything that it started."""
        stop(self.process)
        self.log.close()


def stop(process: subprocess.Popen[Any]) -> None:
    """End a process and its group."""
    for number in (15, 9):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                continue


def sampling(count: int) -> dict[str, Any]:
    """Greedy decoding of a fixed length."""
    return {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}


def engine(options: dict[str, Any]) -> None:
    """The child's loop."""
    import sglang

    made = sglang.Engine(model_path=str(MODEL / "target"), **options)
    print("ANSWER " + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        outs = made.generate(input_ids=prompts(), sampling_params=sampling(int(line)))
        print("ANSWER " + json.dumps([out["output_ids"] for out in outs]), flush=True)


EAGER: dict[str, Any] = {"disable_cuda_graph": True}
# Three requests are padded to four: what a replay reads and what is live differ.
GRAPHS: dict[str, Any] = {"cuda_graph_bs_decode": [1, 4, 8], "disable_prefill_cuda_graph": True}
NGRAM: dict[str, Any] = {
    "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 16
}  # fmt: skip
DFLASH: dict[str, Any] = {
    "speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(MODEL / "draft"),
    "speculative_dflash_block_size": 8,
}  # fmt: skip


class Sound:
    """One server for the class."""

    KIND: Any = Child
    OPTIONS: ClassVar[dict[str, Any]] = {}

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = Path(tempfile.mkdtemp(prefix="ddtree-guard-suite-"))
        cls.plant = cls.folder / "plant"
        env = {**os.environ, "DDTREE_GUARD_PLANT_FILE": str(cls.plant)}
        logs = Path(os.environ.get("SUITE_LOGS") or cls.folder)
        cls.server = cls.KIND(env, logs / f"{cls.__name__}-{os.getpid()}.log", **cls.OPTIONS)

    @classmethod
    def tearDownClass(cls) -> None:
        cls.server.stop()

    def test_1_sound(self) -> None:
        assert [len(ids) for ids in self.server.generate(48)] == [48] * 3


class Planted(Sound):
    """Eager: what is planted in a captured buffer may stay there for the next replays."""

    FAULT = "P1"

    def test_2_planted(self) -> None:
        self.plant.write_text(self.FAULT)
        assert [len(ids) for ids in self.server.generate(48)] == [48] * 3
        done = self.folder / "plant.done"
        print(done.read_text() if done.exists() else "nothing was planted")

    def test_3_sound_again(self) -> None:
        assert [len(ids) for ids in self.server.generate(48)] == [48] * 3


class TestNgramServer(Planted, unittest.TestCase):
    KIND = Http
    OPTIONS = NGRAM | EAGER
    FAULT = "W3"


class TestDflashEngine(Planted, unittest.TestCase):
    OPTIONS = DFLASH | EAGER
    FAULT = "K2"


class TestDflashGraphs(Sound, unittest.TestCase):
    OPTIONS = DFLASH | GRAPHS


if __name__ == "__main__":
    if "--engine" in sys.argv:
        engine(json.loads(sys.argv[2]))
    else:
        unittest.main()
