"""The all-reduce of several ranks, each in a process, over memory that they share."""

from __future__ import annotations

import mmap
import multiprocessing
import warnings
from multiprocessing.queues import SimpleQueue

import pytest
import torch
from torch import Tensor

from tandem.engine.kernels.rowwise import triton_all_reduce
from tandem.engine.kernels.rowwise.triton_all_reduce import AllReduce, buffer_bytes
from tandem.engine.kernels.triton_launch import INTERPRETED
from tests.rank_sums import MOST_BYTES, check_sums

LIMIT_S = 300.0
CPU = torch.device("cpu")


def check_rank(number: int, addresses: Tensor, checked: SimpleQueue[list[int]]) -> None:
    checked.put(check_sums(AllReduce(number, addresses, MOST_BYTES), number, len(addresses), CPU))


@pytest.mark.skipif(not INTERPRETED, reason="several GPUs sum in tests/gpu/test_ranks_cuda.py")
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_gets_the_sum_in_the_order_of_the_ranks(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes are forked, so that the memory has the same addresses in each. A program has several pieces."""
    monkeypatch.setattr(triton_all_reduce, "PROGRAMS", 3)
    memory = [torch.frombuffer(mmap.mmap(-1, buffer_bytes(MOST_BYTES, ranks)), dtype=torch.uint8) for _ in range(ranks)]
    addresses = torch.tensor([part.data_ptr() for part in memory])
    context = multiprocessing.get_context("fork")
    checked: SimpleQueue[list[int]] = context.SimpleQueue()
    processes = [context.Process(target=check_rank, args=(number, addresses, checked)) for number in range(ranks)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks while threads run; nothing here waits for them
        for process in processes:
            process.start()
    try:
        for process in processes:
            process.join(LIMIT_S)
        assert [process.exitcode for process in processes] == [0] * ranks
        words = [checked.get() for _ in processes]
        assert words == [words[0]] * ranks
    finally:
        for process in processes:
            process.kill()
