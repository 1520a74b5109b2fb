"""Kernels side by side: a second stream beside the step's own, for work that leaves parts of a device idle."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


class SecondStream:
    """Of one GPU. None = there is no second one, and everything runs in its turn."""

    def __init__(self, device: torch.device | None) -> None:
        self._stream = None if device is None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def apart(self) -> bool:
        """Whether there is one."""
        return self._stream is not None

    @contextmanager
    def joined(self) -> Iterator[None]:
        """What was launched before comes before both streams' work inside, and all of that before what comes after."""
        if self._stream is None:
            yield
            return
        step = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(step)
        try:
            yield
        finally:
            step.wait_stream(self._stream)

    def turn(self) -> AbstractContextManager[None]:
        """Inside of `joined`: what is launched in here runs beside what is not. Its memory has to outlast `joined`."""
        return torch.cuda.stream(self._stream)
