"""What a wheel holds: every module, the data files, and nothing else at the top level."""

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def source() -> set[str]:
    """Every Python file as it is named in the wheel."""
    found = set()
    for folder in ("ddtree_guard", "hooks", "checks"):
        prefix = "" if folder == "ddtree_guard" else "ddtree_guard/"
        for path in (ROOT / folder).rglob("*.py"):
            inside = path.relative_to(ROOT).as_posix()
            if not inside.startswith(("ddtree_guard/hooks/", "ddtree_guard/checks/")):
                found.add(prefix + inside)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    # From a clean copy: an old build/ or *.egg-info puts deleted or unlisted files into the wheel.
    clean = tmp_path_factory.mktemp("clean") / "tree"
    ignore = shutil.ignore_patterns("build", "*.egg-info", ".*", "__pycache__", "tests")
    shutil.copytree(ROOT, clean, symlinks=True, ignore=ignore)
    out = clean.parent / "out"
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q",
               "--disable-pip-version-check", "-w", str(out), str(clean)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_module_and_no_bare_folder(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"ddtree_guard"}
    assert {name for name in names if name.endswith(".py")} == source()
    assert len(names) == len(set(names))


def test_the_wheel_holds_data_licence_and_entry_points(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {"ddtree_guard/py.typed", "ddtree_guard/dump/manifest.schema.json"} <= names
    assert "ddtree_guard/report/template.html" in names
    assert "ddtree_guard/pytest_plugin/report.schema.json" in names
    doctor = {"known_faults.json", "doctor.schema.json"}
    assert {f"ddtree_guard/doctor/{name}" for name in doctor} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    points = configparser.ConfigParser()
    (path,) = [name for name in names if name.endswith("entry_points.txt")]
    points.read_string(wheel.read(path).decode())
    assert dict(points["console_scripts"]) == {"ddtree-guard": "ddtree_guard.cli:main"}
    assert dict(points["pytest11"]) == {"ddtree_guard": "ddtree_guard.pytest_plugin"}
    assert dict(points["sglang.srt.plugins"]) == {"ddtree_guard": "ddtree_guard.hooks.plugin:load"}


def test_the_wheel_runs_from_an_empty_folder_without_bare_names(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    wheel.extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    code = (
        "import importlib.util as u, ddtree_guard.checks as c, ddtree_guard.cli as cli\n"
        "assert u.find_spec('hooks') is None and u.find_spec('checks') is None\n"
        "assert c.__file__.endswith('site/ddtree_guard/checks/__init__.py'), c.__file__\n"
        "raise SystemExit(cli.main(['explain', 'W3']))"
    )
    env = {"PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path / "empty", env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "mask-offset-gap" in done.stdout


def test_the_top_folders_are_links_in_the_checkout() -> None:
    for name in ("hooks", "checks"):
        assert (ROOT / "ddtree_guard" / name).readlink() == Path("..") / name
