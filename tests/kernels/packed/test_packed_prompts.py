"""Long steps of packed weights: the products of plain weights, which the engine's kernels dequantize first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.engine.kernels.cuda import CudaKernels
from tandem.engine.kernels.layers import Linear, Norm
from tandem.engine.kernels.packed import packed_products, products
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.models.load_spec import load_spec
from tests.factories import write_tiny_model
from tests.kernels.packed_cases import KINDS, make_packed
from tests.kernels.product_cases import DEVICE

TOKENS, HIDDEN, ROWS = 6, 128, 64
EPS = 1e-5


@pytest.fixture
def kernels(tmp_path: Path) -> CudaKernels:
    return CudaKernels(load_spec(write_tiny_model(tmp_path, head_dim=64)), DEVICE, torch.float32, 16, 4)


@pytest.mark.parametrize("most_items", [1 << 20, 20 * HIDDEN], ids=["whole", "pieces"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_product(kind: str, most_items: int, kernels: CudaKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_products, "FUSED_TOKENS", TOKENS - 1)
    monkeypatch.setattr(packed_products, "FUSED_NORM_TOKENS", TOKENS - 1)
    monkeypatch.setattr(packed_products, "SCRATCH_ITEMS", most_items)
    packed = make_packed(kind, (ROWS, HIDDEN), 64 if kind.startswith("int4") else HIDDEN)
    matrix = packed.dequantized(torch.float32)
    ours, plain = (
        results(backend, Linear(weight, torch.linspace(-1, 1, ROWS)))
        for backend, weight in ((kernels, packed), (ReferenceKernels(), matrix))
    )
    for actual, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def test_weights_of_few_tokens_and_plain_ones_stay_as_they_are() -> None:
    packed = Linear(make_packed("int8", (ROWS, HIDDEN), HIDDEN))
    plain = Linear(torch.zeros(ROWS, HIDDEN))
    assert products.dequantized_for(packed_products.FUSED_TOKENS, packed, torch.float32) is packed
    assert products.dequantized_for(1 << 20, plain, torch.float32) is plain


def results(kernels: CudaKernels | ReferenceKernels, linear: Linear) -> list[Tensor]:
    """Returns the outputs of all products with this weight."""
    if isinstance(linear.weight, PackedWeight):
        linear = kernels.prepare(linear)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    norm = Norm(torch.rand(HIDDEN, generator=generator), EPS)
    added = torch.ones(TOKENS, ROWS)
    kernels.linear_add(x, linear, added)
    return [
        kernels.norm_linear(x, norm, linear),
        kernels.norm_gate_up(x, norm, linear),
        kernels.norm_gate_up(x, norm, linear, "gelu_tanh"),
        kernels.linear(x, linear),
        added,
    ]
