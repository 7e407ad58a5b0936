"""What is imported when, and who may import whom."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_guard.config import Config
from ddtree_guard.dump.write import DumpWriter
from ddtree_guard.testing.steps import sound_step

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "triton", "sglang"}

# Design section 2, lowest first. A module may import its own layer and the layers below it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("config", "step", "results", "rule", "form", "shape", "runbook", "loglines"),
    # synthetic steps and faults are what the self-test runs in a server
    ("checks", "attention.reference", "device", "testing.steps", "testing.faults"),
    ("render", "fold", "recorder", "dump", "evidence", "guard", "metrics"),
    ("hooks", "attention", "ddtree", "doctor"),
    ("cli", "commands", "report", "demo", "testing", "pytest_plugin", "__main__"),
)


def layer(module: str) -> int:
    """The layer of a module named relative to the package: the longest prefix wins."""
    found = [
        (len(name), at)
        for at, names in enumerate(LAYERS)
        for name in names
        if module == name or module.startswith(f"{name}.")
    ]
    assert found, f"{module} is in no layer; add it to LAYERS"
    return max(found)[1]


def modules() -> Iterator[tuple[str, ast.Module]]:
    for folder, prefix in (("ddtree_guard", ""), ("hooks", "hooks."), ("checks", "checks.")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT / folder)
            if folder == "ddtree_guard" and relative.parts[0] in ("hooks", "checks"):
                continue  # the two links, in case rglob follows them
            name = prefix + ".".join(relative.with_suffix("").parts)
            name = name.removesuffix("__init__").rstrip(".")
            if name:
                yield name, ast.parse(path.read_text())


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top_level(tree: ast.Module) -> Iterator[str]:
    """Imports that run when the module is imported: not in functions, not for type checkers."""
    for node in tree.body:
        guard = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not guard and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from imports(node)


MODULES = dict(modules())


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module: str) -> None:
    for name in imports(MODULES[module]):
        if name.startswith("ddtree_guard."):
            used = name.removeprefix("ddtree_guard.")
            if used.split(".")[0] != "__version__":
                assert layer(used) <= layer(module), f"{module} imports {name}"


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("checks")])
def test_checks_import_numpy_and_the_vocabulary_only(module: str) -> None:
    allowed = ("numpy", "ddtree_guard.rule", "ddtree_guard.step", "ddtree_guard.checks")
    for name in imports(MODULES[module]):
        inside = name.startswith(allowed) or name.split(".")[0] in sys.stdlib_module_names
        assert inside, f"{module} imports {name}"


def test_only_config_and_the_entry_point_touch_the_environment() -> None:
    readers = {name for name, tree in MODULES.items() if "os.environ" in ast.unparse(tree)}
    assert readers <= {"config", "hooks.plugin"} | {
        name for name in MODULES if name.startswith("testing")
    }


# run only where torch is loaded
WITH_TORCH = (
    "attention", "device", "testing", "hooks", "ddtree.choose", "ddtree.propose",
    "ddtree.tree_kernel", "ddtree.verify_kernel", "ddtree.worker",
)  # fmt: skip


@pytest.mark.parametrize("module", [n for n in MODULES if not n.startswith(WITH_TORCH)])
def test_heavy_modules_are_not_imported_at_module_level(module: str) -> None:
    found = {name.split(".")[0] for name in top_level(MODULES[module])}
    assert not found & (HEAVY | {"rich"})


def loaded(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after running the code."""
    program = f"{code}\nimport sys\nprint('MODULES', *sorted(sys.modules))"
    command = [sys.executable, "-c", program]
    env = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    return {name.split(".")[0] for name in done.stdout.split("MODULES ")[1].split()}


@pytest.mark.parametrize("code", ["import ddtree_guard", "import ddtree_guard.cli"])
def test_importing_is_light(code: str) -> None:
    assert not loaded(code) & (HEAVY | {"numpy", "rich", "safetensors"})


def test_every_public_name_loads_without_torch() -> None:
    assert not loaded("from ddtree_guard import *") & (HEAVY | {"rich"})


def test_explain_does_not_wait_for_numpy() -> None:
    code = "from ddtree_guard.cli import main\nassert main(['explain', 'W3']) == 0\n"
    found = loaded(code + "import sys\nassert 'numpy.linalg' not in sys.modules")
    assert not found & (HEAVY | {"rich", "safetensors"})


def test_numpy_is_whole_after_it_was_put_off() -> None:
    code = (
        "from ddtree_guard.commands.catalogue import catalogue\ncatalogue()\n"
        "from ddtree_guard.testing.examples import example\n"
        "assert all(example(rule) for rule in catalogue())"
    )
    assert "numpy" in loaded(code)


@pytest.mark.parametrize("command", ["check", "show", "explain", "report", "bundle", "recompute"])
def test_commands_on_a_dump_are_light(tmp_path: Path, command: str) -> None:
    path = DumpWriter("run", Config(dump_dir=tmp_path)).write([sound_step()])
    out = f", '-o', {str(tmp_path / 'out')!r}" if command in ("report", "bundle") else ""
    found = loaded(f"from ddtree_guard.cli import main\nmain(['{command}', {str(path)!r}{out}])")
    assert not found & HEAVY
    assert ("rich" in found) == (command == "show")


@pytest.mark.parametrize("argv", [["diff", "A", "A"], ["ranks", "D"], ["request", "r0", "D"]])
def test_commands_on_folders_are_light(tmp_path: Path, argv: list[str]) -> None:
    path = DumpWriter("run", Config(dump_dir=tmp_path)).write([sound_step()])
    argv = [{"A": str(path), "D": str(tmp_path)}.get(word, word) for word in argv]
    found = loaded(f"from ddtree_guard.cli import main\nmain({argv!r})")
    assert not found & (HEAVY | {"rich"})


def test_the_recorder_needs_no_torch() -> None:
    assert not loaded("import ddtree_guard.recorder") & (HEAVY | {"rich"})


def test_the_proof_would_notice_a_heavy_import() -> None:
    assert "torch" in loaded("import types, sys\nsys.modules['torch'] = types.ModuleType('torch')")
