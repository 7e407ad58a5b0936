"""Errors that reach a person. Each one owns the exit code of the command line."""


class GuardError(Exception):
    """Base class. The message is one sentence: what was expected, what was found, what to do."""

    exit_code = 1


class UsageError(GuardError):
    """A wrong option, mode, rule id or value of an environment variable."""

    exit_code = 2


class IncompatibleError(GuardError):
    """No SGLang, an SGLang that the guard cannot hook, or a guard that is not armed."""

    exit_code = 3


class DumpError(GuardError):
    """A dump that cannot be read: foreign, truncated, of another schema, or tampered with."""

    exit_code = 4


def not_yours(path: object) -> str:
    """What to say of a dump or a folder of dumps that belongs to another user."""
    return (
        f"{str(path)!r} cannot be read by this user: dumps are their server's alone; run this as "
        "the user of the server, or copy them with its rights."
    )


class Violation(GuardError):
    """Raised in `raise` mode, carrying the finding's text."""

    exit_code = 1
