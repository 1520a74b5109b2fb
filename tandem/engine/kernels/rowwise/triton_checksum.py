"""Checksums of KV pages in GPU memory (defined in `tandem/engine/cache/page_checksums.py`), and their reference."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLITS = 64
"""Number of programs per page, so that a few pages take microseconds and many leave the GPU capacity for a step."""
BLOCK = 2048
"""Number of words that a program loads at a time."""
WARPS = 4


def partial_sums(
    words: Tensor,
    codes: int,
    token_words: int,
    chosen: Tensor,
    parts: Tensor,
    *,
    numbering: tuple[int, int, int] = (0, 1, 0),
) -> None:
    """Compute `parts` [n, SPLITS] int64: a page's checksum is the sum of a row mod 2^64. Does not wait for the device.

    words [pages, rows, words of a row] int32, each row contiguous: the first `codes` words of a row are `token_words`
    words of each token, the rest one word of each token (the scales). chosen [n, 2] int64: a page's number, and the
    number of tokens in the page. All tensors are on one device. With the numbering (first, head, gap), the index of
    word w of a page is w + first + w // head * gap.
    """
    _, rows, row_words = words.shape
    first, head, gap = numbering
    _sum_page[(len(chosen), SPLITS)](
        words,
        chosen,
        parts,
        rows * row_words,
        words.stride(0),
        ROW=row_words,
        ROW_STRIDE=row_words if rows == 1 else words.stride(1),
        CODES=codes,
        TOKEN=token_words,
        FIRST=first,
        HEAD=head,
        GAP=gap,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


def reference_sums(
    words: Tensor, tokens: Tensor, pages: Sequence[int], filled: Sequence[int], numbers: Tensor | None = None
) -> list[int]:
    """Return the checksums as defined, computed in plain PyTorch on any device.

    `words` is as for `partial_sums`; tokens [words of a row] is the token position that each word belongs to. `numbers`
    [rows, words of a row] are the indices of a page's words; None = in order from 0.
    """
    if numbers is None:
        numbers = torch.arange(words[0].numel(), device=words.device).view(words.shape[1:])
    weights = 2 * numbers + 1
    totals = [
        (words[page].long() * weights * (tokens < count)).sum() for page, count in zip(pages, filled, strict=True)
    ]
    return [int(total) % 2**64 for total in totals]


@triton.jit
def _sum_page(
    words_ptr,
    chosen_ptr,
    parts_ptr,
    total,
    page_stride,
    ROW: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    CODES: tl.constexpr,
    TOKEN: tl.constexpr,
    FIRST: tl.constexpr,
    HEAD: tl.constexpr,
    GAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (n, split) sums the blocks split, split + SPLITS, … of page n.

    ROW, ROW_STRIDE, CODES, TOKEN, FIRST, HEAD and GAP are numbers of words; `total` is the number of words of a page,
    and `page_stride` that from a page to the next.
    """
    number, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    page = tl.load(chosen_ptr + 2 * number)
    filled = tl.load(chosen_ptr + 2 * number + 1)
    first = words_ptr + page * page_stride
    sums = tl.zeros((BLOCK,), tl.int64)
    for start in range(split * BLOCK, total, splits * BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place % ROW
        token = tl.where(inside < CODES, inside // TOKEN, inside - CODES)
        counts = (place < total) & (token < filled)
        at = place
        if ROW_STRIDE != ROW:
            at = place // ROW * ROW_STRIDE + inside
        word = tl.load(first + at, mask=counts, other=0).to(tl.int64)
        index = place.to(tl.int64) + FIRST
        if GAP:
            index += place.to(tl.int64) // HEAD * GAP
        sums += word * (2 * index + 1)
    tl.store(parts_ptr + number * splits + split, tl.sum(sums, 0))
