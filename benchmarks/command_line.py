"""The benchmarks' command lines: numbers as arguments, and errors as one sentence instead of a traceback."""

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tandem.protocol.errors import TandemError


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Ends the program with the message of a TandemError raised within."""
    try:
        yield
    except TandemError as error:
        raise SystemExit(error.message) from error


def need_gpu() -> None:
    """Raises SystemExit where PyTorch has no CUDA GPU."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            "this benchmark measures a CUDA GPU and PyTorch sees none; "
            "run it on a machine with one, with PyTorch built for CUDA."
        )


def at_least(least: int) -> Callable[[str], int]:
    """Returns a `type` for `add_argument`: an integer of at least `least`."""

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
    """Parses a finite number above 0, as a `type` for `add_argument`."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{value:g} is not above 0")
    return value
