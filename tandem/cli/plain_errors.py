"""Errors of commands: one sentence on stderr and an exit code, never a traceback."""

import functools
import re
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from tandem.settings.cluster import ClusterSettings
from tandem.settings.options import options_of

P = ParamSpec("P")
R = TypeVar("R")

FAILED = 1
BAD_OPTION = 2
BAD_MODEL = 3
UNAVAILABLE = 4
INTERRUPTED = 130

SETTINGS = {
    **{option.field.name: option.flag for option in options_of(ClusterSettings) if "_" in option.field.name},
    **{name: f"--{name}" for name in ("model", "tokenizer", "device", "dtype", "quantization", "draft", "threads")},
    "loras": "--lora",
    "output": "OUTPUT",
    **{name: f"--{name.replace('_', '-')}" for name in ("out", "scheme", "group_size", "method", "samples", "kind")},
    **{name: f"--{name}" for name in ("text", "tokens")},
}
"""The option for each setting name that may occur in error messages of `tandem up` and other commands."""


def plain_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Wrap `command` so that a TandemError prints one sentence and sets the exit code; Ctrl-C only sets the code."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        from tandem.protocol.errors import TandemError

        try:
            return command(*args, **kwargs)
        except TandemError as error:
            print(f"error: {in_options(' '.join(error.message.split()))}", file=sys.stderr)
            raise typer.Exit(exit_code(error)) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None

    return wrapped


def in_options(message: str) -> str:
    """Return `message` with the names of settings replaced by the command's options.

    Names with an underscore are replaced anywhere, others only at the beginning of the message before a colon.
    """
    return re.sub(r"^(\w+)(?=:)|\b\w+_\w+\b", lambda match: SETTINGS.get(match.group(), match.group()), message)


def exit_code(error: Exception) -> int:
    """Return 2 for a wrong option, 3 for a model that cannot be served, 4 for an unavailable cluster, else 1."""
    from tandem.protocol.errors import InvalidArgument, ModelError, Unavailable

    codes: dict[type[Exception], int] = {InvalidArgument: BAD_OPTION, ModelError: BAD_MODEL, Unavailable: UNAVAILABLE}
    return codes.get(type(error), FAILED)
