"""diff, ranks, request, bundle and recompute: what they say, and with which exit code."""

import json
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ddtree_guard import cli
from ddtree_guard.commands.bundle import Leak, Secrets, build
from ddtree_guard.config import Config
from ddtree_guard.doctor import look
from ddtree_guard.dump.compare import MEANING, Difference, differences
from ddtree_guard.dump.read import Dump
from ddtree_guard.dump.write import DumpWriter, Notes
from ddtree_guard.guard import Guard
from ddtree_guard.recorder import Recorder, Ring
from ddtree_guard.step import PARTS, Static, Step
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.hostile import target_step
from ddtree_guard.testing.steps import sound_step

LENS = (37, 21, 50)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "240")

    def call(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([str(arg) for arg in argv])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert max(map(len, out.splitlines()), default=0) <= 240
        return code, out, err

    return call


def step(number: int = 1, rank: str = "TP0") -> Step:
    made = sound_step(number, lens=LENS, padded_bs=4)
    return made.replace(who__step_id=number, who__rank=rank)


def written(root: Path, *steps: Step, redact: bool = False, notes: Notes | None = None) -> Path:
    findings = [(i, f) for i, one in enumerate(steps) for f in Guard().check(one).findings]
    return DumpWriter("run", Config(dump_dir=root, redact=redact)).write(
        list(steps), findings, notes
    )


# --- diff -----------------------------------------------------------------------------------------
def test_the_same_dump_does_not_differ(run: Run, tmp_path: Path) -> None:
    a, b = written(tmp_path / "a", step(1), step(2)), written(tmp_path / "b", step(1), step(2))
    code, out, _ = run("diff", a, b)
    assert (code, out) == (0, "compared 2 pairs of steps by step id: all of them the same\n")


def test_the_first_difference_is_the_cause_and_not_its_effect(run: Run, tmp_path: Path) -> None:
    bad = FAULTS["W3"](step(2), 2).step
    bad = bad.replace(outcome__accept_lens=bad.outcome.accept_lens + 1)
    a, b = written(tmp_path / "a", step(1), step(2)), written(tmp_path / "b", step(1), bad)
    code, out, _ = run("diff", a, b)
    assert code == 1
    first = out.splitlines()[1]
    before, after = step(2).layout.mask_indptr, bad.layout.mask_indptr
    at = int(np.argmax(before != after))
    assert f"layout.mask_indptr[{at}]" in first
    assert f"{before[at]} in A, {after[at]} in B (offsets handed to the attention kernel)" in first
    assert "outcome.accept_lens" in out
    assert out.splitlines()[-1] == "compared 2 pairs of steps by step id: 1 of them differ"


def test_steps_are_paired_by_their_id(run: Run, tmp_path: Path) -> None:
    a, b = written(tmp_path / "a", step(1), step(2)), written(tmp_path / "b", step(2), step(3))
    code, out, _ = run("diff", a, b)
    assert code == 1  # two steps are in one dump only
    assert "2 steps are in one dump only" in out
    assert "compared 1 pair of steps by step id: they are the same" in out


def test_redacted_dumps_of_different_jobs_are_compared_by_equal_ids(
    run: Run, tmp_path: Path
) -> None:
    a = written(tmp_path / "a", step(1), redact=True)
    b = written(tmp_path / "b", step(1), redact=True)
    code, out, _ = run("diff", a, b)
    assert code == 0
    assert "compared by which of them are equal" in out
    tokens = step(1).tree.tokens.copy()
    tokens[2, 1] = tokens[2, 0]
    c = written(tmp_path / "c", step(1).replace(tree__tokens=tokens), redact=True)
    assert "tree.tokens[2, 1]" in run("diff", a, c)[1]


def recorded(one: Step) -> Step:
    """The step as a device's ring gives it back."""
    ring = Ring(1, one.padded_bs, one.w)
    assert ring.put(one)
    (kept,) = ring.snapshot()
    return kept


def test_what_only_one_dump_holds_is_no_first_difference(run: Run, tmp_path: Path) -> None:
    bad = FAULTS["M2"](step(2), 2).step
    a, b = written(tmp_path / "a", bad), written(tmp_path / "b", recorded(bad))
    code, out, _ = run("diff", a, b)
    assert code == 1  # they do not hold the same
    assert "first difference" not in out
    assert "only A holds, so not compared: layout.kv_indices, " in out
    assert "1 pair of steps by step id: they are the same in what both hold" in out
    code, out, _ = run("diff", a, written(tmp_path / "c", recorded(step(2))))
    assert code == 1
    assert out.splitlines()[1].startswith("  mask.tree_bits[2, ")


def placed(one: Step, shift: int, alias: bool = False) -> Step:
    """The step with buffers at addresses of its own process."""
    names = ("seq_lens", "positions", "mask")
    born = {name: Static(64 * at + shift, "int64", (4,)) for at, name in enumerate(names)}
    live = dict(born) if not alias else {**born, "mask": born["seq_lens"]}
    return one.replace(graph__born=born, graph__live=live)


def test_addresses_of_two_processes_are_no_difference(run: Run, tmp_path: Path) -> None:
    a, b = (written(tmp_path / str(n), placed(step(1), n)) for n in (4096, 8192))
    assert run("diff", a, b)[0] == 0
    c = written(tmp_path / "c", placed(step(1), 4096, alias=True))
    code, out, _ = run("diff", b, c)
    assert code == 1
    assert "mask.pointer: 'graph.born.mask' in A, 'graph.born.seq_lens' in B" in out


def test_diff_as_json(run: Run, tmp_path: Path) -> None:
    a = written(tmp_path / "a", step(1))
    b = written(tmp_path / "b", step(1).replace(widths__holders={"backend": 8}))
    code, out, _ = run("diff", a, b, "--json")
    told = json.loads(out)
    assert code == told["exit"] == 1
    assert told["differ"][0]["fields"][0] == {
        "where": "widths.holders.backend", "a": "17", "b": "8",
        "meaning": "rows per request, as each part of the server holds it",
    }  # fmt: skip


def test_every_part_of_a_step_has_a_meaning_and_a_place() -> None:
    assert set(MEANING) == set(PARTS)


def test_every_kind_of_value_is_compared() -> None:
    one = step(1)
    changes = {
        "bs": one.replace(bs=2),
        "widths.block": one.replace(widths__block=9),
        "mask.cells shape": one.replace(mask__cells=one.mask.cells[:-1]),
        "outcome.row_min[0, 0]": one.replace(outcome__row_min=one.outcome.row_min - 1),
        "mask.present": one.replace(mask__present=None),
        "graph.live_key.w": one.replace(graph__live_key={**one.graph.live_key, "w": 8}),
    }
    for where, other in changes.items():
        first = next(differences(one, other))
        assert first.where.startswith(where), where
        assert isinstance(first, Difference)
    nan = one.replace(outcome__row_min=np.full_like(one.outcome.row_min, np.nan))
    assert list(differences(nan, nan)) == []


# --- ranks ----------------------------------------------------------------------------------------
def job(root: Path, odd: dict[str, Step]) -> None:
    for rank in ("TP0", "TP1", "TP2"):
        steps = [odd.get(rank, step(n, rank)) if n == 3 else step(n, rank) for n in (2, 3, 4)]
        written(root, *(s.replace(who__rank=rank) for s in steps))


def test_ranks_that_agree(run: Run, tmp_path: Path) -> None:
    job(tmp_path, {})
    code, out, _ = run("ranks", tmp_path)
    assert code == 0
    assert out == "3 ranks (TP0, TP1, TP2), 3 shared steps: every rank holds the same\n"


def test_a_rank_that_recorded_less_does_not_depart(run: Run, tmp_path: Path) -> None:
    job(tmp_path, {"TP1": recorded(step(3))})
    assert run("ranks", tmp_path)[0] == 0
    job(tmp_path / "odd", {"TP1": recorded(FAULTS["M2"](step(3), 2).step)})
    code, out, _ = run("ranks", tmp_path / "odd")
    assert code == 1
    assert out.startswith("step 3: TP1 departs from TP0 (2 of 3 ranks agree)\n  mask.tree_bits[2, ")


def test_the_first_rank_that_differs_is_named(run: Run, tmp_path: Path) -> None:
    tokens = step(3).tree.tokens.copy()
    tokens[1, 0] += 5
    job(tmp_path, {"TP1": step(3).replace(tree__tokens=tokens)})
    code, out, _ = run("ranks", tmp_path)
    assert code == 1
    assert "step 3: TP1 departs from TP0 (2 of 3 ranks agree)" in out
    assert f"tree.tokens[1, 0]: {tokens[1, 0] - 5} on TP0, {tokens[1, 0]} on TP1" in out
    told = json.loads(run("ranks", tmp_path, "--json")[1])
    assert (told["odd"]["rank"], told["odd"]["step"], told["exit"]) == ("TP1", 3, 1)


def test_one_rank_is_not_enough(run: Run, tmp_path: Path) -> None:
    written(tmp_path, step(1))
    code, _, err = run("ranks", tmp_path)
    assert code == 2
    assert "two or more ranks were expected" in err


def test_a_damaged_dump_is_left_out_and_named(run: Run, tmp_path: Path) -> None:
    job(tmp_path, {})
    bad = written(tmp_path, step(9, "TP7"))
    (bad / "manifest.json").write_text("{")
    code, out, _ = run("ranks", tmp_path)
    assert code == 0
    assert f"{bad.name} was left out: " in out
    assert run("ranks", tmp_path / "nowhere")[0] == 4


def test_ranks_without_a_shared_step_prove_nothing(run: Run, tmp_path: Path) -> None:
    written(tmp_path, step(1, "TP0"))
    written(tmp_path, step(2, "TP1"))
    assert "share no step: nothing is known" in run("ranks", tmp_path)[1]


# --- request --------------------------------------------------------------------------------------
def served(root: Path, redact: bool = False, bad: bool = False) -> Recorder:
    config = Config(dump_dir=root, redact=redact)
    recorder = Recorder(config, DumpWriter("run", config))
    for n in range(1, 13):
        one = step(n)
        recorder.step(one)
        recorder.accepted(n, one.who.rids, [[1, 1], [2], [3, 4]])
    if bad:
        one = FAULTS["W3"](step(12), 2).step
        recorder.finding(one, Guard().check(one).findings, ("r2",))
    recorder.stop()
    return recorder


def test_a_clean_request_is_exonerated(run: Run, tmp_path: Path) -> None:
    served(tmp_path)
    code, out, _ = run("request", "r0", tmp_path)
    assert code == 0
    assert "12/12 steps checked, clean" in out
    assert "longest run of one token 24" in out
    assert "accepted per step: 2 in 12" in out


def test_a_bad_request_is_told_what_was_wrong(run: Run, tmp_path: Path) -> None:
    served(tmp_path, bad=True)  # the dump and the trail file hold the same steps, counted once
    code, out, _ = run("request", "r2", tmp_path)
    assert code == 1
    assert "12/12 steps checked, W3 in 1 of them" in out
    assert run("request", "r1", tmp_path)[0] == 0
    told = json.loads(run("request", "r2", tmp_path, "--json")[1])
    assert told["clean"] is False
    assert [p["rules"] for p in told["processes"].values()] == [{"W3": 1}]


def test_an_unknown_request_is_no_exoneration(run: Run, tmp_path: Path) -> None:
    served(tmp_path)
    code, _, err = run("request", "r9", tmp_path)
    assert code == 2
    assert "request 'r9' was expected" in err
    assert run("request", "r9", tmp_path / "nowhere")[0] == 4


def test_a_redacted_trail_is_asked_by_its_hash(run: Run, tmp_path: Path) -> None:
    recorder = served(tmp_path, redact=True)
    code, _, err = run("request", "r0", tmp_path)
    assert code == 2
    assert "ids are hashed there" in err
    assert run("request", recorder.writer.redactor.rid("r0"), tmp_path)[0] == 0


def test_the_configured_folder_is_the_default(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served(tmp_path)
    monkeypatch.setenv("SGLANG_DDTREE_GUARD_DUMP_DIR", str(tmp_path))
    assert run("request", "r0")[0] == 0


# --- bundle ---------------------------------------------------------------------------------------
def secretive(root: Path) -> Path:
    bad = FAULTS["W3"](step(2), 2).step.replace(
        who__rids=("alice-7731", "bob-7732", "carol-7733"),
        mask__rids=("alice-7731", "bob-7732", "carol-7733"),
        attention=target_step().attention,
    )
    host = socket.gethostname()
    notes = Notes(
        "finding",
        f"W3 of alice-7731 on {host}",
        requests=[{**one, "rid": "bob-7732"} for one in served(root / "x").trails.recent()[:1]],
        doctor=(f"armed=8/8 dumps=/var/dg/{host} model=/home/me/secret-model",),
    )
    return written(root / "d", bad, notes=notes)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(socket, "gethostname", lambda: "build-host-17.example")
    return "build-host-17"


@pytest.mark.usefixtures("host")
def test_a_bundle_holds_nothing_private_and_is_still_a_dump(run: Run, tmp_path: Path) -> None:
    path, out = secretive(tmp_path), tmp_path / "issue.zip"
    code, said, _ = run("bundle", path, "-o", out)
    assert code == 0
    assert "none found; safe to attach to an issue" in said
    assert out.stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(out) as archive:
        archive.extractall(tmp_path / "unpacked")
    raw = b"".join(f.read_bytes() for f in (tmp_path / "unpacked").rglob("*") if f.is_file())
    hidden = (
        "alice",
        "bob-77",
        "carol",
        "/var/dg",
        "/home/me",
        str(tmp_path),
        socket.gethostname(),
    )
    assert [text for text in hidden if text.encode() in raw] == []
    dump = Dump(tmp_path / "unpacked" / "dump")
    before, after = Dump(path).step(0), dump.step(0)
    assert not np.isin(after.tree.tokens[after.tree.tokens >= 0], before.tree.tokens).any()
    assert after.attention.q is None
    assert np.array_equal(after.layout.mask_indptr, before.layout.mask_indptr)
    assert run("check", dump.path)[0] == 1  # the finding is still in it


def test_a_redacted_dump_can_be_bundled(run: Run, tmp_path: Path) -> None:
    path = written(tmp_path, FAULTS["W3"](step(2), 2).step, redact=True)
    assert run("bundle", path, "-o", tmp_path / "b.zip")[0] == 0


@pytest.mark.usefixtures("host")
def test_a_bundle_can_hold_the_doctors_words(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = "importing SGLang: /opt/secret/lib.so is missing on build-host-17.example"
    monkeypatch.setattr(look, "look", lambda words: {"ended": ended})
    out = tmp_path / "issue.zip"
    assert run("bundle", secretive(tmp_path), "-o", out, "--doctor")[0] == 0
    with zipfile.ZipFile(out) as archive:
        text = archive.read("doctor.txt").decode()
    assert text.startswith("doctor: NOT GUARDED: the survey stopped at importing SGLang")
    assert "secret" not in text
    assert "build-host" not in text


@pytest.mark.parametrize(
    ("member", "text"),
    [("README.txt", "see alice-7731"), ("README.txt", "in /var/log/sglang/x.log"),
     ("dump/manifest.json", "{HOST}"), ("README.txt", "{HOST}")],
)  # fmt: skip
def test_the_scan_finds_what_was_planted(tmp_path: Path, member: str, text: str, host: str) -> None:
    dump = Dump(secretive(tmp_path))
    members = build(dump)
    Secrets(dump).scan(members)
    text = text.replace("{HOST}", host)
    if member.endswith(".json"):
        members[member] = members[member].replace(b'"doctor": [', f'"doctor": ["{text}",'.encode())
    else:
        members[member] += text.encode()
    with pytest.raises(Leak, match="nothing was written"):
        Secrets(dump).scan(members)


def test_the_scan_finds_a_token_id_that_was_not_hashed(tmp_path: Path) -> None:
    path = secretive(tmp_path)
    dump, members = Dump(path), build(Dump(path))
    name = "dump/step-0000.safetensors"
    members[name] = (path / "step-0000.safetensors").read_bytes()
    with pytest.raises(Leak, match=r"q, k or v rows|a token id"):
        Secrets(dump).scan(members)


def test_a_bundle_does_not_follow_a_link(run: Run, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "out.zip").symlink_to(victim)
    assert run("bundle", written(tmp_path / "d", step(1)), "-o", tmp_path / "out.zip")[0] == 2
    assert victim.read_text() == "precious"


# --- recompute ------------------------------------------------------------------------------------
def test_recompute_needs_rows(run: Run, tmp_path: Path) -> None:
    code, _, err = run("recompute", written(tmp_path, step(1)))
    assert code == 2
    assert "SGLANG_DDTREE_GUARD_CAPTURE=qkv" in err


@pytest.mark.parametrize(
    "change",
    [{"tree__parents": None}, {"layout__prefix_lens": np.array([5, 4, 1])},
     {"attention__output": np.zeros((10, 2, 3), np.float32)},
     {"attention__k_prefix": np.zeros((7, 1, 4), np.float32)},
     {"tree__parents": np.full((2, 5), 4)}],
    ids=["no tree", "lengths", "output", "prefix", "order"],
)  # fmt: skip
def test_rows_that_do_not_fit_are_refused(
    run: Run, tmp_path: Path, change: dict[str, object]
) -> None:
    path = written(tmp_path, target_step().replace(**change))
    code, out, err = run("recompute", path)
    assert (code, out) == (4, "")
    assert err.count("\n") == 1


def test_recompute_runs_without_torch(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("recompute", written(tmp_path, target_step()))
    assert code == 1  # its output rows are random
    assert "request 0 (rid r0), row 0" in out
    assert run("recompute", written(tmp_path, target_step()), "--tolerance=0")[0] == 2
