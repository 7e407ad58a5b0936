"""Request trails: what is counted, how much is kept, and that an hour of it is on disk."""

import json
import os
import random
from collections import Counter, defaultdict
from pathlib import Path

import jsonschema
import pytest

from ddtree_guard.dump import schema
from ddtree_guard.dump.find import find_trails
from ddtree_guard.dump.read import read_trails
from ddtree_guard.dump.redact import Redactor
from ddtree_guard.dump.trail import Trail, merged, trail_from_json
from ddtree_guard.errors import DumpError
from ddtree_guard.recorder.trail import Trails


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def trail(trails: Trails, rid: str) -> Trail:
    found = trails.get(rid)
    assert found is not None
    return found


def test_a_trail_counts_what_the_issue_asks_for() -> None:
    trails = Trails()
    for w in (17, 17, 9):
        trails.ran(("a", "b"), w, checked=w == 17)
    trails.hit(("b",), "W3")
    trails.taint("b")
    assert [trails.accepted(["a"], [t]) for t in ([5, 5], [5, 6], [6])] == [[2], [1], [2]]
    a, b = trail(trails, "a"), trail(trails, "b")
    assert (a.steps, a.checked, a.widths, a.accept, a.run) == (3, 2, {17: 2, 9: 1}, {2: 2, 1: 1}, 3)
    assert a.verdict == "2/3 steps checked, clean"
    assert b.verdict == (
        "2/3 steps checked, W3 in 1 of them; its prefix holds KV of a step with a finding"
    )


def test_exoneration_takes_every_step() -> None:
    assert Trail("a", steps=412, checked=412).verdict == "412/412 steps checked, clean"
    assert Trail("a", steps=412, checked=412).clean
    assert not Trail("a", steps=412, checked=411).clean
    assert not Trail("a").clean
    assert Trail("a", steps=3).verdict == "0/3 steps checked, so nothing is known"


def test_the_json_form_obeys_the_schema_and_comes_back() -> None:
    trails = Trails()
    trails.ran(("a",), 17, True)
    trails.hit(("a",), "K12")
    trails.accepted(["a"], [[1, 1]])
    (data,) = trails.recent()
    rules = json.loads(schema.SCHEMA_FILE.read_text())
    jsonschema.validate(data, {"$ref": "#/$defs/request", "$defs": rules["$defs"]})
    assert trail_from_json(json.loads(json.dumps(data))).as_json() == data


@pytest.mark.parametrize(
    "change",
    [{"rid": 5}, {"steps": -1}, {"checked": 9}, {"widths": {"x": 1}}, {"accept": {"1": 0}},
     {"rules": {"W3": True}}, {"run": "3"}, {"first": None}, {"more": 1}, {"rid": "x" * 600}],
    ids=str,
)  # fmt: skip
def test_a_lying_trail_is_refused(change: dict[str, object]) -> None:
    data = {**Trail("a", steps=1, checked=1, widths={17: 1}).as_json(), **change}
    with pytest.raises(DumpError):
        trail_from_json(data)


def test_idle_requests_go_to_disk_and_out_of_memory(tmp_path: Path) -> None:
    clock = Clock()
    trails = Trails(tmp_path / "run", "TP0", clock=clock)
    trails.ran(("old",), 17, True)
    clock.now += 50
    trails.ran(("new",), 17, True)
    clock.now += 20
    trails.sweep()
    assert len(trails) == 1
    (path,) = find_trails(tmp_path)
    assert [t.rid for t, _ in read_trails(path.parent, path.name)] == ["old"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_hour_is_kept_and_no_more_than_two(tmp_path: Path) -> None:
    clock = Clock()
    trails = Trails(tmp_path / "run", clock=clock)
    for _ in range(10):
        trails.ran((f"at-{clock.now:.0f}",), 17, True)
        clock.now += 1200  # 20 minutes
        trails.sweep()
    kept = {t.rid for path in find_trails(tmp_path) for t, _ in read_trails(path.parent, path.name)}
    newest = [f"at-{1000 + 1200 * n}" for n in range(10)]
    assert set(newest[-3:]) <= kept  # the last hour
    assert len(find_trails(tmp_path)) == 2
    assert len(kept) <= 6


def test_memory_is_bounded_and_who_is_pushed_out_is_written(tmp_path: Path) -> None:
    trails = Trails(tmp_path / "run", keep=10)
    for n in range(25):
        trails.ran((f"r{n}",), 17, True)
    assert len(trails) == 10
    trails.sweep()
    (path,) = find_trails(tmp_path)
    written = [t.rid for t, _ in read_trails(path.parent, path.name)]
    assert len(written) + trails.lost == 15
    assert trails.lost == 5  # only as many may wait as may live


def test_redaction_hashes_the_rid(tmp_path: Path) -> None:
    redactor = Redactor(bytes(32))
    trails = Trails(tmp_path / "run", hide=redactor.request)
    trails.ran(("alice-secret",), 17, True)
    trails.sweep(idle_s=-1)
    (path,) = find_trails(tmp_path)
    assert "alice" not in path.read_text()
    assert [(t.rid, hashed) for t, hashed in read_trails(path.parent, path.name)] == [
        (redactor.rid("alice-secret"), True)
    ]


def test_a_line_cut_off_by_a_crash_costs_that_line_only(tmp_path: Path) -> None:
    trails = Trails(tmp_path / "run")
    trails.ran(("a", "b"), 17, True)
    trails.sweep(idle_s=-1)
    (path,) = find_trails(tmp_path)
    os.truncate(path, path.stat().st_size - 5)
    assert len(list(read_trails(path.parent, path.name))) == 1


def test_a_folder_that_cannot_be_written_is_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trails = Trails(tmp_path / "file" / "run")
    trails.ran(("a", "b"), 17, True)
    trails.sweep(idle_s=-1)
    assert (trails.lost, len(trails)) == (2, 0)


def test_parts_add_up() -> None:
    one = Trail("a", 3, 3, {"W3": 1}, {17: 3}, {2: 3}, 4, False, 1.0, 2.0)
    two = Trail("a", 2, 1, {"W3": 1, "M2": 1}, {9: 2}, {2: 1}, 2, True, 5.0, 6.0)
    whole = merged([one, two])
    assert (whole.steps, whole.checked, whole.run, whole.tainted) == (5, 4, 4, True)
    assert (whole.rules, whole.widths, whole.accept) == (
        {"W3": 2, "M2": 1}, {17: 3, 9: 2}, {2: 4},
    )  # fmt: skip


def test_batches_that_go_on_and_change_are_counted_step_by_step() -> None:
    rng = random.Random(7)
    now = [0.0]
    trails = Trails(clock=lambda: now[0])
    steps: Counter[str] = Counter()
    checked: Counter[str] = Counter()
    widths: dict[str, Counter[int]] = defaultdict(Counter)
    last: dict[str, float] = {}
    rids, w = ("a", "b"), 17
    for n in range(600):
        now[0] = float(n)
        if rng.random() < 0.1:
            rids = tuple(rng.sample("abcdef", rng.randint(0, 4)))
        if rng.random() < 0.05:
            w = rng.choice((8, 17, 65))
        good = rng.random() < 0.8
        trails.ran(list(rids) if n % 7 == 0 else rids, w, good)
        for rid in rids:
            steps[rid] += 1
            checked[rid] += good
            widths[rid][w] += 1
            last[rid] = now[0]
        if rng.random() < 0.2 and last:
            rid = rng.choice(list(last))
            trail = trails.get(rid)
            assert trail is not None
            assert (trail.steps, trail.checked) == (steps[rid], checked[rid])
            assert (trail.widths, trail.last) == (dict(widths[rid]), last[rid])
    assert {t["rid"]: t["steps"] for t in trails.recent()} == dict(steps)
    gone = trails.sweep(idle_s=0.0)
    assert {t.rid: (t.steps, t.checked) for t in gone} == {r: (steps[r], checked[r]) for r in last}


def test_a_request_that_is_pushed_out_takes_its_steps_along(tmp_path: Path) -> None:
    trails = Trails(tmp_path, keep=2)
    for _ in range(3):
        trails.ran(("a", "b"), 17, True)
    trails.ran(("c",), 17, True)
    assert {t.rid: t.steps for t in trails.sweep(idle_s=-1.0)} == {"a": 3, "b": 3, "c": 1}
