"""Every rule stays silent on the worker's own steps, and speaks when a step is tampered with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from ddtree_guard.guard import Guard  # noqa: E402
from ddtree_guard.hooks.observe import read_step  # noqa: E402
from ddtree_guard.step import Outcome, Step  # noqa: E402
from ddtree_guard.testing.fakes import host_context  # noqa: E402
from ddtree_guard.testing.toy_server import VOCAB, ToyServer  # noqa: E402

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2], [1, 6, 1, 8, 0, 3, 3, 9, 8, 8, 7, 4]]


@pytest.fixture(autouse=True)
def _needs_interpreter(interpreter: None) -> None:
    return


def observed_steps(
    budget: int, steps: int, block: int = 8, asked: tuple[int, ...] = ()
) -> list[Step]:
    """Steps of a toy server as the guard would see them, outcome included. `asked` are budgets of
    the requests, one a step.
    """
    server = ToyServer(PROMPTS, budget, block, skill=0.4)
    seen: list[Step] = []

    def observe(step: Any) -> None:
        backend, done = server.runner.attn_backend, step.accepted
        record = read_step(
            backend, step.batch, server.runner, q_rows=step.trees.tokens.numel(),
            rids=("r0", "r1", "r2"), step_id=len(seen),
        )  # fmt: skip
        lens = done.lens.numpy().astype(np.int64)
        committed = np.where(done.accept_index.numpy() < 0, -1, done.committed.numpy())
        outcome = Outcome(
            predict=step.predict.numpy(),
            accept_index=done.accept_index.numpy(),
            accept_lens=lens,
            committed=committed,
            truncated=np.zeros(3, np.int64),
            delta_seq_lens=(done.new_lens - step.batch.seq_lens).numpy(),
            hidden_rows=done.accept_index.numpy(),
            draft_anchor=step.trees.tokens[:, 0].numpy(),
            last_committed=np.array([text[-1] for text in server.texts]),
            masked_walk=np.ones(3, np.int64),
            walk="tree",
            greedy_kernel=True,
            greedy=np.ones(3, np.bool_),
        )
        seen.append(record.replace(outcome=outcome, limits__vocab=VOCAB))

    server.worker.observers.append(observe)
    with host_context(server.runner.server_args):
        for at in range(steps):
            server.step(custom_params={"ddtree_budget": asked[at]} if asked else None)
    return seen


@pytest.mark.parametrize("budget", [3, 16])
def test_every_rule_is_silent_on_sound_steps(budget: int) -> None:
    guard = Guard()
    for step in observed_steps(budget, 3):
        report = guard.check(step)
        assert report.findings == ()
        assert {"W1", "W3"} <= set(report.checked)


def test_every_rule_is_silent_where_requests_ask_for_less() -> None:
    for step in observed_steps(16, 4, asked=(5, 1, 16, 7)):
        assert Guard().check(step).findings == ()


def test_a_step_wider_than_the_budget_is_found() -> None:
    step = observed_steps(16, 1)[0]
    report = Guard().check(step.replace(widths__budget=15))
    assert "CFG1" in report.rules


def test_a_shifted_mask_offset_is_found() -> None:
    step = observed_steps(16, 1)[0]
    indptr = step.layout.mask_indptr.copy()
    indptr[-1] -= 9
    report = Guard().check(step.replace(layout__mask_indptr=indptr))
    assert "W3" in report.rules
