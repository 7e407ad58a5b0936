"""`doctor` bare and with arguments: what it makes of a survey: whole, half or none."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ddtree_guard import cli
from ddtree_guard.doctor import look
from ddtree_guard.doctor.diagnosis import BARE, Diagnosis, headline, troubles
from ddtree_guard.doctor.document import document, schema
from ddtree_guard.doctor.text import lines, words_of
from ddtree_guard.hooks import survey as child

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str, str]]
HOOK = {
    "part": "guard", "site": "build", "status": "matched", "required": True,
    "detail": "sglang.x.y", "how": "imported", "blocking": False,
}  # fmt: skip
SURVEY: dict[str, Any] = {
    "ended": "",
    "during": "",
    "environment": {"versions": {"ddtree_guard": "0.1.0", "python": "3.11.7"}, "gpu": "none"},
    "sglang": {
        "installed": True, "release": "0.5.16", "tested": "cpu-tested", "importable": True,
        "generation": "out-graph", "why": "", "unknown_buffers": [],
    },
    "hooks": [HOOK, {**HOOK, "site": "replay"}],
    "plugin": {
        "found": True, "excluded_by": None, "others": [], "loaded": True, "why": "",
        "mode": "log", "backend": "auto", "incident": False, "warnings": [],
    },
}  # fmt: skip
MOVED = {**HOOK, "status": "changed", "blocking": True, "detail": "has parameters (self, plan)"}
ARGS = {
    "status": "resolved", "why": "", "model": None, "assumed": [], "exit_code": 0,
    "values": {
        "speculative_algorithm": "DDTREE", "speculative_ddtree_budget": 16,
        "speculative_num_draft_tokens": 17, "speculative_dflash_block_size": 8,
        "speculative_ddtree_varies": True, "attention_backend": "triton", "page_size": 1,
        "context_length": 4096, "cuda_graph_config": {"decode": {"bs": [8]}},
        "max_running_requests": 8, "pp_size": 1,
    },
}  # fmt: skip


def survey(**changes: Any) -> dict[str, Any]:
    """A survey with parts changed: `plugin__loaded=False`."""
    found = copy.deepcopy(SURVEY)
    for path, value in changes.items():
        part, _, name = path.partition("__")
        if name:
            found[part][name] = value
        else:
            found[part] = value
    return found


@pytest.fixture
def surveyed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the next survey come out as given."""

    def use(**changes: Any) -> None:
        monkeypatch.setattr(look, "look", lambda words, timeout_s=0: survey(**changes))

    return use


SETTING = "SGLANG_DDTREE_GUARD=warn is not a mode. Use one of: off, log, raise."
CASES: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "ready": ({}, 0, "READY: a server started here", ""),
    "off": ({"plugin__mode": "off"}, 0, "READY, AND OFF", "SGLANG_DDTREE_GUARD=log"),
    "excluded": (
        {"plugin__excluded_by": "a,b", "plugin__loaded": False}, 3,
        "NOT GUARDED: plugin excluded by SGLANG_PLUGINS=a,b", "SGLANG_PLUGINS=a,b,ddtree_guard",
    ),
    "no entry point": ({"plugin__found": False, "plugin__loaded": False}, 3,
                       "cannot find the plugin", "`pip install .` in a checkout"),
    "not called": ({"plugin__loaded": False}, 3, "SGLang did not call it", "correct that"),
    "setting": ({"plugin__setting": SETTING}, 3, "warn is not a mode", "SGLANG_DDTREE_GUARD=log"),
    "rule": ({"plugin__setting": "no rule is called 'A22'. Nearest: A2"}, 3, "called 'A22'",
             "correct SGLANG_DDTREE_GUARD_RULES"),
    "hook": ({"hooks": [HOOK, MOVED]}, 3, "hook build (guard) is changed", "adapter"),
    "another hook": ({"hooks": [{**MOVED, "part": "DDTREE"}], "sglang__release": "0.5.20"}, 0,
                     "READY", ""),
    "old": ({"sglang__why": "expected SGLang >=0.5.12,<0.6, found 0.5.9"}, 3, "found 0.5.9",
            ">=0.5.12,<0.6"),
    "crash": ({"ended": "importing SGLang: killed by signal 11"}, 3, "by signal 11", "repair"),
    "none": ({"sglang__installed": False}, 3, "SGLang is not installed here", "where the server"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_survey_in_one_sentence(run: Run, surveyed: Callable[..., None], case: str) -> None:
    changes, code, words, change = CASES[case]
    surveyed(**changes)
    found, out, _ = run()
    assert found == code
    assert words in " ".join(out.split())
    assert change in out
    assert max(map(len, out.splitlines())) <= 100
    assert out.splitlines()[-1].startswith(("checked: ", "things not checked"))
    told = json.loads(run("--json")[1])
    jsonschema.validate(told, schema())
    assert told["exit"] == code


def judged(surveyed: Callable[..., None], run: Run, args: Any, **changes: Any) -> Any:
    """(exit code, document) of `doctor -- ARGUMENTS` after this survey."""
    surveyed(arguments={**ARGS, **args}, **changes)
    code, out, _ = run("--json", "--", "--model-path", "/nowhere")
    found = json.loads(out)
    jsonschema.validate(found, schema())
    assert run("--", "--model-path", "/nowhere")[0] == code
    return code, found


def test_with_the_plugin_the_corrected_backend_is_used(
    run: Run, surveyed: Callable[..., None]
) -> None:
    code, found = judged(surveyed, run, {})
    assert (code, found["uses"]) == (0, "corrected")
    assert found["stock"]["wrong"]
    assert not found["corrected"]["wrong"]


CHOICES = {
    "SGLANG_DDTREE_GUARD_BACKEND=auto": ({"plugin__backend": "stock"}, "smaller budget"),
    "SGLANG_DDTREE_INCIDENT=off": ({"plugin__incident": True}, "with a width of 8"),
}


@pytest.mark.parametrize("change", CHOICES)
def test_a_stock_backend_by_choice_is_wrong(
    run: Run, surveyed: Callable[..., None], change: str
) -> None:
    changes, words = CHOICES[change]
    code, found = judged(surveyed, run, {}, **changes)
    assert (code, found["uses"]) == (1, "stock")
    assert found["verdict"].startswith("WRONG: ")
    assert words in found["verdict"]
    assert found["change"] == change


def test_a_fork_without_the_plugin_is_wrong_and_says_what_to_do(
    run: Run, surveyed: Callable[..., None]
) -> None:
    values = {**ARGS["values"], "speculative_num_draft_tokens": 8}
    values.pop("speculative_ddtree_varies")
    code, found = judged(
        surveyed, run, {"values": values}, plugin__excluded_by="a", plugin__loaded=False
    )
    assert code == 1
    assert "with a width of 8" in found["verdict"]
    assert found["change"] == "SGLANG_PLUGINS=a,ddtree_guard"


REFUSALS = {
    "page": ({"page_size": 16}, "set --page-size 1"),
    "lora": ({"enable_lora": True}, "drop --enable-lora"),
    "backend": ({"attention_backend": "fa3"}, "set --attention-backend triton"),
    "block": ({"speculative_dflash_block_size": 1}, "a draft block of 2 to"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_ddtree_refuses_is_said_before_it_starts(
    run: Run, surveyed: Callable[..., None], case: str
) -> None:
    changes, words = REFUSALS[case]
    code, found = judged(surveyed, run, {"values": {**ARGS["values"], **changes}})
    assert code == (2 if case == "block" else 3)
    assert words in found["refused"]
    assert found["verdict"].startswith("WILL NOT START")
    assert found["change"]


def test_what_sglang_does_not_understand_is_usage(run: Run, surveyed: Callable[..., None]) -> None:
    said = {"status": "usage", "values": {}, "why": "unrecognized arguments: --foo", "exit_code": 2}
    assert judged(surveyed, run, said)[0] == 2
    flag = {**said, "why": "unrecognized arguments: --speculative-ddtree-budget 16"}
    code, found = judged(surveyed, run, flag)
    assert (code, "0.5.16 or 0.5.17" in found["change"]) == (3, True)


def test_raw_arguments_are_undecided_without_a_backend(
    run: Run, surveyed: Callable[..., None]
) -> None:
    values = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 4,
              "speculative_num_steps": 3, "speculative_eagle_topk": 1}  # fmt: skip
    raw = {"status": "raw", "values": values, "why": "OSError: no such model"}
    code, found = judged(surveyed, run, raw)
    assert code == 3
    assert found["verdict"] == "UNDECIDED: not known: attention backend"
    assert "--attention-backend" in found["change"]
    assert {entry["what"] for entry in found["not_checked"]} >= {"SGLang's own defaults", "model"}


def test_a_tree_on_a_model_that_is_not_here_is_undecided_and_not_wrong(
    run: Run, surveyed: Callable[..., None]
) -> None:
    """SGLang cannot read a model of a hub from here, so that block and context stay open."""
    values = {"speculative_algorithm": "DDTREE", "speculative_ddtree_budget": 16,
              "attention_backend": "triton"}  # fmt: skip
    raw = {"status": "raw", "values": values, "why": "OSError: no such model"}
    code, found = judged(surveyed, run, raw)
    assert (code, found["uses"]) == (3, "unknown")
    assert found["verdict"].startswith("UNDECIDED: not known: whether the corrected backend")
    assert found["change"] == "give --model-path as a local folder with its config.json"
    code, found = judged(surveyed, run, raw, plugin__backend="corrected")
    assert (code, found["uses"]) == (3, "corrected")
    assert "sliding-window" in found["verdict"]


def test_sglang_that_is_absent_reads_no_arguments(run: Run, surveyed: Callable[..., None]) -> None:
    surveyed(sglang__installed=False, hooks=[])
    code, out, _ = run("--", "--model-path", "x")
    assert code == 3
    assert "only SGLang can read them" in out


def test_a_pasted_command_is_cleaned() -> None:
    from ddtree_guard.hooks.arguments import serve_arguments

    words = ["A=1", "B=x", "python3", "-m", "sglang.launch_server", "--model-path", "m"]
    assert serve_arguments(words) == (["--model-path", "m"], {"A": "1", "B": "x"})
    assert serve_arguments(["--tp", "2"]) == (["--tp", "2"], {})


def test_the_words_for_a_bundle_hold_the_verdict_and_no_address() -> None:
    d = Diagnosis(BARE, survey=survey(plugin__mode="off"))
    words = words_of(d)
    assert words[0].startswith("doctor: READY, AND OFF")
    assert any("2 of 2 hooks matched" in line for line in words)
    assert all(line.startswith("doctor: ") for line in words)


def test_shadow_mode_says_its_line_where_it_is_on() -> None:
    said = "ddtree_guard shadow every=8 capture=meta layers=0/unknown"
    text = "\n".join(lines(Diagnosis(BARE, survey=survey(plugin__shadow=said))))
    assert "  shadow     every=8 capture=meta layers=0/unknown (layers are known once" in text
    assert "shadow" not in "\n".join(lines(Diagnosis(BARE, survey=survey(plugin__shadow=""))))


def test_hostile_words_of_an_environment_do_not_reach_the_terminal() -> None:
    bad = "\x1b[31m\nforged"
    d = Diagnosis(BARE, survey=survey(plugin__others=[bad], sglang__why=bad, plugin__why=bad))
    text = "\n".join(lines(d))
    assert "\x1b" not in text
    assert not any(line.startswith("forged") for line in text.splitlines())
    assert headline(d)[0]
    assert document(d)["exit"] == 3
    assert troubles(d.survey or {})


# --- the real child ---
@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A survey in a Python that has neither torch nor SGLang."""
    out = tmp_path_factory.mktemp("survey") / "out.json"
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'triton', 'sglang'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name.split('.')[0] in "
        "('torch', 'triton', 'sglang') else real(name, package)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from ddtree_guard.hooks.survey import main\n"
        f"sys.exit(main([{str(out)!r}, '--', '--model-path', 'x']))"
    )
    env = {"PYTHONPATH": str(ROOT), "SGLANG_DDTREE_GUARD_SHADOW_EVERY": "8"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, cwd=out.parent)
    return json.loads(out.read_text())


def test_without_torch_and_sglang_the_survey_is_whole(alone: Any) -> None:
    assert alone["during"] == ""
    assert alone["sglang"]["installed"] is False
    assert alone["environment"]["gpu"] == "none: torch is not installed"
    assert "arguments" not in alone
    assert alone["plugin"]["shadow"].startswith("does not load here: ModuleNotFoundError")
    d = Diagnosis(BARE, survey={**alone, "ended": ""})
    assert d.exit_code == 3
    assert "not installed here" in headline(d)[0]


def test_an_old_release_is_refused_by_the_real_child(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    for package in ("sglang", "sglang/srt"):
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13 is missing')")
    info = tmp_path / "sglang-0.5.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.9\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    code, out, _ = run("--", "--model-path", "x")
    said = " ".join(out.split())
    assert code == 3
    assert said.startswith("NOT GUARDED: expected SGLang >=0.5.12,<0.6")
    assert "0.5.9, untested" in said
    assert "libcudart.so.13 is missing" in said


def test_a_survey_that_dies_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(command: list[str], timeout_s: float) -> tuple[str, str]:
        Path(command[3]).write_text(json.dumps({"during": "sglang"}))
        return "killed by signal 11", "Segmentation fault"

    monkeypatch.setattr(look, "_run", dying)
    assert look.look(None)["ended"] == "importing SGLang: killed by signal 11"


def test_a_survey_that_does_not_begin_is_exit_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(look, "_run", lambda command, timeout_s: ("exit code 1", "boom"))
    assert cli.main(["doctor"]) == 3
    assert "did not begin (exit code 1): boom" in capsys.readouterr().err


def test_a_child_that_hangs_is_stopped() -> None:
    ended, _ = look._run([sys.executable, "-c", "import time; time.sleep(60)"], 0.3)
    assert ended == "stopped after 0 s"
    assert look._run(["/nowhere/python"], 1.0)[0].startswith("cannot start")


def test_a_step_that_ends_the_process_leaves_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends() -> Any:
        raise SystemExit(3)

    monkeypatch.setattr(child, "_gpu", lambda: "none")
    monkeypatch.setattr(child, "_sglang", ends)
    out = tmp_path / "out.json"
    assert child.main([str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["during"] == "sglang"
    assert "versions" in found["environment"]
    assert capsys.readouterr().err.splitlines()[-1] == "SystemExit: 3"


def test_the_doctor_itself_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom ddtree_guard.cli import main\n"
        "code = main(['doctor', '--url', 'http://127.0.0.1:9'])\n"
        "heavy = {'torch', 'triton', 'sglang', 'rich'} & {m.split('.')[0] for m in sys.modules}\n"
        "assert code == 3 and not heavy, (code, heavy)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT)})
