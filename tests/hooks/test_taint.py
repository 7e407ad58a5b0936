"""A request whose cached prefix reaches into KV of a faulty step is found, once."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from ddtree_guard.hooks.taint import Taints


def _req(rid: str, tokens: list[int], cached: int = 0, output: list[int] | None = None) -> Any:
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=tokens,
        output_ids=array("q", output or []),
        prefix_indices=range(cached),
    )


def test_reuse_beyond_the_first_suspect_token_is_found_once() -> None:
    taints = Taints()
    taints.add(_req("bad", [1, 2, 3], output=[4, 5, 6]), start=4)
    later = _req("later", [1, 2, 3, 4, 5, 9], cached=5)
    assert taints.reuse(later) == "bad"
    assert taints.reuse(later) is None


def test_a_shorter_cached_prefix_is_clean() -> None:
    taints = Taints()
    taints.add(_req("bad", [1, 2, 3], output=[4, 5, 6]), start=4)
    assert taints.reuse(_req("later", [1, 2, 3, 4, 5], cached=4)) is None


def test_another_text_is_clean() -> None:
    taints = Taints()
    taints.add(_req("bad", [1, 2, 3], output=[4, 5, 6]), start=4)
    assert taints.reuse(_req("later", [1, 2, 3, 4, 8, 8], cached=6)) is None


def test_tokens_that_the_source_produced_later_count() -> None:
    taints = Taints()
    source = _req("bad", [1, 2], output=[3])
    taints.add(source, start=3)
    source.output_ids.extend([4, 5])
    assert taints.reuse(_req("later", [1, 2, 3, 4, 5], cached=4)) == "bad"


def test_taint_passes_on() -> None:
    taints = Taints()
    taints.add(_req("bad", [1, 2, 3, 4]), start=2)
    assert taints.reuse(_req("second", [1, 2, 3, 7], cached=3)) == "bad"
    assert taints.reuse(_req("third", [1, 2, 3, 7], cached=4)) in ("bad", "second")


def test_memory_is_bounded() -> None:
    taints = Taints(keep=8)
    for i in range(100):
        taints.add(_req(f"r{i}", [i, i, i]), start=1)
    assert taints.reuse(_req("x", [0, 0, 0], cached=3)) is None
    assert taints.reuse(_req("y", [99, 99, 99], cached=3)) == "r99"
