"""Concurrent kernels: a second stream in addition to the step's own, for work that leaves parts of a device idle."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


class SecondStream:
    """The second stream of one GPU. Without a device there is none, and everything runs in order."""

    def __init__(self, device: torch.device | None) -> None:
        self._stream = None if device is None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def apart(self) -> bool:
        """True if there is a second stream."""
        return self._stream is not None

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Orders the streams: both wait for earlier work, and later work waits for both."""
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
        """Runs launches inside on the second stream, within `joined`. Their memory must outlive `joined`."""
        return torch.cuda.stream(self._stream)
