"""Checksums of KV pages, to verify that a page arrived as it was sent, on any kind of device.

The checksum of a page is the sum of w_i * (2 i + 1) mod 2^64 over the page's 32-bit words w_i, little-endian and
signed, i being the word's index in the page. Of a partly filled page only the filled token positions count: the memory
after them is unused, and the decode worker writes there.

Words differ by less than 2^32 and weights by less than 2^32 as well, so no product of the two is 0 mod 2^64: one
changed word, or any two that were swapped, always change the sum. Other errors go undetected with a probability of
about 2^-64. It is no protection against an attacker, who could send any sum as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels.kv_cache import KvCache, QuantizedKv, codes_of

WORD_BYTES = 4
_MASK = (1 << 64) - 1


class PageChecksums(Protocol):
    """A function that sums pages in place."""

    def __call__(self, pages: Sequence[int], filled: Sequence[int]) -> Sequence[int]:
        """Returns the checksums, below 2^64, of these pages' first `filled` token positions.

        It waits for the device, so it belongs on a thread that may block; one thread at a time. Nothing may write these
        pages meanwhile. IndexError outside the pool.
        """


@dataclass(frozen=True, slots=True)
class PageWords:
    """The memory of a pool of pages as 32-bit words.

    A row is one head's keys or values of a layer: `token_words` words of each of its `page_tokens` tokens, then a scale
    of each if `scaled`. Rows are in the order of the memory, whatever that of the cache's dimensions is.
    """

    words: Tensor
    """[pages, rows, words of a row] int32."""
    page_tokens: int
    token_words: int
    scaled: bool = False

    def tokens(self) -> Tensor:
        """Returns the token position of each word of a row: [words of a row] int64, on the words' device."""
        place = torch.arange(self.words.shape[2], device=self.words.device)
        codes = self.page_tokens * self.token_words
        return torch.where(place < codes, place // self.token_words, place - codes)


def page_checksums(cache: KvCache) -> PageChecksums:
    """Returns checksums over a cache [pages, layers, 2, kv_heads, page_tokens, head_dim] of any dtype, on its device.

    ValueError when one token's keys of one head are not whole 32-bit words: head_dim would be odd.
    """
    words = as_words(cache)
    if words.words.device.type == "cpu":
        return HostChecksums(words)
    from engine.cache.device_checksums import DeviceChecksums

    return DeviceChecksums(words)


def as_words(cache: KvCache) -> PageWords:
    """Returns the same memory as words. ValueError as for `page_checksums`."""
    codes = codes_of(cache)
    pages, layers, parts, kv_heads, page_tokens, head_dim = codes.shape
    outer = sorted((1, 2, 3), key=codes.stride, reverse=True)
    bytes_of_token = head_dim * codes.element_size()
    if bytes_of_token % WORD_BYTES:
        raise ValueError(f"heads of {head_dim} elements of {codes.dtype} are not whole words of {WORD_BYTES} bytes")
    scaled, token_words, rows = isinstance(cache, QuantizedKv), bytes_of_token // WORD_BYTES, layers * parts * kv_heads
    row_words = page_tokens * (token_words + scaled)
    ordered = codes.permute(0, *outer, 4, 5).view(torch.int32)
    assert ordered.stride(3) == row_words
    words = ordered.as_strided((pages, rows, row_words), (ordered.stride(0), row_words, 1))
    return PageWords(words, page_tokens, token_words, scaled)


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
