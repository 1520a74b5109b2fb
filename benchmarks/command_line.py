"""What a benchmark's command line says where there is nothing to measure: one sentence instead of a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from wire.errors import TandemError


@contextmanager
def errors_in_words() -> Iterator[None]:
    """A TandemError within ends the program with its message."""
    try:
        yield
    except TandemError as error:
        raise SystemExit(error.message) from error


def need_gpu() -> None:
    """SystemExit where PyTorch sees no CUDA GPU."""
    if not torch.cuda.is_available():
        raise SystemExit(
            "this benchmark measures a CUDA GPU and PyTorch sees none; "
            "run it on a machine with one, with PyTorch built for CUDA."
        )
