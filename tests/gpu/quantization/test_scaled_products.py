"""Products with weights and inputs of 8 bits on a GPU: Triton's and the library's, of any number of tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.engine.kernels.layers import Linear, Norm
from tandem.engine.kernels.linear.triton_linear import reserve_scratch
from tandem.engine.kernels.packed import scaled_products
from tandem.engine.kernels.packed.scaled_weight import ScaledWeight
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.kernels.triton_launch import overlaps_launches
from tests.kernels.packed_cases import make_packed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

REFERENCE = ReferenceKernels()
EPS = 1e-5
BF16 = torch.bfloat16
TOKENS = [1, 15, 16, 17, 33, 64, 100, 128, 129, 255, 256, 257, 300, 511, 513, 1000, 2049]
"""With numbers beside the multiples of 256, at which the library once read out of bounds."""
SHAPES = [(512, 4096, 4096), (512, 4096, 128), (272, 14336, 14336), (528, 576, 64)]
"""(rows, k, group)."""


def make_weight(kind: str, rows: int, k: int, group: int) -> PackedWeight:
    packed = make_packed(kind, (rows, k), group)
    scales = packed.scales.float()
    if group == 128 and rows % 128 == 0:
        scales = scales[::128].repeat_interleave(128, dim=0)  # blocks, as checkpoints have them
    return PackedWeight(packed.codes.cuda(), scales.cuda(), None, group, quantized_inputs=True)


def random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, device="cuda").bfloat16()


def exact_product(x: Tensor, norm: Norm | None, weight: PackedWeight, prepared: ScaledWeight) -> Tensor:
    """The product of what the codes stand for, in float64."""
    quantized = scaled_products.quantized(x, norm, prepared, pdl=False)
    scales = quantized.scales[:, : len(x)].t().double().repeat_interleave(weight.group, dim=1)
    return (quantized.codes[: len(x)].double() * scales) @ weight.dequantized(torch.float64).t()


def check(actual: Tensor, exact: Tensor, fp8: bool, columns: int = 4096) -> None:
    """An output's rounding, and of FP8 the matrix units' sums, which have 13 bits beside the largest term.

    They cut off the rest, which adds up: with 4,096 columns peers saw 2 %, with more `columns` more.
    """
    spread = exact.square().mean(1, keepdim=True).sqrt()
    allowed = exact.abs() * 2**-8 + spread * (2**-5 * max(1, columns / 4096) if fp8 else 2**-12)
    assert ((actual.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_products_of_any_number_of_tokens(kind: str, shape: tuple[int, int, int]) -> None:
    rows, k, group = shape
    torch.manual_seed(rows)
    weight = make_weight(kind, rows, k, group)
    prepared, norm, bias = scaled_products.prepared(weight), Norm(random(k), EPS), random(rows)
    reserve_scratch(weight.device)
    pdl = overlaps_launches()
    for tokens in TOKENS:
        x = random(tokens, k)
        product = exact_product(x, norm, weight, prepared)
        actual = scaled_products.norm_linear(x, norm, Linear(prepared, bias), pdl=pdl)
        check(actual, product + bias.double(), kind == "fp8", group)
        gate, up = (product + bias.double()).chunk(2, dim=1)
        actual = scaled_products.norm_gate_up(x, norm, Linear(prepared, bias), pdl=pdl)
        wanted = torch.nn.functional.silu(gate) * up
        slack = (gate.abs() + up.abs()).square().mean().sqrt() ** 2
        assert ((actual.double() - wanted).abs() <= wanted.abs() * 2**-6 + slack * 2**-4).all()
        hidden = random(tokens, rows)
        wanted = hidden.double() + exact_product(x, None, weight, prepared)
        scaled_products.linear_add(x, Linear(prepared), hidden, pdl=pdl)
        check(hidden, wanted, kind == "fp8", group)


def test_the_library_is_used_where_it_has_the_product() -> None:
    rows, blocks, integers = (
        scaled_products.prepared(make_weight(kind, 512, 4096, group))
        for kind, group in (("fp8", 4096), ("fp8", 128), ("int8", 4096))
    )
    most = scaled_products.LIBRARY_TOKENS
    assert scaled_products.uses_library(most + 1, rows, BF16)
    assert not scaled_products.uses_library(most, rows, BF16)
    assert not scaled_products.uses_library(4096, integers, BF16)
    print("blocks by the library:", scaled_products.uses_library(129, blocks, BF16))


@pytest.mark.parametrize(("kind", "group"), [("fp8", 4096), ("fp8", 128), ("int8", 4096)])
@pytest.mark.parametrize("tokens", [5, 200])
def test_a_graph_repeats_its_bits(tokens: int, kind: str, group: int) -> None:
    weight = scaled_products.prepared(make_weight(kind, 512, 4096, group))
    norm, x = Norm(random(4096), EPS), random(tokens, 4096)
    pdl = overlaps_launches()
    reserve_scratch(weight.device)
    once = scaled_products.norm_linear(x, norm, Linear(weight), pdl=pdl)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled_products.norm_linear(x, norm, Linear(weight), pdl=pdl)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, once)


@pytest.mark.parametrize(("kind", "group"), [("fp8", 4096), ("fp8", 128), ("int8", 4096)])
def test_a_token_alone_and_in_company(kind: str, group: int) -> None:
    """Codes and scales have the same bits in all steps, products those of the same tile; else sums differ in order."""
    weight = make_weight(kind, 512, 4096, group)
    prepared, norm, x = scaled_products.prepared(weight), Norm(random(4096), EPS), random(400, 4096)
    pdl = overlaps_launches()
    alone = scaled_products.norm_linear(x[7:8], norm, Linear(prepared), pdl=pdl)
    codes = scaled_products.quantized(x[7:8], norm, prepared, pdl=pdl)
    for tokens in (16, 64, 200, 400):
        many = scaled_products.quantized(x[:tokens], norm, prepared, pdl=pdl)
        assert torch.equal(many.codes[7].float(), codes.codes[0].float())
        assert torch.equal(many.scales[:, 7], codes.scales[:, 0])
        together = scaled_products.norm_linear(x[:tokens], norm, Linear(prepared), pdl=pdl)
        if tokens == 16:
            assert torch.equal(together[7], alone[0])
        check(together[7:8], exact_product(x[7:8], norm, weight, prepared), kind == "fp8")


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_codes_are_the_reference_s(kind: str) -> None:
    from tandem.engine.kernels.kv_cache import quantize_kv

    torch.manual_seed(300)
    x = random(300, 14336)
    for group in (14336, 128):
        weight = make_weight(kind, 16, 14336, group)
        quantized = scaled_products.quantized(x, None, weight, pdl=False)
        codes, scales = quantize_kv(x.view(300, -1, group), weight.codes.dtype)
        assert torch.equal(quantized.codes[:300].float(), codes.view(300, -1).float())
        assert torch.equal(quantized.scales[:, :300].t(), scales)
