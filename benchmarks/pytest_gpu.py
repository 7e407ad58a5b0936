"""The pytest plugin and ci-report on real servers: `python benchmarks/pytest_gpu.py MODEL`.

    PYTHONPATH=.:benchmarks:<sglang> python benchmarks/pytest_gpu.py MODEL --out benchmarks/results

MODEL comes from `tiny_model.py`. Runs `tests/gpu/suite/servers.py` under the plugin, one server per
class, and its NGRAM class again without pytest. Writes `pytest_gpu.json`: what each test saw, and
what `ci-report` says. Exit code 1 if a planted fault did not fail its test and only its test.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from common import environment, write

ROOT = Path(__file__).resolve().parents[1]
SUITE = ROOT / "tests" / "gpu" / "suite" / "servers.py"
SECONDS = 600.0
POINTS = {
    "sglang.srt.plugins": {"ddtree_guard": "ddtree_guard.hooks.plugin:load"},
    "pytest11": {"ddtree_guard": "ddtree_guard.pytest_plugin"},
}
WANTED = {
    "TestNgramServer::test_1_sound": ("passed", []),
    "TestNgramServer::test_2_planted": ("failed", ["W3"]),
    "TestNgramServer::test_3_sound_again": ("passed", []),
    "TestDflashEngine::test_1_sound": ("passed", []),
    "TestDflashEngine::test_2_planted": ("failed", ["K2", "K3"]),  # one or both are seen
    "TestDflashEngine::test_3_sound_again": ("passed", []),
    "TestDflashGraphs::test_1_sound": ("passed", []),
}


def metadata(site: Path) -> Path:
    """Entry points of the guard where it is not installed, and of what plants on demand."""
    groups: dict[str, dict[str, str]] = {}
    for group, points in POINTS.items():
        known = [point.name for point in entry_points(group=group)]
        groups[group] = {name: target for name, target in points.items() if name not in known}
    groups["sglang.srt.plugins"]["on_demand"] = "ddtree_guard.testing.on_demand:load"
    info = site / "ddtree_guard_suite-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ddtree-guard-suite\nVersion: 0\n")
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return site


def measure(
    model: Path, folder: Path, workers: int = 0, seconds: float = SECONDS
) -> dict[str, Any]:
    """Run the suite both ways at once; the JSON report, the verdict of ci-report, exit codes."""
    deadline = time.monotonic() + seconds
    site = metadata(folder / "site")
    paths = [str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TINY": str(model),
        "SUITE_LOGS": str(folder),
    }  # fmt: skip
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable, "-m", "pytest", str(SUITE), "-c", str(folder / "pytest.ini"), "-rA",
        "-p", "no:cacheprovider", "--ddtree-guard=log",
        f"--ddtree-guard-dump-dir={folder / 'dumps'}",
        f"--ddtree-guard-report={folder / 'report.json'}", f"--junitxml={folder / 'junit.xml'}",
        *(["-n", str(workers), "--dist", "loadscope"] if workers else []),
    ]  # fmt: skip
    running = start(command, folder / "pytest.txt", env)
    plain = folder / "plain"
    log = {"SGLANG_DDTREE_GUARD": "log", "SGLANG_DDTREE_GUARD_DUMP_DIR": str(plain)}
    words = [sys.executable, str(SUITE), "-v", "TestNgramServer"]
    alone = start(words, folder / "unittest.txt", env | log)
    result: dict[str, Any] = {
        "unittest_exit": finish(alone, deadline),
        "ci_report": ci_report(plain, env),
    }
    result["pytest_exit"] = finish(running, deadline)
    report = folder / "report.json"
    result["report"] = json.loads(report.read_text()) if report.exists() else None
    return result


def start(command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process whose output goes to a file."""
    with log.open("wb") as file:
        return subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen[bytes], deadline: float) -> int:
    """Its exit code; 124 where it took too long. It is asked to end first: pytest then reports."""
    for wait in (deadline - time.monotonic(), 20.0):
        try:
            return process.wait(max(0.1, wait))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
    process.kill()
    return 124


def ci_report(folder: Path, env: dict[str, str]) -> dict[str, Any]:
    """What ci-report says of a folder, and its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "ddtree_guard", "ci-report", str(folder), "--json"],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    verdict = json.loads(done.stdout) if done.stdout.startswith("{") else done.stderr[-2000:]
    return {"exit_code": done.returncode, "verdict": verdict}


def wrong(result: dict[str, Any]) -> list[str]:
    """What is not as it should be, in words."""
    tests = {t["test"].split("::", 1)[1]: t for t in (result["report"] or {"tests": []})["tests"]}
    told = []
    for name, (outcome, rules) in WANTED.items():
        test = tests.get(name, {"outcome": "not run"})
        seen = sorted({f["rule"] for f in test.get("findings", [])})
        if test["outcome"] != outcome or not set(seen) <= set(rules) or bool(rules) != bool(seen):
            told.append(f"{name}: {test['outcome']} {seen}, wanted {outcome} {rules}")
        elif not test["steps_checked"] or test["skipped"]:
            told.append(f"{name}: steps were not checked")
        elif rules and not all(f["dump"] for f in test["findings"][:1]):
            told.append(f"{name}: no dump")
    if (result["pytest_exit"], result["unittest_exit"]) != (1, 0):
        told.append(f"exit codes {result['pytest_exit']}, {result['unittest_exit']}: wanted 1, 0")
    if result["ci_report"]["exit_code"] != 1:
        told.append(f"ci-report: exit code {result['ci_report']['exit_code']}, wanted 1")
    return told


def without_paths(value: Any, folder: Path) -> Any:
    """The result without the names of this machine's folders."""
    text = json.dumps(value).replace(str(folder), "RUN").replace(str(ROOT), "ROOT")
    return json.loads(text)


def main() -> int:
    """Measure, write, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--logs", type=Path, help="keep logs and dumps here")
    parser.add_argument("--workers", type=int, default=0, help="of pytest-xdist; 0: without it")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of the whole")
    options = parser.parse_args()
    folder = options.logs or Path(tempfile.mkdtemp(prefix="ddtree-guard-suite-"))
    folder.mkdir(parents=True, exist_ok=True)
    result = measure(options.model.absolute(), folder.absolute(), options.workers, options.seconds)
    told = wrong(result)
    value = {"environment": environment(), "workers": options.workers, "wrong": told, **result}
    write(options.out / "pytest_gpu.json", without_paths(value, folder.absolute()))
    print("\n".join(told) or "every fault failed its test and only its test", flush=True)
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
