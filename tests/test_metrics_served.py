"""What scheduler processes count arrives at `/metrics`, through files, as SGLang serves it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("prometheus_client") is None,
    reason="prometheus_client is not installed: pip install prometheus_client",
)

# A scheduler process, as SGLang starts it: the client is first imported when the guard is armed.
SCHEDULER = """
import sys
from pathlib import Path
from ddtree_guard.config import Config, Mode
from ddtree_guard.hooks.runtime import ServerGuard
from ddtree_guard.metrics import metrics_for, metrics_of_process
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step

assert "prometheus_client" not in sys.modules
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
metrics = metrics_for(f"TP{rank}", served=True)
assert metrics_for(f"TP{rank}", served=True) is metrics  # the client refuses a name twice
assert metrics_of_process() is metrics
dumps = folder if rank == 0 else folder / "file"  # rank 1 cannot write there
(folder / "file").touch()
guard = ServerGuard(Config(mode=Mode.LOG, dump_dir=dumps), rank=f"TP{rank}", metrics=metrics)
guard.metrics.set("armed", 1)
step = sound_step(0)
if rank == 0:
    guard.metrics.set("ranks", 2)
    guard.metrics.set("ranks_armed", 2)
    guard.judge(FAULTS["CFG1"](step, step.bs - 1).step)
    guard.metrics.add("verify_steps_total", 3)
else:
    guard.judge(FAULTS["CFG2"](step, step.bs - 1).step)
    for _ in range(3):
        with guard.fuses.internal("build"):
            raise RuntimeError("broken guard")
"""

# The server process: SGLang's own functions where it is installed, else what they do.
SERVER = """
import os, subprocess, sys, tempfile
scheduler, folder, real, accept = sys.argv[1], sys.argv[2], sys.argv[3] == "sglang", sys.argv[4]
if real:
    from sglang.srt.utils.common import add_prometheus_middleware, set_prometheus_multiproc_dir
    set_prometheus_multiproc_dir()
else:
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp(dir=folder)
for rank in ("0", "1"):
    subprocess.run([sys.executable, "-c", scheduler, rank, folder], check=True)
if real:
    import asyncio
    import httpx
    from starlette.applications import Starlette
    app = Starlette()
    add_prometheus_middleware(app)
    async def get():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return (await client.get("/metrics", headers={"Accept": accept})).text
    print(asyncio.run(get()))
else:
    from prometheus_client import CollectorRegistry, multiprocess
    from prometheus_client.exposition import choose_encoder
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    print(choose_encoder(accept)[0](registry).decode())
"""


# What a browser and what Prometheus asks for; to the latter, newer clients escape the colon.
ACCEPTS = {
    "text": "text/plain",
    "openmetrics": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",
}
NAME = re.compile(r"sglang[:_]ddtree_guard_")  # as the alert rules match it


def _served(folder: Path, how: str, accept: str) -> dict[str, float]:
    """Each sample of the guard's, as `name{labels}` without the prefix, and its value."""
    done = subprocess.run(
        [sys.executable, "-c", SERVER, SCHEDULER, str(folder), how, accept],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.rpartition(" ") for line in done.stdout.splitlines() if NAME.match(line)]
    return {NAME.sub("", name): float(value) for name, _, value in rows}


@pytest.mark.parametrize(
    ("how", "accept"),
    [
        ("client", "text"),
        ("client", "openmetrics"),
        pytest.param("sglang", "openmetrics", marks=pytest.mark.sglang),
    ],
)
def test_every_rank_is_exported(tmp_path: Path, how: str, accept: str) -> None:
    found = _served(tmp_path, how, ACCEPTS[accept])
    counted = {name: value for name, value in found.items() if name.startswith("violations")}
    assert counted == {
        'violations_total{latent="no",rank="TP0",rule="CFG1",scope="server"}': 1.0,
        'violations_total{latent="no",rank="TP1",rule="CFG2",scope="server"}': 1.0,
    }
    assert found['armed{rank="TP0"}'] == 1.0
    assert found['armed{rank="TP1"}'] == 0.0  # its build site blew its fuse
    assert found['internal_faults_total{rank="TP1",site="build"}'] == 3.0
    assert (found['ranks{rank="TP0"}'], found['ranks_armed{rank="TP0"}']) == (2.0, 2.0)
    assert 'ranks{rank="TP1"}' not in found
    assert found['verify_steps_total{rank="TP0"}'] == 3.0
    assert found['verify_steps_total{rank="TP1"}'] == 0.0  # there before the first step
    assert (found['dumps_total{rank="TP0"}'], found['dumps_total{rank="TP1"}']) == (1.0, 0.0)
    assert found['dumps_failed_total{rank="TP1"}'] == 1.0
