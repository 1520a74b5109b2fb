"""A view of the memory of KV pages as 32-bit words, over which checksums are computed."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.engine.config.kv import ALIGNMENT
from tandem.engine.config.sharding import PagePart
from tandem.engine.kernels.kv_cache import GroupCache, QuantizedKv, StateCache, UnequalKv

WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class PageWords:
    """The memory of all pages of a cache, viewed as 32-bit words without a copy.

    A row is the keys or the values of one head of one layer: `token_words` words for each of the `page_tokens` tokens,
    then, in a quantized cache, one scale for each token. Rows are in memory order, which may differ from the order of
    the cache tensor's dimensions. The state of one head of a state layer is a row of one token.
    """

    words: Tensor
    """The words, [pages, rows of a page, words of a row] int32; the rows of a page are equally far apart."""
    page_tokens: int
    token_words: int
    head_words: int
    """Number of words of a head in a page."""
    first_number: int = 0
    """The number of a page's first word in a page of the whole model.

    If the parts have different numbers of dimensions, all words of the first part are numbered before the second's.
    """
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


def words_of(cache: GroupCache, part: PagePart | None = None) -> tuple[PageWords, ...]:
    """Return `as_words` of the cache, or of each of its parts if these have different numbers of dimensions."""
    if not isinstance(cache, UnequalKv):
        return (as_words(cache, part),)
    every, before = [as_words(kv_part, part) for kv_part in cache.parts], 0
    for number, words in enumerate(every):
        every[number] = replace(words, first_number=words.first_number + before)
        _, rows, row_words = words.words.shape
        before += row_words * (rows if part is None else part.heads * part.layers)
    return tuple(every)


def as_words(cache: Tensor | QuantizedKv | StateCache, part: PagePart | None = None) -> PageWords:
    """Return a view of the cache's memory as words; `part` is the part of a page that it has, None = whole pages.

    Raises ValueError as `page_checksums` does.
    """
    if isinstance(cache, StateCache):
        return _state_words(cache, part)
    codes = cache.codes if isinstance(cache, QuantizedKv) else cache
    pages, layers, parts, kv_heads, page_tokens, head_dim = codes.shape
    # The stride of a dimension of size 1 carries no information, so such dimensions are sorted apart from the others.
    outer = sorted((1, 2, 3), key=lambda dim: (codes.shape[dim] == 1, codes.stride(dim)), reverse=True)
    bytes_of_token = head_dim * codes.element_size()
    if bytes_of_token % WORD_BYTES:
        raise ValueError(f"heads of {head_dim} elements of {codes.dtype} are not whole words of {WORD_BYTES} bytes")
    scaled, token_words, rows = isinstance(cache, QuantizedKv), bytes_of_token // WORD_BYTES, layers * parts * kv_heads
    row_words = page_tokens * (token_words + scaled)
    ordered = codes.permute(0, *outer, 4, 5).view(torch.int32)
    row_stride = row_words if rows == 1 else ordered.stride(3)
    words = ordered.as_strided((pages, rows, row_words), (ordered.stride(0), row_stride, 1))
    return _numbered(PageWords(words, page_tokens, token_words, layers * parts * row_words), layers, parts, part)


def _state_words(cache: StateCache, part: PagePart | None) -> PageWords:
    """Return a view of the memory of states; the padding of a head's state counts, as it is transferred too."""
    inputs, states = cache.inputs, cache.states
    pages, layers, heads = inputs.shape[:3]
    item, state_bytes = inputs.element_size(), 0 if states is None else states[0, 0, 0].nbytes
    # Not a stride: PyTorch chooses that of a dimension of one layer freely.
    row_words = -(-(state_bytes + inputs[0, 0, 0].nbytes) // ALIGNMENT) * ALIGNMENT // WORD_BYTES
    start = inputs.storage_offset() * item - state_bytes
    shape, page_words = (pages, heads * layers, row_words), inputs.stride(0) * item // WORD_BYTES
    words = torch.empty(0, dtype=torch.int32, device=inputs.device)
    words.set_(inputs.untyped_storage(), start // WORD_BYTES, shape, (page_words, row_words, 1))
    return _numbered(PageWords(words, 1, row_words, layers * row_words), layers, 1, part)


def _numbered(words: PageWords, layers: int, parts: int, part: PagePart | None) -> PageWords:
    """Return the words of a page with `layers` layers, numbered as in a page of the whole model."""
    if part is None:
        return words
    row_words = words.words.shape[2]
    first_row = (part.first_head * part.layers + part.first_layer) * parts
    gap = (part.layers - layers) * parts * row_words
    return replace(words, first_number=first_row * row_words, head_gap=gap)
