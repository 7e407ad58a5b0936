"""The Kubernetes example: safe defaults, settings that exist, and names that fit each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ddtree_guard.config import Config, Mode

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "kubernetes"


def _load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


POD = _load("deployment.yaml")["spec"]["template"]
(SERVER,) = POD["spec"]["containers"]
ENV = {item["name"]: item["value"] for item in SERVER["env"]}


def test_every_file_is_applied() -> None:
    assert set(_load("kustomization.yaml")["resources"]) == {
        path.name for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml"
    }


def test_the_container_has_no_more_rights_than_it_needs() -> None:
    pod, container = POD["spec"]["securityContext"], SERVER["securityContext"]
    assert pod["runAsNonRoot"]
    assert pod["runAsUser"] == pod["fsGroup"] > 0
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert POD["spec"]["automountServiceAccountToken"] is False


def test_the_image_makes_the_user_that_the_pod_runs_as() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    user = POD["spec"]["securityContext"]["runAsUser"]
    assert f"useradd --uid {user} " in text
    assert text.rstrip().endswith(f"USER {user}")


def test_the_image_is_given_what_the_build_needs_and_no_more() -> None:
    lines = (FOLDER / "Dockerfile.dockerignore").read_text().split()
    assert lines[0] == "*"
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert kept == {"ddtree_guard", "hooks", "checks", "pyproject.toml", "README.md", "LICENSE"}
    assert all((ROOT / name).exists() for name in kept)


def test_the_guard_understands_its_settings() -> None:
    config = Config.from_env(ENV)
    assert config.mode is Mode.LOG
    assert config.warnings == ()


def test_whatever_is_written_has_a_volume() -> None:
    mounts = {mount["mountPath"]: mount for mount in SERVER["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
    assert {mount["name"] for mount in mounts.values()} == set(volumes)
    for path in (ENV["SGLANG_DDTREE_GUARD_DUMP_DIR"], ENV["HOME"], "/tmp", "/dev/shm"):
        assert not mounts[path].get("readOnly"), path
    claim = volumes[mounts[ENV["SGLANG_DDTREE_GUARD_DUMP_DIR"]]["name"]]["persistentVolumeClaim"]
    assert claim["claimName"] == _load("storage.yaml")["metadata"]["name"]


def test_the_dump_volume_holds_the_dumps_and_one_being_written() -> None:
    size = _load("storage.yaml")["spec"]["resources"]["requests"]["storage"]
    assert int(size.removesuffix("Gi")) << 10 >= 2 * Config.from_env(ENV).dump_max_mb


def test_metrics_are_served_and_scraped_where_they_are() -> None:
    assert "--enable-metrics" in SERVER["args"]
    (port,) = SERVER["ports"]
    assert f"--port={port['containerPort']}" in SERVER["args"]
    monitor = _load("podmonitor.yaml")["spec"]
    (end,) = monitor["podMetricsEndpoints"]
    labels = POD["metadata"]["labels"]
    assert (end["port"], end["path"]) == (port["name"], "/metrics")
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert _load("deployment.yaml")["spec"]["selector"]["matchLabels"] == labels
    assert POD["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes_wait_for_the_answer_of_sglang(probe: str) -> None:
    found = SERVER[probe]
    assert found["httpGet"] == {"path": "/health", "port": "http"}
    assert found["timeoutSeconds"] > 20  # HEALTH_CHECK_TIMEOUT of SGLang


def test_it_has_a_gpu() -> None:
    assert SERVER["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_every_place_to_change_says_so() -> None:
    text = (FOLDER / "deployment.yaml").read_text()
    assert len(re.findall("# CHANGE", text)) == 4
