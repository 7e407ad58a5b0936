"""Shared by the tests of the doctor: a real /server_info of 0.5.16, and deployments."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddtree_guard import cli
from ddtree_guard.doctor.deployment import Deployment, deployment_of
from ddtree_guard.doctor.model import Model

SHAPE = Path(__file__).with_name("server_info_0.5.16.json")
FORK = {  # the incident: a fork whose server argument stays the draft block
    "speculative_algorithm": "DDTREE", "speculative_ddtree_budget": 16,
    "speculative_num_draft_tokens": 8, "speculative_dflash_block_size": 8,
    "attention_backend": "triton", "page_size": 1, "context_length": 4096,
    "cuda_graph_config": {"decode": {"backend": "full", "bs": [1, 8, 32]}},
    "max_running_requests": 48,
}  # fmt: skip
EAGLE = {
    "speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 8, "attention_backend": "triton", "page_size": 1,
    "context_length": 4096, "cuda_graph_config": {"decode": {"backend": "full", "max_bs": 8}},
}  # fmt: skip
PLAIN = Model(4096, 32_000, heads=16, head_dim=128, recurrent=False)
Make = Callable[..., Deployment]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def info() -> dict[str, Any]:
    """/server_info of a DDTREE server of this package on SGLang 0.5.16, block 8, budget 16."""
    found: dict[str, Any] = json.loads(SHAPE.read_text())
    return found


@pytest.fixture
def fork(info: dict[str, Any]) -> dict[str, Any]:
    """/server_info of a fork that keeps its server argument at the draft block."""
    state = {k: v for k, v in info["internal_states"][0].items() if "ddtree" not in k}
    return {**info, **FORK, "internal_states": [state]}


@pytest.fixture
def make() -> Make:
    """A deployment of the fork's or EAGLE's arguments, changed."""

    def call(
        release: str = "0.5.16", model: Model | None = PLAIN, base: str = "fork", **changes: Any
    ) -> Deployment:
        values = {**(FORK if base == "fork" else EAGLE), **changes}
        return deployment_of(values, release, model)

    return call


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line: exit code, stdout, stderr; never a traceback."""

    def call(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(["doctor", *argv])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert all(c.isprintable() or c == "\n" for c in out + err)
        return code, out, err

    return call
