"""Products with packed weights in Triton: those of the dequantized weight, for every form of codes and scales."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.kernels.held_weight import step_bytes
from tandem.engine.kernels.layers import Linear, Norm
from tandem.engine.kernels.linear.triton_linear_tiles import Skinny
from tandem.engine.kernels.packed import packed_products
from tandem.engine.kernels.packed.float4_weight import word_scaled
from tandem.engine.kernels.packed.triton_codes import bytes_as, nibbles_as, words_as
from tandem.engine.kernels.packed.triton_float4 import float4_as
from tandem.engine.kernels.packed_weight import unpack_nibbles
from tandem.engine.kernels.reference import ReferenceKernels
from tests.kernels.packed_cases import FLOAT4_KINDS, KINDS, make_packed, on_device
from tests.kernels.product_cases import DEVICE, EPS
from tests.kernels.steps import assert_as_good

REFERENCE = ReferenceKernels()
# Triton's interpreter multiplies the bit patterns of bfloat16 as integers: float16 is tested for both on the CPU.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
PDL = False
SHAPES = [(1, 40, 256, 128), (3, 70, 192, 64), (17, 64, 96, 32), (2, 32, 576, 576)]
"""(tokens, rows, k, group): whole tiles of 4-bit codes and a shorter last one, several groups and one scale a row."""


class Case:
    """Random inputs of a product that every dtype holds exactly, in float64, and its packed weight."""

    def __init__(self, kind: str, tokens: int, rows: int, k: int, group: int, *, bias: bool) -> None:
        generator = torch.Generator().manual_seed(tokens)

        def random(*sizes: int) -> Tensor:
            return (torch.randn(*sizes, generator=generator) * 16).round().clamp(-64, 64).double().to(DEVICE) / 16

        self.packed = packed_products.prepared(on_device(make_packed(kind, (rows, k), group, seed=k), DEVICE))
        self.x, self.norm, self.residual = random(tokens, k), random(k), random(tokens, rows)
        self.bias = random(rows) if bias else None

    def linear(self, dtype: torch.dtype, dequantized: torch.dtype | None = None) -> Linear:
        bias = None if self.bias is None else self.bias.to(dtype)
        return Linear(self.packed if dequantized is None else self.packed.dequantized(dequantized).to(dtype), bias)

    def ours(self, operation: str, dtype: torch.dtype) -> Tensor:
        x, norm, linear = self.x.to(dtype), Norm(self.norm.to(dtype), EPS), self.linear(dtype)
        if operation == "norm_linear":
            return packed_products.norm_linear(x, norm, linear, pdl=PDL)
        if operation in {"silu", "gelu_tanh"}:
            return packed_products.norm_gate_up(x, norm, linear, pdl=PDL, activation=operation)
        hidden = self.residual.to(dtype)
        packed_products.linear_add(x, linear, hidden, pdl=PDL)
        return hidden

    def torch(self, operation: str, dtype: torch.dtype, weight: torch.dtype) -> Tensor:
        x, norm, linear = self.x.to(dtype), Norm(self.norm.to(dtype), EPS), self.linear(dtype, weight)
        if operation == "norm_linear":
            return REFERENCE.norm_linear(x, norm, linear)
        if operation in {"silu", "gelu_tanh"}:
            return REFERENCE.norm_gate_up(x, norm, linear, operation)
        hidden = self.residual.to(dtype, copy=True)
        REFERENCE.linear_add(x, linear, hidden)
        return hidden


def check(operation: str, cases: list[Case], dtype: torch.dtype) -> None:
    actual = torch.cat([case.ours(operation, dtype).flatten() for case in cases])
    baseline = torch.cat([case.torch(operation, dtype, dtype).flatten() for case in cases])
    exact = torch.cat([case.torch(operation, torch.float64, torch.float64).flatten() for case in cases])
    assert_as_good(actual, baseline, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", ["norm_linear", "silu", "gelu_tanh", "linear_add"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_dequantized_weight(kind: str, operation: str, dtype: torch.dtype) -> None:
    check(operation, [Case(kind, *shape, bias=number % 2 == 0) for number, shape in enumerate(SHAPES)], dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", ["norm_linear", "silu", "linear_add"])
def test_long_prompts_are_multiplied_by_dequantized_pieces(
    kind: str, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_products, "FUSED_TOKENS", 4)
    monkeypatch.setattr(packed_products, "FUSED_NORM_TOKENS", 4)
    monkeypatch.setattr(packed_products, "SCRATCH_ITEMS", 30 * 192)
    check(operation, [Case(kind, 5, 64, 192, 64, bias=True), Case(kind, 7, 64, 192, 192, bias=False)], torch.float32)


@pytest.mark.parametrize("kind", ["int8_offsets", "int4", "int4_offsets", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("operation", ["norm_linear", "silu"])
@pytest.mark.parametrize("group", [64, 320])
def test_programs_share_the_columns(kind: str, operation: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps of columns are divided among two programs, the second of which has one less."""
    columns = 64 if kind in FLOAT4_KINDS else 32
    tile = Skinny(rows=32, tokens=16, columns=columns, splits=2, stages=2, warps=4)
    monkeypatch.setattr(packed_products, "tile_for", lambda *_: tile)
    check(operation, [Case(kind, 3, 64, 320, group, bias=True)], torch.float32)


@triton.jit
def _convert(bytes_, nibbles, out, FP8: tl.constexpr):
    at = tl.arange(0, 256)
    held = tl.load(bytes_ + at)
    tl.store(out + at, bytes_as(held, FP8, tl.bfloat16).to(tl.float32))
    tl.store(nibbles + at[None, :], nibbles_as((held & 15)[None, :], tl.bfloat16).to(tl.float32))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_every_code_as_bfloat16(dtype: torch.dtype) -> None:
    codes = torch.arange(256, device=DEVICE).to(torch.uint8)
    wide, nibbles = torch.zeros(2, 256, device=DEVICE)
    _convert[(1,)](codes, nibbles, wide, FP8=dtype != torch.int8)
    expected = codes.view(dtype).float()
    finite = expected.isfinite()
    assert torch.equal(wide[finite], expected[finite])
    assert torch.equal(nibbles, (codes & 15).float() - 8)


@triton.jit
def _convert_words(words, out, BITS: tl.constexpr, FP8: tl.constexpr, CODES: tl.constexpr):
    held = tl.load(words + tl.arange(0, 64)[None, :])
    numbers = words_as(held, BITS, FP8, out.dtype.element_ty)
    tl.store(out + tl.arange(0, CODES)[None, :], numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_every_word_of_codes_in_word_order(kind: str, dtype: torch.dtype) -> None:
    """On a GPU bfloat16 is converted by PTX, elsewhere by the plain operations."""
    held = torch.arange(256, device=DEVICE).to(torch.uint8)
    if kind == "int4":
        expected = unpack_nibbles(held).float() - 8
    else:
        expected = held.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn).float()
    out = torch.zeros(len(expected), dtype=dtype, device=DEVICE)
    bits = 4 if kind == "int4" else 8
    _convert_words[(1,)](held.view(torch.int32), out, BITS=bits, FP8=kind == "fp8", CODES=len(out))
    ordered = expected.view(-1, 4, 2, 2).transpose(1, 2).flatten()
    finite = ordered.isfinite()
    assert torch.equal(out.float()[finite], ordered[finite])


@triton.jit
def _convert_float4(words, scales, out, GROUP: tl.constexpr):
    held = tl.load(words + tl.arange(0, 64)[None, :])
    of_words = tl.load(scales + tl.arange(0, 128 // GROUP)[None, :])
    tl.store(out + tl.arange(0, 512)[None, :], float4_as(held, of_words, GROUP, out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", FLOAT4_KINDS)
def test_every_float4_code_with_its_scale_in_word_order(kind: str, dtype: torch.dtype) -> None:
    """The codes times the scales are exact in each of the types; on a GPU bfloat16 is converted by PTX."""
    weight = make_packed(kind, (1, 512), 0)
    weight = replace(weight, codes=torch.arange(256).to(torch.uint8)[None], factors=torch.ones(1))
    held = word_scaled(on_device(weight, DEVICE))
    out = torch.zeros(1, 512, dtype=dtype, device=DEVICE)
    _convert_float4[(1,)](held.codes.view(torch.int32), held.scales.contiguous(), out, GROUP=held.group)
    expected = (
        (weight.dequantized(torch.float32) / held.factors.cpu()[:, None]).view(-1, 4, 2, 2).transpose(1, 2).flatten()
    )
    assert torch.equal(out.float().cpu().flatten(), expected)


def test_scales_beyond_the_range_of_bfloat16_are_exact() -> None:
    """An E8M0 scale may be 2 ** 127; the factor of its row takes over what a word of scales cannot hold."""
    weight = make_packed("mxfp4", (3, 64), 0)
    exponents = torch.tensor([[10, 127], [128, 129], [250, 200]]).to(torch.uint8)
    weight = replace(weight, scales=exponents.view(torch.float8_e8m0fnu), factors=torch.full((3,), 2.0**-100))
    held = word_scaled(on_device(weight, DEVICE))
    out = torch.empty(3, 64, dtype=torch.float32, device=DEVICE)
    packed_products.dequantize(held, out)
    assert torch.equal(out.cpu(), weight.dequantized(torch.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_dequantized_by_the_kernel(kind: str) -> None:
    for _, rows, k, group in SHAPES:
        packed = Case(kind, 1, rows, k, group, bias=False).packed
        out = torch.empty(rows, k, dtype=torch.float32, device=DEVICE)
        packed_products.dequantize(packed, out)
        assert torch.allclose(out, packed.dequantized(torch.float32), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "k", "group", "columns"),
    [
        ("int8", 4096, 4096, 128), ("int8", 4096, 32, 32), ("fp8", 4096, 128, 128), ("int4", 4096, 128, 64),
        ("int4", 4096, 32, 32), ("int4", 576, 576, 32), ("int4", 192, 64, 32), ("int4", 96, 32, 16),
        ("mxfp4", 96, 32, 64), ("nvfp4", 4096, 16, 64),
    ],
)  # fmt: skip
def test_pieces_of_codes_have_few_scales(kind: str, k: int, group: int, columns: int) -> None:
    packed = make_packed(kind, (2, k), group)
    assert step_bytes(packed) == columns
    assert packed_products.multiplies(packed)


def test_groups_that_are_too_narrow_have_no_product() -> None:
    assert not packed_products.multiplies(make_packed("int8", (2, 24), 8))
    assert not packed_products.multiplies(make_packed("int8", (3, 2, 64), 64))
