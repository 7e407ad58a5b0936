"""Would every hook find what it expects? Looks and changes nothing; needs no GPU.

A target is imported where that is possible, because a plugin may have changed what is in force.
Where its module does not import (no torch, no compiled kernels), its source is read instead.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ddtree_guard.attention import backend
from ddtree_guard.config import Backend, Config
from ddtree_guard.ddtree import algorithm
from ddtree_guard.hooks import arm, sites
from ddtree_guard.hooks.facts import CLASS
from ddtree_guard.hooks.hook import Hook
from ddtree_guard.hooks.patching import Outcome, Patch, examine
from ddtree_guard.hooks.runtime import ServerGuard

_SPEC = "sglang.srt.speculative"
# Where the worker of an algorithm takes its step, newest release first.
_WORKERS = {
    "DFLASH": ("dflash_worker_v2.DFlashWorkerV2", "dflash_worker.DFlashWorker"),
    "EAGLE": ("eagle_worker_v2.EAGLEWorkerV2", "eagle_worker.EAGLEWorker"),
    "NGRAM": ("ngram_worker.NGRAMWorker",),
}
_STEP = "forward_batch_generation"
_WHY = "knows the requests of a step without asking the device, and ends the step"


@dataclass(frozen=True, slots=True)
class Seen:
    """What a site's hook would find. `status`: matched, changed, missing or unknown.

    `part` is what needs it: `guard`, `corrected backend` or `DDTREE`. `how` says whether the code
    was imported or read.
    """

    part: str
    site: str
    status: str
    required: bool
    detail: str
    how: str = "imported"

    @property
    def blocking(self) -> bool:
        """Whether the part that needs it cannot be armed."""
        return self.required and self.status != "matched"


def inspect_hooks(runs_ddtree: bool = True) -> tuple[Seen, ...]:
    """Every hook of the guard, of the corrected backend and, with `runs_ddtree`, of DDTREE."""
    guard = cast(ServerGuard, None)  # wrappers are not made, so nobody asks it anything
    found = [_site("guard", hook) for hook in (arm.scheduler_patch(Config()),)]
    found += [_site("guard", hook) for hook in sites.scheduler_hooks(guard)]
    found += [_site("guard", hook) for hook in _backend_hooks(guard)]
    found += [_worker(name, targets) for name, targets in _WORKERS.items()]
    found += [_site("corrected backend", Hook("registry", (backend.registry_patch(Backend.AUTO),)))]
    if runs_ddtree:
        for site, patches in (("arguments", algorithm.ARGUMENTS), ("server", algorithm.SERVER)):
            found += [_site("DDTREE", Hook(site, (patch,))) for patch in patches]
    return tuple(found)


def _backend_hooks(guard: ServerGuard) -> tuple[Hook, ...]:
    module, _, name = CLASS.rpartition(".")
    return sites.hooks_at(guard, f"{module}.{name}")


def _worker(name: str, targets: Iterable[str]) -> Seen:
    """An algorithm's worker, under the names that it has in different releases."""
    patches = tuple(
        Patch(f"{_SPEC}.{target}.{_STEP}", _WHY, _unused, ("self",)) for target in targets
    )
    return _site("guard", Hook(f"worker {name}", patches, required=False))


def _unused(original: Any) -> Any:
    raise AssertionError("an inspection never wraps")


def _site(part: str, hook: Hook) -> Seen:
    """The best of a site's alternatives: releases differ, and one match is enough."""
    seen = [_look(patch) for patch in hook.patches]
    order = ("matched", "signature-changed", "unknown", "absent")
    outcome, how = min(seen, key=lambda pair: order.index(pair[0].status))
    words = {"signature-changed": "changed", "absent": "missing"}
    detail = f"{outcome.patch.target}{outcome.detail and ': ' + outcome.detail}"
    if outcome.status == "absent":
        detail = " or ".join(o.patch.target for o, _ in seen)
    status = words.get(outcome.status, outcome.status)
    return Seen(part, hook.site, status, hook.required, detail, how)


def _look(patch: Patch) -> tuple[Outcome, str]:
    try:
        return examine(patch), "imported"
    except Exception as error:  # whatever SGLang's own module does when it is imported
        why = f"{type(error).__name__}: {error}"
    try:
        return _read_source(patch), f"read, not imported ({why})"
    except (OSError, SyntaxError, ValueError) as error:
        return Outcome(patch, "unknown", f"{why}; {error}"), "neither imported nor read"


def _read_source(patch: Patch) -> Outcome:
    """What the source says. Raises OSError or SyntaxError where there is none that can be read."""
    key = ""
    target = patch.target
    if target.endswith("]"):
        target, _, key = target[:-1].partition("[")
    path, names = _file_of(target.split("."))
    if path is None:
        return Outcome(patch, "absent")
    node = _find(ast.parse(path.read_text()), names, path)
    if key and node is not None:  # a mapping that decorators fill: who registers the key?
        node = next(_registered(ast.parse(path.read_text()), key), None)
    if node is None:
        return Outcome(patch, "absent")
    problem = _parameters_problem(node, patch.expects)
    return Outcome(patch, "signature-changed" if problem else "matched", problem)


def _file_of(parts: list[str]) -> tuple[Path | None, list[str]]:
    """The file of the longest module in a dotted path, and the names inside it. Imports nothing."""
    spec = importlib.util.find_spec(parts[0])
    if spec is None or not spec.submodule_search_locations:
        return None, []
    base = Path(next(iter(spec.submodule_search_locations)))
    for count in range(1, len(parts)):
        folder = base / parts[count]
        if folder.is_dir():
            base = folder
            continue
        file = base / f"{parts[count]}.py"
        return (file, parts[count + 1 :]) if file.is_file() else (None, [])
    return None, []


def _find(tree: ast.AST, names: list[str], path: Path, depth: int = 0) -> ast.AST | None:
    """The definition of a name, an attribute of a class, or what is inherited from its bases."""
    body = getattr(tree, "body", [])
    for node in _flat(body):
        if _named(node, names[0]):
            if len(names) == 1:
                return node
            inner = _find(node, names[1:], path, depth)
            return inner or _inherited(node, names[1:], path, depth)
    return _imported(body, names, depth)


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, those below `if` and `try` included."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from _flat([*node.body, *node.orelse])


def _named(node: ast.stmt, name: str) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name == name
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _imported(body: list[ast.stmt], names: list[str], depth: int) -> ast.AST | None:
    """A name that the module imports from another one of SGLang's."""
    for node in _flat(body):
        if not isinstance(node, ast.ImportFrom) or node.level or depth > 8:
            continue
        for alias in node.names:
            if (alias.asname or alias.name) == names[0]:
                path, inside = _file_of([*(node.module or "").split("."), alias.name])
                if path is not None and inside:
                    tree = ast.parse(path.read_text())
                    return _find(tree, [*inside, *names[1:]], path, depth + 1)
    return None


def _inherited(node: ast.AST, names: list[str], path: Path, depth: int) -> ast.AST | None:
    if not isinstance(node, ast.ClassDef) or depth > 8:
        return None
    tree = ast.parse(path.read_text())
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id != node.name:
            found = _find(tree, [base.id, *names], path, depth + 1)
            if found is not None:
                return found
    return None


def _registered(tree: ast.Module, key: str) -> Iterator[ast.AST]:
    """Functions that a decorator with this string registers."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                words = decorator.args if isinstance(decorator, ast.Call) else []
                if words and getattr(words[0], "value", None) == key:
                    yield node


def _parameters_problem(node: ast.AST, expects: tuple[str, ...]) -> str:
    if not expects or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ""
    given = node.args
    names = tuple(arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs))
    if names[: len(expects)] == expects or (given.vararg is not None and not names):
        return ""
    return f"has parameters ({', '.join(names)}), expected ({', '.join(expects)}, ...)"
