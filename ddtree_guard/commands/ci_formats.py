"""The verdict of `ci-report` as JUnit XML and as GitHub annotations."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree

from ddtree_guard.render import plain

if TYPE_CHECKING:
    from ddtree_guard.commands.ci_report import Verdict
    from ddtree_guard.evidence import Process

ANNOTATIONS = 50  # GitHub shows no more of a step


def junit(verdict: Verdict) -> str:
    """One test case per process, and one for the run as a whole."""
    suite = ElementTree.Element("testsuite", name="ddtree-guard")
    failures = 0
    for process in verdict.processes:
        failures += _case(suite, process.name, _failure(process), process)
    failures += _case(suite, "the run as a whole", "\n".join(verdict.not_guarded), None)
    suite.set("tests", str(len(verdict.processes) + 1))
    suite.set("failures", str(failures))
    properties = ElementTree.Element("properties")
    for name, value in (
        ("steps_checked", verdict.checked), ("findings", sum(verdict.found.values())),
    ):  # fmt: skip
        ElementTree.SubElement(
            properties, "property", name=f"ddtree_guard_{name}", value=str(value)
        )
    suite.insert(0, properties)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, name: str, failure: str, process: Process | None) -> int:
    case = ElementTree.SubElement(suite, "testcase", classname="ddtree_guard", name=_clean(name))
    if process is not None:
        steps = f"{process.steps_checked} of {process.verify_steps} verify steps checked"
        ElementTree.SubElement(case, "system-out").text = steps
    if failure:
        head = failure.split("\n", 1)[0][:200]
        ElementTree.SubElement(case, "failure", message=_clean(head)).text = _clean(failure)
    return int(bool(failure))


def _failure(process: Process) -> str:
    """What is wrong with one process."""
    told = [f"NOT GUARDED: {process.problem}"] if process.problem else []
    told += [process.distrust] if process.distrust else []
    told += [f"{n} steps ran unchecked: {why}" for why, n in sorted(process.skipped.items())]
    told += [hit.text for hit in process.hits if not hit.latent]
    missing = process.found - type(process.found)(h.rule for h in process.hits if not h.latent)
    told += [f"{rule}: {n} more, counted only" for rule, n in sorted(missing.items())]
    return "\n\n".join(told)


def _clean(text: str) -> str:
    """Text without characters that XML cannot hold."""
    return "\n".join(plain(line) for line in text.split("\n"))


def github(verdict: Verdict) -> list[str]:
    """Workflow commands: one `::error` per rule and process, and per reason of distrust."""
    from ddtree_guard.commands.ci_report import first_hits, summary

    lines = [
        _command("error", f"ddtree_guard {hit.rule} in {process.name}", hit.text)
        for process, hit in first_hits(verdict)
    ]
    lines += [_command("error", "ddtree_guard not guarded", why) for why in verdict.not_guarded]
    level = "notice" if verdict.exit_code == 0 else "error"
    return [*lines[: ANNOTATIONS - 1], _command(level, "ddtree_guard", summary(verdict))]


def _command(level: str, title: str, message: str) -> str:
    return f"::{level} title={_escaped(title, True)}::{_escaped(message)}"


def _escaped(text: str, is_property: bool = False) -> str:
    """As the runner unescapes it; nothing in a finding can begin a command of its own."""
    text = _clean(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if is_property else text
