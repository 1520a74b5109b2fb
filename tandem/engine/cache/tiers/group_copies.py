"""Copies of the pages of a worker whose ranks divide the model: a page of a tier has the parts of all ranks.

The first rank has the tiers and decides what they keep. Each rank copies its own part of a page between its pool and
memory that it shares with the first rank. So all ranks save, load and evict alike.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from torch import Tensor

from tandem.engine.cache.page_checksums import PageChecksums
from tandem.engine.cache.tiers.host_memory import HostMemory
from tandem.engine.cache.tiers.page_copies import PageCopies

_MASK = (1 << 64) - 1


class RankCopies(Protocol):
    """The pages of another rank. Both calls return at once, and their futures fail if the rank has ended."""

    page_bytes: int
    """The size of the rank's part of a page in bytes."""

    @property
    def rows(self) -> Tensor:
        """The memory that the ranks share, [pages copied together, page bytes] uint8; the first call may wait."""
        ...

    def copy(self, pages: Sequence[int], *, to_pool: bool) -> "Future[None]":
        """Copy pages of the rank's pool into the first rows, one to one, or back if `to_pool`."""
        ...

    def sums(self, pages: Sequence[int], filled: Sequence[int], groups: Sequence[int]) -> "Future[Sequence[int]]":
        """Compute the rank's checksums of pages (`PageChecksums`)."""
        ...


class GroupPageCopies(PageCopies):
    """`PageCopies` of all ranks of a worker: a buffer has the parts of a page in the order of the ranks.

    The checksum of a page is the sum of the ranks' checksums. If ranks hold the same heads, it covers each copy.
    """

    def __init__(self, storage: Tensor, sums: PageChecksums, page_tokens: int, others: Sequence[RankCopies]) -> None:
        """Create the copies; `storage` and `sums` are those of the first rank."""
        super().__init__(storage, sums, page_tokens)
        self._others = others

    @property
    def page_bytes(self) -> int:
        """The size of a page in bytes, with the parts of all ranks."""
        return super().page_bytes + sum(other.page_bytes for other in self._others)

    def save(self, pages: Sequence[int], buffers: Sequence[Tensor]) -> None:
        """Copy pages of the pools into host buffers [page bytes] uint8, at most as many as the memory has rows."""
        parts = self._parts(buffers)
        copies = [other.copy(pages, to_pool=False) for other in self._others]
        super().save(pages, self._own(buffers))
        for copy in copies:
            copy.result()
        for part, rows in parts:
            for buffer, row in zip(part, rows, strict=False):
                buffer.copy_(row)

    def load(self, pages: Sequence[int], buffers: Sequence[Tensor]) -> None:
        """Copy host buffers [page bytes] uint8 into pages of the pools, at most as many as the memory has rows."""
        for part, rows in self._parts(buffers):
            for buffer, row in zip(part, rows, strict=False):
                row.copy_(buffer)
        copies = [other.copy(pages, to_pool=True) for other in self._others]
        super().load(pages, self._own(buffers))
        for copy in copies:
            copy.result()

    def checksums(self, pages: Sequence[int], groups: Sequence[int]) -> Sequence[int]:
        """Return the checksums of full pages, each of the given group of layers."""
        filled = [self._page_tokens] * len(pages)
        sums = [other.sums(pages, filled, groups) for other in self._others]
        totals = [super().checksums(pages, groups), *(future.result() for future in sums)]
        return [sum(parts) & _MASK for parts in zip(*totals, strict=True)]

    def _own(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Return the first rank's part of each buffer."""
        size = super().page_bytes
        return [buffer[:size] for buffer in buffers]

    def _parts(self, buffers: Sequence[Tensor]) -> list[tuple[list[Tensor], Tensor]]:
        """Return for each other rank its part of each buffer, and its rows."""
        parts, start = [], super().page_bytes
        for other in self._others:
            end = start + other.page_bytes
            parts.append(([buffer[start:end] for buffer in buffers], other.rows))
            start = end
        return parts


class SharedCopies:
    """Copies between the pool of a rank in this process and the memory that the first rank has shared."""

    def __init__(self, copies: PageCopies, path: Path) -> None:
        """Map the shared memory, the file `path`."""
        self._copies = copies
        file = os.open(path, os.O_RDWR)
        try:
            rows = os.fstat(file).st_size // copies.page_bytes
            self._memory = HostMemory(rows, copies.page_bytes, copies.device, file)
        finally:
            os.close(file)

    def __call__(self, pages: Sequence[int], *, to_pool: bool) -> None:
        """Copy pages of the pool into the first rows, one to one, or back if `to_pool`."""
        rows = list(self._memory.rows[: len(pages)])
        if to_pool:
            self._copies.load(pages, rows)
        else:
            self._copies.save(pages, rows)
