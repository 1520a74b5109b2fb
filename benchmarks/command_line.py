"""Error handling of the benchmarks' command lines: one sentence instead of a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from wire.errors import TandemError


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Ends the program with the message of a TandemError raised within."""
    try:
        yield
    except TandemError as error:
        raise SystemExit(error.message) from error


def need_gpu() -> None:
    """Raises SystemExit where PyTorch has no CUDA GPU."""
    if not torch.cuda.is_available():
        raise SystemExit(
            "this benchmark measures a CUDA GPU and PyTorch sees none; "
            "run it on a machine with one, with PyTorch built for CUDA."
        )
