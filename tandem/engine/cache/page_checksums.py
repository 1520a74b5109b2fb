"""Checksums of KV pages, which verify that a page arrived as it was sent, whatever device each side runs on.

The checksum of a page is the sum of w_i * (2 i + 1) mod 2^64 over the page's 32-bit words w_i, little-endian and
signed, where i is the index of the word in the page. In a partly filled page only the filled token positions count: the
memory after them is unused, and the decode worker writes new tokens there.

A changed word changes the sum, because the difference of two words and the weight 2 i + 1 are both below 2^32, so that
their product is never 0 mod 2^64. For the same reason any two swapped words change it. Other errors go undetected with
a probability of about 2^-64. The checksum is no protection against an attacker, who could send a matching sum.
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
"""The largest number of pages that one kernel launch sums."""


class DeviceChecksums:
    """`PageChecksums` on a GPU, on a stream of its own: engine steps do not wait for it, nor does it wait for them.

    Only the calling thread waits, and sleeps after a short spin. The kernel is compiled and all memory is allocated in
    the constructor.
    """

    def __init__(self, words: PageWords) -> None:
        """Take `words` on a GPU, as returned by `tandem.engine.cache.page_words.as_words`."""
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
        """Return the checksum of the first `filled` token positions of each page.

        Raises IndexError if a page number is outside the pool.
        """
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
        # The current device is a property of each thread; entering the stream's context sets it for this one.
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
    """A function that computes checksums of pages in the cache's own memory, without copying them."""

    def __call__(self, pages: Sequence[int], filled: Sequence[int]) -> Sequence[int]:
        """Return the checksums, below 2^64, of the first `filled` token positions of each page.

        The call waits for the device, so only a thread that may block calls it, and only one thread at a time. Nothing
        may write to the pages during the call. Raises IndexError if a page number is outside the pool.
        """


def page_checksums(cache: KvCache) -> PageChecksums:
    """Return the checksum function of a cache, for its device and dtype.

    The cache is [pages, layers, 2, kv_heads, page_tokens, head_dim].

    Raises ValueError if the keys of one token and one head do not fill whole 32-bit words.
    """
    words = as_words(cache)
    if words.words.device.type == "cpu":
        return HostChecksums(words)

    return DeviceChecksums(words)


class HostChecksums:
    """`PageChecksums` on the CPU: NumPy on the calling thread, about 0.4 ms per megabyte.

    NumPy releases the GIL meanwhile.
    """

    def __init__(self, words: PageWords) -> None:
        """Take `words` on the CPU, as returned by `as_words`."""
        self._words: npt.NDArray[np.int32] = words.words.numpy()
        self._token_words, self._first_scale = words.token_words, words.page_tokens * words.token_words
        shape = self._words.shape[1:]
        self._weights = (2 * np.arange(np.prod(shape), dtype=np.int64) + 1).reshape(shape)

    def __call__(self, pages: Sequence[int], filled: Sequence[int]) -> Sequence[int]:
        """Return the checksum of the first `filled` token positions of each page.

        Raises IndexError if a page number is outside the pool.
        """
        return [self._sum(page, tokens) for page, tokens in zip(pages, filled, strict=True)]

    def _sum(self, page: int, tokens: int) -> int:
        if page < 0:
            raise IndexError(f"page {page} of a pool of {len(self._words)}")
        codes, scales = slice(tokens * self._token_words), slice(self._first_scale, self._first_scale + tokens)
        return (self._part(page, codes) + self._part(page, scales)) & _MASK

    def _part(self, page: int, chosen: slice) -> int:
        words = self._words[page][:, chosen].astype(np.int64).ravel()
        return int(np.dot(words, self._weights[:, chosen].ravel()))
