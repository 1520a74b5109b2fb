"""Checksums of KV pages, with which a receiver on any kind of device verifies that a page arrived unchanged.

The checksum of a page is the sum of w_i * (2 i + 1) mod 2^64 over the page's 32-bit words w_i, little-endian and
signed, where i is the number of the word in the page (`PageWords`). If ranks divide the model, i is the number in a
page of the whole model, so the sums of ranks that together have each word once add up to the checksum of the page. In
a partly filled page only the filled token positions count: the memory after them is unused, and the decode worker
writes new tokens there. The states of state layers count as a whole.

A changed word changes the sum, because the difference of two words and the weight 2 i + 1 are both below 2^32, so that
their product is never 0 mod 2^64. For the same reason any two swapped words change it. Other errors go undetected with
a probability of about 2^-64. The checksum is no protection against an attacker, who could send a matching sum.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tandem.engine.cache.page_words import PageWords, words_of
from tandem.engine.config.sharding import PagePart
from tandem.engine.kernels.kv_cache import GroupCache

_MASK = (1 << 64) - 1


class PageChecksums(Protocol):
    """A function that computes checksums of pages in place, without copying them."""

    def __call__(self, pages: Sequence[int], filled: Sequence[int], groups: Sequence[int] = ()) -> Sequence[int]:
        """Return the checksums, below 2^64, of the first `filled` token positions of each page.

        `groups` has the number of each page's group of layers; empty = all pages are of the first group. The call waits
        for the device, so the calling thread must be one that may block; only one thread may call it at a time. Nothing
        may write to the pages during the call. Raises IndexError if a page number is outside the pool.
        """


class GroupSums(Protocol):
    """A function that computes checksums of pages of one group of layers, as `PageChecksums` does."""

    def __call__(self, pages: Sequence[int], filled: Sequence[int]) -> Sequence[int]:
        """Return the checksums of the first `filled` token positions of each page."""


def page_checksums(*caches: GroupCache, parts: Sequence[PagePart] = ()) -> PageChecksums:
    """Return the function that computes checksums of pages on their device.

    `caches` are the views that the groups of layers have of the pages (`PagedCache.views`). `parts` has the part of a
    page of the whole model that each view has; empty = whole pages.

    Raises ValueError if the keys of one token and one head do not fill whole 32-bit words.
    """
    made: dict[tuple[int, PagePart | None], GroupSums] = {}
    sums: list[GroupSums] = []
    for group, cache in enumerate(caches):
        part = parts[group] if parts else None
        key = id(cache), part
        if key not in made:
            made[key] = _group_sums(cache, part)
        sums.append(made[key])
    return PoolChecksums(sums)


def _group_sums(cache: GroupCache, part: PagePart | None) -> GroupSums:
    sums = [_sums(words) for words in words_of(cache, part)]
    return sums[0] if len(sums) == 1 else PartSums(sums)


def _sums(words: PageWords) -> GroupSums:
    if words.words.device.type == "cpu":
        return HostChecksums(words)

    from tandem.engine.cache.device_checksums import DeviceChecksums

    return DeviceChecksums(words)


class PartSums:
    """`GroupSums` of pages whose parts are summed separately, because they have different numbers of dimensions."""

    def __init__(self, parts: Sequence[GroupSums]) -> None:
        """Create the function from those of the parts."""
        self._parts = parts

    def __call__(self, pages: Sequence[int], filled: Sequence[int]) -> Sequence[int]:
        """Return the checksums. Raises IndexError if a page number is outside the pool."""
        sums = [part(pages, filled) for part in self._parts]
        return [sum(part_sums) & _MASK for part_sums in zip(*sums, strict=True)]


class PoolChecksums:
    """`PageChecksums` of the pages of all groups of layers."""

    def __init__(self, sums: Sequence[GroupSums]) -> None:
        """Create the function from those of the groups; groups with equal pages have the same function."""
        self._sums = sums

    def __call__(self, pages: Sequence[int], filled: Sequence[int], groups: Sequence[int] = ()) -> Sequence[int]:
        """Return the checksums. Raises IndexError if a page number is outside the pool."""
        totals = [0] * len(pages)
        functions = [self._sums[group] for group in groups] if groups else [self._sums[0]] * len(pages)
        for function in dict.fromkeys(functions):
            own = [index for index, other in enumerate(functions) if other is function]
            sums = function([pages[index] for index in own], [filled[index] for index in own])
            for index, total in zip(own, sums, strict=True):
                totals[index] = total
        return totals


class HostChecksums:
    """`GroupSums` on the CPU: NumPy on the calling thread, about 0.4 ms per megabyte.

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
