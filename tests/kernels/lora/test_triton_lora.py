"""The Triton kernels of adapters against products in float64."""

import itertools

import pytest
import torch
from torch import Tensor

from tandem.engine.kernels.layers import Norm
from tandem.engine.kernels.lora.triton_lora import TritonUpdate
from tandem.engine.kernels.lora_tables import LoraTables
from tandem.engine.kernels.reference import activate, rms_norm
from tandem.engine.kernels.triton_launch import overlaps_launches

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 3e-3}
NUMBERS = {
    "one token": [2],
    "none": [0, 0, 0],
    "mixed": [1, 0, 3, 2, 2, 0, 1, 3, 3, 1, 2, 0, 0, 1, 2, 3, 1, 2, 0],
    "two rows of a prompt": [1] * 40 + [3] * 33 + [0] * 5,
}
PARTS = {"one": (80,), "gate and up": (40, 80), "q, k and v": (144, 176, 208)}


def make_tables(part_ends: tuple[int, ...], k: int, rank: int, dtype: torch.dtype) -> LoraTables:
    generator = torch.Generator().manual_seed(rank)
    a = torch.randn(3, len(part_ends) * rank, k, generator=generator) / k**0.5
    b = torch.randn(3, part_ends[-1], rank, generator=generator) / rank**0.5
    return LoraTables(a.to(DEVICE, dtype), b.to(DEVICE, dtype), part_ends)


def expected(x: Tensor, numbers: Tensor, tables: LoraTables, out: Tensor) -> Tensor:
    """Returns out + B · (A · x) in float64."""
    out = out.double().clone()
    for token, number in enumerate(numbers.tolist()):
        if number:
            parts = (tables.a[number - 1].double() @ x[token].double()).split(tables.rank)
            updates = [
                tables.b[number - 1, rows.start : rows.stop].double() @ part
                for part, rows in zip(parts, tables.part_rows, strict=True)
            ]
            out[token] += torch.cat(updates)
    return out


@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS.keys())
@pytest.mark.parametrize("part_ends", PARTS.values(), ids=PARTS.keys())
@pytest.mark.parametrize("normed", [False, True])
def test_update(numbers: list[int], part_ends: tuple[int, ...], normed: bool, dtype: torch.dtype) -> None:
    for k, rank in itertools.product((96, 640), (16, 32) if len(numbers) < 10 else (16,)):
        tables = make_tables(part_ends, k, rank, dtype)
        generator = torch.Generator().manual_seed(len(numbers))
        x = torch.randn(len(numbers), k, generator=generator).to(DEVICE, dtype)
        norm = Norm(1 + torch.randn(k, generator=generator).to(DEVICE, dtype) / 10, 1e-5) if normed else None
        out = torch.randn(len(numbers), part_ends[-1], generator=generator).to(DEVICE, dtype)
        given = torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
        y = x.double() if norm is None else rms_norm(x.double(), norm.weight.double(), 1e-5)
        wanted = expected(y, given, tables, out)
        update = TritonUpdate(x, norm, given, tables, pdl=overlaps_launches())
        if len(part_ends) == 2:
            for activation in ("silu", "gelu_tanh"):
                close(update.activated(out, activation), activate(wanted, activation), dtype)
        before = out.clone()
        update.add_to(out)
        close(out, wanted, dtype)
        assert torch.equal(out[given == 0], before[given == 0])


def close(actual: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
