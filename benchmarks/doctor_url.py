"""`ddtree-guard doctor --url` against real servers: `python benchmarks/doctor_url.py MODEL OUT`.

MODEL is what tiny_model.py trained. Every server runs at once on one GPU, each on a port of its
own; the doctor asks each of them three times. Rows go to OUT/doctor_url.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import environment, write
from serving import ROOT, write_plugins

from ddtree_guard.hooks.facts import generation_of, release

PORT = 31_700
ROUNDS = 3
START_S = 240.0


@dataclass(frozen=True, slots=True)
class Server:
    """One server; `garbled` is what the doctor must say up to SGLang 0.5.16."""

    name: str
    algorithm: str
    budget: int = 0
    graphs: bool = True
    incident: bool = False
    garbled: bool = False

    def environment(self, out: Path) -> dict[str, str]:
        """Variables of the server's processes."""
        paths = [str(ROOT), str(write_plugins(out / "plugins")), os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "SGLANG_PLUGINS": "ddtree_guard",
            "SGLANG_DDTREE_INCIDENT": "on" if self.incident else "off",
            "SGLANG_DDTREE_GUARD_BACKEND": "auto",
        }

    def options(self, model: Path, port: int) -> dict[str, Any]:
        """SGLang's server arguments."""
        options: dict[str, Any] = {
            "model_path": str(model / "target"), "skip_tokenizer_init": True,
            "attention_backend": "triton", "sampling_backend": "pytorch",
            "grammar_backend": "none", "mem_fraction_static": 0.7, "max_total_tokens": 40_000,
            "max_running_requests": 32, "disable_cuda_graph": not self.graphs,
            "log_level": "warning", "host": "127.0.0.1", "port": port,
        }  # fmt: skip
        if self.graphs:
            options |= {"cuda_graph_bs_decode": [1, 4, 16, 32], "disable_prefill_cuda_graph": True}
        if self.algorithm in ("DFLASH", "DDTREE"):
            options |= {
                "speculative_algorithm": self.algorithm,
                "speculative_draft_model_path": str(model / "draft"),
                "speculative_dflash_block_size": 8,
            }
        elif self.algorithm:
            options |= {"speculative_algorithm": self.algorithm}
        if self.budget:
            options["speculative_ddtree_budget"] = self.budget
        return options


SERVERS = (
    Server("incident-16-graphs", "DDTREE", 16, incident=True, garbled=True),
    Server("incident-16-eager", "DDTREE", 16, graphs=False, incident=True, garbled=True),
    Server("incident-7-graphs", "DDTREE", 7, incident=True),
    Server("ddtree-16-graphs", "DDTREE", 16),
    Server("ddtree-64-eager", "DDTREE", 64, graphs=False),
    Server("dflash-graphs", "DFLASH"),
    Server("ngram-graphs", "NGRAM"),
    Server("plain-graphs", ""),
)


def main() -> int:
    """Start, ask, stop; 1 if the doctor said something else than it must."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end with the script
    running = [_start(server, PORT + at, options) for at, server in enumerate(SERVERS)]
    rows: list[dict[str, Any]] = []
    path = options.out / "doctor_url.json"
    where = {**environment(), "sglang": release()}
    try:
        for at, server in enumerate(SERVERS):
            ready = _wait(PORT + at, running[at])
            for again in range(ROUNDS if ready else 0):
                rows.append(_ask(server, PORT + at, again))
                write(path, {"environment": where, "rows": rows})
            if not ready:
                rows.append({"server": server.name, "error": "did not start"})
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, 9)
    write(path, {"environment": where, "rows": rows})
    return 0 if all(row.get("as_expected") for row in rows) else 1


def _start(server: Server, port: int, options: Any) -> Any:
    log = (options.out / f"{server.name}.log").open("w")
    command = [sys.executable, __file__, "--serve", json.dumps(server.options(options.model, port))]
    return subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        env=server.environment(options.out),
    )  # fmt: skip


def _wait(port: int, process: Any) -> bool:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health_generate", timeout=20):
                return process.poll() is None  # and not somebody else's server on that port
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    return False


def _ask(server: Server, port: int, again: int) -> dict[str, Any]:
    """One run of the doctor, in words and as JSON."""
    command = [sys.executable, "-m", "ddtree_guard", "doctor", "--url", f"http://127.0.0.1:{port}"]
    begun = time.monotonic()
    told = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    seconds = time.monotonic() - begun
    row: dict[str, Any] = {**asdict(server), "server": server.name, "round": again}
    row["garbled"] = _garbles(server)
    row |= {"exit": told.returncode, "seconds": round(seconds, 2), "stderr": told.stderr[-500:]}
    try:
        found = json.loads(told.stdout)
    except ValueError:
        return row | {"error": told.stdout[-500:], "as_expected": False}
    names = ("verdict", "change", "summary", "canaries", "deployment", "armed_there", "uses")
    row |= {name: found.get(name) for name in names}
    row["as_expected"] = (told.returncode == 1) is _garbles(server)
    if not again:
        text = subprocess.run(command, capture_output=True, text=True, check=False)
        row["text"] = text.stdout
    return row


def _garbles(server: Server) -> bool:
    """The incident garbles where stock keeps to the width that it was told."""
    facts = generation_of(release())
    return server.garbled and facts is not None and not facts.follows_batch


def _serve(values: dict[str, Any]) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    launch_server(ServerArgs(**values))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve(json.loads(sys.argv[2]))
        sys.exit()
    sys.exit(main())
