"""Numbers on a benchmark's command line: argparse says what is wrong with one, before anything is measured."""

import argparse
import math
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """For `add_argument(type=...)`: a whole number, `least` or more."""

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
    """For `add_argument(type=...)`: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{value:g} is not above 0")
    return value
