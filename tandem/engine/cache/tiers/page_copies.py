"""Copies of whole pages between the page pool and host memory, outside the engine's steps."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.cache.page_checksums import PageChecksums
from tandem.engine.device_wait import wait_for


class PageCopies:
    """Copies pages and computes their checksums; on a GPU on a stream of its own.

    Only one thread may call the methods; each of them waits for the device. No step may write to the pages meanwhile.
    """

    def __init__(self, storage: Tensor, sums: PageChecksums, page_tokens: int) -> None:
        """Create the copies of the pages of `storage` [pages, elements].

        `sums` is the function that computes their checksums; no other thread may call it.
        """
        self._pages = storage.view(torch.uint8)
        self._sums = sums
        self._page_tokens = page_tokens
        self._stream = torch.cuda.Stream(storage.device) if storage.is_cuda else None  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event(blocking=True) if storage.is_cuda else None  # type: ignore[no-untyped-call]

    @property
    def page_bytes(self) -> int:
        """The size of a page in bytes."""
        return self._pages.shape[1]

    @property
    def device(self) -> torch.device:
        """The device of the page pool."""
        return self._pages.device

    def save(self, pages: Sequence[int], buffers: Sequence[Tensor]) -> None:
        """Copy pages of the pool into host buffers [page bytes] uint8."""
        self._copy([(buffer, self._pages[page]) for page, buffer in zip(pages, buffers, strict=True)])

    def load(self, pages: Sequence[int], buffers: Sequence[Tensor]) -> None:
        """Copy host buffers [page bytes] uint8 into pages of the pool."""
        self._copy([(self._pages[page], buffer) for page, buffer in zip(pages, buffers, strict=True)])

    def checksums(self, pages: Sequence[int], groups: Sequence[int]) -> Sequence[int]:
        """Return the checksums of full pages of the pool, each of the given group of layers."""
        return self._sums(pages, [self._page_tokens] * len(pages), groups)

    def _copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        if self._stream is None or self._done is None:
            for target, source in copies:
                target.copy_(source)
            return
        # The current device is a property of each thread; entering the stream's context sets it for this one.
        with torch.cuda.stream(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            self._done.record()
        wait_for(self._done)
