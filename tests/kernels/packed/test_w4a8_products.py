"""Products of 4-bit codes with 8-bit codes in Triton, and the 8-bit codes of 4-bit weights that PyTorch multiplies."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from tandem.engine.kernels.layers import Linear, Norm
from tandem.engine.kernels.linear.triton_linear import ADD, GATE_UP, STORE
from tandem.engine.kernels.linear.triton_linear_tiles import Skinny
from tandem.engine.kernels.packed import packed_products, products, w4a8_products
from tandem.engine.kernels.packed.scaled_weight import QuantizedInput
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.reference import activate, rms_norm
from tests.kernels.packed_cases import make_packed, on_device
from tests.kernels.product_cases import DEVICE, EPS
from tests.kernels.steps import assert_as_good

KINDS = ["int4", "int4_offsets"]
TILE = Skinny(rows=32, tokens=16, columns=128, splits=1, stages=2, warps=4)


def random(*sizes: int, seed: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def make_weight(kind: str, rows: int, k: int, group: int) -> PackedWeight:
    return on_device(make_packed(kind, (rows, k), group, seed=k), DEVICE)


def values_of(x: QuantizedInput) -> Tensor:
    """The tokens [T, K] that the codes stand for, in float64."""
    codes = x.codes[: x.tokens].double()
    scales = x.scales[:, : x.tokens].t().double()
    return codes * scales.repeat_interleave(codes.shape[1] // scales.shape[1], dim=1)


def finished(product: Tensor, op: int, residual: Tensor, gelu: bool) -> Tensor:
    if op == GATE_UP.value:
        return activate(product, "gelu_tanh" if gelu else "silu")
    return residual + product if op == ADD.value else product


def check(
    kind: str,
    op: int,
    *,
    tokens: int,
    rows: int,
    k: int,
    tile: Skinny | None = None,
    gelu: bool = False,
    grouped: bool = False,
) -> None:
    """Compares a product with PyTorch's in float32, both against float64, on the numbers that the codes stand for."""
    weight, x, bias = make_weight(kind, rows, k, 128), random(tokens, k, seed=1), random(rows, seed=2)
    residual = random(tokens, rows // 2 if op == GATE_UP.value else rows, seed=3)
    codes = w4a8_products.quantized(x, None, weight, pdl=False, grouped=grouped)
    ours = residual.clone()
    prepared = packed_products.prepared(weight)
    w4a8_products.launch(codes, prepared, bias, ours, op, pdl=False, gelu=gelu, tile=tile)
    exact, baseline = (
        finished(
            linear(values_of(codes).to(wide), weight.dequantized(wide), bias.to(wide)), op, residual.to(wide), gelu
        )
        for wide in (torch.float64, torch.float32)
    )
    if DEVICE.type == "cuda":  # tensor cores sum FP8 with some 13 bits beside the largest term
        assert (ours.double() - exact).abs().max() <= 2**-6 * exact.abs().max()
    else:
        assert_as_good(ours, baseline, exact)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("op", [STORE.value, GATE_UP.value, ADD.value])
def test_a_product_is_that_of_the_numbers_that_codes_stand_for(kind: str, grouped: bool, op: int) -> None:
    check(kind, op, tokens=5, rows=96, k=384, tile=TILE, grouped=grouped)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(("k", "splits"), [(512, 2), (384, 2), (128, 1), (4352, 2)])
def test_programs_share_the_columns(grouped: bool, k: int, splits: int) -> None:
    """Equal shares, a last program with less columns, a single group, and more groups than offsets loaded at a time."""
    tile = Skinny(rows=32, tokens=16, columns=128, splits=splits, stages=2, warps=4)
    check("int4_offsets", STORE.value, tokens=17, rows=40, k=k, tile=tile, grouped=grouped)


@pytest.mark.parametrize("op", [STORE.value, GATE_UP.value])
def test_the_tile_of_the_rule(op: int) -> None:
    check("int4", op, tokens=33, rows=64, k=256, gelu=True)


@pytest.mark.parametrize("grouped", [True, False])
def test_totals_are_those_of_the_codes(grouped: bool) -> None:
    weight, norm = make_weight("int4", 16, 384, 128), Norm(random(384, seed=2), EPS)
    x = random(3, 384, seed=1)
    codes = w4a8_products.quantized(x, norm, weight, pdl=False, grouped=grouped)
    assert codes.totals is not None
    sums = codes.codes[:3].double().view(3, 3, 128).sum(-1)
    assert (codes.totals[:, :3].t().double() - sums).abs().max() <= 1e-6 * sums.abs().max()
    exact = rms_norm(x.double(), norm.weight.double(), EPS)
    assert (values_of(codes) - exact).abs().max() <= exact.abs().amax() / 16


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # by the interpreter
@pytest.mark.parametrize("grouped", [True, False])
def test_a_number_that_is_none_stays_in_its_token(grouped: bool) -> None:
    weight, x = packed_products.prepared(make_weight("int4", 32, 256, 128)), random(3, 256, seed=1)
    x[1, 200] = float("nan")
    out = x.new_empty(3, 32)
    codes = w4a8_products.quantized(x, None, weight, pdl=False, grouped=grouped)
    w4a8_products.launch(codes, weight, None, out, STORE.value, pdl=False, tile=TILE)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("operation", ["norm_linear", "gelu_tanh", "linear_add"])
@pytest.mark.parametrize("by_library", [True, False])
def test_a_step_of_many_tokens_is_computed_with_8_bit_inputs(
    operation: str, by_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer tokens, and float32, have products with the inputs as they are."""
    weight, dtype = make_weight("int4", 32, 256, 128), torch.float16
    prepared, bias = packed_products.prepared(weight), random(32, seed=5).to(dtype)
    layer = Linear(prepared, bias)
    monkeypatch.setattr(w4a8_products, "least_tokens", lambda *_: 5)
    if by_library:
        monkeypatch.setattr(w4a8_products, "uses_library", lambda tokens, *_: tokens >= 5)
        monkeypatch.setattr(w4a8_products, "library_product", multiplied_by_pytorch)
    few = products.products_of(prepared, 4, dtype)
    assert few is products.products_of(prepared, 5, torch.float32) is packed_products
    x, norm, hidden = (random(*sizes, seed=1).to(dtype) for sizes in ((5, 256), (256,), (5, 32)))
    many, normed = products.products_of(prepared, 5, dtype), Norm(norm, EPS)
    residual = hidden.double()
    codes = w4a8_products.quantized(x, None if operation == "linear_add" else normed, weight, pdl=False)
    exact = values_of(codes) @ weight.dequantized(torch.float64).t() + bias.double()
    if operation == "norm_linear":
        actual = many.norm_linear(x, normed, layer, pdl=False)
    elif operation == "gelu_tanh":
        actual = many.norm_gate_up(x, normed, layer, pdl=False, activation="gelu_tanh")
        exact = activate(exact, "gelu_tanh")
    else:
        many.linear_add(x, layer, hidden, pdl=False)
        actual, exact = hidden, exact + residual
    assert ((actual.double() - exact).abs() <= exact.abs() * 2**-9 + 2e-2).all()


def multiplied_by_pytorch(x: QuantizedInput, weight: PackedWeight, bias: Tensor, dtype: torch.dtype) -> Tensor:
    return linear(values_of(x), weight.dequantized(torch.float64), bias.double()).to(dtype)


def test_widened_codes_are_exact() -> None:
    weight = make_weight("int4", 16, 256, 128)
    widened = w4a8_products.widened(weight).double().view(16, 2, 128)
    exact = widened * weight.scales.double()[..., None]
    assert torch.equal(exact.view(16, 256), weight.dequantized(torch.float64))


def test_widened_mxfp4_is_exact_within_the_range_of_a_row() -> None:
    """Scales from 2⁻¹⁴ of the row's largest on; of smaller ones, numbers keep the bits down to 2⁻¹⁵ of the largest."""
    weight = make_weight("mxfp4", 3, 256, 32)
    scales = weight.scales.view(torch.uint8)
    scales[0, :4], scales[1, :4] = torch.tensor([109, 123, 112, 116], dtype=torch.uint8), 120
    scales[2, 0], scales[2, 1:] = 120, 100
    weight = replace(weight, factors=torch.tensor([1.5, 0.75, 1.0]).to(DEVICE))
    widened = w4a8_products.widened_float4(packed_products.prepared(weight)).dequantized(torch.float64)
    exact = weight.dequantized(torch.float64)
    assert torch.equal(widened[:2], exact[:2])
    assert not torch.equal(widened[2], exact[2])
    assert (widened[2] - exact[2]).abs().max() <= 2.0 ** (120 - 127 - 16)


@pytest.mark.parametrize(
    ("kind", "served"), [("mxfp4", True), ("nvfp4", False), ("int4", True), ("int4_offsets", False)]
)
def test_weights_that_the_library_multiplies(kind: str, served: bool) -> None:
    weight = packed_products.prepared(make_weight(kind, 32, 256, 128))
    assert w4a8_products.library_multiplies(weight) == served
    product = w4a8_products.quantized(random(5, 256, seed=1), None, weight, pdl=False)
    assert (product.totals is None) == (kind in {"mxfp4", "nvfp4"})


def test_the_library_s_product_of_mxfp4() -> None:
    weight = make_weight("mxfp4", 32, 256, 32)
    x, bias = random(40, 256, seed=1).bfloat16(), random(32, seed=2).bfloat16()
    codes = w4a8_products.quantized(x, None, weight, pdl=False)
    made = w4a8_products.library_product(codes, packed_products.prepared(weight), bias, torch.bfloat16)
    exact = values_of(codes) @ weight.dequantized(torch.float64).t() + bias.double()
    assert ((made.double() - exact).abs() <= exact.abs() * 2**-7 + 0.02).all()


def test_the_library_s_product_has_the_form_that_pytorch_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and strides alone: there is none on CPUs."""
    codes = torch.empty(256, 640, dtype=torch.float8_e4m3fn, device="meta")
    weight = PackedWeight(
        torch.empty(256, 320, dtype=torch.uint8, device="meta"), torch.empty(5, 256, device="meta").t(), None, 128
    )
    monkeypatch.setattr(w4a8_products, "widened", lambda _: codes)
    x = QuantizedInput(codes, torch.empty(1, 256, device="meta"), 200)
    assert w4a8_products.library_multiplies(weight)
    assert w4a8_products.library_product(x, weight, None, torch.bfloat16).shape == (200, 256)


@pytest.mark.parametrize(
    ("kind", "k", "group", "multiplied"),
    [
        ("int4", 256, 128, True),
        ("int4", 256, 64, False),
        ("int4", 256, 256, False),
        ("int8", 256, 128, False),
        ("mxfp4", 256, 32, False),
    ],
)
def test_weights_that_are_multiplied(kind: str, k: int, group: int, multiplied: bool) -> None:
    assert w4a8_products.multiplies(make_weight(kind, 16, k, group)) == multiplied
