"""Do the guard's metrics arrive at `/metrics` of a real SGLang server? Two servers side by side.

One runs DDTREE as it should be, one the incident. Both get the same few requests; what each serves
to a browser and to Prometheus (OpenMetrics) goes into the result. `python served_metrics.py OUT`.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from common import environment as machine
from common import write
from serving import Cell, environment, tokens, write_model

OPEN_METRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
SAMPLE = re.compile(r"^(sglang[:_](?:ddtree_guard_\w+|spec_accept_length)\{[^}]*\}) (\S+)", re.M)
WAIT_S = 150.0


class Server:
    """`sglang.launch_server` with metrics and the guard in mode log."""

    def __init__(self, name: str, port: int, folder: Path, incident: bool) -> None:
        self.name, self.port = name, port
        cell = Cell("DDTREE", w=17, folder=str(folder / name))
        cell.path("probe.json").parent.mkdir(parents=True, exist_ok=True)
        models = write_model(folder / "models", cell.shape)
        values = environment(cell) | {"SGLANG_DDTREE_INCIDENT": "on" if incident else "off"}
        self.log = folder / f"{name}.log"
        flags = {
            "model-path": models["target"], "load-format": "dummy", "port": port,
            "speculative-algorithm": "DDTREE", "speculative-draft-model-path": models["dflash"],
            "speculative-dflash-block-size": 8, "attention-backend": "triton",
            "sampling-backend": "pytorch", "grammar-backend": "none", "max-total-tokens": 30_000,
            "mem-fraction-static": 0.6, "max-running-requests": 8, "random-seed": 7,
        }  # fmt: skip
        words = [f"--{name}={value}" for name, value in flags.items()]
        words += ["--enable-metrics", "--skip-tokenizer-init", "--skip-server-warmup"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *words],
                stdout=log, stderr=subprocess.STDOUT, env=values, start_new_session=True,
            )  # fmt: skip

    def get(self, path: str, accept: str = "*/*", body: Any = None) -> str:
        """The answer to a request; raises OSError or URLError."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Accept": accept, "Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    def wait(self) -> bool:
        """Whether the server answers before the time is over."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.get("/health")
                return True
            except OSError:
                time.sleep(1)
        return False

    def serve(self, count: int = 6) -> None:
        """A few requests of unequal lengths, one after the other and then a batch."""
        rng = random.Random(3)
        prompts = [tokens(rng, 9 + 37 * i) for i in range(count)]
        greedy = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}
        for prompt in [*prompts, prompts]:
            self.get("/generate", body={"input_ids": prompt, "sampling_params": greedy})

    def samples(self, accept: str) -> dict[str, float]:
        """The guard's samples as served."""
        return {name: float(value) for name, value in SAMPLE.findall(self.get("/metrics", accept))}

    def row(self) -> dict[str, Any]:
        """Serve, then read the metrics both ways and the log lines."""
        if not self.wait():
            return {"server": self.name, "error": self.log.read_text(errors="replace")[-3000:]}
        self.serve()
        time.sleep(2)
        log = self.log.read_text(errors="replace")
        said = re.findall(r"(?:ddtree_guard (?:armed|finding|tainted|step)|NOT GUARDED).*", log)
        return {
            "server": self.name,
            "text": self.samples("text/plain"),
            "openmetrics": self.samples(OPEN_METRICS),
            "flush_cache": self.get("/flush_cache", body={}).splitlines()[0],
            "log": said[:12],
        }

    def stop(self) -> None:
        """End the server and what it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, 15)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, 9)


def main() -> int:
    """Write the result; 1 if a server did not start."""
    out = Path(sys.argv[1])
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else "/tmp/ddtree-guard-metrics")
    folder.mkdir(parents=True, exist_ok=True)
    servers = [
        Server("sound", 31910, folder, incident=False),
        Server("incident", 31911, folder, incident=True),
    ]
    rows = []
    for server in servers:
        try:
            rows.append(server.row())
        except Exception as error:
            rows.append({"server": server.name, "error": f"{type(error).__name__}: {error}"})
        finally:
            server.stop()
        told = json.dumps({"environment": machine(), "rows": rows})
        write(out, json.loads(told.replace(str(folder), "FOLDER")))
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
