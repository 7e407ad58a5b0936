"""The demo: its JSON, its verdict in both directions, and the sentences where it cannot run."""

import dataclasses
import importlib.metadata
import importlib.util
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddtree_guard import cli, config, demo
from ddtree_guard.config import PREFIX
from ddtree_guard.guard import Guard
from ddtree_guard.report import story
from ddtree_guard.step import Step
from ddtree_guard.testing.steps import sound_step

KEYS = ["name", "budget", "block", "backend", "path", "rows", "wrong_rows", "max_error", "rules"]


def installed() -> str | None:
    """Why the real demo cannot run here, or None."""
    if importlib.util.find_spec("sglang") is None:
        return "SGLang is not installed"
    if not importlib.metadata.version("sglang").startswith("0.5.16"):
        return "the demo shows SGLang 0.5.16"
    plugins = importlib.metadata.entry_points(group="sglang.srt.plugins")
    if "ddtree_guard" not in {plugin.name for plugin in plugins}:
        return "this checkout is not installed, so SGLang cannot find its plugin: pip install -e ."
    return None


real = pytest.mark.skipif(installed() is not None, reason=str(installed()))


@pytest.mark.sglang
@real
def test_the_incident_comes_out_as_it_must(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ddtree_guard", "demo", "--json", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert list(told) == ["experiments", "dump", "recheck_exit"]
    assert [list(experiment) for experiment in told["experiments"]] == [KEYS] * 5
    assert told["recheck_exit"] == 1
    assert Path(told["dump"], "manifest.json").is_file()
    for row in told["experiments"]:
        broken = row["backend"] == "stock" and row["budget"] == 16
        assert row["rows"] == 2 * (row["budget"] + 1)
        assert (row["wrong_rows"] > 8) is broken
        assert (row["max_error"] > 1e-5) is broken
        assert bool(row["rules"]) is broken
    assert "importing SGLang" in done.stderr


SABOTAGE = """
import sys
from ddtree_guard.testing import standins
build = standins.build_backend
def stock(case, choice="stock", draft=False):
    return build(case, "stock", draft)
standins.build_backend = stock
from ddtree_guard.cli import main
sys.exit(main(["demo", "--out", sys.argv[1]]))
"""


@pytest.mark.sglang
@real
def test_a_corrected_backend_that_is_not_makes_the_demo_fail(tmp_path: Path) -> None:
    # TRITON_INTERPRET must be set before Triton is imported; the stand-ins import it first here.
    program = "import os; os.environ['TRITON_INTERPRET'] = '1'\n" + SABOTAGE
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "NOT as the incident says it must" in done.stdout
    assert "budget-16-corrected-eager, budget-16-corrected-graph" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def step_of(plan: demo.Experiment) -> Step:
    lanes = 2 if plan.path == "graph" else None
    step = sound_step(3, lens=(37, 21), w=plan.budget + 1, padded_bs=lanes)
    if plan.clean:
        return step
    lens, width = step.layout.prefix_lens, 8
    return step.replace(
        layout__qo_indptr=np.arange(3) * width,
        layout__mask_indptr=np.concatenate([[0], np.cumsum(width * (lens + width))]),
    )


def result_of(plan: demo.Experiment) -> demo.Result:
    step, wrong = step_of(plan), 0 if plan.clean else 33
    error = 3.6e-7 if plan.clean else 3.4
    return demo.Result(plan, 2 * step.w, wrong, error, step, Guard().check(step).findings)


RESULTS = [result_of(plan) for plan in demo.EXPERIMENTS]


def test_synthetic_results_come_out_as_expected() -> None:
    assert [result.as_expected for result in RESULTS] == [True] * 5
    telling = RESULTS[1].telling
    assert telling is not None
    assert telling.request == 0
    assert "8 query rows, not 17" in telling.headline


@pytest.mark.parametrize(
    ("at", "changes"),
    [
        (0, {"wrong_rows": 1}),
        (0, {"findings": RESULTS[1].findings}),
        (1, {"wrong_rows": 0}),
        (1, {"findings": ()}),
        (1, {"findings": tuple(f for f in RESULTS[1].findings if f.rule == "W3")}),
        (1, {"findings": (dataclasses.replace(RESULTS[1].telling, request=None),)}),  # type: ignore[type-var]
    ],
    ids=[
        "wrong row",
        "false alarm",
        "no wrong row",
        "silent guard",
        "without the two widths",
        "without the request",
    ],
)
def test_a_result_that_departs_is_noticed(at: int, changes: dict[str, Any]) -> None:
    assert not dataclasses.replace(RESULTS[at], **changes).as_expected


def test_an_infinite_error_is_null_in_json() -> None:
    values = dataclasses.replace(RESULTS[0], max_error=math.nan).as_json()
    assert values["max_error"] is None
    assert list(values) == KEYS


def test_the_recheck_runs_alone_and_light(tmp_path: Path) -> None:
    checked = demo.recheck(demo.write_dump(RESULTS, str(tmp_path)))
    assert (checked.exit_code, checked.loaded) == (1, ())
    assert checked.summary.startswith("checked 2 steps")
    sound = demo.recheck(demo.write_dump(RESULTS[:1], str(tmp_path)))
    assert sound.exit_code == 0
    assert not sound.as_expected


def test_the_recheck_would_notice_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text("import torch")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(filter(None, sys.path))}")
    assert demo.recheck(demo.write_dump(RESULTS, str(tmp_path))).loaded == ("torch",)


def told(capsys: pytest.CaptureFixture[str], results: list[demo.Result], good: bool) -> str:
    story.tell(results, 8, Path("/dumps/d1"), demo.Recheck(1, "checked 2 steps", ()), good)
    return capsys.readouterr().out


def test_the_story_walks_the_chain(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, RESULTS, True)
    words = ("DDTree itself?", "the larger tree?", "CUDA graphs?", "the tree mask?", "the width?")
    places = [text.index(word) for word in words]
    assert places == sorted(places)
    for word in ("33 of 34", "0 of 34", "covers 8 query rows, not 17", "expected 1*w = 17",
                 "usual cause", "belong to nobody", "mask of request 1", "/dumps/d1", "exit 1",
                 "no: read at wrong places", "Everything came out"):  # fmt: skip
        assert word in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("  ")) <= 100


def test_the_story_names_what_departed(capsys: pytest.CaptureFixture[str]) -> None:
    bad = [*RESULTS[:4], dataclasses.replace(RESULTS[4], wrong_rows=3)]
    text = told(capsys, bad, False)
    assert "NOT as the incident says it must: budget-16-corrected-graph" in text


def test_a_mask_that_is_itself_wrong_is_not_excused() -> None:
    step = RESULTS[1].step
    assert story.mask_errors(step) == 0
    cells = step.mask.cells.copy()
    cells[37] ^= 1
    assert story.mask_errors(step.replace(mask__cells=cells)) == 1


def missing(*names: str) -> Callable[[str], object]:
    return lambda name: None if name in names else object()


def release(number: str) -> Callable[[str], str]:
    return lambda name: number


ENVIRONMENTS = {
    "no SGLang at all": (
        missing("sglang"),
        release("-"),
        "sglang is not installed; run `make demo` in a checkout, which installs",
    ),
    "no torch": (missing("torch", "triton"), release("-"), "torch, triton are not installed"),
    "a later release": (missing(), release("0.5.20"), "up to 0.5.16, but 0.5.20 is installed"),
    "a later fork": (missing(), release("0.5.17+corp.42"), "but 0.5.17+corp.42 is installed"),
    "not installed": (missing(), release("0.5.16+corp.42"), "ddtree-guard is not installed"),
}


@pytest.mark.parametrize("case", ENVIRONMENTS)
def test_an_environment_that_does_not_fit_is_exit_3_and_a_sentence(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find, version, words = ENVIRONMENTS[case]
    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    assert cli.main(["demo"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


SETTINGS = {
    "": ("bogus", "SGLANG_DDTREE_GUARD=bogus is not a mode"),
    "_CAPTURE": ("qkv", "SGLANG_DDTREE_GUARD_CAPTURE=qkv is refused"),
    "_DUMP_KEEP": ("x", "SGLANG_DDTREE_GUARD_DUMP_KEEP=x is not a whole number"),
    "_RULES": ("FOO", "no rule is called 'FOO'"),
}


@pytest.mark.parametrize("suffix", SETTINGS)
def test_a_wrong_setting_is_told_before_anything_runs(
    suffix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    value, words = SETTINGS[suffix]
    monkeypatch.setenv(PREFIX + suffix, value)
    assert cli.main(["demo"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert "pip install" not in err


def test_a_folder_that_cannot_be_written_is_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--out", str(tmp_path / "file")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "give a folder that can be written with --out" in err


def test_the_settings_of_a_server_do_not_reach_the_experiments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(PREFIX, "raise")
    monkeypatch.setenv(f"{PREFIX}_DUMP_KEEP", "3")
    monkeypatch.setenv(f"{PREFIX}IAN", "another program's")
    config.unset()
    assert [name for name in os.environ if name.startswith(PREFIX)] == [f"{PREFIX}IAN"]


def test_an_unwritable_folder_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(cli.UsageError, match="give a folder that can be written with --out"):
        demo.write_dump(RESULTS, str(tmp_path / "file"))


def test_noise_is_kept_quiet_unless_the_work_fails(capfd: pytest.CaptureFixture[str]) -> None:
    stage = demo._Stage(io.StringIO())
    assert (
        stage.during("work", lambda: subprocess.run(["echo", "noise"], check=True).returncode) == 0
    )
    assert capfd.readouterr().out == ""

    def fail() -> None:
        subprocess.run(["echo", "the reason"], check=True)
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        stage.during("work", fail)
    assert "the reason" in capfd.readouterr().err
