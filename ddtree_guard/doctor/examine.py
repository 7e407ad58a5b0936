"""The three ways in: this environment, serve arguments, and a running server."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ddtree_guard.ddtree.limits import check_arguments, check_backends, check_budget, check_model
from ddtree_guard.doctor import canary, look
from ddtree_guard.doctor.client import Client, NoAnswer, Refused
from ddtree_guard.doctor.deployment import FIELDS, Deployment, deployment_of
from ddtree_guard.doctor.diagnosis import ARGUMENTS, BARE, URL, Diagnosis
from ddtree_guard.doctor.faults import matches
from ddtree_guard.doctor.memory import verify_memory
from ddtree_guard.doctor.model import model_of, read_model
from ddtree_guard.doctor.predict import corrected_here, predict
from ddtree_guard.errors import GuardError
from ddtree_guard.hooks.facts import BUDGET, GENERATIONS, VARIES, Facts, generation_of

_ARMED = "ddtree_guard_armed"
_MODEL_FLAGS = ("--model-path", "--model")
_DRAFT_FLAGS = ("--speculative-draft-model-path", "--speculative-draft-model")


def environment() -> Diagnosis:
    """Bare: what is installed, and whether a server that is started here would be guarded."""
    return Diagnosis(BARE, survey=look.look(None))


def arguments(words: Sequence[str]) -> Diagnosis:
    """What a server started here with these arguments would do."""
    survey = look.look(words)
    d = Diagnosis(ARGUMENTS, survey=survey)
    parsed = survey.get("arguments")
    if not isinstance(parsed, Mapping):
        why = "SGLang is not importable here" if not survey.get("ended") else survey["ended"]
        d.not_checked.append(("the serve arguments", f"{why}, and only SGLang can read them"))
        return d
    if parsed["status"] in ("usage", "refused"):
        d.refused, d.refusal_code = parsed["why"], parsed["exit_code"]
        return d
    if parsed["status"] == "raw":
        d.not_checked.append(("SGLang's own defaults", f"it could not apply them: {parsed['why']}"))
    d.notes += [f"assumed: {text}" for text in parsed["assumed"]]
    _note_backend(d, parsed["values"], words)
    told = parsed.get("model")
    model = model_of(told) if isinstance(told, Mapping) else read_model(_flag(words, _MODEL_FLAGS))
    made = deployment_of(
        parsed["values"], str(survey["sglang"]["release"]), model,
        read_model(_flag(words, _DRAFT_FLAGS)),
    )  # fmt: skip
    if made.ddtree and made.block and survey["plugin"].get("incident"):
        made = dataclasses.replace(made, declared=made.block)
        d.notes.append("SGLANG_DDTREE_INCIDENT=on: the stock backend is told the draft block")
    facts = next((f for f in GENERATIONS if f.name == survey["sglang"]["generation"]), None)
    _predict(d, made, facts)
    d.uses = _backend_here(d, made, facts)
    _limits(d, made)
    return d


def _flag(words: Sequence[str], names: Sequence[str]) -> str | None:
    """The value of a flag, written with a space or with an equals sign."""
    for at, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in names:
            return value or (words[at + 1] if at + 1 < len(words) else None)
    return None


def _note_backend(d: Diagnosis, values: Mapping[str, Any], words: Sequence[str]) -> None:
    given = any(word.partition("=")[0].endswith("attention-backend") for word in words)
    if not given and values.get("attention_backend") and d.notes:
        chosen = values["attention_backend"]
        d.not_checked.append(
            ("the attention backend on your GPU", f"none is given, and SGLang chooses it by GPU; "
             f"{chosen} is its choice without one")
        )  # fmt: skip


def _predict(d: Diagnosis, made: Deployment, facts: Facts | None) -> None:
    """Fill in what the rules and the table say of a deployment."""
    d.deployment = made
    d.facts = facts if made.backend == "triton" else None
    d.known = matches(made)
    d.stock = predict(made, d.facts, d.known)
    if made.ddtree and d.facts is not None:
        d.corrected = predict(made, d.facts, d.known, corrected=True)
        d.memory = verify_memory(made, d.facts)
    elif made.tree:
        d.memory = verify_memory(made, d.facts)
    if made.algorithm and made.backend not in (None, "triton"):
        d.not_checked.append(
            (f"offsets and masks on {made.backend}",
             "its plan is its own; configuration and known faults only")
        )  # fmt: skip
    if made.backend == "triton" and facts is None:
        d.not_checked.append(
            ("what this backend builds", f"release {made.release} is in no row of the table")
        )
    for what, why in made.unknown.items():
        d.not_checked.append((what, why))


def _backend_here(d: Diagnosis, made: Deployment, facts: Facts | None) -> str:
    """The backend that the target of a server started here would get."""
    assert d.survey is not None
    plugin = d.survey["plugin"]
    if not plugin["loaded"] or d.corrected is None or plugin.get("incident"):
        return "stock"
    choice = plugin.get("backend", "auto")
    auto = corrected_here(made, facts) if choice == "auto" else choice == "corrected"
    return "unknown" if auto is None else "corrected" if auto else "stock"


def _limits(d: Diagnosis, made: Deployment) -> None:
    """What DDTREE of this package refuses when it starts, in its own words."""
    if not made.ddtree or made.arguments.get(VARIES) is not True:
        return  # a fork's DDTREE has limits of its own
    target = SimpleNamespace(sliding_window_size=made.model.window, token_to_kv_pool=None)
    try:
        check_arguments(SimpleNamespace(**made.arguments))
        if made.backend is not None:
            check_backends((made.backend,))
        if made.budget is not None:
            check_budget(made.budget, made.block)
        check_model(target, bool(made.model.recurrent))
    except GuardError as error:
        d.refused, d.refusal_code = str(error), error.exit_code


def server(client: Client, with_canaries: bool = True) -> Diagnosis:
    """A running server, from outside. Raises NoAnswer where it cannot be asked."""
    info = _server_info(client)
    release = str(info.get("version") or "unknown")[:60]
    values = _values(info)
    folder = values.get("model_path")
    model = read_model(folder if isinstance(folder, str) else None)
    drafts = values.get("speculative_draft_model_path")
    draft = read_model(drafts if isinstance(drafts, str) else None)
    d = Diagnosis(URL, url=client.address.text)
    made = deployment_of(
        {name: values[name] for name in FIELDS if name in values}, release, model, draft
    )
    _predict(d, made, generation_of(release))
    if made.ddtree and made.varies:
        d.uses = "unknown"
        d.notes.append(
            "it runs DDTREE of this package; whether its backend is the corrected one cannot be "
            "seen from outside"
        )
    _look_for_guard(d, client)
    if made.ddtree and d.armed_there:
        d.uses = "unknown"
    if with_canaries:
        _sing(d, client, values.get("skip_tokenizer_init") is True)
    else:
        d.not_checked.append(("its output", "--no-canaries was given"))
    return d


def _server_info(client: Client) -> dict[str, Any]:
    """What the server says of itself. Raises NoAnswer for what is not SGLang."""
    found: Any = None
    for path in ("/server_info", "/get_server_info"):
        try:
            found = client.get(path)
            break
        except Refused as error:
            if error.status not in (404, 405, 410):
                raise
    where = client.address.text
    if found is None:
        raise NoAnswer(
            f"{where} has neither /server_info nor /get_server_info; that is not an SGLang server, "
            "or a router stands before it; give the address of the server itself."
        )
    known = isinstance(found, dict) and {"attention_backend", "speculative_algorithm"} & set(found)
    if not known:
        raise NoAnswer(
            f"{where}/server_info answers with JSON that holds no server arguments of SGLang; "
            "check host and port."
        )
    return dict(found)


def _values(info: Mapping[str, Any]) -> dict[str, Any]:
    """Server arguments, with what only the scheduler's state tells (no field of SGLang's own)."""
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states else {}
    state = state if isinstance(state, Mapping) else {}
    values = dict(info)
    for name in (BUDGET, VARIES):
        if values.get(name) is None and state.get(name) is not None:
            values[name] = state[name]
    running = state.get("effective_max_running_requests_per_dp")
    if values.get("max_running_requests") is None and isinstance(running, int):
        values["max_running_requests"] = running
    return values


def _look_for_guard(d: Diagnosis, client: Client) -> None:
    """Whether the guard's metric says that it runs there."""
    text = client.text("/metrics")
    lines = [line for line in (text or "").splitlines() if _ARMED in line and line[:1] != "#"]
    if lines:
        armed = all(line.rsplit(" ", 1)[-1] in ("1", "1.0") for line in lines)
        d.armed_there = "armed" if armed else "installed and NOT armed"
    else:
        d.not_checked.append(
            ("each step of that server", "no guard is visible there (metrics are off, or it is not "
             "installed); canaries are samples")
        )  # fmt: skip


def _sing(d: Diagnosis, client: Client, ids_only: bool) -> None:
    try:
        d.canary = canary.sing(client, ids_only)
    except NoAnswer as error:
        d.silent = str(error).rstrip(".")
        d.not_checked.append(("its output", d.silent))
        return
    for text in d.canary.not_judged:
        what, _, why = text.partition(": ")
        d.not_checked.append((what, why))
