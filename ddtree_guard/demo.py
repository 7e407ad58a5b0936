"""`ddtree-guard demo`: the incident on SGLang's own Triton backend and kernels, without a GPU.

Five verify steps in the order in which the incident was debugged. The kernels run in Triton's
interpreter, every row is compared with a dense oracle, and the guard sees only the Step.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from ddtree_guard.config import Config, export, unset
from ddtree_guard.errors import GuardError, IncompatibleError, UsageError
from ddtree_guard.fold import fold
from ddtree_guard.rule import Finding
from ddtree_guard.step import Step

BLOCK = 8
LENS = (37, 21)
HEAVY = ("torch", "triton", "sglang")
LAST_STOCK_FAULT = (0, 5, 16)  # later releases read the width from the batch in eager steps
T_ = TypeVar("T_")


@dataclass(frozen=True, slots=True)
class Experiment:
    """One step of the debugging chain. `clean` is what the incident says must come out."""

    name: str
    budget: int
    backend: Literal["stock", "corrected"]
    path: Literal["eager", "graph"]
    clean: bool
    hypothesis: str


EXPERIMENTS = (
    Experiment("budget-7-stock-eager", 7, "stock", "eager", True, "DDTree itself"),
    Experiment("budget-16-stock-eager", 16, "stock", "eager", False, "the larger tree"),
    Experiment("budget-16-stock-graph", 16, "stock", "graph", False, "CUDA graphs"),
    Experiment("budget-16-corrected-eager", 16, "corrected", "eager", True, "the width"),
    Experiment("budget-16-corrected-graph", 16, "corrected", "graph", True, "the width, in graphs"),
)


@dataclass(frozen=True, slots=True)
class Result:
    """What one experiment gave."""

    experiment: Experiment
    rows: int
    wrong_rows: int
    max_error: float
    step: Step
    findings: tuple[Finding, ...]

    @property
    def rules(self) -> list[str]:
        """Ids of the broken rules."""
        return [finding.rule for finding in self.findings]

    @property
    def as_expected(self) -> bool:
        """Whether the experiment came out as the incident says."""
        if self.experiment.clean:
            return self.wrong_rows == 0 and not self.findings
        return self.wrong_rows > 0 and self.telling is not None

    @property
    def telling(self) -> Finding | None:
        """The first finding that names a request and both widths, the batch's and the backend's."""
        numbers = {str(self.step.w), str(BLOCK)}
        for finding in self.findings:
            if finding.request is not None and numbers <= set(
                re.findall(r"\d+", f"{finding.headline} {finding.equation}")
            ):
                return finding
        return None

    def as_json(self) -> dict[str, Any]:
        """The documented keys of one experiment."""
        e = self.experiment
        return {
            "name": e.name,
            "budget": e.budget,
            "block": BLOCK,
            "backend": e.backend,
            "path": e.path,
            "rows": self.rows,
            "wrong_rows": self.wrong_rows,
            "max_error": self.max_error if math.isfinite(self.max_error) else None,
            "rules": self.rules,
        }


@dataclass(frozen=True, slots=True)
class Recheck:
    """`ddtree-guard check` on the dump, in a process of its own."""

    exit_code: int
    summary: str
    loaded: tuple[str, ...]  # heavy modules that the process imported

    @property
    def as_expected(self) -> bool:
        """Whether it found the fault without any of the heavy modules."""
        return self.exit_code == 1 and not self.loaded


def run(args: argparse.Namespace) -> int:
    """Run the demo. 0 when everything came out as the incident says, else 1.

    Raises UsageError for a wrong setting or a folder that cannot be written, before anything runs,
    and IncompatibleError where SGLang or its plugin entry point is missing.
    """
    stage = _Stage(sys.stderr if args.json else sys.stdout)
    _require_settings()
    _require_folder(args.out)
    release = require_sglang()
    stage.title(release)
    stage.during(f"importing SGLang {release} and loading its plugins", load_sglang)
    results = [stage.during(e.name, partial(experiment, e)) for e in EXPERIMENTS]
    draft = stage.during("the draft runner's backend", draft_width)
    dump = write_dump(results, args.out)
    checked = stage.during("ddtree-guard check DUMP, in a new process", lambda: recheck(dump))
    good = all(r.as_expected for r in results) and checked.as_expected and draft == BLOCK
    if args.json:
        experiments = [result.as_json() for result in results]
        document = {
            "experiments": experiments,
            "dump": str(dump),
            "recheck_exit": checked.exit_code,
        }
        print(json.dumps(document, indent=1))
    else:
        from ddtree_guard.report.story import tell

        tell(results, draft, dump, checked, good)
    return 0 if good else 1


def _require_settings() -> None:
    """Raise UsageError for settings that no server could start with; SGLang would swallow them."""
    from ddtree_guard.guard import Guard

    config = Config.from_env()
    Guard(config)  # knows which rules exist
    for warning in config.warnings:
        print(f"ddtree-guard: {warning}", file=sys.stderr)


def _require_folder(out: str | None) -> None:
    """Raise UsageError if the dump could not be written at the end."""
    if out is None:
        return
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise _unwritable(out, error) from None


def _unwritable(folder: Path | str, error: OSError) -> UsageError:
    return UsageError(
        f"the dump cannot be written to {str(folder)!r} ({error.strerror}); give a folder that can "
        "be written with --out."
    )


def require_sglang() -> str:
    """The installed SGLang release. Raises IncompatibleError with what to install."""
    missing = [name for name in HEAVY if importlib.util.find_spec(name) is None]
    if missing:
        raise IncompatibleError(
            f"the demo runs SGLang's own code, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed; run "
            "`make demo` in a checkout, which installs them in its own environment."
        )
    release = importlib.metadata.version("sglang")
    number = re.match(r"(\d+)\.(\d+)\.(\d+)", release)
    if number and tuple(map(int, number.groups())) > LAST_STOCK_FAULT:
        raise IncompatibleError(
            f"the demo shows a fault of SGLang up to 0.5.16, but {release} is installed; run "
            "`make demo` in a checkout, which installs 0.5.16 in its own environment."
        )
    plugins = importlib.metadata.entry_points(group="sglang.srt.plugins")
    if "ddtree_guard" not in {plugin.name for plugin in plugins}:
        raise IncompatibleError(
            "SGLang finds its plugins by their installed metadata, but ddtree-guard is not "
            "installed in this environment; run `pip install -e .` in the checkout."
        )
    return release


def load_sglang() -> None:
    """Import SGLang and let it load this package through its own plugin entry point.

    Raises IncompatibleError when SGLang did not call the plugin: it swallows plugin errors.
    """
    unset()  # the experiments set what they need, whatever the caller's server is given
    export(  # before the first import of triton
        TRITON_INTERPRET="1",
        SGLANG_PLUGINS="ddtree_guard",
        SGLANG_DDTREE_GUARD_BACKEND="corrected",
    )
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins import load_plugins

    stock = ATTENTION_BACKENDS["triton"]
    load_plugins()
    if ATTENTION_BACKENDS["triton"] is stock:
        raise IncompatibleError(
            "SGLang was expected to load ddtree_guard through its entry point sglang.srt.plugins, "
            "but its registry still holds the stock backend; run `pip install -e .` again."
        )
    from ddtree_guard.hooks.plugin import unload

    unload()  # the experiments choose their backend one by one


def experiment(plan: Experiment) -> Result:
    """Run one verify step on SGLang's backend and let the guard judge it."""
    from ddtree_guard.guard import Guard
    from ddtree_guard.testing.standins import VerifyCase, build_backend, run_verify

    case = VerifyCase(lens=LENS, budget=plan.budget, block=BLOCK)
    backend = build_backend(case, choice=plan.backend)
    done = run_verify(backend, case, path=plan.path)
    report = Guard().check(done.step)
    return Result(
        plan, done.rows, len(done.wrong_rows), float(done.max_error), done.step, report.findings
    )


def draft_width() -> int:
    """The width of the draft runner's corrected backend, which must stay the block size."""
    from ddtree_guard.testing.standins import VerifyCase, build_backend

    case = VerifyCase(lens=LENS, budget=16, block=BLOCK)
    return int(build_backend(case, choice="corrected", draft=True).num_draft_tokens)


def write_dump(results: list[Result], out: str | None) -> Path:
    """Dump the faulty steps with their findings. Raises UsageError if `out` cannot be written."""
    from ddtree_guard.dump.write import DumpWriter

    faulty = [result for result in results if result.findings] or results[:1]
    findings = [(at, f) for at, result in enumerate(faulty) for f in result.findings]
    folder = Path(out or tempfile.mkdtemp(prefix="ddtree-guard-"))
    try:
        writer = DumpWriter("demo", Config(dump_dir=folder))
        return writer.write([result.step for result in faulty], findings)
    except OSError as error:
        raise _unwritable(folder, error) from None


def recheck(dump: Path) -> Recheck:
    """Run `ddtree-guard check` on the dump in a child, and list the heavy modules it imported."""
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "ddtree_guard",
        "check",
        str(dump),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    imported = {
        line.rsplit("|", 1)[1].strip().split(".")[0]
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    try:
        summary = str(json.loads(done.stdout)["summary"])
    except (ValueError, KeyError):
        summary = "no output"
    return Recheck(done.returncode, summary, tuple(n for n in HEAVY if n in imported))


class _Stage:
    """Progress lines, and silence for what SGLang prints while it is at work."""

    def __init__(self, out: Any) -> None:
        self.out = out

    def title(self, release: str) -> None:
        head = fold(
            f"The server answers `The.r!!!!!!!!!!`. SGLang {release}, Triton backend, DDTree with "
            f"block {BLOCK}.\nNo GPU: SGLang's own backend and kernels run in Triton's "
            "interpreter.\n\n"
        )
        self.out.write(head)

    def during(self, what: str, work: Callable[[], T_]) -> T_:
        """Do the work under a progress line that ends with the seconds it took."""
        self.out.write(f"  {what} ... ")
        self.out.flush()
        began = time.monotonic()
        with _quiet():
            done = work()
        self.out.write(f"{time.monotonic() - began:.1f} s\n")
        self.out.flush()
        return done


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what libraries write to stdout and stderr; show the end of it if the work fails."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as noise:
        try:
            os.dup2(noise.fileno(), 1)
            os.dup2(noise.fileno(), 2)
            yield
        except GuardError:
            raise
        except Exception:
            noise.seek(0)
            os.write(kept[1], b"failed\n" + noise.read()[-4000:])
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for saved, number in zip(kept, (1, 2), strict=True):
                os.dup2(saved, number)
                os.close(saved)
