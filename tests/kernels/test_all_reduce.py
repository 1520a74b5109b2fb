"""The all-reduce of several ranks, each in a process, over memory that they share."""

from __future__ import annotations

import mmap
import multiprocessing
import warnings
from multiprocessing.queues import SimpleQueue

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import start_processes

from tandem.engine.kernels.rowwise import triton_all_reduce
from tandem.engine.kernels.rowwise.triton_all_reduce import AllReduce, buffer_bytes
from tandem.engine.kernels.triton_launch import INTERPRETED
from tests.rank_sums import check_sums

MOST_BYTES = 1 << 13
CPU = torch.device("cpu")


def check_rank(number: int, addresses: Tensor, checked: SimpleQueue[list[int]]) -> None:
    checked.put(check_sums(AllReduce(number, addresses, MOST_BYTES), number, len(addresses), MOST_BYTES, CPU))


@pytest.mark.skipif(not INTERPRETED, reason="several GPUs sum in tests/gpu/test_ranks_cuda.py")
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_gets_the_sum_in_the_order_of_the_ranks(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes are forked, so that the memory has the same addresses in each. A program has several pieces."""
    monkeypatch.setattr(triton_all_reduce, "PROGRAMS", 3)
    memory = [torch.frombuffer(mmap.mmap(-1, buffer_bytes(MOST_BYTES, ranks)), dtype=torch.uint8) for _ in range(ranks)]
    addresses = torch.tensor([part.data_ptr() for part in memory])
    checked: SimpleQueue[list[int]] = multiprocessing.get_context("fork").SimpleQueue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks while threads run; nothing here waits for them
        start_processes(check_rank, (addresses, checked), ranks, daemon=True, start_method="fork")
    words = [checked.get() for _ in range(ranks)]
    assert words == [words[0]] * ranks
