"""The command line. It parses, loads one command's module, and turns errors into sentences.

Exit codes: 0 clean, 1 finding or mismatch, 2 usage, 3 environment incompatible or not armed, 4 dump
unreadable; 70 a fault of this program, 130 interrupted, 141 the reader of the output has gone.
"""

from __future__ import annotations

import argparse
import codecs
import errno
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import ddtree_guard
from ddtree_guard.errors import GuardError, UsageError

PROGRAM = "ddtree-guard"
INTERNAL = 70  # a fault of this program, as in sysexits.h
INTERRUPTED, READER_GONE = 128 + 2, 128 + 13  # what a shell makes of SIGINT and SIGPIPE
_ASCII = "ddtree-guard-ascii"
_PICTURES = dict(zip("━┃░█·├└│─…", "=|%#.|`|-~", strict=True))
_OUTPUT_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF)
_IGNORED = re.compile(r"-(?!h$)[A-Za-z][A-Za-z0-9]*([@,][-@,A-Za-z0-9]*)?")
Command = Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are UsageErrors of one sentence."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[0].lower()}{message[1:]}; see `{self.prog} --help`.")


def build_parser() -> argparse.ArgumentParser:
    """The parser; every command sets `module`, whose `run` does the work."""
    parser = _Parser(
        prog=PROGRAM,
        description="Check DDTree verify steps against what their trees say they must be.",
        epilog="exit codes: 0 clean, 1 finding or mismatch, 2 usage, 3 environment, "
        f"4 dump unreadable; {INTERNAL} a fault of {PROGRAM} itself, {INTERRUPTED} interrupted, "
        f"{READER_GONE} the reader of the output has gone",
    )
    parser.add_argument(
        "--version", action="version", version=f"{PROGRAM} {ddtree_guard.__version__}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    demo = _command(commands, "demo", "demo", "the incident on SGLang's own code, without a GPU")
    demo.add_argument("--out", metavar="DIR", help="where the dump goes (default: a new folder)")

    selftest = _command(
        commands, "selftest", "commands.selftest", "does the device checker see a planted fault?"
    )
    selftest.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where it exists")

    _doctor(commands)

    rules = _command(commands, "rules", "commands.rules", "the rule catalogue")
    rules.add_argument("--markdown", metavar="DIR", help="write one page per rule into DIR")

    explain = _command(
        commands, "explain", "commands.explain", "what a rule, a log line or a dump means"
    )
    explain.add_argument(
        "what", nargs="+", metavar="ID|NAME|LOGLINE|DUMP", help="for example W3, or a dump folder"
    )

    check = _command(commands, "check", "commands.check", "re-check the steps of a dump")
    check.add_argument("dump", metavar="DUMP", help="the dump folder")
    check.add_argument(
        "--rules", default="", metavar="LIST", help="for example W,T4,-P1 or -P1@2026-12-31"
    )
    check.add_argument("--all", action="store_true", help="list every rule that was not checked")

    show = _command(commands, "show", "commands.show", "draw a step: trees, masks, stride ruler")
    show.add_argument("dump", metavar="DUMP", help="the dump folder")
    show.add_argument(
        "--step", type=int, metavar="INDEX",
        help="place in the dump, 0 is the oldest; not the step's number",
    )  # fmt: skip
    show.add_argument("--request", type=int, metavar="INDEX", help="place in the batch, from 0")

    _more_on_dumps(commands)
    return parser


def _doctor(commands: argparse._SubParsersAction[_Parser]) -> None:
    doctor = _command(
        commands, "doctor", "commands.doctor", "would this server be right, and is it guarded?"
    )
    doctor.usage = (
        "ddtree-guard doctor [--json] [--url URL [OPTIONS]]\n"
        "       ddtree-guard doctor [--json] -- SERVE ARGUMENTS"
    )
    doctor.formatter_class = argparse.RawDescriptionHelpFormatter
    doctor.description = """Would this server be right, and is it guarded?

  doctor                this environment: versions, hooks,
                        whether SGLang loads the plugin
  doctor -- ARGUMENTS   a server that would be started here
                        with these `sglang serve` arguments;
                        nothing is started, no GPU is needed
  doctor --url URL      a running server, guarded or not:
                        its configuration, and a few greedy
                        prompts; nothing is installed there"""
    doctor.epilog = (
        "exit codes: 0 nothing wrong found, 1 output would be\n"
        "wrong or is garbled, 2 usage, also WILL NOT START where\n"
        "the server's arguments are not understood, 3 NOT GUARDED,\n"
        "WILL NOT START for another reason, or UNDECIDED; also\n"
        "where the server cannot be asked"
    )
    doctor.add_argument("--url", metavar="URL", help="for example http://127.0.0.1:30000")
    doctor.add_argument("--api-key", metavar="KEY", help="the server's key, or @FILE to read it")
    doctor.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds per request: %(default)s"
    )
    doctor.add_argument("--no-canaries", action="store_true", help="send no prompts")
    doctor.add_argument("arguments", nargs="*", metavar="ARGUMENTS", help=argparse.SUPPRESS)


def _more_on_dumps(commands: argparse._SubParsersAction[_Parser]) -> None:
    report = _command(commands, "report", "commands.report", "one HTML page about a dump")
    report.add_argument("dump", metavar="DUMP", help="the dump folder")
    report.add_argument("-o", "--out", metavar="FILE", default="report.html", help="%(default)s")

    diff = _command(commands, "diff", "commands.diff", "where two dumps differ first, by meaning")
    diff.add_argument("a", metavar="A", help="a dump folder")
    diff.add_argument("b", metavar="B", help="another one")

    ranks = _command(commands, "ranks", "commands.ranks", "the first rank that departs from others")
    ranks.add_argument("dir", metavar="DIR", help="a folder with dumps of all ranks")

    request = _command(commands, "request", "commands.request", "how the steps of a request went")
    request.add_argument("rid", metavar="RID", help="the request id")
    request.add_argument(
        "dir", metavar="DIR", nargs="?", help="the dump folder's root (default: as configured)"
    )

    recompute = _command(
        commands, "recompute", "commands.recompute", "recorded rows against dense attention"
    )
    recompute.add_argument("dump", metavar="DUMP", help="a dump captured with qkv")
    recompute.add_argument("--tolerance", type=float, default=0.02, metavar="X", help="%(default)s")
    recompute.add_argument("--kernel", action="store_true", help="run SGLang's kernel as well")

    bundle = _command(commands, "bundle", "commands.bundle", "a dump made safe for a public issue")
    bundle.add_argument("dump", metavar="DUMP", help="the dump folder")
    bundle.add_argument("-o", "--out", metavar="FILE", help="default: the dump's name with .zip")
    bundle.add_argument(
        "--doctor", action="store_true", help="add what `doctor` says of this environment"
    )

    ci = _command(
        commands, "ci-report", "commands.ci_report", "verdict on a suite that ran without pytest"
    )
    ci.add_argument("dir", metavar="DIR", help="SGLANG_DDTREE_GUARD_DUMP_DIR of the suite")
    ci.add_argument("--junit", metavar="FILE", help="write JUnit XML")
    ci.add_argument(
        "--github", action="store_true", help="annotations, also where GITHUB_ACTIONS is not set"
    )
    ci.add_argument("--since", metavar="TIME", help="leave out what ended before (`date +%%s`)")

    dump = _command(commands, "dump", "commands.ask", "ask a running scheduler for a dump")
    dump.add_argument("--pid", type=int, required=True, help="its process id")


def _command(
    commands: argparse._SubParsersAction[_Parser], name: str, module: str, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    parser.set_defaults(module=module)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Nothing escapes as a traceback."""
    argv = list(sys.argv[1:] if argv is None else argv)
    codecs.register_error(_ASCII, _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_ASCII)
    try:
        if sys.stdout is None:
            raise UsageError("there is no standard output to write to; redirect it to a file.")
        code = _run(argv)
        sys.stdout.flush()
        return code
    except GuardError as error:
        return _fail(str(error), error.exit_code, argv)
    except BrokenPipeError:
        # The reader has gone, as `| head` does; point stdout away so that exit stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error.filename is None and error.errno in _OUTPUT_FAULTS:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sentence = f"the output cannot be written ({error.strerror}); redirect it elsewhere."
            return _fail(sentence, UsageError.exit_code, ())
        return _fault(error, argv)
    except Exception as error:
        return _fault(error, argv)


def _fault(error: Exception, argv: Sequence[str]) -> int:
    if sys.flags.dev_mode:
        raise error
    sentence = (
        f"this is a fault of {PROGRAM} itself: {type(error).__name__}: {error}; run it again "
        f"as `python -X dev -m ddtree_guard ...` and report what that prints."
    )
    return _fail(sentence, INTERNAL, argv)


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Characters for an output that cannot encode the ones of the pictures, one for one."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(_PICTURES.get(c, "?") for c in text), error.end


def _joined(argv: Sequence[str]) -> list[str]:
    """The arguments with `--rules -P1` as one: argparse would take `-P1` for an option."""
    found: list[str] = []
    for word in argv:
        ignoring = found and found[-1] == "--rules" and _IGNORED.fullmatch(word)
        if ignoring:
            found[-1] = f"--rules={word}"
        else:
            found.append(word)
    return found


def _run(argv: Sequence[str]) -> int:
    args = build_parser().parse_args(_joined(argv))
    for name in ("dump", "a", "b", "dir"):
        if getattr(args, name, None) == "":
            raise UsageError(f"{name.upper()} is empty; give the path of a folder.")
    for name in ("out", "markdown", "junit"):
        if getattr(args, name, None) == "":
            raise UsageError(f"--{name} is empty; give a path, or leave it out.")
    run: Command = importlib.import_module(f"ddtree_guard.{args.module}").run
    return run(args)


def _fail(sentence: str, code: int, argv: Sequence[str]) -> int:
    from ddtree_guard.fold import say
    from ddtree_guard.render import plain  # a sentence may quote a hostile file

    say(f"{PROGRAM}: {plain(sentence)}", sys.stderr)
    if "--json" in argv:
        print(json.dumps({"error": sentence, "exit": code}))
    return code
