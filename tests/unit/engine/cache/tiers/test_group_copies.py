"""Copies of pages that ranks divide: a buffer has the parts of all ranks, and a checksum covers each of them."""

import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.engine.cache.tiers.group_copies import GroupPageCopies, SharedCopies
from tandem.engine.cache.tiers.host_memory import HostMemory
from tandem.engine.cache.tiers.page_copies import PageCopies

ROWS, PAGES = 4, 6
SIZES = (8, 12, 4)
"""The bytes of a page of each rank."""


class ByteSums:
    """Sums of the bytes of pages, as checksums."""

    def __init__(self, pool: Tensor) -> None:
        self.pool = pool

    def __call__(self, pages: Sequence[int], filled: Sequence[int], groups: Sequence[int] = ()) -> list[int]:
        return [int(self.pool[page].sum()) for page in pages]


class OtherRank:
    """A rank with its own pool, whose copies go through a file that both sides map."""

    def __init__(self, pool: Tensor, path: Path) -> None:
        self.page_bytes = pool.shape[1]
        self.sums_of = ByteSums(pool)
        path.write_bytes(bytes(ROWS * self.page_bytes))
        file = os.open(path, os.O_RDWR)
        self.rows = HostMemory(ROWS, self.page_bytes, torch.device("cpu"), file).rows
        os.close(file)
        self.shared = SharedCopies(PageCopies(pool, self.sums_of, 1), path)

    def copy(self, pages: Sequence[int], *, to_pool: bool) -> "Future[None]":
        future: Future[None] = Future()
        self.shared(pages, to_pool=to_pool)
        future.set_result(None)
        return future

    def sums(self, pages: Sequence[int], filled: Sequence[int], groups: Sequence[int]) -> "Future[Sequence[int]]":
        future: Future[Sequence[int]] = Future()
        future.set_result(self.sums_of(pages, filled, groups))
        return future


@pytest.fixture
def pools() -> list[Tensor]:
    random = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (PAGES, size), dtype=torch.uint8, generator=random) for size in SIZES]


@pytest.fixture
def copies(pools: list[Tensor], tmp_path: Path) -> GroupPageCopies:
    others = [OtherRank(pool, tmp_path / str(rank)) for rank, pool in enumerate(pools[1:])]
    return GroupPageCopies(pools[0], ByteSums(pools[0]), 1, others)


def test_saved_pages_come_back_on_all_ranks(copies: GroupPageCopies, pools: list[Tensor]) -> None:
    assert copies.page_bytes == sum(SIZES)
    before = [pool.clone() for pool in pools]
    buffers = [torch.zeros(copies.page_bytes, dtype=torch.uint8) for _ in range(3)]
    copies.save([5, 0, 2], buffers)
    sums = copies.checksums([5, 0, 2], [0, 0, 0])
    assert torch.equal(buffers[1], torch.cat([pool[0] for pool in before]))
    for pool in pools:
        pool.zero_()
    copies.load([1, 3, 4], buffers)
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool[[1, 3, 4]], old[[5, 0, 2]])
        assert not pool[[0, 2, 5]].any()
    assert copies.checksums([1, 3, 4], [0, 0, 0]) == sums


@pytest.mark.parametrize("rank", range(3))
def test_a_changed_byte_of_any_rank_changes_the_checksum(
    copies: GroupPageCopies, pools: list[Tensor], rank: int
) -> None:
    before = copies.checksums([2], [0])
    pools[rank][2, -1] ^= 1
    assert copies.checksums([2], [0]) != before
