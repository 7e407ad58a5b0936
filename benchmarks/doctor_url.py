"""`ddtree-guard doctor --url` against real servers.

    python benchmarks/doctor_url.py MODEL OUT [--site 0.5.17=FOLDER] [--only 0.5.17] [--parallel 4]

MODEL is what tiny_model.py trained. Servers run on one GPU, a few at a time, each on a port of its
own; the doctor asks each of them three times. Rows go to OUT/doctor_url.json after each server;
rows of servers that are not asked again stay.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import environment, write
from serving import ROOT, write_plugins

from ddtree_guard.hooks.facts import generation_of, release

ROUNDS = 3
START_S = 240.0


REFUSED = "reproduces a fault of"  # of the incident switch, where SGLang follows the batch


@dataclass(frozen=True, slots=True)
class Server:
    """One server; `garbled` is what the doctor must say. `refused`: it must not start. `site` is a
    folder with another SGLang than this interpreter's.
    """

    name: str
    algorithm: str
    budget: int = 0
    graphs: bool = True
    incident: bool = False
    garbled: bool = False
    refused: bool = False
    backend: str = "auto"
    release: str = ""
    site: str = ""

    def environment(self, out: Path) -> dict[str, str]:
        """Variables of the server's processes."""
        plugins, more = write_plugins(out / "plugins"), os.environ.get("PYTHONPATH", "")
        paths = [self.site, str(ROOT), str(plugins), more]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "SGLANG_PLUGINS": "ddtree_guard",
            "SGLANG_DDTREE_INCIDENT": "on" if self.incident else "off",
            "SGLANG_DDTREE_GUARD_BACKEND": self.backend,
            "SGLANG_ENABLE_JIT_DEEPGEMM": "0",  # `write_plugins` leaves a stand-in for it
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


def servers(site: tuple[str, str] = ("", "")) -> list[Server]:
    """All servers, those of the other release first. It has no incident: the switch is refused."""
    own, (other, folder) = release(), site
    mine = [_fitted(server, own) for server in SERVERS]
    stock = Server("ddtree-64-graphs-stock", "DDTREE", 64, backend="stock")
    kept = [server for server in (*SERVERS, stock) if not server.incident or server.garbled]
    theirs = [replace(_fitted(server, other), site=folder) for server in kept]
    return [*(theirs if folder else ()), *mine]


def _fitted(server: Server, name: str) -> Server:
    """The server under a release: what garbles where stock keeps to the width it was told is
    refused where it follows the batch.
    """
    facts = generation_of(name)
    follows = facts is not None and facts.follows_batch
    refused = server.incident and follows
    return replace(server, release=name, refused=refused, garbled=server.garbled and not follows)


def main() -> int:
    """Start, ask, stop; 1 if the doctor said something else than it must."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end with the script
    path = options.out / "doctor_url.json"
    held = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {_key(row): row for row in held}
    chosen = [s for s in servers(options.site) if options.only in f"{s.release} {s.name}"]
    lock = threading.Lock()

    def one(at: int) -> None:
        found = _measure(chosen[at], options.port + at, options)
        with lock:
            rows.update({_key(row): row for row in found})
            write(path, {"environment": environment(), "rows": list(rows.values())})
        words = [row["as_expected"] for row in found]
        print(chosen[at].release, chosen[at].name, words, flush=True)

    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(one, range(len(chosen))))
    return 0 if all(row["as_expected"] for row in rows.values()) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--site", type=_site, default=("", ""), help="RELEASE=FOLDER, another one")
    parser.add_argument("--only", default="", help="part of `RELEASE NAME` of the servers to ask")
    parser.add_argument("--parallel", type=int, default=4, help="servers at a time")
    parser.add_argument("--port", type=int, default=31_700, help="of the first server")
    return parser.parse_args()


def _site(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    return name, folder


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row.get("release"), row["server"], row.get("round")


def _measure(server: Server, port: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one server."""
    row = {**asdict(server), "server": server.name, "round": 0, "as_expected": False}
    del row["site"]
    if _taken(port):  # somebody else's server would answer
        return [row | {"error": f"port {port} is taken"}]
    process = _start(server, port, options)
    try:
        if _wait(port, process):
            return [row | {"round": n} | _ask(server, port, n) for n in range(ROUNDS)]
        log = _log(server, options).read_text(errors="replace")
        said = [line for line in log.splitlines() if REFUSED in line][-1:]
        return [row | {"as_expected": bool(server.refused and said), "refusal": said,
                       "error": "did not start", "tail": "" if said else log[-1500:]}]  # fmt: skip
    finally:
        with contextlib.suppress(ProcessLookupError):  # its schedulers may outlive it
            os.killpg(process.pid, 9)
        process.wait()


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _log(server: Server, options: argparse.Namespace) -> Path:
    return Path(options.out / f"{server.release}-{server.name}.log")


def _start(server: Server, port: int, options: argparse.Namespace) -> Any:
    command = [sys.executable, __file__, "--serve", json.dumps(server.options(options.model, port))]
    with _log(server, options).open("w") as log:
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
    row: dict[str, Any] = {"exit": told.returncode, "seconds": round(seconds, 2)}
    row["stderr"] = told.stderr[-500:]
    try:
        found = json.loads(told.stdout)
    except ValueError:
        return row | {"error": told.stdout[-500:], "as_expected": False}
    names = ("verdict", "change", "summary", "canaries", "deployment", "armed_there", "uses")
    row |= {name: found.get(name) for name in names}
    asked = (row["deployment"] or {}).get("release")  # of the server, not of this interpreter
    verdict = (told.returncode == 1) is server.garbled and told.returncode in (0, 1)
    row["as_expected"] = asked == server.release and verdict and not server.refused
    if not again:
        text = subprocess.run(command, capture_output=True, text=True, check=False)
        row["text"] = text.stdout
    return row


def _serve(values: dict[str, Any]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the script that started this process
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
