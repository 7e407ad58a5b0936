"""The report page: what it says, that nothing in it runs, and how a browser sees it."""

import dataclasses
import html
import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ddtree_guard import cli
from ddtree_guard.config import Config
from ddtree_guard.dump.read import Dump
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.guard import Guard
from ddtree_guard.recorder import Recorder
from ddtree_guard.report import svg
from ddtree_guard.report.html import page, sentence, story
from ddtree_guard.rule import Finding
from ddtree_guard.step import Step
from ddtree_guard.testing.faults import FAULTS
from ddtree_guard.testing.steps import sound_step

LENS = (37, 21, 50)
WIDTHS = (1000, 390)
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--enable-logging=stderr",
    # what the browser itself would ask for, and the way out for whatever else there is
    "--disable-features=NetworkTimeServiceQuerying,OptimizationHints",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip


def step(number: int) -> Step:
    return sound_step(number, lens=LENS, padded_bs=4).replace(who__step_id=number)


def incident(number: int) -> Step:
    """Offsets made from the block size 8 where the tree has 17 rows."""
    one = step(number)
    cells = [8 * (int(s) + 8) for s in one.layout.prefix_lens]
    offsets = [sum(cells[:i]) for i in range(len(cells) + 1)]
    return one.replace(
        layout__qo_indptr=one.layout.qo_indptr * 8 // 17,
        layout__mask_indptr=np.array(offsets, np.int64),
        widths__holders={"backend": 8, "graph_runner": 17},
    )


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Config(dump_dir=tmp_path_factory.mktemp("dumps"), redact=False)
    recorder = Recorder(config, DumpWriter("run", config))
    recorder.doctor = ("armed=8/8 mode=log",)
    for number in range(1, 21):
        recorder.step(step(number))
    bad = incident(21)
    recorder.step(bad)
    path = recorder.finding(bad, Guard().check(bad).findings)
    assert path is not None
    return path


@pytest.fixture
def written(dump: Path, tmp_path: Path) -> Path:
    out = tmp_path / "report.html"
    assert cli.main(["report", str(dump), "-o", str(out)]) == 0
    return out


class Parser(html.parser.HTMLParser):
    """Collects elements and checks that what is opened is closed."""

    VOID = ("meta", "link", "br", "wbr", "rect", "path", "circle")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Parser:
    parser = Parser()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def test_the_page_says_what_the_issue_asks_for(written: Path) -> None:
    text = written.read_text()
    for words in (
        "<h1>CFG1 width-copies-differ", "expected", "found", "Likely cause", "Known faults",
        "What cures it", "What to do next", "ddtree-guard bundle", "Where the kernel reads",
        "The mask", "The tree", "The last steps", "rows per request", "mean prefix length",
        "mean accepted tokens",
        "Environment", "armed=8/8", "ddtree_guard version", "should see, does not",
        "Requests of this step", "21/21 steps checked", "accepted path",
    ):  # fmt: skip
        assert words in text, words
    assert written.stat().st_mode & 0o777 == 0o600


def test_the_page_is_self_contained_and_nothing_in_it_runs(written: Path) -> None:
    parser = parsed(written.read_text())
    tags = {tag for tag, _ in parser.seen}
    assert not tags & {"script", "iframe", "object", "embed", "img", "form", "base", "a"}
    for tag, attributes in parser.seen:
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "href", "action"):
            assert str(attributes.get(name, "data:")).startswith("data:")
    assert not re.search(r"url\((?!#)|@import", written.read_text())
    assert "default-src 'none'" in written.read_text()


def test_what_a_stranger_wrote_stays_text(tmp_path: Path) -> None:
    evil = '<script>alert(1)</script>" onload="x\x1b[2J$title ${sections}'
    bad = incident(1).replace(
        who__rids=(evil, evil, evil), who__release=evil, widths__holders={evil: 8}
    )
    finding = Finding(evil, evil, evil, evil, 2, 3, cause=evil, rule="W3", name=evil, rid=evil)
    finding = Finding(**{**{f: getattr(finding, f) for f in Finding.__dataclass_fields__},
                         "next_step": evil, "bindings": {evil: 1}})  # fmt: skip
    path = DumpWriter("r", Config(dump_dir=tmp_path, redact=False)).write([bad], [(0, finding)])
    text = page(story(Dump(path)))
    parser = parsed(text)
    assert "script" not in {tag for tag, _ in parser.seen}
    assert not any("onload" in attributes for _, attributes in parser.seen)
    assert "\x1b" not in text
    assert "$title" in text  # quoted, not substituted


@pytest.mark.parametrize("rule", sorted(FAULTS))
def test_every_kind_of_finding_makes_a_page(rule: str, tmp_path: Path) -> None:
    planted = FAULTS[rule](step(3), 2).step
    findings = [(0, finding) for finding in Guard().check(planted).findings]
    path = DumpWriter("r", Config(dump_dir=tmp_path)).write([planted], findings)
    told = story(Dump(path))
    parsed(page(told))
    assert sentence(told).startswith(findings[0][1].rule if findings else "No rule")


def test_a_bare_step_makes_a_page_that_says_what_is_missing(tmp_path: Path) -> None:
    from ddtree_guard.step import Widths

    path = DumpWriter("r", Config(dump_dir=tmp_path)).write([Step(2, 2, Widths(17))])
    text = page(story(Dump(path)))
    for words in ("No rule was recorded", "No picture of the mask", "The tree is not in this step",
                  "The offsets are not in this step", "not in this dump"):  # fmt: skip
        assert words in text


def test_a_sentence_keeps_its_code_and_breaks_long_names() -> None:
    name = "SGLANG_DDTREE_GUARD_BACKEND=corrected"
    assert svg.prose(f"set `a<b` or {name}") == (
        f"set <code>a&lt;b</code> or {name.replace('_', '_<wbr>').replace('=', '=<wbr>')}"
    )
    assert svg.prose("a ` alone & <b>") == "a ` alone &amp; &lt;b&gt;"


def test_the_root_of_a_tree_that_is_scrolled_is_in_sight(tmp_path: Path) -> None:
    def root(w: int) -> float:
        one = sound_step(1, lens=(9, 8), w=w, kind="star", full_trees=True)
        return float(re.findall(r'<circle class="node[^"]*" cx="([\d.]+)"', svg.tree(one, 1))[0])

    assert root(17) == 18 + 15 / 2 * 28  # above the middle of its 16 children
    assert root(200) == 18


def test_what_the_headline_counts_is_listed_below_it(tmp_path: Path) -> None:
    """A rule that is broken in another step only is listed with that step, not left out."""
    steps = [incident(21), step(22)]
    found = [(0, f) for f in Guard().check(steps[0]).findings]
    latent = dataclasses.replace(found[0][1], rule="M5", name="cells-too-many", latent=True)
    path = DumpWriter("r", Config(dump_dir=tmp_path)).write(steps, [*found, (1, latent)])
    text = page(story(Dump(path)))
    assert f"; {len(found)} more rules are broken." in text
    assert f"{len(found) - 1} further findings of this step and 1 more rule in other steps" in text
    assert "M5 cells-too-many" in text
    assert "step=22" in text
    alone = DumpWriter("r", Config(dump_dir=tmp_path)).write(steps, [found[0], (1, latent)])
    assert "<summary>1 more rule in other steps</summary>" in page(story(Dump(alone)))


def test_the_timeline_counts_the_rules_that_it_does_not_name(written: Path) -> None:
    assert ">CFG1 W1 W3 +1</text>" in written.read_text()


def test_a_wide_tree_is_cut_and_pooled(tmp_path: Path) -> None:
    wide = sound_step(1, lens=(9, 8), w=600, kind="star", full_trees=True)
    path = DumpWriter("r", Config(dump_dir=tmp_path)).write([wide])
    text = page(story(Dump(path)))
    assert "the first 400 of them drawn" in text
    assert "one square is 5 x 5 cells" in text
    assert len(text) < 400_000


def test_the_report_does_not_follow_a_link(dump: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "out.html").symlink_to(victim)
    assert cli.main(["report", str(dump), "-o", str(tmp_path / "out.html")]) == 2
    assert cli.main(["report", str(dump), "-o", str(tmp_path / "no" / "out.html")]) == 2
    assert victim.read_text() == "precious"


# --- in a browser ---------------------------------------------------------------------------------
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium found: apt-get install chromium"
)


def browse(path: Path, width: int, *flags: str) -> tuple[str, str, list[str]]:
    """Open a page: its DOM, what the console said, and every request that left the file."""
    assert BROWSER is not None
    profile, log = path.parent / "profile", path.parent / "net.json"
    command = [
        BROWSER, *FLAGS, f"--user-data-dir={profile}", f"--log-net-log={log}",
        f"--window-size={width},1400", *flags, f"file://{path}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    shutil.rmtree(profile, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-2000:]
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return done.stdout, console, requests(log)


def requests(log: Path) -> list[str]:
    """What the page asked for, of a network log: the browser's own requests have no origin."""
    found = []
    for event in json.loads(log.read_text())["events"]:
        params = event.get("params", {})
        asked = str(params.get("url", "")).startswith(("http", "ws"))
        if asked and params.get("initiator", "not an origin") != "not an origin":
            found.append(str(params["url"]))
    return found


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_browser_draws_it_without_an_error_or_a_request(
    written: Path, width: int, scheme: str
) -> None:
    shot = written.with_suffix(".png")
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    _, console, urls = browse(written, width, f"--screenshot={shot}", *dark)
    assert (console, urls) == ("", [])
    size = shot.read_bytes()[16:24]
    assert int.from_bytes(size[:4], "big") == width
    assert shot.stat().st_size > 20_000  # something is on it


PROBE = """<script>addEventListener("load", () => {
const wide = [...document.querySelectorAll("main *")].filter(e => !e.closest(".scroll, .wide") &&
  e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName);
parent.document.title = JSON.stringify([innerWidth, document.documentElement.scrollWidth, wide,
  getComputedStyle(document.body).backgroundColor]);
});</script></head>"""


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_window(written: Path, width: int, scheme: str) -> None:
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", written.read_text())
    inner_page = html.escape(text.replace("</head>", PROBE), quote=True)
    probed = written.with_name("probed.html")  # in a frame: windows have a least width
    probed.write_text(
        f'<title>-</title><iframe width="{width}" height="1400" style="border:0" '
        f'srcdoc="{inner_page}"></iframe>'
    )
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    dom, _, _ = browse(probed, 1200, "--dump-dom", *dark)
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title is not None
    inner, scroll, wide, colour = json.loads(title.group(1).replace("&quot;", '"'))
    assert scroll <= inner == width
    assert wide == []
    assert colour == {"light": "rgb(251, 251, 250)", "dark": "rgb(22, 24, 26)"}[scheme]


@needs_browser
def test_the_browser_test_would_notice_a_request_and_an_error(written: Path) -> None:
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", written.read_text())
    bad = '<img src="http://127.0.0.1:9/x.png"><script>nothing.there()</script></body>'
    written.write_text(text.replace("</body>", bad))
    _, console, urls = browse(written, 1000, "--dump-dom")
    assert "nothing is not defined" in console
    assert any("127.0.0.1:9" in url for url in urls)
