"""The documents name nothing that does not exist, and leave out nothing that an operator meets."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_guard import loglines, recorder, render
from ddtree_guard.cli import build_parser
from ddtree_guard.config import PREFIX, TREE_PREFIX, VARIABLES, Config, Mode
from ddtree_guard.evidence import MAX_BYTES
from ddtree_guard.hooks import evidence, flight, fuses, journal, ranks, taint
from ddtree_guard.hooks.boot import Boot
from ddtree_guard.metrics import exported
from ddtree_guard.recorder import heuristics
from ddtree_guard.runbook import GENERAL, Cure

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
PAGES.append(ROOT / "docs" / "rules" / "runbook.md")
GUIDE = (ROOT / "docs" / "operations.md").read_text()
LINES = re.findall(
    r"^\| `([^`]+)` \| (?:info|warning|error) \|", GUIDE.partition("## Metrics")[0], re.M
)
OURS = {"--speculative-ddtree-budget"}  # flags that this package adds to SGLang
TOOLS = ("docker", "kubectl", "curl", "pip", "make", "pytest", "promtool")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def code(text: str) -> Iterator[str]:
    """Inline code, and the lines of code blocks, without their comments."""
    for block in re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.S | re.M):
        yield from (line.partition(" # ")[0] for line in block.splitlines())
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M))


def anchor(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {anchor(heading) for heading in headings} | set(re.findall(r"<a id='(\w+)'>", text))


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, place = link.partition("#")
        target = (page.parent / path) if path else page
        if not target.exists() or (place and place not in anchors(target.read_text())):
            wrong.append(link)
    assert wrong == []


@each_page
def test_variables_exist(page: Path) -> None:
    known = {PREFIX, *(f"{PREFIX}_{name}" for name in VARIABLES)}
    known |= {f"{TREE_PREFIX}_{name}" for name in ("BUDGET", "TOPK", "INCIDENT")}
    named = set(re.findall(rf"{TREE_PREFIX}\w*", page.read_text())) - {TREE_PREFIX}
    assert named - known == set()


@each_page
def test_metrics_exist(page: Path) -> None:
    named = re.findall(r"sglang(?::|\[:_\])(ddtree_guard\w+)", page.read_text())
    assert {f"sglang:{name}" for name in named} <= set(exported())


def commands(text: str) -> Iterator[list[str]]:
    """Every use of the command line, as words behind `ddtree-guard`, up to a bare `--`."""
    for piece in code(text):
        found = re.search(r"^(?:\$ )?(?:\S*/bin/|bin/)?ddtree-guard ([a-z].*)$", piece.strip())
        if found and not piece.strip().startswith(TOOLS):
            words = shlex.split(found[1])
            yield words[: words.index("--")] if "--" in words else words  # the rest is SGLang's


@each_page
def test_commands_and_their_options_exist(page: Path) -> None:
    actions = build_parser()._subparsers._group_actions[0]  # type: ignore[union-attr]
    parsers = actions.choices
    assert parsers is not None
    for words in commands(page.read_text()):
        assert words[0] in parsers, words
        options = {word.partition("=")[0] for word in words if word.startswith("-")}
        known = set(parsers[words[0]]._option_string_actions)  # type: ignore[index]
        assert options <= known, words


def test_the_readme_lists_every_variable() -> None:
    table = (ROOT / "README.md").read_text().partition("## Environment")[2].partition("\n\nA ")[0]
    listed = set(re.findall(rf"`(?:{PREFIX})?(_[A-Z_]+)`", table))
    assert {f"_{name}" for name in VARIABLES} == listed


def test_the_guide_uses_the_command_line() -> None:
    used = {words[0] for words in commands(GUIDE)}
    assert {"explain", "check", "bundle", "ranks", "selftest"} <= used


def test_the_readme_lists_every_command() -> None:
    table = (
        (ROOT / "README.md").read_text().partition("## Command line")[2].partition("\n\nOnly")[0]
    )
    listed = re.findall(r"`([a-z-]+)[ `]", "\n".join(re.findall(r"^\| (`.*?) \|", table, re.M)))
    actions = build_parser()._subparsers._group_actions[0]  # type: ignore[union-attr]
    assert sorted(listed) == sorted(actions.choices or ())


@pytest.mark.sglang
def test_flags_of_sglang_exist() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    srt = Path(spec.submodule_search_locations[0], "srt")
    files = [srt / "server_args.py", *(srt / "arg_groups").rglob("*.py")]
    source = "".join(file.read_text() for file in files)
    own = set().union(
        *(
            p._option_string_actions
            for p in build_parser()._subparsers._group_actions[0].choices.values()
        )  # type: ignore[union-attr]
    )
    texts = [GENERAL, GUIDE, *(cure.value for cure in Cure)]
    texts.append((ROOT / "examples" / "kubernetes" / "deployment.yaml").read_text())
    flags = {flag for text in texts for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}
    assert len(flags) > 12
    missing = [
        flag
        for flag in sorted(flags - OURS - own)
        if f'"{flag}"' not in source and f"\n    {flag[2:].replace('-', '_')}:" not in source
    ]
    assert missing == []


def test_every_metric_is_explained() -> None:
    assert [name for name in exported() if f"`{name}`" not in GUIDE] == []


def test_the_fields_of_both_lines_are_explained() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", GUIDE, re.M)
    fields = re.findall(r"`(\w+)`", " ".join(rows))
    boot = Boot(Config(mode=Mode.LOG), "0.5.16", 1, 1, 1, 1, {}, "stock").line()
    keys = re.findall(r"(\w+)=", boot)
    assert len(keys) == 8
    assert [key for key in (*keys, *render.LOG_KEYS) if key not in fields] == []
    (shown,) = re.findall(r"^ddtree_guard armed=.*$", GUIDE, re.M)
    assert re.findall(r"(\w+)=", shown) == keys


def messages() -> Iterator[str]:
    """What the package logs while it serves, up to the first value."""
    for folder in ("hooks", "ddtree_guard"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                logs = isinstance(node.func.value, ast.Name) and node.func.value.id == "log"
                first = node.args[0] if logs and node.args else None
                if isinstance(first, ast.Constant) and str(first.value)[:2] != "%s":
                    yield re.split(r"[%:]", str(first.value).replace("guard: ", "guard; ", 1))[0]


def test_every_line_that_is_logged_is_explained() -> None:
    heads = tuple(head.replace("guard: ", "guard; ", 1) for head in LINES)
    logged = {text.strip() for text in messages()}
    assert len(logged) > 8
    unexplained = [
        text
        for text in logged
        # where a value comes next it is a sentence of Config's: a misspelt variable
        if text != "ddtree_guard;" and not text.startswith(heads)
    ]
    assert unexplained == [], "explain it in docs/operations.md, Log lines"


def test_every_line_that_is_explained_is_logged() -> None:
    source = "".join(
        path.read_text()
        for name in ("hooks", "ddtree_guard")
        for path in (ROOT / name).rglob("*.py")
        if path.name != "loglines.py"  # what explains the lines logs none
    )
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # sentences over two lines
    for head in LINES:
        for part in head.split(" ... "):
            part = part.removesuffix("armed=").strip()
            assert part in source or part == "ddtree_guard: backend=", head


def test_the_guide_says_what_explain_says() -> None:
    """The tables of lines and of reasons hold exactly the texts of `loglines`."""
    lines = GUIDE.partition("| Line | Level | Means |\n|---|---|---|\n")[2].partition("\n\n")[0]
    assert lines.splitlines() == [line.row for line in loglines.LINES]
    reasons = GUIDE.partition("| Reason in the line | What to do |\n|---|---|\n")[2]
    rows = [f"| `{reason}` | {todo} |" for reason, todo in loglines.REASONS.items()]
    assert reasons.partition("\n\n")[0].splitlines() == rows


def test_every_reason_for_not_guarded_exists() -> None:
    table = GUIDE.partition("| Reason in the line |")[2].partition("\n\n")[0]
    reasons = re.findall(r"^\| `([^`]+)`", table, re.M)
    source = "".join(path.read_text() for path in (ROOT / "hooks").rglob("*.py"))
    assert len(reasons) == 8
    for reason in reasons:
        parts = re.split(r" S | \d ", reason)
        assert all(part in source for part in parts), reason


def test_the_numbers_are_those_of_the_code() -> None:
    text = " ".join(GUIDE.split())
    assert recorder.LONGEST_S == 3600
    for said in (
        f"remembers {taint.KEPT} sources",
        f"at most every {journal.EVERY_S:.0f} s",
        f"{ranks.EVERY}th step",
        f"failed {fuses.LIMIT} times",
        f"`SGLANG_DDTREE_GUARD_DUMP_MAX_MB` ({Config().dump_max_mb})",
        f"`SGLANG_DDTREE_GUARD_DUMP_KEEP` ({Config().dump_keep})",
        f"(`SGLANG_DDTREE_GUARD_RING_STEPS`, {Config().ring_steps})",
        f"twice within {recorder.QUIET_S:.0f} s",
        f"dumped again after {recorder.QUIET_S:.0f} s, 1 min,",
        "at most every hour",
        f"{heuristics.RUN} equal tokens in a row",
        f"for the newest {evidence.SPARED}",
        f"recorder failed {flight.LIMIT} times",
        f"at most {MAX_BYTES >> 20} MiB. [ci-report]",
    ):
        assert said in text
