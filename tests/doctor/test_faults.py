"""The table of known faults: whole, linked, and about incidents that are documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddtree_guard.checks import ALL
from ddtree_guard.doctor.deployment import Deployment
from ddtree_guard.doctor.faults import CONDITIONS, Fault, matches, table
from ddtree_guard.hooks.contracts import ROWS
from ddtree_guard.hooks.facts import generation_of

INCIDENTS = (Path(__file__).parents[2] / "docs" / "incidents.md").read_text()
BOUND = re.compile(r"(<=|>=)\d+\.\d+\.\d+")


def test_ids_are_unique_and_the_seed_is_there() -> None:
    names = [fault.id for fault in table()]
    assert len(names) == len(set(names))
    assert "verify-width-from-server-argument" in names


@pytest.mark.parametrize("fault", table(), ids=lambda fault: fault.id)
def test_a_row_is_whole(fault: Fault) -> None:
    assert set(fault.rules) <= {rule.id for rule in ALL}
    assert set(fault.algorithms) <= {row.algorithm for row in ROWS}
    assert set(fault.when) <= set(CONDITIONS)
    assert fault.links
    assert fault.change
    assert fault.effect
    assert all(bound == "" or BOUND.fullmatch(bound) for bound in (fault.present, fault.absent))
    assert len(fault.title) <= 90


@pytest.mark.parametrize("fault", table(), ids=lambda fault: fault.id)
def test_an_incident_is_documented_with_one_of_the_links(fault: Fault) -> None:
    if not fault.incident:
        assert "SGLang's own check" in fault.evidence or "measured" in fault.evidence
        return
    row = next(line for line in INCIDENTS.splitlines() if line.startswith(f"| {fault.incident} "))
    assert any(link in row for link in fault.links)


@pytest.mark.parametrize("fault", table(), ids=lambda fault: fault.id)
def test_links_fit_beside_their_indent(fault: Fault) -> None:
    assert all(link.startswith("https://github.com/") and len(link) <= 87 for link in fault.links)


def test_the_widths_of_the_table_are_those_of_the_generations() -> None:
    (seed,) = [f for f in table() if f.id == "verify-width-from-server-argument"]
    (mask,) = [f for f in table() if f.id == "captured-mask-misses-tree-columns"]
    for fault in (seed, mask):
        last, first = fault.present.removeprefix("<="), fault.absent.removeprefix(">=")
        old, new = generation_of(last), generation_of(first)
        assert old is not None
        assert new is not None
        assert (old.follows_batch, new.follows_batch) == (False, True)
        assert old.mask_cells(8, 100) == 800
        assert new.mask_cells(8, 100) == 864


def test_between_the_releases_that_were_read_nothing_is_claimed() -> None:
    d = Deployment("0.5.14", "EAGLE", "triton", w=8, declared=8, topk=4, graphs=True)
    (match,) = [m for m in matches(d) if m.fault.id == "draft-extend-stride"]
    assert not match.sure
    assert match.open == ("release 0.5.14",)


def test_where_the_fix_was_seen_the_fault_is_not_even_possible() -> None:
    for release, there in (("0.5.12", True), ("0.5.16", False), ("0.5.23", False)):
        d = Deployment(release, "EAGLE", "triton", w=8, declared=8, topk=4, graphs=True)
        assert ("draft-extend-stride" in [m.fault.id for m in matches(d)]) is there


def test_a_server_without_speculation_has_no_fault() -> None:
    assert matches(Deployment("0.5.16")) == ()


@pytest.mark.parametrize(("tokens", "page", "there"), [(8, 1, []), (16, 1, [True]), (16, 16, [])])
def test_a_row_too_narrow_for_what_is_reserved(tokens: int, page: int, there: list[bool]) -> None:
    d = Deployment("0.5.16", "DFLASH", "triton", w=tokens, declared=tokens, page_size=page)
    found = [m.sure for m in matches(d) if m.fault.id == "reserved-slots-beyond-the-row"]
    assert found == there
    assert not any(m.wrong for m in matches(d))
