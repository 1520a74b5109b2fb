"""Checksums of KV pages, with which a receiver on any kind of device verifies that a page arrived unchanged.

The checksum of a page is the sum of w_i * (2 i + 1) mod 2^64 over the page's 32-bit words w_i, little-endian and
signed, where i is the index of the word in the page. If ranks divide the model, i is the index in a page of the whole
model, so the sums of ranks that together have each word once add up to the checksum of the page. In a partly filled
page only the filled token positions count: the memory after them is unused, and the decode worker writes new tokens
there.

A changed word changes the sum, because the difference of two words and the weight 2 i + 1 are both below 2^32, so that
their product is never 0 mod 2^64. For the same reason any two swapped words change it. Other errors go undetected with
a probability of about 2^-64. The checksum is no protection against an attacker, who could send a matching sum.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tandem.engine.cache.page_words import PageWords, as_words
from tandem.engine.config.sharding import PagePart
from tandem.engine.kernels.kv_cache import KvCache

_MASK = (1 << 64) - 1


class PageChecksums(Protocol):
    """A function that computes checksums of pages in place, without copying them."""

    def __call__(self, pages: Sequence[int], filled: Sequence[int]) -> Sequence[int]:
        """Return the checksums, below 2^64, of the first `filled` token positions of each page.

        The call waits for the device, so the calling thread must be one that may block; only one thread may call it at
        a time. Nothing may write to the pages during the call. Raises IndexError if a page number is outside the pool.
        """


def page_checksums(cache: KvCache, part: PagePart | None = None) -> PageChecksums:
    """Return the function that computes checksums of a cache's pages on the cache's device.

    The cache is [pages, layers, parts, kv_heads, page_tokens, head_dim]. `part` is the part of a page of the whole
    model that the cache has; None = all of it.

    Raises ValueError if the keys of one token and one head do not fill whole 32-bit words.
    """
    words = as_words(cache, part)
    if words.words.device.type == "cpu":
        return HostChecksums(words)

    from tandem.engine.cache.device_checksums import DeviceChecksums

    return DeviceChecksums(words)


class HostChecksums:
    """`PageChecksums` on the CPU: NumPy on the calling thread, about 0.4 ms per megabyte.

    NumPy releases the GIL during the computation.
    """

    def __init__(self, words: PageWords) -> None:
        """Prepare the checksums of `words`, which `as_words` returned for a cache on the CPU."""
        self._words: npt.NDArray[np.int32] = words.words.numpy()
        self._token_words, self._first_scale = words.token_words, words.page_tokens * words.token_words
        self._weights: npt.NDArray[np.int64] = (2 * words.numbers() + 1).numpy()

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
