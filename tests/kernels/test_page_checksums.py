"""Checksums of KV pages: one value on every device, and every error that a transfer can make is detected."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.engine.cache.page_checksums import page_checksums
from tandem.engine.cache.page_words import as_words
from tandem.engine.cache.paged_cache import PagedCache, page_bytes
from tandem.engine.config.attention import AttentionShape
from tandem.engine.config.model import DenseFeedForward, GroupedQueryAttention, LayerSpec, ModelSpec
from tandem.engine.config.sharding import PagePart
from tandem.engine.kernels.kv_cache import KvCache, QuantizedKv, quantize_kv
from tandem.engine.kernels.rowwise.triton_checksum import SPLITS, partial_sums, reference_sums
from tests.soak import seeds

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(5, 2, 2, 3, 16, 64), (4, 3, 2, 1, 5, 6), (3, 1, 2, 1, 4, 2), (4, 4, 2, 8, 128, 8)]
"""Cache shapes; the last has pages of more words than one round of a page's programs loads."""
DTYPES = [torch.float32, torch.bfloat16]
PAGE_TOKENS = 16


def make_cache(shape: tuple[int, ...] = SHAPES[0], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def naive(cache: KvCache, page: int, filled: int) -> int:
    """Computes the definition in Python integers."""
    total, place = 0, 0
    data = as_words(cache)
    for row in data.words[page].tolist():
        for word, token in zip(row, data.tokens().tolist(), strict=True):
            total += word * (2 * place + 1) * (token < filled)
            place += 1
    return total % 2**64


def make_quantized(shape: tuple[int, ...] = SHAPES[0]) -> QuantizedKv:
    """Returns random codes with scales, in the memory of a `PagedCache`."""
    pages, layers, _, heads, page_tokens, head_dim = shape
    attention = GroupedQueryAttention(AttentionShape(heads, heads, head_dim, 1.0), None)
    layer = LayerSpec(attention, DenseFeedForward(8))
    spec = ModelSpec("LlamaForCausalLM", 10, 8, (layer,) * layers, 1e-6, 4096, False, (0,), None)
    memory = pages * page_bytes(spec, page_tokens, torch.int8)
    cache = PagedCache(spec, page_tokens, memory, torch.int8, torch.device("cpu"))
    assert isinstance(cache.tensor, QuantizedKv)
    codes, scales = quantize_kv(make_cache(shape), torch.int8)
    cache.tensor.codes.copy_(codes)
    cache.tensor.scales.copy_(scales)
    return cache.tensor


def triton_sums(cache: KvCache, pages: list[int], filled: list[int], part: PagePart | None = None) -> list[int]:
    chosen = torch.tensor(list(zip(pages, filled, strict=True)), device=DEVICE)
    parts = torch.full((len(pages), SPLITS), -1, device=DEVICE)
    data = as_words(cache, part)
    codes = data.page_tokens * data.token_words
    numbering = data.first_number, data.head_words, data.head_gap
    partial_sums(data.words.to(DEVICE), codes, data.token_words, chosen, parts, numbering=numbering)
    return [total % 2**64 for total in parts.sum(dim=1).tolist()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_value_everywhere(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    cache = make_cache(shape, dtype)
    page_tokens = shape[4]
    pages, filled = [2, 0, 1], [page_tokens, 1, page_tokens - 1]
    words = as_words(cache)
    expected = reference_sums(words.words, words.tokens(), pages, filled)
    assert expected == [naive(cache, page, tokens) for page, tokens in zip(pages, filled, strict=True)]
    assert len(set(expected)) == len(pages)
    assert list(page_checksums(cache)(pages, filled)) == expected
    assert triton_sums(cache, pages, filled) == expected


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("stages", [1, 2])
def test_the_sums_of_the_ranks_add_up_to_the_checksum_of_the_page(ranks: int, stages: int) -> None:
    """Every rank has some heads of some layers, in the memory order of its own cache."""
    whole = make_quantized((3, 2, 2, 3, 16, 64))
    heads, layers = 3 // ranks, 2 // stages
    pages, filled = [2, 0], [PAGE_TOKENS, 5]
    totals = [0, 0]
    for first_head, first_layer in itertools.product(range(0, 3, heads), range(0, 2, layers)):
        own = make_quantized((3, layers, 2, heads, 16, 64))
        chosen = slice(first_layer, first_layer + layers), slice(None), slice(first_head, first_head + heads)
        own.codes.copy_(whole.codes[:, *chosen])
        own.scales.copy_(whole.scales[:, *chosen])
        part = PagePart(3, 2, first_head, first_layer)
        sums = list(page_checksums(own, parts=[part])(pages, filled))
        assert triton_sums(own, pages, filled, part) == sums
        totals = [(total + value) % 2**64 for total, value in zip(totals, sums, strict=True)]
    assert totals == list(page_checksums(whole)(pages, filled))


def test_sums_that_overflow_are_still_equal() -> None:
    cache = make_cache()
    as_words(cache).words[1] = torch.iinfo(torch.int32).min
    as_words(cache).words[2] = torch.iinfo(torch.int32).max
    pages, filled = [1, 2], [PAGE_TOKENS] * 2
    assert list(page_checksums(cache)(pages, filled)) == [naive(cache, page, PAGE_TOKENS) for page in pages]
    assert triton_sums(cache, pages, filled) == [naive(cache, page, PAGE_TOKENS) for page in pages]


@seeds(20)
def test_one_changed_bit_and_two_swapped_words_are_seen(seed: int) -> None:
    """Words of similar size, of opposite sign and adjacent ones are included."""
    cache = make_cache()
    sums = page_checksums(cache)
    before = sums([1], [PAGE_TOKENS])
    words = as_words(cache).words[1].view(-1).numpy()
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
    words = as_words(cache).words[1].view(-1)
    words[len(words) // 2 :] = as_words(make_cache()).words[3].view(-1)[len(words) // 2 :]
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


@pytest.mark.parametrize("shape", [(5, 2, 2, 3, 16, 64), (3, 1, 2, 2, 6, 16), (3, 2, 2, 1, 4, 16)], ids=str)
def test_quantized_pages_have_the_scales_in_their_sum(shape: tuple[int, ...]) -> None:
    cache = make_quantized(shape)
    pages, filled = [2, 0, 1], [shape[4], 1, shape[4] - 1]
    words = as_words(cache)
    expected = reference_sums(words.words, words.tokens(), pages, filled)
    assert expected == [naive(cache, page, tokens) for page, tokens in zip(pages, filled, strict=True)]
    sums = page_checksums(cache)
    assert list(sums(pages, filled)) == expected
    assert triton_sums(cache, pages, filled) == expected
    cache.scales[1, :, :, :, shape[4] - 1] = float("nan")
    cache.codes[1, :, :, :, shape[4] - 1] = 0
    assert list(sums(pages, filled)) == expected
    for part in (cache.scales[2, -1, 1, -1, -1:], cache.codes[2, -1, 1, -1, -1, -1:]):
        before = part.clone()
        part.add_(1)
        assert list(sums(pages, filled)) != expected
        part.copy_(before)
    assert list(sums(pages, filled)) == expected
