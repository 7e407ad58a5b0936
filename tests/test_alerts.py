"""The alert rules: their expressions name metrics and labels that exist; promtool runs the rest."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ddtree_guard.checks import ALL
from ddtree_guard.hooks.fuses import LIMIT
from ddtree_guard.hooks.runtime import OPEN
from ddtree_guard.metrics import LABELS, exported
from ddtree_guard.rule import Scope

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "prometheus"
GUIDE = (ROOT / "docs" / "operations.md").read_text()
(GROUP,) = yaml.safe_load((FOLDER / "ddtree_guard.rules.yml").read_text())["groups"]
SGLANGS = {"sglang:spec_accept_length"}  # a metric of SGLang's own
SCRAPED = {"job", "instance"}  # labels that Prometheus adds

each_alert = pytest.mark.parametrize("alert", GROUP["rules"], ids=lambda alert: alert["alert"])


def selectors(expr: str) -> list[tuple[str, dict[str, str]]]:
    """Each metric of an expression, as it is exported, with its label matchers."""
    found = re.findall(r'\{__name__=~"sglang\[:_\](\w+)"(?:, ([^}]*))?\}', expr)
    assert len(found) == expr.count("sglang") == expr.count("{")  # no other way to name one
    matchers = [dict(re.findall(r'(\w+)=~?"([^"]*)"', match)) for _, match in found]
    return [(f"sglang:{name}", match) for (name, _), match in zip(found, matchers, strict=True)]


@each_alert
def test_metrics_and_labels_exist(alert: dict[str, Any]) -> None:
    names, labels = set(), set(SCRAPED)
    for name, match in selectors(alert["expr"]):
        names.add(name)
        assert set(match) <= set(exported().get(name, ()))
        labels |= set(exported().get(name, ()))
    assert names
    assert names <= {*exported(), *SGLANGS}
    grouped = re.findall(r"(?:by|on) \(([^)]*)\)", alert["expr"])
    kept = {label for group in grouped for label in group.split(", ")}
    assert kept <= labels
    shown = set(re.findall(r"\$labels\.(\w+)", str(alert["annotations"])))
    assert shown <= kept


@each_alert
def test_values_of_labels_exist(alert: dict[str, Any]) -> None:
    for _, match in selectors(alert["expr"]):
        assert match.get("latent", "no") in ("yes", "no")
        assert match.get("scope", "batch") in {scope.value for scope in Scope}
        if "rule" in match:
            assert {r.id for r in ALL if re.fullmatch(match["rule"], r.id)} == {"X1", "X4"}


@each_alert
def test_the_guide_says_what_to_do(alert: dict[str, Any]) -> None:
    assert set(alert["annotations"]) == {"summary", "description"}
    assert f"| `{alert['alert']}` | {alert['labels']['severity']} | " in GUIDE


def test_the_guide_names_no_other_alert() -> None:
    assert set(re.findall(r"DDTreeGuard\w+", GUIDE)) == {a["alert"] for a in GROUP["rules"]}


def test_every_metric_that_tells_of_trouble_has_an_alert() -> None:
    used = {name for alert in GROUP["rules"] for name, _ in selectors(alert["expr"])}
    quiet = {"rules_active", "dumps_total", "shadow_steps_total"}
    assert set(exported()) - used == {f"sglang:ddtree_guard_{name}" for name in quiet}


def test_what_the_words_say_of_the_code() -> None:
    words = {alert["alert"]: alert for alert in GROUP["rules"]}
    assert LIMIT == 3
    assert "At the third one" in words["DDTreeGuardInternalFault"]["annotations"]["description"]
    (margin,) = re.findall(r"> (\d+)\s*$", words["DDTreeGuardCoverage"]["expr"])
    assert OPEN < int(margin) < 2 * OPEN
    assert set(LABELS) == {"violations_total", "internal_faults_total"}


def test_a_real_server_exported_all_that_the_alerts_read() -> None:
    """Once on a GPU, both as text and as OpenMetrics: `benchmarks/served_metrics.py`."""
    result = json.loads((ROOT / "benchmarks/results/served_metrics.json").read_text())
    sound, incident = result["rows"]
    assert not [name for name in sound["text"] if "violations" in name]
    seen: set[str] = set()
    for form in ("text", "openmetrics"):
        for name in incident[form]:
            metric = re.sub(r"^sglang[:_]", "sglang:", name.partition("{")[0])
            seen.add(metric)
            if metric in exported():
                assert set(re.findall(r'(\w+)="', name)) == set(exported()[metric])
    needed = {name for alert in GROUP["rules"] for name, _ in selectors(alert["expr"])}
    assert needed - seen == {"sglang:ddtree_guard_internal_faults_total"}  # there was no fault


@pytest.mark.sglang
def test_sglang_exports_what_is_taken_from_it() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0], "srt", "observability")
    source = "".join(path.read_text() for path in folder.rglob("*.py"))
    assert [name for name in SGLANGS if f'"{name}"' not in source] == []


@pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not on the PATH: it comes with Debian's package prometheus",
)
@pytest.mark.parametrize("prefix", ["sglang:", "sglang_"])
def test_promtool_agrees(tmp_path: Path, prefix: str) -> None:
    """With names as they are exported, and as a scraper of OpenMetrics gets them."""
    for path in FOLDER.glob("*.yml"):
        (tmp_path / path.name).write_text(path.read_text().replace("sglang:", prefix))
    for what in (
        ["check", "rules", "--lint-fatal", "ddtree_guard.rules.yml"],
        ["test", "rules", "ddtree_guard.test.yml"],
    ):
        done = subprocess.run(
            ["promtool", *what], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
