"""The command lines of benchmarks: cases, numeric arguments, and errors as one sentence instead of a traceback."""

import argparse
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.results import save_result
from tandem.protocol.errors import TandemError

Measured = tuple[str, Mapping[str, Any]]
"""The result of a case: the name under which it is saved, and its figures."""


def run_case(command: str, description: str, cases: Mapping[str, str], arguments: Sequence[str] | None = None) -> None:
    """Run the case that the command line names, by default the first one, and print its result as JSON.

    Cases are modules with `add_options(parser)` and `measure(options) -> Measured`. Only the chosen one is imported,
    because some need a GPU. `--save` saves the result. A TandemError ends the program with its message.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] in (["-h"], ["--help"]):
        print(f"{description}\n\n    python -m benchmarks.{command} [{'|'.join(cases)}] [--help]")
        return
    case = given.pop(0) if given and given[0] in cases else next(iter(cases))
    module: Any = importlib.import_module(cases[case])
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{command} {case}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_options(parser)
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results/")
    options = parser.parse_args(given)
    with exit_on_error():
        name, result = module.measure(options)
    if options.save:
        print("saved", save_result(name, result))
    print(json.dumps(result))


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the program with the message of a TandemError that is raised within the context."""
    try:
        yield
    except TandemError as error:
        raise SystemExit(error.message) from error


def need_gpu() -> None:
    """Raise SystemExit if PyTorch has no CUDA GPU."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            "this benchmark measures a CUDA GPU and PyTorch sees none; "
            "run it on a machine with one, with PyTorch built for CUDA."
        )


def at_least(least: int) -> Callable[[str], int]:
    """Return a `type` for `add_argument` that accepts integers of at least `least`."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


def above_0(text: str) -> float:
    """Parse a finite number above 0, as a `type` for `add_argument`."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{value:g} is not above 0")
    return value


def misplaced_options(
    parser: argparse.ArgumentParser, parsed: argparse.Namespace, group: argparse._ArgumentGroup, option: str, on: bool
) -> None:
    """End the program with an error if an option of `group` is given that cannot be combined with `option`.

    If `option` is given (`on`), no option of the group may be given; otherwise none may be given without `option`. An
    option counts as given if its value is not its default.
    """
    given = [
        action.option_strings[0]
        for action in group._group_actions
        if action.dest != option.removeprefix("--") and getattr(parsed, action.dest) != action.default
    ]
    if given:
        parser.error(f"{', '.join(given)}: only with{'out' if on else ''} {option}; leave out one or the other")
