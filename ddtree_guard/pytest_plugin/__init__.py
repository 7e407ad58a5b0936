"""The pytest plugin, entry point `pytest11: ddtree_guard`. Off unless asked for.

Nothing but options, fixtures and skips lives here: loading it must cost a suite that does not use
it nothing. With `--ddtree-guard=log` a `session.Session` is registered, which does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ddtree_guard.pytest_plugin.fixture import GuardFixture
    from ddtree_guard.step import Step

MODES = ("off", "log", "raise")
MARKER = (
    "ddtree_guard(mode=..., rules=..., expect=[...], steps='required', device='cuda'): how the "
    "guard treats this test; expect=['W3'] passes only if exactly these rules fire"
)
WIDTHS = (16, 17, 33, 65, 257)  # beside the block size and its neighbours
SESSION = "ddtree_guard_session"
OPTIONS = (
    ("ddtree-guard", "off|log|raise", "check verify steps in this run; off is the default"),
    ("ddtree-guard-rules", "LIST", "rules to select, -ID to ignore, -ID@2026-12-31 until a day"),
    ("ddtree-guard-dump-dir", "DIR", "where dumps and evidence go (default: ddtree-guard-dumps)"),
    ("ddtree-guard-report", "FILE", "write a JSON report"),
    ("ddtree-guard-shadow-every", "N", "shadow attention in every n-th step; 0 is off"),
    ("ddtree-guard-block", "N", "draft block size, for the widths of ddtree_budgets (default: 8)"),
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options, and ini settings of the same name with underscores."""
    group = parser.getgroup("ddtree-guard", "invariants of tree speculative decoding")
    for name, metavar, text in OPTIONS:
        group.addoption(f"--{name}", metavar=metavar, default=None, help=text)
        ini = name.replace("-", "_")
        if ini == "ddtree_guard_rules":
            parser.addini(ini, text, type="linelist", default=None)
        else:
            parser.addini(ini, text, default=None)
    group.addoption(
        "--ddtree-guard-sweep", action="store_true", help="ddtree_budgets: every width to 257"
    )


def setting(config: pytest.Config, name: str) -> str:
    """An option, else the ini setting of its name, else an empty string."""
    value = config.getoption(f"--{name}")
    if value is None:
        value = config.getini(name.replace("-", "_"))
    return ",".join(value) if isinstance(value, list) else str(value or "").strip()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and, unless the guard is off, the session."""
    config.addinivalue_line("markers", MARKER)
    mode = setting(config, "ddtree-guard").lower() or "off"
    if mode not in MODES:
        raise pytest.UsageError(
            f"--ddtree-guard={mode} is not a mode. Use one of: {', '.join(MODES)}."
        )
    if mode != "off":
        from ddtree_guard.pytest_plugin.session import Session

        config.pluginmanager.register(Session(config), SESSION)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, and what asks a guard that is off."""
    off = not config.pluginmanager.has_plugin(SESSION)
    for item in items:
        marker = item.get_closest_marker("ddtree_guard")
        if marker is None:
            continue
        if marker.kwargs.get("device") == "cuda":
            from ddtree_guard.pytest_plugin.gpu import no_gpu

            why = no_gpu()
            if why:
                item.add_marker(pytest.mark.skip(reason=why))
        if off and marker.kwargs.get("expect"):
            why = "the test expects findings and the guard is off: pytest --ddtree-guard=log"
            item.add_marker(pytest.mark.skip(reason=why))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests that use `ddtree_budgets`."""
    if "ddtree_budgets" in metafunc.fixturenames:
        values = widths(metafunc.config)
        metafunc.parametrize("ddtree_budgets", values, ids=[f"w{w}" for w in values])


def widths(config: pytest.Config) -> list[int]:
    """Verify widths around the block size and at tile borders; with the sweep all up to 257."""
    if config.getoption("--ddtree-guard-sweep"):
        return list(range(2, 258))
    text = setting(config, "ddtree-guard-block") or "8"
    if not (text.isascii() and text.isdigit() and 2 < int(text) < 10_000):
        raise pytest.UsageError(f"--ddtree-guard-block={text} is not a block size of at least 3.")
    block = int(text)
    return sorted({block - 1, block, block + 1, *WIDTHS})


@pytest.fixture
def ddtree_guard(request: pytest.FixtureRequest) -> GuardFixture:
    """The guard of this test: findings so far, steps checked, `expect`, `watch` and `check`.

    Skips the test where the guard is off: without it there is nothing to ask.
    """
    session = request.config.pluginmanager.get_plugin(SESSION)
    if session is None:
        pytest.skip("the test asks the guard, which is off: pytest --ddtree-guard=log")
    from ddtree_guard.pytest_plugin.fixture import GuardFixture

    return GuardFixture(session)


@pytest.fixture
def ddtree_step() -> Callable[..., Step]:
    """`ddtree_step(seed=0, lens=(37, 21, 50), w=17, ...)`: a sound synthetic Step.

    With `fault="W3"` the fault of that rule is planted in its last request.
    """

    def make(seed: int = 0, fault: str | None = None, **sizes: Any) -> Step:
        from ddtree_guard.guard import find_rule
        from ddtree_guard.testing.faults import FAULTS
        from ddtree_guard.testing.steps import sound_step

        step = sound_step(seed, **sizes)
        return step if fault is None else FAULTS[find_rule(fault).id](step, step.bs - 1).step

    return make


@pytest.fixture
def ddtree_budgets() -> Iterator[int]:
    """A verify width, budget + 1: one test per width. See `pytest_generate_tests`."""
    raise RuntimeError("ddtree_budgets is parametrized by the plugin")
