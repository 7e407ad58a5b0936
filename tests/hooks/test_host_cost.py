"""What the guard asks of torch in a step of a captured graph: a bound, so that it stays small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree_guard.config import Config
from ddtree_guard.hooks import arm
from ddtree_guard.testing.cases import VerifyCase

pytestmark = pytest.mark.sglang

# by site: before the replay nothing at all; a slice of a static buffer; the verdict to the host
MOST = {"begin": 0, "built": 0, "accepted": 1, "end": 1, "resolve": 0, "commit": 0}
LAUNCHES = 2  # bs, the trees and the table; the end of the step


@pytest.fixture
def start(with_device: Callable[..., Any], tmp_path: Path, monkeypatch: Any) -> Iterator[Any]:
    from ddtree_guard.testing.cost import launching_nothing, on_stream
    from ddtree_guard.testing.server import MiniServer

    with launching_nothing() as launches:

        def make(algorithm: str, w: int, lens: tuple[int, ...]) -> Any:
            case = VerifyCase(
                algorithm=algorithm, lens=lens, budget=w - 1, padded_bs=len(lens) + 1, head_dim=16,
                draft_tokens=None if algorithm == "DDTREE" else w, heads=2, kv_heads=1,
            )  # fmt: skip
            monkeypatch.setattr(arm, "ServerGuard", with_device)
            server = MiniServer(case, "auto")
            guard = server.arm(Config(dump_dir=tmp_path))
            assert guard is not None
            for _ in range(3):  # the first ones are read to the host as well
                server.step()
            on_stream(guard.checker.graphs.check)
            guard.checker.ready()
            return server, guard, launches

        yield make
        while arm.GUARDS:
            assert arm.GUARDS.pop().remove() == ()


def _counting(guard: Any, name: str, found: dict[str, list[str]], monkeypatch: Any) -> None:
    from ddtree_guard.testing.cost import Dispatches

    call = getattr(guard, name)

    def counted(*args: Any) -> Any:
        with Dispatches() as mode:
            result = call(*args)
        found.setdefault(name, []).extend(mode.names)
        return result

    monkeypatch.setattr(guard, name, counted)


def _signing(check: Any, live: int, monkeypatch: Any) -> None:
    """The verdicts of clean steps, as the kernels that do nothing here would leave them."""
    from ddtree_guard.testing.cost import sign

    collect, slots, steps = check.collect, check.slots.numpy(), []

    def signed() -> None:
        steps.append(1)
        sign(slots, len(steps), live)
        collect()

    monkeypatch.setattr(check, "collect", signed)


@pytest.mark.parametrize("lens", [(19, 11), (9, 30, 21, 14, 8)], ids=["2", "5"])
@pytest.mark.parametrize("w", [8, 17])
@pytest.mark.parametrize("algorithm", ["DDTREE", "NGRAM"])
def test_a_replayed_step_asks_little_of_torch(
    start: Any, monkeypatch: Any, algorithm: str, w: int, lens: tuple[int, ...]
) -> None:
    server, guard, launches = start(algorithm, w, lens)
    if not hasattr(server.backend, "init_forward_metadata_out_graph"):
        pytest.skip("0.5.12 hands its fields over one by one, and the check is launched eagerly")
    found: dict[str, list[str]] = {}
    checked = guard.coverage.steps_checked
    _signing(guard.checker.graphs.check, len(lens), monkeypatch)
    for _ in range(2):  # the first one binds
        server.step()
    for name in MOST:
        _counting(guard, name, found, monkeypatch)
    before = launches.count
    server.step()
    asked = {name: len(calls) for name, calls in found.items()}
    assert set(asked) == set(MOST)
    assert all(asked[name] <= MOST[name] for name in MOST), found
    assert launches.count - before == LAUNCHES
    assert guard.coverage.steps_checked - checked == 3
    assert not guard.fuses.faults
    assert guard.flight.recorder.faults == 0
