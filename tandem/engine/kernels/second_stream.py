"""A second CUDA stream beside the step's own, for work that runs while another kernel leaves a part of the GPU idle."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


class SecondStream:
    """The second stream of one GPU. Without a GPU there is no second stream, and all work runs in order."""

    def __init__(self, device: torch.device | None) -> None:
        self._stream = None if device is None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def apart(self) -> bool:
        """True if there is a second stream."""
        return self._stream is not None

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Fork the second stream from the current one, and join both at the end of the context.

        Inside the context, work on the second stream waits only for work launched on the current stream before the
        context. Work after the context waits for both streams.
        """
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
        """Launch the kernels inside the context on the second stream; used within `joined`.

        Memory that these kernels use must stay allocated until `joined` has ended.
        """
        return torch.cuda.stream(self._stream)
