"""Checksums of KV pages, to verify that a page arrived as it was sent, on any kind of device.

The checksum of a page is the sum of w_i * (2 i + 1) mod 2^64 over the page's 32-bit words w_i, little-endian and
signed, i being the word's index in the page. Of a partly filled page only the filled token positions count: the memory
after them is unused, and the decode worker writes there.

Words differ by less than 2^32 and weights by less than 2^32 as well, so no product of the two is 0 mod 2^64: one
changed word, or any two that were swapped, always change the sum. Other errors go undetected with a probability of
about 2^-64. It is no protection against an attacker, who could send any sum as well.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.cache.page_words import PageWords, as_words
from tandem.engine.device_wait import wait_for
from tandem.engine.kernels.kv_cache import KvCache
from tandem.engine.kernels.rowwise.triton_checksum import SPLITS, partial_sums

_MOST_PAGES = 64
"""The number of pages per launch."""


class DeviceChecksums:
    """`PageChecksums` on a dedicated stream: no step waits for it, and it waits for none.

    Only the calling thread waits, and soon sleeps. It is compiled at construction and allocates no memory after that.
    """

    def __init__(self, words: PageWords) -> None:
        """Takes `words` as `tandem.engine.cache.page_words.as_words` returns them, on a GPU."""
        self._words, device = words, words.words.device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._chosen = torch.zeros(_MOST_PAGES, 2, dtype=torch.int64, device=device)
        self._parts = torch.zeros(_MOST_PAGES, SPLITS, dtype=torch.int64, device=device)
        self._chosen_here = torch.zeros(_MOST_PAGES, 2, dtype=torch.int64, pin_memory=True)
        self._parts_here = torch.zeros(_MOST_PAGES, SPLITS, dtype=torch.int64, pin_memory=True)
        torch.cuda.synchronize(device)
        self([0], [0])

    def __call__(self, pages: Sequence[int], filled: Sequence[int]) -> Sequence[int]:
        """Returns the checksum of each page's first `filled` token positions; IndexError outside the pool."""
        chosen = list(zip(pages, filled, strict=True))
        count = len(self._words.words)
        outside = [page for page in pages if not 0 <= page < count]
        if outside:
            raise IndexError(f"page {outside[0]} of a pool of {count}")
        sums: list[int] = []
        for first in range(0, len(chosen), _MOST_PAGES):
            sums += self._sum(chosen[first : first + _MOST_PAGES])
        return sums

    def _sum(self, chosen: Sequence[tuple[int, int]]) -> list[int]:
        count = len(chosen)
        self._chosen_here.numpy()[:count] = chosen
        # The current device is a setting of each thread; the stream's context sets it as well.
        with torch.cuda.stream(self._stream):
            self._chosen[:count].copy_(self._chosen_here[:count], non_blocking=True)
            words = self._words
            codes = words.page_tokens * words.token_words
            partial_sums(words.words, codes, words.token_words, self._chosen[:count], self._parts[:count])
            self._parts_here[:count].copy_(self._parts[:count], non_blocking=True)
            self._done.record()
        wait_for(self._done)
        return [total & _MASK for total in self._parts_here.numpy()[:count].sum(axis=1).tolist()]


_MASK = (1 << 64) - 1


class PageChecksums(Protocol):
    """A function that sums pages in place."""

    def __call__(self, pages: Sequence[int], filled: Sequence[int]) -> Sequence[int]:
        """Returns the checksums, below 2^64, of these pages' first `filled` token positions.

        It waits for the device, so it belongs on a thread that may block; one thread at a time. Nothing may write these
        pages meanwhile. IndexError outside the pool.
        """


def page_checksums(cache: KvCache) -> PageChecksums:
    """Returns checksums over a cache [pages, layers, 2, kv_heads, page_tokens, head_dim] of any dtype, on its device.

    ValueError when one token's keys of one head are not whole 32-bit words.
    """
    words = as_words(cache)
    if words.words.device.type == "cpu":
        return HostChecksums(words)

    return DeviceChecksums(words)


class HostChecksums:
    """`PageChecksums` by NumPy on the calling thread, which releases the GIL meanwhile; about 0.4 ms per megabyte."""

    def __init__(self, words: PageWords) -> None:
        """Takes `words` as `as_words` returns them."""
        self._words: npt.NDArray[np.int32] = words.words.numpy()
        self._token_words, self._first_scale = words.token_words, words.page_tokens * words.token_words
        shape = self._words.shape[1:]
        self._weights = (2 * np.arange(np.prod(shape), dtype=np.int64) + 1).reshape(shape)

    def __call__(self, pages: Sequence[int], filled: Sequence[int]) -> Sequence[int]:
        """Returns the checksum of each page's first `filled` token positions; IndexError outside the pool."""
        return [self._sum(page, tokens) for page, tokens in zip(pages, filled, strict=True)]

    def _sum(self, page: int, tokens: int) -> int:
        if page < 0:
            raise IndexError(f"page {page} of a pool of {len(self._words)}")
        codes, scales = slice(tokens * self._token_words), slice(self._first_scale, self._first_scale + tokens)
        return (self._part(page, codes) + self._part(page, scales)) & _MASK

    def _part(self, page: int, chosen: slice) -> int:
        words = self._words[page][:, chosen].astype(np.int64).ravel()
        return int(np.dot(words, self._weights[:, chosen].ravel()))
