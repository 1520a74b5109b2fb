"""The one-shot all-reduce of one rank, to which the other ranks' parts have been sent already."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.engine.kernels.rowwise.triton_all_reduce import OneShot, buffer_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANKS, NUMBER = 3, 1
MOST_BYTES = 1 << 14


def slot(memory: Tensor, call: int, sender: int) -> Tensor:
    """The 64-bit words in a rank's memory to which `sender` writes its part in this call."""
    return memory.view(2, RANKS, MOST_BYTES // 4)[call % 2, sender]


def sent(part: Tensor, call: int) -> Tensor:
    return (part.view(torch.int32).long() & 0xFFFFFFFF) | call << 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_parts_are_added_in_the_order_of_the_ranks_and_the_own_part_is_sent(dtype: torch.dtype) -> None:
    memory = [torch.zeros(buffer_bytes(MOST_BYTES, RANKS) // 8, dtype=torch.int64, device=DEVICE) for _ in range(RANKS)]
    one_shot = OneShot(NUMBER, torch.tensor([part.data_ptr() for part in memory], device=DEVICE), MOST_BYTES)
    generator = torch.Generator().manual_seed(0)
    for call, count in enumerate((MOST_BYTES // dtype.itemsize, 6, 2500), 1):
        # Small whole numbers, whose sums every dtype has.
        parts = [torch.randint(-40, 40, (count,), generator=generator).to(DEVICE, dtype) for _ in range(RANKS)]
        for sender in (0, 2):
            words = sent(parts[sender], call)
            slot(memory[NUMBER], call, sender)[: len(words)] = words
        expected, mine = sum(parts, torch.zeros_like(parts[0])), parts[NUMBER].clone()
        if call == 2:
            one_shot.add_sum(mine, None)
            assert torch.equal(mine, expected)
        else:
            total = torch.full_like(mine, 3)
            one_shot.add_sum(mine, total)
            assert torch.equal(total, expected + 3)
        for other in (0, 2):
            words = sent(parts[NUMBER], call)
            assert torch.equal(slot(memory[other], call, NUMBER)[: len(words)], words)
