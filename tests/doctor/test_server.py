"""`doctor --url`: sound, garbled and hostile servers; what it sends, and what it never shows."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ddtree_guard.doctor import canary
from ddtree_guard.doctor.document import schema
from ddtree_guard.testing.doctor_server import serving

Run = Callable[..., tuple[int, str, str]]
Info = dict[str, Any]
PLAIN = {"speculative_algorithm": None, "speculative_num_draft_tokens": None}


def asked(run: Run, info: Any, kind: str = "sound", *more: str, **changes: Any) -> Any:
    """(exit code, JSON document, the server)."""
    with serving(info, kind, **changes) as server:
        code, out, err = run("--url", server.url, "--json", *more)
        assert err == ""
        found = json.loads(out)
        jsonschema.validate(found, schema())
        return code, found, server


@pytest.mark.parametrize(
    ("kind", "garbled"),
    [("sound", False), ("garbled", True), ("ties", False), ("loops", False), ("broken-text", True)],
)
def test_canaries_tell_garbled_from_sound(run: Run, info: Info, kind: str, garbled: bool) -> None:
    code, found, _ = asked(run, info, kind)
    assert found["canaries"]["garbled"] is garbled
    assert code == found["exit"] == int(garbled)
    assert found["verdict"].startswith("GARBLED" if garbled else "NOTHING WRONG FOUND")
    assert (found["change"] == "--speculative-ddtree-budget 7") is garbled


def test_the_oracle_asks_for_one_token_of_each_prefix(run: Run, info: Info) -> None:
    _, found, server = asked(run, info, "garbled")
    ones = [body for body in server.asked if body["sampling_params"]["max_new_tokens"] == 1]
    assert len(ones) == len(canary.PROMPTS)
    first = ones[0]["input_ids"]
    assert [len(p) for p in first] == list(range(len(first[0]), len(first[0]) + canary.PREFIXES))
    assert {body["sampling_params"]["temperature"] for body in server.asked} == {0.0}
    prompt = found["canaries"]["prompts"][1]
    assert prompt["first_other"] == 3  # where the stand-in begins to garble
    assert prompt["run"] >= canary.RUN


def test_a_run_that_the_model_means_is_no_garbling(run: Run, info: Info) -> None:
    _, found, _ = asked(run, info, "loops")
    assert found["canaries"]["prompts"][0]["run"] == canary.COUNT
    assert found["canaries"]["garbled"] is False


def test_without_token_ids_only_the_looks_decide(run: Run, info: Info) -> None:
    code, found, _ = asked(run, info, "text-only")
    assert code == 0
    assert found["canaries"]["asked"] == 0
    assert "tokens against prefill" in [entry["what"] for entry in found["not_checked"]]


def test_a_server_without_a_tokenizer_gets_ids(run: Run, info: Info) -> None:
    _, found, server = asked(run, {**info, "skip_tokenizer_init": True}, tokenizes=False)
    assert found["canaries"]["garbled"] is False
    assert all("text" not in body for body in server.asked)


def test_a_fork_is_wrong_by_its_configuration_even_with_clean_canaries(
    run: Run, fork: Info
) -> None:
    code, found, _ = asked(run, fork)
    assert code == 1
    assert found["uses"] == "stock"
    assert "verifies 17 rows per request (budget 16) with a width of 8" in found["verdict"]
    assert found["change"] == "--speculative-ddtree-budget 7"
    assert {f["rule"] for f in found["stock"]["findings"]} >= {"CFG1", "W1", "W3", "W8"}
    assert found["known_faults"][0]["id"] == "verify-width-from-server-argument"


def test_what_no_guard_would_check_there_is_said_with_the_reason(run: Run, fork: Info) -> None:
    with serving({**fork, "attention_backend": "fa3"}) as server:
        _, out, _ = run("--url", server.url)
    said = " ".join(out.split())
    assert "W1, W2, W3" in said
    assert "fa3 keeps its offsets in a plan that this version does not read" in said


def test_the_same_fork_at_budget_7_is_right(run: Run, fork: Info) -> None:
    code, found, _ = asked(run, {**fork, "speculative_ddtree_budget": 7})
    assert code == 0
    assert found["verdict"].startswith("NOTHING WRONG FOUND")


def test_a_fault_that_comes_out_now_and_then_is_in_the_answer(run: Run, fork: Info) -> None:
    ngram = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 16}
    bare = {name: value for name, value in fork.items() if "ddtree" not in name}
    code, found, _ = asked(run, {**bare, **ngram})
    assert code == 0  # and it is no reason to stop a roll-out
    assert found["verdict"].startswith("NOTHING WRONG FOUND: no rule of ")
    sure = [fault for fault in found["known_faults"] if fault["sure"]]
    assert len(sure) >= 2
    assert f"a known fault (and {len(sure) - 1} more, below): " in found["verdict"]
    assert sure[0]["title"] in found["verdict"]
    assert found["change"] == sure[0]["change"] != ""


def test_ddtree_of_this_package_tells_its_budget_in_the_schedulers_state(
    run: Run, info: Info
) -> None:
    assert "speculative_ddtree_budget" not in info
    _, found, _ = asked(run, info)
    sizes = found["deployment"]
    assert (sizes["budget"], sizes["block"], sizes["declared"], sizes["w"]) == (16, 8, 17, 17)
    assert found["uses"] == "unknown"


def test_a_server_without_speculation(run: Run, info: Info) -> None:
    code, found, _ = asked(run, {**info, **PLAIN})
    assert code == 0
    assert found["verdict"].startswith("NOTHING TO VERIFY")


def test_a_garbled_server_without_speculation_has_another_cause(run: Run, info: Info) -> None:
    code, found, _ = asked(run, {**info, **PLAIN}, "garbled")
    assert code == 1
    assert found["change"].startswith("no draft is configured")


def test_an_older_server_answers_at_the_old_path(run: Run, info: Info) -> None:
    code, _, _ = asked(run, info, info_paths=("/get_server_info",))
    assert code == 0


def test_the_guard_shows_in_the_metrics(run: Run, info: Info) -> None:
    metrics = '# HELP\nsglang:ddtree_guard_armed{rank="TP0"} 1.0\n'
    assert asked(run, info, metrics=metrics)[1]["armed_there"] == "armed"
    assert "NOT" in asked(run, info, metrics=metrics.replace("1.0", "0.0"))[1]["armed_there"]


def test_no_canaries_sends_no_prompt_and_decides_nothing_it_cannot(run: Run, info: Info) -> None:
    code, found, server = asked(run, info, "sound", "--no-canaries")
    assert server.asked == []
    assert code == 3
    assert found["verdict"].startswith("UNDECIDED")


def test_a_server_that_does_not_generate_is_undecided(run: Run, info: Info) -> None:
    code, found, _ = asked(run, info, generates=False)
    assert code == 3
    assert "does not support generation" in found["verdict"]


@pytest.mark.parametrize("as_json", [False, True])
def test_secrets_of_the_server_are_never_shown(run: Run, info: Info, as_json: bool) -> None:
    assert info["api_key"] == "sk-very-secret"
    with serving(info, api_key="sk-very-secret") as server:
        more = ["--json"] if as_json else []
        _, out, err = run("--url", server.url, "--api-key", "sk-very-secret", *more)
    assert "secret" not in out + err
    assert info["model_path"] not in out


def test_a_key_is_sent_and_its_lack_is_said(run: Run, info: Info, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-1\n")
    with serving(info, api_key="sk-1") as server:
        assert run("--url", server.url, "--api-key", f"@{file}")[0] == 0
        code, _, err = run("--url", server.url)
        assert code == 3
        assert "pass the server's with --api-key" in err
        assert run("--url", server.url, "--api-key", "wrong")[0] == 3


def test_a_base_path_is_kept(run: Run, info: Info) -> None:
    assert asked(run, info, base="/v2/model")[0] == 0


HOSTILE = {
    "html": "answers with HTML; that is not an SGLang server",
    "huge": "answers with more than 8 MiB",
    "slow": "did not answer within 0 s",
    "drip": "did not answer within 0 s",
    "silent": "did not answer within 0 s",
    "nested": "answers with no JSON",
    "list": "holds no server arguments of SGLang",
    "foreign": "holds no server arguments of SGLang",
    "redirect": "redirects (HTTP 307); give the server's own address",
    "fails": "answers with HTTP 500: scheduler died\\u001b[31m",
    "garbage": "gave no HTTP answer",
}


@pytest.mark.parametrize("act", HOSTILE)
def test_a_hostile_answer_is_one_sentence_and_exit_3(run: Run, info: Info, act: str) -> None:
    with serving(info, hostile=act) as server:
        seconds = "0.4" if act in ("slow", "silent", "drip") else "20"
        code, out, err = run("--url", server.url, "--timeout", seconds)
    assert (code, out) == (3, "")
    assert HOSTILE[act] in err
    assert err.count("\n") == 1


def test_a_key_does_not_follow_a_redirect(run: Run, info: Info) -> None:
    with serving(info, hostile="redirect") as server:
        run("--url", server.url, "--api-key", "sk-1")
        assert len(server.seen) == 1


def test_nothing_listens(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code, _, err = run("--url", f"http://127.0.0.1:{port}")
    assert code == 3
    assert "connection refused" in err
    code, out, _ = run("--url", f"http://127.0.0.1:{port}", "--json")
    assert json.loads(out)["exit"] == code == 3


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--url", "ftp://x"], "is not an http or https URL"),
        (["--url", ""], "is not an http or https URL"),
        (["--url", "http://h:99999"], "is not a URL"),
        (["--url", "http://[::1"], "is not a URL"),
        (["--url", "http://me:pw@h"], "holds a user name or a password"),
        (["--url", "http://h/?a=1"], "holds more than an address"),
        (["--url", "http://h/ x"], "holds more than an address"),
        (["--url", "http://h\x1b[31m"], "is not a URL"),
        (["--url", "http://h", "--timeout", "0"], "--timeout is 0.0"),
        (["--url", "http://h", "--timeout", "nan"], "--timeout is nan"),
        (["--url", "http://h", "--api-key", ""], "--api-key is empty"),
        (["--url", "http://h", "--api-key", "a\nb"], "no HTTP header can hold"),
        (["--url", "http://h", "--api-key", "@/nowhere/x"], "cannot be read"),
        (["--url", "http://h", "--", "--model-path", "x"], "not both"),
        (["--no-canaries"], "--no-canaries is for --url"),
        (["--api-key", "x"], "--api-key is for --url"),
    ],
)
def test_usage(run: Run, argv: list[str], words: str) -> None:
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert words in err


def test_the_text_fits_100_columns_and_starts_with_the_verdict(run: Run, fork: Info) -> None:
    with serving(fork, "garbled") as server:
        code, out, _ = run("--url", server.url)
    assert code == 1
    lines = out.splitlines()
    assert lines[0].startswith("GARBLED: ")
    assert lines[1] == "change:  --speculative-ddtree-budget 7"
    assert max(map(len, lines)) <= 100
    assert "W3 mask-offset-gap: mask_indptr[1] - mask_indptr[0] = 360" in out
    assert "17*(37+17) = 918" in " ".join(out.split())
    assert "https://github.com/sgl-project/sglang/pull/29907" in out
    assert lines[-2].startswith("checked: 14 rules on the configuration")
