"""Running steps of SGLang's own backend, without a GPU: each trigger, read back, judged again."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from ddtree_guard import cli
from ddtree_guard.config import Config
from ddtree_guard.dump.find import find_dumps
from ddtree_guard.dump.read import Dump
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.guard import Guard
from ddtree_guard.recorder import Recorder
from ddtree_guard.step import Attention, Step
from ddtree_guard.testing.compare import differences

pytestmark = pytest.mark.sglang
LENS, BLOCK = (37, 21, 50), 8


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    """Three sound steps of budget 7, then two of budget 16: the incident. All with qkv rows."""
    from ddtree_guard.testing.cases import make_inputs
    from ddtree_guard.testing.standins import VerifyCase, build_backend, run_verify

    made = []
    for number, budget in enumerate((7, 7, 7, 16, 16)):
        lens = tuple(s + number for s in LENS)
        case = VerifyCase(lens=lens, budget=budget, block=BLOCK, seed=number)
        run = run_verify(build_backend(case), case)
        inputs = make_inputs(case)
        attention = Attention(
            q=inputs.q.numpy(), k=inputs.k.numpy(), v=inputs.v.numpy(),
            k_prefix=np.concatenate([k.numpy() for k, _ in inputs.prefix]),
            v_prefix=np.concatenate([v.numpy() for _, v in inputs.prefix]),
            output=run.output.reshape(-1, *run.output.shape[2:]),
        )  # fmt: skip
        tree = inputs.tree
        made.append(
            run.step.replace(
                attention=attention, who__step_id=100 + number, tree__parents=tree.parents,
                tree__depths=tree.depths, tree__sizes=tree.sizes,
            )
        )  # fmt: skip
    return made


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    config = Config(dump_dir=tmp_path, redact=False)
    made = Recorder(config, DumpWriter("run", config))
    yield made
    made.stop()
    assert made.faults == 0


def play(recorder: Recorder, steps: list[Step]) -> list[Path]:
    """What the hooks do for each step; returns the dumps of findings."""
    dumps = []
    for step in steps:
        recorder.step(step)
        found = Guard().check(step).findings
        if found:
            dumps.append(recorder.finding(step, found))
    return [path for path in dumps if path is not None]


def waited(root: Path) -> Dump:
    for _ in range(2400):
        if find_dumps(root):
            return Dump(find_dumps(root)[0])
        time.sleep(0.025)
    raise AssertionError("no dump was written")


def test_a_finding_offline_is_the_finding_online(recorder: Recorder, steps: list[Step]) -> None:
    (path,) = play(recorder, steps)  # the second bad step comes within the quiet time
    dump, bad = Dump(path), steps[3]
    online = Guard().check(bad)
    assert "W3" in online.rules
    assert dump.step_ids() == [100, 101, 102, 103]
    assert differences(bad, dump.step(3)) == []  # bit for bit, q, k and v included
    assert Guard().check(dump.step(3)) == online
    assert [finding for _, finding in dump.findings()] == list(online.findings)
    assert [Guard().check(step).findings for step in list(dump.steps())[:3]] == [()] * 3


def test_steps_of_the_ring_lead_to_the_same_layout_findings(
    recorder: Recorder, steps: list[Step]
) -> None:
    play(recorder, steps[:4])
    path = recorder.trigger("signal", "SIGUSR2")
    assert path is not None
    ring = Guard().check(Dump(path).step(3))
    whole = Guard().check(steps[3])
    assert set(ring.rules) <= set(whole.rules)
    assert {"W1", "W3"} & set(ring.rules) == {"W1", "W3"} & set(whole.rules) != set()


def test_the_signal_dumps_the_running_process(recorder: Recorder, steps: list[Step]) -> None:
    play(recorder, steps[:3])
    recorder.start(on_signal=True)
    signal.raise_signal(signal.SIGUSR2)
    dump = waited(recorder.config.dump_dir)
    assert dump.trigger["kind"] == "signal"
    assert dump.step_ids() == [100, 101, 102]


def test_a_heuristic_dumps(recorder: Recorder, steps: list[Step]) -> None:
    play(recorder, steps[:2])
    rids = steps[1].who.rids
    for _ in range(40):
        recorder.accepted(101, rids, [[0], [1, 2], [3]])
    dump = waited(recorder.config.dump_dir)
    assert dump.trigger["kind"] == "heuristic"


def test_a_crash_dumps(recorder: Recorder, steps: list[Step]) -> None:
    def serve() -> None:
        with recorder.crash_path():
            play(recorder, steps[:2])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        serve()
    dump = waited(recorder.config.dump_dir)
    assert (dump.trigger["kind"], len(dump)) == ("crash", 2)


def test_the_request_is_told_what_its_steps_were(
    recorder: Recorder, steps: list[Step], capsys: pytest.CaptureFixture[str]
) -> None:
    play(recorder, steps[:4])
    rid = steps[0].who.rids[2]
    assert cli.main(["request", rid, str(recorder.config.dump_dir)]) == 1
    assert "4/4 steps checked, " in capsys.readouterr().out


def test_recompute_finds_the_rows_that_the_kernel_got_wrong(
    recorder: Recorder, steps: list[Step], capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = play(recorder, steps[:4])
    assert cli.main(["recompute", str(path), "--kernel", "--json"]) == 1
    (told,) = json.loads(capsys.readouterr().out)["steps"]
    assert told["rows"] == 51
    assert len(told["wrong"]) > 25
    assert told["kernel_max_error"] < 1e-5  # the kernel is right on offsets from the tree
    assert cli.main(["recompute", str(path)]) == 1
    request, row = told["wrong"][0]
    assert f"first: request {request} (rid r{request}), row {row}:" in capsys.readouterr().out


def test_recompute_acquits_sound_rows(
    tmp_path: Path, steps: list[Step], capsys: pytest.CaptureFixture[str]
) -> None:
    path = DumpWriter("run", Config(dump_dir=tmp_path, redact=False)).write(steps[:2])
    assert cli.main(["recompute", str(path), "--kernel"]) == 0
    out = capsys.readouterr().out
    assert "recomputed 48 rows of 2 steps with dense attention: all right" in out
    assert "SGLang's kernel on offsets from the tree is right as well" in out
