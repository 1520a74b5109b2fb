"""A view of the memory of KV pages as 32-bit words, over which checksums are computed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.config.sharding import PagePart
from tandem.engine.kernels.kv_cache import KvCache, QuantizedKv, codes_of

WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class PageWords:
    """The memory of all pages of a cache, viewed as 32-bit words without a copy.

    A row is the keys or the values of one head of one layer: `token_words` words for each of the `page_tokens` tokens,
    then, in a quantized cache, one scale for each token. Rows are in memory order, which may differ from the order of
    the cache tensor's dimensions.
    """

    words: Tensor
    """The words, [pages, rows of a page, words of a row] int32."""
    page_tokens: int
    token_words: int
    head_words: int
    """Number of words of a head in a page."""
    first_number: int = 0
    """The number of a page's first word in a page of the whole model."""
    head_gap: int = 0
    """Number of words of each head in a page of the whole model that are missing here: those of other layers."""

    def numbers(self) -> Tensor:
        """Return each word's number in a page of the whole model: [rows, words of a row] int64, on its device."""
        own = torch.arange(self.words[0].numel(), device=self.words.device).view(self.words.shape[1:])
        return own + self.first_number + own // self.head_words * self.head_gap

    def tokens(self) -> Tensor:
        """Return each word's token position in its page: [words of a row] int64, on the device of the words."""
        place = torch.arange(self.words.shape[2], device=self.words.device)
        codes = self.page_tokens * self.token_words
        return torch.where(place < codes, place // self.token_words, place - codes)


def as_words(cache: KvCache, part: PagePart | None = None) -> PageWords:
    """Return a view of the cache's memory as words; `part` is the part of a page that it has, None = whole pages.

    Raises ValueError as `page_checksums` does.
    """
    codes = codes_of(cache)
    pages, layers, parts, kv_heads, page_tokens, head_dim = codes.shape
    # The stride of a dimension of size 1 carries no information, so such dimensions are sorted apart from the others.
    outer = sorted((1, 2, 3), key=lambda dim: (codes.shape[dim] == 1, codes.stride(dim)), reverse=True)
    bytes_of_token = head_dim * codes.element_size()
    if bytes_of_token % WORD_BYTES:
        raise ValueError(f"heads of {head_dim} elements of {codes.dtype} are not whole words of {WORD_BYTES} bytes")
    scaled, token_words, rows = isinstance(cache, QuantizedKv), bytes_of_token // WORD_BYTES, layers * parts * kv_heads
    row_words = page_tokens * (token_words + scaled)
    ordered = codes.permute(0, *outer, 4, 5).view(torch.int32)
    assert rows == 1 or ordered.stride(3) == row_words
    words = ordered.as_strided((pages, rows, row_words), (ordered.stride(0), row_words, 1))
    head_words = layers * parts * row_words
    if part is None:
        return PageWords(words, page_tokens, token_words, head_words)
    first_row = (part.first_head * part.layers + part.first_layer) * parts
    gap = (part.layers - layers) * parts * row_words
    return PageWords(words, page_tokens, token_words, head_words, first_row * row_words, gap)
