"""Pages of a GPU's pool move to pinned host memory and back on a stream of their own."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tandem.engine.cache.page_checksums import page_checksums
from tandem.engine.cache.page_key import PageKey
from tandem.engine.cache.tiers.host import HostTier
from tandem.engine.cache.tiers.page_copies import PageCopies

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

DEVICE = torch.device("cuda:0")
SHAPE = (2, 2, 2, 16, 64)
"""Layers, parts, heads, tokens and dimensions of a page."""


def test_pages_come_back_with_their_checksums() -> None:
    storage = torch.randn(9, torch.Size(SHAPE).numel(), dtype=torch.bfloat16, device=DEVICE)
    copies = PageCopies(storage, page_checksums(storage.view(9, *SHAPE)), 16)
    tier = HostTier(4 * copies.page_bytes, copies.page_bytes, copies.device)
    tier.open()
    assert tier._memory.is_pinned()
    pages, keys = [1, 5, 7], [PageKey(bytes([number]), 0) for number in range(3)]
    before, sums = storage[pages].clone(), copies.checksums(pages, [0, 0, 0])

    def fill(buffers: Sequence[Tensor]) -> Sequence[int]:
        copies.save(pages, buffers)
        return sums

    tier.save(keys, fill)
    storage.zero_()
    torch.cuda.synchronize()
    stored = [page for key in keys if (page := tier.read(key)) is not None]
    copies.load([0, 2, 4], [page.data for page in stored])
    assert torch.equal(storage[[0, 2, 4]], before)
    assert list(copies.checksums([0, 2, 4], [0, 0, 0])) == [page.checksum for page in stored] == list(sums)
    tier.close()
