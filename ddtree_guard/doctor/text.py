"""A diagnosis as text of at most 100 columns, without colour: the verdict first, the rest below."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from ddtree_guard.config import PREFIX
from ddtree_guard.doctor.canary import Judgement
from ddtree_guard.doctor.deployment import Deployment
from ddtree_guard.doctor.diagnosis import URL, Diagnosis, headline, relevant
from ddtree_guard.doctor.faults import Match
from ddtree_guard.doctor.memory import Memory
from ddtree_guard.doctor.predict import Prediction
from ddtree_guard.fold import WIDTH, columns
from ddtree_guard.hooks.words import by_reason
from ddtree_guard.render import plain
from ddtree_guard.rule import Finding
from ddtree_guard.step import Step

_MARK = 11  # columns of the first word of a row
Row = tuple[str, str]


def lines(d: Diagnosis) -> list[str]:
    """The whole text."""
    said, change = headline(d)
    found = _wrapped("", said, 0)
    if change:
        found += _wrapped("change:", change, 9)
    for title, rows in (
        (f"server {d.url}", _there(d)),
        ("environment", _environment(d)),
        ("configuration", _configuration(d)),
        ("output", _output(d.canary)),
        (f"known faults of SGLang {_release(d)}", _faults(d)),
        ("not checked", [("-", f"{what}: {why}") for what, why in d.not_checked]),
    ):
        kept = list(rows)
        if kept:
            found += ["", title]
            for mark, text in kept:
                found += _wrapped(f"  {mark}", text, _MARK + 2)
    return [*found, "", *_wrapped("", summary(d), 0)]


def summary(d: Diagnosis) -> str:
    """The closing line: what was checked, and how much was not. Never a bare OK."""
    parts = []
    if d.survey is not None:
        hooks = d.survey.get("hooks") or []
        if hooks:
            matched = sum(hook["status"] == "matched" for hook in hooks)
            parts.append(f"{matched} of {len(hooks)} hooks matched")
    seen = d.corrected if d.uses == "corrected" else d.stock
    if seen is not None and seen.checked:
        parts.append(f"{_count(len(seen.checked), 'rule')} on the configuration")
        parts.append(f"{_count(len(seen.not_checked), 'rule')} need a running step")
    if d.canary is not None and d.canary.canaries:
        parts.append(f"{len(d.canary.canaries)} canaries in {d.canary.requests} requests")
    rest = "nothing else was left out"
    if d.not_checked:
        rest = f"{_count(len(d.not_checked), 'thing')} not checked, as above"
    return f"checked: {', '.join(parts) or 'nothing that can be judged'}; {rest}"


def words_of(d: Diagnosis) -> list[str]:
    """A few lines for a dump's manifest or a bundle: no path, no address, no key."""
    said, change = headline(d)
    found = [f"doctor: {said}"]
    found += [f"doctor: change {change}"] if change else []
    found += [f"doctor: {mark} {text}" for mark, text in _environment(d)]
    return [plain(line) for line in [*found, f"doctor: {summary(d)}"]]


def _there(d: Diagnosis) -> Iterator[Row]:
    if d.way != URL or d.deployment is None:
        return
    tested = "by its version string"
    yield "release", f"SGLang {d.deployment.release}, {tested}; nothing was installed there"
    if d.armed_there:
        yield "guard", f"{d.armed_there} there, as its metrics say"


def _environment(d: Diagnosis) -> Iterator[Row]:
    """What is installed, whether hooks fit, and whether the plugin is loaded."""
    if d.survey is None or "sglang" not in d.survey:
        return
    versions = d.survey["environment"]["versions"]
    sglang, plugin = d.survey["sglang"], d.survey.get("plugin", {})
    yield "versions", ", ".join(f"{name} {value}" for name, value in versions.items())
    yield "GPU", d.survey["environment"]["gpu"]
    if not sglang["installed"]:
        yield "MISSING", "SGLang is not installed here"
        return
    yield "SGLang", f"{sglang['release']}, {_tested(sglang['tested'])}"
    if sglang["generation"]:
        yield "", f"its Triton backend is of generation {sglang['generation']!r}"
    if sglang["why"]:
        yield "MISSING", sglang["why"]
    yield from _hooks(d)
    yield from _plugin(plugin)


def _tested(word: str) -> str:
    return {
        "gpu-tested": "gpu-tested: guarded engines ran on a GPU without a finding",
        "cpu-tested": "cpu-tested: its own backend and kernels ran in Triton's interpreter",
    }.get(word, "untested: hooks are chosen by what its code looks like")


def _hooks(d: Diagnosis) -> Iterator[Row]:
    assert d.survey is not None
    hooks = [hook for hook in d.survey.get("hooks") or [] if relevant(hook, d.survey)]
    for part in dict.fromkeys(hook["part"] for hook in hooks):
        mine = [hook for hook in hooks if hook["part"] == part]
        good = [hook["site"] for hook in mine if hook["status"] == "matched"]
        read = sum(hook["how"].startswith("read") for hook in mine)
        how = f" ({read} read from source: their modules do not import here)" if read else ""
        yield "hooks", f"{part}: {len(good)} of {len(mine)} matched{how}: {_listed(good)}"
        for hook in mine:
            if hook["status"] != "matched" and hook["blocking"]:
                yield hook["status"].upper(), f"{hook['site']}: {hook['detail']}"
            elif hook["status"] != "matched":
                yield hook["status"], f"{hook['site']}, which this release can do without"


def _listed(names: Iterable[str]) -> str:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(name if n == 1 else f"{name} x{n}" for name, n in counts.items())


def _plugin(plugin: dict[str, object]) -> Iterator[Row]:
    if not plugin:
        return
    if plugin["excluded_by"] is not None:
        yield "EXCLUDED", f"SGLANG_PLUGINS={plugin['excluded_by']} leaves ddtree_guard out"
    elif not plugin["found"]:
        yield "MISSING", "no entry point of ddtree-guard: SGLang will not load it"
    elif plugin["loaded"]:
        others = plugin.get("others")
        names = ", ".join(map(str, others)) if isinstance(others, list) else ""
        yield "plugin", f"SGLang's own loader loads it{names and '; beside it: ' + names}"
    else:
        yield "FAILED", f"the plugin does not load: {plugin['why'] or 'SGLang did not call it'}"
    if plugin.get("setting"):
        yield "WRONG", str(plugin["setting"])
    else:
        backend = f"backend={plugin.get('backend')}"
        incident = ", SGLANG_DDTREE_INCIDENT=on" if plugin.get("incident") else ""
        off = (
            f"; steps are not checked, {PREFIX}=log checks them" if plugin["mode"] == "off" else ""
        )
        yield "settings", f"mode={plugin['mode']} {backend}{incident}{off}"
    if plugin.get("shadow"):
        line = str(plugin["shadow"]).removeprefix("ddtree_guard shadow ")
        yield "shadow", f"{line} (layers are known once a server runs: its log has this line)"
    warned = plugin.get("warnings")
    for text in warned if isinstance(warned, list) else []:
        yield "warning", str(text)


def _configuration(d: Diagnosis) -> Iterator[Row]:
    made = d.deployment
    if made is None:
        return
    yield "serves", _serves(made)
    for text in d.notes:
        yield "note", text
    if not made.algorithm:
        return
    for seen in (d.stock, d.corrected):
        if seen is not None:
            yield from _prediction(seen, d)
    if d.stock is not None:
        yield from _exempt(d.stock)
    if d.refused:
        yield "REFUSED", d.refused
    yield from _memory(d.memory, made)


def _serves(made: Deployment) -> str:
    """The sizes on which everything depends, `?` where one is not known."""
    if not made.algorithm:
        return "no speculative algorithm"
    parts = [f"{made.algorithm} on {made.backend or '?'}"]
    sizes = (
        ("budget", made.budget if made.ddtree else 0), ("block", made.block or 0),
        ("rows per request", made.w), ("SGLang's D", made.declared),
        ("topk", 0 if made.ddtree else made.topk or 0), ("page size", made.page_size),
        ("context", made.context), ("captured batch", made.lanes if made.graphs else 0),
    )  # fmt: skip
    parts += [f"{name} {'?' if value is None else value}" for name, value in sizes if value != 0]
    return ", ".join([*parts, "no graphs"] if made.graphs is False else parts)


def _prediction(seen: Prediction, d: Diagnosis) -> Iterator[Row]:
    made = d.deployment
    assert made is not None
    here = {seen.backend: "this one is used", "unknown": "whether it is used is not known"}
    note = here.get(d.uses, "not used here")
    now = [(step, finding) for step, finding in seen.findings if not finding.latent]
    later = [(step, finding) for step, finding in seen.findings if finding.latent]
    count = _count(len(seen.checked), "rule")
    if not seen.checked:
        yield seen.backend, "no rule can be checked: see below"
    elif now and note == "not used here":
        broken = ", ".join(finding.rule for _, finding in now)
        yield seen.backend, f"would be WRONG: {len(now)} of {count} broken ({note}): {broken}"
        return
    elif now:
        yield seen.backend, f"WRONG: {len(now)} of {count} broken ({note})"
    else:
        yield seen.backend, f"{count} checked, none broken ({note})"
    yield from (("", _rule(step, finding, made)) for step, finding in now)
    for step, finding in later:
        yield "", f"only at the limit of its buffer: {_rule(step, finding, made)}"


def _rule(step: Step, finding: Finding, made: Deployment) -> str:
    smaller = step.bs and made.w is not None and step.w < made.w
    whose = f" (a request with budget {step.w - 1})" if smaller else ""
    return f"{finding.rule} {finding.name}{whose}: {finding.equation}"


def _exempt(seen: Prediction) -> Iterator[Row]:
    """Rules that a guard on this server would not check either, by reason."""
    for why, rules in by_reason(seen.exempt).items():
        yield "exempt", f"{', '.join(rules)}: {why}"


def _memory(memory: Memory | None, made: Deployment) -> Iterator[Row]:
    if memory is None:
        return
    sized = f"{memory.lanes} requests x {memory.w} rows at context {memory.context}"
    yield "memory", f"verify buffers of captured graphs, {sized}:"
    pairs = [("stock", memory.stock)]
    pairs += [("corrected", memory.corrected)] if made.ddtree else []
    for name, need in pairs:
        logits = f", logits {_mib(need.attn_logits)}" if memory.logits_known else ""
        yield (
            "",
            (
                f"{name} {_mib(need.total)} MiB (mask {_mib(need.mask)}, KV indices "
                f"{_mib(need.kv_indices)}{logits})"
            ),
        )
    if not memory.logits_known:
        yield "", "without attention logits: the number of heads is not known"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


def _output(judged: Judgement | None) -> Iterator[Row]:
    if judged is None:
        return
    for canary in judged.canaries:
        first = canary.prompt.split("\n")[0][:30]
        parts = [f"{len(canary.alone.ids) or len(canary.alone.text)} "
                 f"{'tokens' if canary.alone.ids else 'characters'}"]  # fmt: skip
        parts.append("same alone and among others" if canary.same else "DIFFERENT among others")
        if canary.asked:
            parts.append(f"{canary.other} of {canary.asked} tokens other than prefill says")
        parts += [f"a run of {canary.run}"] if canary.run >= 8 else []
        parts += [f"{canary.replaced} replacement characters"] if canary.replaced else []
        yield "canary", f"{first!r}: {', '.join(parts)}"
        shown = canary.among.text or " ".join(map(str, canary.among.ids[:16]))
        if judged.garbled:
            yield "", f"says {shown[:60]!r}"
    for why in judged.why:
        yield "GARBLED" if judged.garbled else "sign", why
    if judged.garbled is False and judged.asked:
        yield "clean", (
            f"{judged.asked - judged.other} of {judged.asked} tokens are what prefill says; the "
            "rest are near ties" if judged.other else
            f"all {judged.asked} tokens are what the server computes without drafts"
        )  # fmt: skip


def _faults(d: Diagnosis) -> Iterator[Row]:
    cured = set(d.known) - set(d.known_here)
    for match in d.known:
        yield from _fault(match, match in cured, d.uses)


def _fault(match: Match, cured: bool, uses: str) -> Iterator[Row]:
    fault = match.fault
    mark = {"corrected": "cured", "unknown": "if stock"}.get(uses, "") if cured else ""
    mark = mark or ("HAS" if match.wrong else "has" if match.sure else "may have")
    seen = f" ({fault.incident})" if fault.incident else ""
    yield mark, f"{fault.title}{seen}: {fault.effect}"
    if cured:
        yield "", "the corrected backend takes its width from the tree"
    elif not match.sure:
        yield "", f"not known: {', '.join(match.open)}; {fault.links[0]}"
        return
    else:
        yield "", f"change: {fault.change}"
    for link in fault.links:
        yield "", link


def _release(d: Diagnosis) -> str:
    return d.deployment.release if d.deployment is not None else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _wrapped(mark: str, text: str, indent: int) -> list[str]:
    """`mark` and the text beside it, folded below itself."""
    head = f"{plain(mark):{indent}}" if indent else ""
    return textwrap.wrap(
        plain(text), min(columns(), WIDTH), initial_indent=head, subsequent_indent=" " * indent,
        break_long_words=False, break_on_hyphens=False,
    ) or [head.rstrip()]  # fmt: skip
