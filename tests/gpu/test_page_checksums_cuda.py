"""Checksums of pages in GPU memory, while a step's kernels run: the host's value, without waiting for the step."""

import pytest
import torch

from tandem.engine.cache.page_checksums import page_checksums
from tandem.engine.cache.page_words import as_words

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SHAPE = (6, 32, 2, 8, 128, 128)
PAGE_TOKENS = SHAPE[4]


def test_the_same_on_both_devices() -> None:
    # Not above: without a GPU, nothing may import Triton before tests/kernels has chosen its interpreter.
    from tandem.engine.kernels.rowwise.triton_checksum import reference_sums

    cache = torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16)
    pages, filled = [5, 0, 3], [PAGE_TOKENS, 1, PAGE_TOKENS - 1]
    sums = page_checksums(cache)
    assert list(sums(pages, filled)) == list(page_checksums(cache.cpu())(pages, filled))
    words = as_words(cache)
    assert list(sums(pages, filled)) == reference_sums(words.words, words.tokens(), pages, filled)


def test_no_wait_for_what_the_engine_does_and_no_page_outside() -> None:
    cache = torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16)
    sums = page_checksums(cache)
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second on the stream of the engine
    busy.record()
    sums([0, 1], [PAGE_TOKENS] * 2)
    assert not busy.query()
    with pytest.raises(IndexError):
        sums([SHAPE[0]], [PAGE_TOKENS])
