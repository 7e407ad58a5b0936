"""The examples of docs/pytest.md run as they are printed, and end as it says."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddtree_guard.hooks import facts

pytestmark = pytest.mark.sglang

GUIDE = (Path(__file__).parents[2] / "docs" / "pytest.md").read_text()
EXAMPLES = dict(re.findall(r"<!-- run: (\w+)\.py -->\n```python\n(.*?)^```", GUIDE, re.S | re.M))
WIDTH_OF_THE_SERVER = ("0.5.12", "0.5.16")  # releases whose stock backend gets every tree wrong

# What the example starts, without a GPU: real hooks on SGLang's real backend behind HTTP.
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from ddtree_guard.config import Config
from ddtree_guard.testing.child import build

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({})
    def do_POST(self):
        prompts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
        mini.step()
        self.reply([{"text": prompt} for prompt in prompts])
    def reply(self, value):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())
    def log_message(self, *words):
        pass

mini = build(*sys.argv[3:])
mini.arm(Config.from_env())
HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""
Report = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def _loaded() -> None:
    """Import what an inner session must not import and drop again."""
    import ddtree_guard.hooks.backends  # noqa: F401
    from ddtree_guard.testing import standins

    standins.build_backend(standins.VerifyCase())


def test_every_block_of_python_is_run() -> None:
    assert set(EXAMPLES) == {"test_stock_backend", "test_server"}
    assert GUIDE.count("```python") == len(EXAMPLES) + 1  # the markers, which are lines of a table


def test_the_command_of_the_first_example_runs_it_without_a_gpu(
    suite: pytest.Pytester, run: Callable[..., pytest.RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    suite.makepyfile(test_stock_backend=EXAMPLES["test_stock_backend"])
    command = r"^\$ (?:(\w+)=(\w+) )?pytest --ddtree-guard=log test_stock_backend\.py$"
    ((name, value),) = re.findall(command, GUIDE, re.M)
    if name:
        monkeypatch.setenv(name, value)
    result = run("-k", "7-eager", "test_stock_backend.py", apart=True)
    result.assert_outcomes(passed=1, deselected=3)


def test_the_stock_backend_at_two_budgets(suite: pytest.Pytester, report: Report) -> None:
    suite.makepyfile(test_stock_backend=EXAMPLES["test_stock_backend"])
    tests = {test["test"].partition("::")[2]: test for test in report()["tests"]}
    outcomes = {name: test["outcome"] for name, test in tests.items()}
    assert len(outcomes) == 4
    assert outcomes["test_stock[7-eager]"] == outcomes["test_stock[7-graph]"] == "passed"
    assert outcomes["test_stock[16-graph]"] == "failed"
    wrong = facts.release().startswith(WIDTH_OF_THE_SERVER)
    assert outcomes["test_stock[16-eager]"] == ("failed" if wrong else "passed")
    found = {f["rule"] for f in tests["test_stock[16-eager]"]["findings"]}
    assert ({"W1", "W3", "W8"} <= found) == wrong


def test_the_corrected_backend_passes(suite: pytest.Pytester, report: Report) -> None:
    text = EXAMPLES["test_stock_backend"].replace('"stock"', '"corrected"')
    suite.makepyfile(test_corrected=text)
    value = report()
    assert [test["outcome"] for test in value["tests"]] == ["passed"] * 4
    assert (value["exit"], value["steps_checked"]) == (0, 4)


def test_a_server_as_a_child_process(
    suite: pytest.Pytester, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the stock backend, which is right in eager steps of later releases."""
    wrong = facts.release().startswith(WIDTH_OF_THE_SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = EXAMPLES["test_server"].replace("31017", str(port))
    launched = '"-m", "sglang.launch_server"'
    assert launched in text
    suite.makepyfile(launch_server=SERVER)
    suite.makepyfile(test_server=text.replace(launched, '"launch_server.py"'))
    monkeypatch.setenv("SERVER_ARGS", "stock DDTREE")
    (test,) = report()["tests"]
    assert (test["outcome"], test["steps_checked"]) == ("failed" if wrong else "passed", 1)
    assert ({"W1", "W3"} <= {f["rule"] for f in test["findings"]}) == wrong
