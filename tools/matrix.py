"""Run the contract tests on every SGLang release of the matrix: `python tools/matrix.py`.

Each release lives in its own overlay folder, made once by pip and put before the common
environment on PYTHONPATH; one pytest child per release. DDTREE_GUARD_OVERLAYS names an existing
cache (default: .overlays). `--only 0.5.16` selects releases; further arguments go to pytest.
Standard library only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ddtree_guard.hooks.facts import MATRIX, Release  # noqa: E402  (needs the path above)


def main(argv: list[str] | None = None) -> int:
    """Make the overlays that are missing, run the tests; 1 if any release failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--only", action="append", default=[], metavar="VERSION")
    parser.add_argument("--install-only", action="store_true", help="make the overlays, no tests")
    options, pytest_args = parser.parse_known_args(argv)
    known = [release.version for release in MATRIX]
    for version in options.only:
        if version not in known:
            parser.error(f"{version} is not in the matrix; choose from {', '.join(known)}")
    chosen = [r for r in MATRIX if not options.only or r.version in options.only]
    for release in [r for r in chosen if sys.version_info < r.python]:
        chosen.remove(release)
        needed = ".".join(map(str, release.python))
        print(f"SGLang {release.version} NOT TESTED: needs Python {needed}", flush=True)
    cache = Path(os.environ.get("DDTREE_GUARD_OVERLAYS") or ROOT / ".overlays")
    results = {}
    for count, release in enumerate(chosen, 1):
        print(f"[{count}/{len(chosen)}] SGLang {release.version}", flush=True)
        started = time.monotonic()
        ok = _overlay(release, cache) and (
            options.install_only or _test(cache / release.version, pytest_args)
        )
        results[release.version] = (ok, time.monotonic() - started)
    for version, (ok, seconds) in results.items():
        print(f"SGLang {version:8} {'ok' if ok else 'FAILED'} {seconds:6.1f} s")
    return 0 if all(ok for ok, _ in results.values()) else 1


class _Raw(argparse.RawDescriptionHelpFormatter):
    """Keeps the paragraphs of the description."""


def _overlay(release: Release, cache: Path) -> bool:
    """Make the overlay unless it is complete. A half-made one never gets the final name."""
    final = cache / release.version
    if (final / "sglang").is_dir() and (final / "transformers").is_dir():
        return True
    cache.mkdir(parents=True, exist_ok=True)
    draft = cache / f".{release.version}.part"
    shutil.rmtree(draft, ignore_errors=True)
    wanted = [f"sglang=={release.version}", *release.pins]
    print(f"  installing {' '.join(wanted)}", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(draft)]
    if subprocess.run([*pip, *wanted]).returncode != 0:
        print(f"  pip could not install SGLang {release.version}; see its message above")
        return False
    draft.rename(final)
    return True


def _test(overlay: Path, pytest_args: list[str]) -> bool:
    path = os.pathsep.join([str(ROOT), str(overlay)])
    if os.environ.get("PYTHONPATH"):
        path += os.pathsep + os.environ["PYTHONPATH"]
    command = [sys.executable, "-m", "pytest", "-q", "tests/matrix", "tests/hooks", *pytest_args]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
