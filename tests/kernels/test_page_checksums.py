"""Checksums of KV pages: one value on every device, and every error that a transfer can make is detected."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.cache.page_checksums import as_words, page_checksums
from engine.kernels.rowwise.triton_checksum import SPLITS, partial_sums, reference_sums

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(5, 2, 2, 3, 16, 64), (4, 3, 2, 1, 5, 6), (3, 1, 2, 1, 4, 2), (4, 4, 2, 8, 128, 8)]
"""Cache shapes; the last has pages of more words than one round of a page's programs loads."""
DTYPES = [torch.float32, torch.bfloat16]
PAGE_TOKENS = 16


def make_cache(shape: tuple[int, ...] = SHAPES[0], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def naive(cache: Tensor, page: int, filled: int) -> int:
    """Computes the definition in Python integers."""
    total, place = 0, 0
    for row in as_words(cache)[page].tolist():
        for token, words in enumerate(row):
            for word in words:
                total += word * (2 * place + 1) * (token < filled)
                place += 1
    return total % 2**64


def triton_sums(cache: Tensor, pages: list[int], filled: list[int]) -> list[int]:
    chosen = torch.tensor(list(zip(pages, filled, strict=True)), device=DEVICE)
    parts = torch.full((len(pages), SPLITS), -1, device=DEVICE)
    partial_sums(as_words(cache.to(DEVICE)), chosen, parts)
    return [total % 2**64 for total in parts.sum(dim=1).tolist()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_value_everywhere(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    cache = make_cache(shape, dtype)
    page_tokens = shape[4]
    pages, filled = [2, 0, 1], [page_tokens, 1, page_tokens - 1]
    expected = reference_sums(as_words(cache), pages, filled)
    assert expected == [naive(cache, page, tokens) for page, tokens in zip(pages, filled, strict=True)]
    assert len(set(expected)) == len(pages)
    assert list(page_checksums(cache)(pages, filled)) == expected
    assert triton_sums(cache, pages, filled) == expected


def test_sums_that_overflow_are_still_equal() -> None:
    cache = make_cache()
    as_words(cache)[1] = torch.iinfo(torch.int32).min
    as_words(cache)[2] = torch.iinfo(torch.int32).max
    pages, filled = [1, 2], [PAGE_TOKENS] * 2
    assert list(page_checksums(cache)(pages, filled)) == [naive(cache, page, PAGE_TOKENS) for page in pages]
    assert triton_sums(cache, pages, filled) == [naive(cache, page, PAGE_TOKENS) for page in pages]


@pytest.mark.parametrize("seed", range(20))
def test_one_changed_bit_and_two_swapped_words_are_seen(seed: int) -> None:
    """Words of similar size, of opposite sign and adjacent ones are included."""
    cache = make_cache()
    sums = page_checksums(cache)
    before = sums([1], [PAGE_TOKENS])
    words = as_words(cache)[1].view(-1).numpy()
    rng = random.Random(seed)
    place, other = rng.randrange(len(words)), rng.randrange(len(words))
    words[place] ^= np.int32(1 << rng.randrange(31))
    assert sums([1], [PAGE_TOKENS]) != before
    cache.copy_(make_cache())
    if seed % 2:
        words[other] = -words[place]
    before = sums([1], [PAGE_TOKENS])
    words[place], words[other] = words[other], words[place]
    assert sums([1], [PAGE_TOKENS]) != before or place == other


def test_swapped_pages_and_lost_ends_are_seen() -> None:
    cache = make_cache()
    sums = page_checksums(cache)
    first, second = sums([1, 2], [PAGE_TOKENS] * 2)
    assert first != second
    words = as_words(cache)[1].view(-1)
    words[len(words) // 2 :] = as_words(make_cache())[3].view(-1)[len(words) // 2 :]
    assert list(sums([1], [PAGE_TOKENS])) != [first]


@pytest.mark.parametrize("filled", [1, PAGE_TOKENS // 2, PAGE_TOKENS - 1])
def test_only_filled_positions_count(filled: int) -> None:
    cache = make_cache()
    before = page_checksums(cache)([3], [filled])
    cache[3, :, :, :, filled:] = float("nan")
    assert page_checksums(cache)([3], [filled]) == before
    assert triton_sums(cache, [3], [filled]) == before
    cache[3, -1, 1, -1, filled - 1, -1] += 1
    assert page_checksums(cache)([3], [filled]) != before


def test_nothing_outside_the_pool_is_read() -> None:
    for page in (-1, 5):
        with pytest.raises(IndexError):
            page_checksums(make_cache())([page], [PAGE_TOKENS])


def test_half_words_are_refused() -> None:
    with pytest.raises(ValueError, match="not whole words"):
        page_checksums(make_cache((2, 1, 2, 1, 4, 3), torch.bfloat16))
