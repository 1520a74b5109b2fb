"""What every rank checks after its sums: the bits, whose order of addition is that of the ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engine.kernels.layers import Norm
from tandem.engine.kernels.reference import rms_norm
from tandem.engine.kernels.rowwise.triton_all_reduce import AllReduce

EPS = 1e-5
ROW_BYTES = 2048


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_sums(sums: AllReduce, number: int, ranks: int, most_bytes: int, device: torch.device) -> list[int]:
    """Checks calls in one shot and in two, in any order, with and without a residual stream and a norm.

    All ranks call it at the same time. The sizes are the maximum, `most_bytes`, one word, not a whole number of pieces,
    and rows, also of words that cannot be divided evenly. Returns the sums of the words of normed rows, which all ranks
    must have.
    """
    seed, words = 0, []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        per_word = 4 // dtype.itemsize
        for shots, shape, adds in (
            (1, (most_bytes // dtype.itemsize,), True),
            (2, (most_bytes // dtype.itemsize,), True),
            (1, (per_word,), False),
            (2, (601 * per_word,), False),
            (1, (most_bytes // ROW_BYTES, ROW_BYTES // dtype.itemsize), True),
            (2, (most_bytes // ROW_BYTES, ROW_BYTES // dtype.itemsize), True),
            (2, (7, 75 * per_word), True),
            (1, (1, 34 * per_word), False),
        ):
            seed += ranks + 1
            parts = [random(seed + rank, *shape).to(dtype) for rank in range(ranks)]
            expected = sum((part.float() for part in parts), torch.zeros(shape)).to(dtype)
            total = random(seed + ranks, *shape).to(dtype) if adds else None
            if total is not None:
                expected = total + expected
                total = total.to(device)
            part = parts[number].to(device)
            norm = Norm(random(seed, shape[-1]).to(dtype).to(device), EPS) if len(shape) == 2 else None
            normed = sums.add_sum(part, total, norm, shots=shots)
            result = part if total is None else total
            assert torch.equal(result.cpu(), expected), (number, dtype, shots, shape)
            if norm is not None:
                assert normed is not None
                once = rms_norm(result.float(), norm.weight.float(), EPS).to(dtype)
                # The sums of squares differ in their order, so a number may be rounded up instead of down.
                assert torch.allclose(normed, once, rtol=4 * torch.finfo(dtype).eps), (number, dtype, shots)
                words.append(int(normed.view(torch.int32).long().sum().item()))
    return words
