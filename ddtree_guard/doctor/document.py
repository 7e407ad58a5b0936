"""A diagnosis as JSON, in the shape of the shipped `doctor.schema.json`."""

from __future__ import annotations

import dataclasses
import json
from importlib.resources import files
from typing import Any

from ddtree_guard.doctor.diagnosis import Diagnosis, headline
from ddtree_guard.doctor.memory import Memory
from ddtree_guard.doctor.predict import Prediction
from ddtree_guard.doctor.text import summary
from ddtree_guard.render import as_json

SCHEMA = "ddtree-guard-doctor/1"
_SIZES = (
    "release", "algorithm", "backend", "w", "declared", "block", "budget", "steps", "topk",
    "page_size", "context", "lanes", "graphs", "kv_canary", "tp_size",
)  # fmt: skip


def schema() -> dict[str, Any]:
    """The JSON schema of `document`."""
    text = files("ddtree_guard.doctor").joinpath("doctor.schema.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def document(d: Diagnosis) -> dict[str, Any]:
    """The diagnosis as JSON values."""
    said, change = headline(d)
    return {
        "schema": SCHEMA,
        "way": d.way,
        "exit": d.exit_code,
        "verdict": said,
        "change": change or None,
        "summary": summary(d),
        "url": d.url,
        "environment": _environment(d),
        "deployment": _deployment(d),
        "uses": d.uses if d.deployment is not None else None,
        "stock": _prediction(d.stock),
        "corrected": _prediction(d.corrected),
        "known_faults": [_fault(match, match in d.known_here) for match in d.known],
        "memory": _memory(d.memory),
        "refused": d.refused or None,
        "canaries": _canaries(d),
        "silent": d.silent or None,
        "armed_there": d.armed_there or None,
        "not_checked": [{"what": what, "why": why} for what, why in d.not_checked],
    }


def _environment(d: Diagnosis) -> dict[str, Any] | None:
    if d.survey is None:
        return None
    survey = d.survey
    names = ("sglang", "hooks", "plugin")
    return {
        "ended": survey.get("ended") or None,
        "versions": survey.get("environment", {}).get("versions", {}),
        "gpu": survey.get("environment", {}).get("gpu"),
        **{name: survey.get(name) for name in names},
        "troubles": [dataclasses.asdict(trouble) for trouble in d.troubles],
    }


def _deployment(d: Diagnosis) -> dict[str, Any] | None:
    if d.deployment is None:
        return None
    sizes = {name: getattr(d.deployment, name) for name in _SIZES}
    return {**sizes, "tree": d.deployment.tree, "unknown": dict(d.deployment.unknown)}


def _prediction(seen: Prediction | None) -> dict[str, Any] | None:
    if seen is None:
        return None
    return {
        "wrong": seen.wrong,
        "findings": [as_json(finding, step) for step, finding in seen.findings],
        "rules_checked": list(seen.checked),
        "rules_exempt": dict(seen.exempt),
        "rules_not_checked": {entry.rule: entry.why for entry in seen.not_checked},
    }


def _fault(match: Any, counts: bool) -> dict[str, Any]:
    fault = match.fault
    return {
        "id": fault.id,
        "title": fault.title,
        "incident": fault.incident or None,
        "effect": fault.effect,
        "sure": match.sure,
        "cured": not counts,
        "open": list(match.open),
        "links": list(fault.links),
        "change": fault.change,
    }


def _memory(memory: Memory | None) -> dict[str, Any] | None:
    if memory is None:
        return None
    return {
        "lanes": memory.lanes,
        "w": memory.w,
        "context": memory.context,
        "logits_known": memory.logits_known,
        "stock_bytes": memory.stock.total,
        "corrected_bytes": memory.corrected.total,
    }


def _canaries(d: Diagnosis) -> dict[str, Any] | None:
    judged = d.canary
    if judged is None:
        return None
    return {
        "garbled": judged.garbled,
        "why": judged.why,
        "requests": judged.requests,
        "asked": judged.asked,
        "other": judged.other,
        "prompts": [
            {
                "prompt": canary.prompt,
                "same": canary.same,
                "run": canary.run,
                "replaced": canary.replaced,
                "asked": canary.asked,
                "other": canary.other,
                "first_other": canary.first_other,
                "text": canary.among.text,
                "ids": list(canary.among.ids),
            }
            for canary in judged.canaries
        ],
    }
