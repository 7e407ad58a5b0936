"""One self-contained HTML page about a dump: no script, no request, light and dark.

Every value comes from a server that misbehaves or from a file of a stranger, so each is escaped;
the page's own policy forbids scripts and requests besides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from string import Template
from typing import Any

from ddtree_guard import render
from ddtree_guard.commands.catalogue import advice
from ddtree_guard.commands.catalogue import sections as page_sections
from ddtree_guard.dump.read import Dump
from ddtree_guard.errors import UsageError
from ddtree_guard.guard import Guard, Report, find_rule
from ddtree_guard.report import rows, svg
from ddtree_guard.report.svg import Moment, prose, text
from ddtree_guard.rule import Finding, Scope
from ddtree_guard.step import Step

TRIGGERS = {
    "finding": "a rule was broken",
    "signal": "somebody asked for it",
    "heuristic": "output looked garbled",
    "crash": "the process failed",
    "manual": "it was asked for",
}

_SCOPES = {
    Scope.REQUEST: "It concerns this request alone.",
    Scope.BATCH: "It concerns the whole batch.",
    Scope.SERVER: "It concerns the whole server.",
}


@dataclass(frozen=True, slots=True)
class Story:
    """What the page is about: one step of the dump, its findings, and the offender."""

    dump: Dump
    at: int
    step: Step
    request: int
    findings: Sequence[Finding]
    recorded: Sequence[tuple[int, Finding]]
    moments: Sequence[Moment]
    report: Report


def story(dump: Dump) -> Story:
    """Read a dump for the page. The step is that of the first recorded finding, else the newest."""
    recorded = dump.findings()
    at = recorded[0][0] if recorded else len(dump) - 1
    broken: dict[int, list[str]] = {}
    for index, finding in recorded:
        broken.setdefault(index, []).append(finding.rule)
    moments, chosen = [], None
    for index, step in enumerate(dump.steps()):
        moments.append(_moment(step, tuple(dict.fromkeys(broken.get(index, ())))))
        if index == at:
            chosen = step
    assert chosen is not None  # a dump holds at least one step
    report = Guard().check(chosen)
    mine = [finding for index, finding in recorded if index == at] or list(report.findings)
    request = rows.offender(mine, chosen)
    return Story(dump, at, chosen, request, mine, recorded, moments, report)


def _moment(step: Step, rules: tuple[str, ...]) -> Moment:
    return Moment(
        step.who.step_id, step.bs, step.w, _mean(step.layout.prefix_lens, step.bs),
        _mean(step.outcome.accept_lens, step.bs), rules,
    )  # fmt: skip


def _mean(values: Any, count: int) -> float | None:
    whole = values is not None and values.ndim == 1 and values.dtype.kind in "iu" and len(values)
    return float(values[:count].astype("float64").mean()) if whole and count else None


def page(told: Story) -> str:
    """The page as text."""
    template = Template(files("ddtree_guard.report").joinpath("template.html").read_text("utf-8"))
    step, who = told.step, told.step.who
    parts = [
        _verdict(told),
        _section(
            "Where the kernel reads", f'<div class="wide">{svg.rulers(step, told.request)}</div>'
        ),
        _section("The mask", svg.mask(step, told.request)),
        _section("The tree", svg.tree(step, told.request)),
        _section(
            "The last steps",
            f'<div class="fit"><figure>{svg.timeline(told.moments)}</figure></div>',
        ),
        _section("Requests of this step", _requests(step)),
        _trails(told),
        _section("Environment", _environment(told)),
        _section("What was checked", _checked(told)),
    ]
    return template.substitute(
        title=text(f"{sentence(told)} - ddtree-guard"),
        where=text(
            f"{who.rank}, step {who.step_id} (index {told.at} of {len(told.dump)}), "
            f"{who.algorithm} on {who.backend} ({who.backend_kind}, {who.path}), "
            f"SGLang {who.release or 'unknown'}, {_when(told.dump.manifest['created'])}"
        ),
        headline=text(sentence(told)),
        summary=text(_trigger(told.dump)),
        sections="\n".join(part for part in parts if part),
    )


def _when(created: str) -> str:
    """The time of a manifest as people write it; as it stands where it is none."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(\.\d+)?\+00:00", created)
    return f"{found[1]} {found[2]} UTC" if found else created


def sentence(told: Story) -> str:
    """What broke, in one sentence."""
    if not told.findings:
        return "No rule was recorded as broken in this dump."
    first = told.findings[0]
    rest = len({finding.rule for _, finding in told.recorded} - {first.rule})
    more = f"; {rest} more rule{'s are' if rest > 1 else ' is'} broken" if rest else ""
    reads = " (latent: this kernel does not read it)" if first.latent else ""
    return f"{first.rule} {first.name}: {first.headline}{reads}{more}."


def _trigger(dump: Dump) -> str:
    trigger = dump.trigger
    why = TRIGGERS.get(trigger["kind"], trigger["kind"])
    words = [f"Written because {why}" + (f": {trigger['why']}" if trigger["why"] else "")]
    if trigger["suppressed"]:
        words.append(f"triggers before it that wrote none: {trigger['suppressed']}")
    if dump.redacted:
        words.append("ids are hashes")
    return "; ".join(words) + "."


def _section(title: str, body: str, kind: str = "") -> str:
    return f'<section class="{kind}"><h2>{text(title)}</h2>{body}</section>'


def _verdict(told: Story) -> str:
    if not told.findings:
        return _section("What to do next", _steps(told, None), "verdict clean")
    first = told.findings[0]
    left = {True: "Its tokens had left.", False: "Its tokens did not leave.", None: ""}
    against = (
        f'<dl class="against"><div><dt>expected</dt><dd>{text(first.expected)}</dd></div>'
        f'<div class="actual"><dt>found</dt><dd>{text(first.actual)}</dd></div></dl>'
    )
    symbols = " ".join(f"{name}={value}" for name, value in first.bindings.items())
    about = [
        _SCOPES[first.scope],
        f"First offender: request {first.request}" if first.request is not None else "",
        f"row {first.row}" if first.row is not None else "",
    ]
    harmed = (
        f" Also harmed: requests {', '.join(map(str, first.victims))}." if first.victims else ""
    )
    where = f"{about[0]} {', '.join(filter(None, about[1:]))}".strip().rstrip(".") + "." + harmed
    cause = first.cause[:1].upper() + first.cause[1:] or "Not known"
    body = [
        against,
        f"<p><code>{text(first.equation)}</code><br><code>{text(symbols)}</code></p>",
        f"<p>{text(where)} {left[first.tokens_left]}</p>",
        f"<h2>Likely cause</h2><p>{prose(cause)} "
        f'<span class="soft">({text(first.confidence)})</span></p>',
        _hint(first),
        "<h2>What to do next</h2>",
        _steps(told, first),
        _others(told),
    ]
    return _section("Expected against found", "".join(body), "verdict")


def _hint(finding: Finding) -> str:
    """The known fault behind the rule, from its manual page, and what cures it."""
    try:
        rule = find_rule(finding.rule)
    except UsageError:  # a rule of another version
        return ""
    page, cures = (
        page_sections(rule),
        "".join(f"<li>{prose(cure)}</li>" for cure in advice(rule)[1]),
    )
    known = [f"{name}: {page[name]}" for name in ("Usual cause", "Seen in") if page.get(name)]
    items = "".join(f"<li>{prose(line)}</li>" for line in known)
    faults = f"<h2>Known faults of this kind</h2><ul>{items}</ul>" if items else ""
    return f"{faults}<h2>What cures it</h2><ol>{cures}</ol>"


def _steps(told: Story, first: Finding | None) -> str:
    path = told.dump.path
    commands = [f"ddtree-guard show {path} --step {told.at} --request {told.request}",
                f"ddtree-guard check {path}"]  # fmt: skip
    if first is not None:
        known = first.next_step.startswith("ddtree-guard ")
        commands.insert(0, first.next_step if known else f"ddtree-guard explain {first.rule}")
        commands.append(f"ddtree-guard bundle {path}")
    items = "".join(f"<li><code>{text(command)}</code></li>" for command in commands)
    extra = ""
    if first is not None and not first.next_step.startswith("ddtree-guard ") and first.next_step:
        extra = f"<p>{text(first.next_step)}</p>"
    return f"{extra}<ol>{items}</ol>"


def _others(told: Story) -> str:
    """What the headline counts and does not name: of this step, and rules of other steps."""
    rest, others = told.findings[1:], _elsewhere(told)
    counts = [f"{render.count(len(rest), 'further finding')} of this step"] if rest else []
    counts += [f"{render.count(len(others), 'more rule')} in other steps"] if others else []
    if not counts:
        return ""
    blocks = [render.block(finding, told.step) for finding in rest[:20]]
    blocks += [render.block(f, told.dump.step(at)) for at, f in others[: 20 - len(blocks)]]
    total, joined = len(rest) + len(others), "\n\n".join(blocks)
    more = f", the first 20 of {total}" if total > 20 else ""
    return (
        f"<details><summary>{' and '.join(counts)}{more}</summary>"
        f"<pre>{text_block(joined)}</pre></details>"
    )


def _elsewhere(told: Story) -> list[tuple[int, Finding]]:
    """The first finding of each rule that is broken in other steps only, by index."""
    mine = {finding.rule for finding in told.findings}
    found: dict[str, tuple[int, Finding]] = {}
    for at, finding in told.recorded:
        if finding.rule not in mine:
            found.setdefault(finding.rule, (at, finding))
    return list(found.values())


def text_block(lines: str) -> str:
    """Several lines as harmless HTML; the line ends stay."""
    return "\n".join(text(line) for line in lines.split("\n"))


def _requests(step: Step) -> str:
    listed = rows.request_rows(step)
    shown = _table(rows.COLUMNS, [[row[key] for key in rows.COLUMNS] for row in listed[:256]])
    return f'<p class="soft">right value -&gt; value in this step</p>{shown}'


def _trails(told: Story) -> str:
    trails = told.dump.requests()[:64]
    if not trails:
        return ""
    listed = [[t.rid, t.verdict, t.run, ", ".join(map(str, sorted(t.widths)))] for t in trails]
    head = ("request", "steps", "longest run", "widths")
    return _section("How the last requests went", _table(head, listed))


def _table(head: Sequence[str], listed: Iterable[Sequence[object]]) -> str:
    top = "".join(f"<th>{text(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(_cell(str(value)) for value in row) + "</tr>" for row in listed)
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _cell(value: str) -> str:
    wrong = ' class="wrong"' if " -> " in value else ""
    return f"<td{wrong}>{text(value)}</td>"


def _environment(told: Story) -> str:
    step, manifest = told.step, told.dump.manifest
    w = step.widths
    listed: Mapping[str, object] = {
        "rows per request": f"w={w.w}, block b={w.block}, budget B={w.budget}",
        "widths held": ", ".join(f"{k} {v}" for k, v in w.holders.items()) or "not in this step",
        "requests": f"bs={step.bs}, padded BS={step.padded_bs}",
        **{f"{name} version": value for name, value in manifest["versions"].items()},
        **{f"config {name}": value for name, value in manifest["config"].items()},
        **{f"at start {n + 1}": line for n, line in enumerate(told.dump.doctor)},
    }
    body = "".join(
        f"<tr><th>{text(name)}</th><td>{text(value if value not in ('', []) else '-')}</td></tr>"
        for name, value in listed.items()
    )
    return f'<table class="wrap">{body}</table>'


def _checked(told: Story) -> str:
    lines = render.not_checked(told.report)
    items = "".join(f"<li>{text(line)}</li>" for line in lines)
    return (
        f"<p>This step, now: {text(render.summary(told.report))}.</p>"
        f"<details><summary>{len(lines)} rules not checked, and why</summary><ul>{items}</ul>"
        "</details>"
    )
