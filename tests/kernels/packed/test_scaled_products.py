"""Products of 8-bit codes with 8-bit codes in Triton: the codes of inputs, and what is multiplied with them."""

import pytest
import torch
from torch import Tensor

from tandem.engine.kernels.kv_cache import quantize_kv
from tandem.engine.kernels.layers import DenseLayer, Linear, Norm
from tandem.engine.kernels.linear.triton_activation import gelu_mul, silu_mul
from tandem.engine.kernels.linear.triton_linear_tiles import Gemv, Skinny
from tandem.engine.kernels.packed import scaled_products
from tandem.engine.kernels.packed.library_products import library_product
from tandem.engine.kernels.packed.scaled_weight import QuantizedInput, ScaledWeight
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.reference import ReferenceKernels, activate, rms_norm
from tests.kernels.packed_cases import make_packed
from tests.kernels.product_cases import DEVICE, EPS
from tests.kernels.steps import assert_as_good

REFERENCE = ReferenceKernels()
KINDS = ["int8", "fp8"]
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
SHAPES = [
    (1, 40, 256, 128),
    (3, 70, 192, 64),
    (17, 64, 96, 32),
    (2, 32, 576, 576),
    (1, 32, 576, 576),
    (1, 32, 512, 256),
]
"""(tokens, rows, k, group): several groups and one scale a row, whole steps of columns and a shorter last one.

A token alone is quantized by the product, but in groups of 256: the last two.
"""


def random(*sizes: int, seed: int) -> Tensor:
    """Numbers that every dtype holds exactly."""
    values = torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))
    return (values * 16).round().clamp(-64, 64).to(DEVICE) / 16


def make_weight(kind: str, rows: int, k: int, group: int) -> PackedWeight:
    packed = make_packed(kind, (rows, k), group, seed=k)
    return PackedWeight(packed.codes.to(DEVICE), packed.scales.to(DEVICE), None, group, quantized_inputs=True)


def values_of(x: QuantizedInput, group: int) -> Tensor:
    """The tokens [T, K] that the codes stand for, in float64."""
    codes = x.codes[: x.tokens].double()
    return codes * x.scales[:, : x.tokens].t().double().repeat_interleave(group, dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "k", "group"), [(3, 256, 128), (5, 192, 192), (2, 576, 576), (2, 96, 32)])
def test_codes_are_the_reference_s(tokens: int, k: int, group: int, kind: str, dtype: torch.dtype) -> None:
    x, weight = random(tokens, k, seed=k).to(dtype), make_weight(kind, 16, k, group)
    x[0, :group] = 0
    quantized = scaled_products.quantized(x, None, weight, pdl=False)
    codes, scales = quantize_kv(x.view(tokens, -1, group), weight.codes.dtype)
    assert torch.equal(quantized.codes[:tokens].float(), codes.view(tokens, k).float())
    assert torch.equal(quantized.scales[:, :tokens].t(), scales)
    assert quantized.scales[0, 0] == 0


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_activation_has_the_codes_that_it_has_when_it_is_stored_first(kind: str, activation: str) -> None:
    both, weight = random(5, 384, seed=1).half(), make_weight(kind, 16, 192, 64)
    stored = (gelu_mul if activation == "gelu_tanh" else silu_mul)(both, pdl=False)
    first, once = (
        scaled_products.quantized(x, None, weight, pdl=False, activation=name)
        for x, name in ((stored, None), (both, activation))
    )
    assert torch.equal(first.codes.float(), once.codes.float())
    assert torch.equal(first.scales, once.scales)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("library", [True, False])
def test_a_feed_forward_network(library: bool, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, hidden = random(6, 64, seed=1).bfloat16(), random(6, 64, seed=1).bfloat16()
    norm = Norm(random(64, seed=2).bfloat16(), EPS)
    gate_up = Linear(scaled_products.prepared(make_weight("fp8", 192, 64, 64)))
    down = Linear(scaled_products.prepared(make_weight("fp8", 64, 96, 96)))
    if library:
        monkeypatch.setattr(scaled_products, "uses_library", lambda *_: True)
    scaled_products.feed_forward(hidden, DenseLayer(norm, gate_up, down, activation), pdl=False)
    inner = scaled_products.norm_gate_up(x, norm, gate_up, pdl=False, activation=activation)
    wanted = x.clone()
    scaled_products.linear_add(inner, down, wanted, pdl=False)
    assert torch.equal(hidden, wanted)
    assert not torch.equal(hidden, x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [64, 192])
def test_a_normed_input_is_rounded_once(group: int, kind: str) -> None:
    x, norm = random(7, 192, seed=1), Norm(random(192, seed=2), EPS)
    weight = make_weight(kind, 16, 192, group)
    quantized = scaled_products.quantized(x, norm, weight, pdl=False)
    exact = rms_norm(x.double(), norm.weight.double(), EPS)
    most = exact.view(7, -1, group).abs().amax(-1, keepdim=True).expand(-1, -1, group).reshape(exact.shape)
    # Half a step of integers, or of three bits of a mantissa.
    allowed = most / 127 / 2 if kind == "int8" else torch.maximum(exact.abs() / 16, most / 448 / 512)
    assert ((values_of(quantized, group) - exact).abs() <= allowed * 1.001).all()


def assert_summed_as_well(kind: str, ours: Tensor, baseline: Tensor, exact: Tensor) -> None:
    """Checks for errors like PyTorch's; the matrix units sum FP8 with some 13 bits beside the largest term alone."""
    if kind == "fp8" and DEVICE.type == "cuda":
        assert (ours.double() - exact).abs().max() <= 2**-6 * exact.abs().max()
    else:
        assert_as_good(ours, baseline, exact)


def operate(operation: str, x: Tensor, norm: Norm, linear: Linear, residual: Tensor) -> Tensor:
    if operation == "norm_linear":
        return scaled_products.norm_linear(x, norm, linear, pdl=False)
    if operation == "linear":
        return scaled_products.norm_linear(x, None, linear, pdl=False)
    if operation in {"silu", "gelu_tanh"}:
        return scaled_products.norm_gate_up(x, norm, linear, pdl=False, activation=operation)
    hidden = residual.clone()
    scaled_products.linear_add(x, linear, hidden, pdl=False)
    return hidden


def expected(operation: str, x: Tensor, linear: Linear, residual: Tensor) -> Tensor:
    """The operation of PyTorch in x's dtype, on an input that is normed and rounded already."""
    product = REFERENCE.linear(x, linear)
    if operation in {"silu", "gelu_tanh"}:
        return activate(product, operation)
    return residual + product if operation == "linear_add" else product


def check(kind: str, operation: str, dtype: torch.dtype, shapes: list[tuple[int, int, int, int]]) -> None:
    actual, baseline, exact = [], [], []
    for number, (tokens, rows, k, group) in enumerate(shapes):
        x, residual = random(tokens, k, seed=1), random(tokens, rows, seed=3)
        norm = Norm(random(k, seed=2).to(dtype), EPS)
        bias = random(rows, seed=4) if number % 2 == 0 else None
        weight = make_weight(kind, rows, k, group)
        normed = operation in {"norm_linear", "silu", "gelu_tanh"}
        codes = scaled_products.quantized(x.to(dtype), norm if normed else None, weight, pdl=False)
        ours = Linear(scaled_products.prepared(weight), None if bias is None else bias.to(dtype))
        actual.append(operate(operation, x.to(dtype), norm, ours, residual.to(dtype)).flatten())
        for results, wide in ((baseline, dtype), (exact, torch.float64)):
            plain = Linear(weight.dequantized(torch.float64).to(wide), None if bias is None else bias.to(wide))
            values = values_of(codes, group).to(wide)
            results.append(expected(operation, values, plain, residual.to(wide)).flatten())
    assert_summed_as_well(kind, torch.cat(actual), torch.cat(baseline), torch.cat(exact))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", ["norm_linear", "linear", "silu", "gelu_tanh", "linear_add"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_what_the_codes_stand_for(kind: str, operation: str, dtype: torch.dtype) -> None:
    check(kind, operation, dtype, SHAPES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", ["linear", "silu"])
@pytest.mark.parametrize("group", [64, 320])
@pytest.mark.parametrize("tokens", [1, 3])
def test_programs_share_the_columns(
    tokens: int, kind: str, operation: str, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five steps of columns are divided among two programs, the second of which has one less."""
    tile = Skinny(rows=32, tokens=16, columns=64, splits=2, stages=2, warps=4)
    monkeypatch.setattr(scaled_products, "tile_for", lambda *_: tile)
    check(kind, operation, torch.float32, [(tokens, 64, 320, group)])


@pytest.mark.parametrize("operation", ["norm_linear", "gelu_tanh", "linear_add"])
def test_one_token_without_tensor_cores(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that no program fills, and columns in two rounds, the second of which has fewer."""
    monkeypatch.setattr(scaled_products, "tile_for", lambda *_: Gemv(rows=4, columns=128, warps=4))
    check("fp8", operation, torch.float32, [(1, 70, 192, 192), (1, 64, 256, 256)])


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # by the interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_is_none_makes_outputs_that_are_none(kind: str) -> None:
    x, weight = random(3, 256, seed=1), make_weight(kind, 48, 256, 256)
    x[1, 200] = float("nan")
    actual = operate("linear", x, Norm(x[0], EPS), Linear(scaled_products.prepared(weight)), x)
    assert actual[1].isnan().all()
    assert actual[[0, 2]].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [128, 256])
def test_a_token_has_the_same_bits_in_every_step(kind: str, group: int) -> None:
    """Its codes do not depend on others; with one program for all columns the tiles have one order of sums, too."""
    x, norm = random(140, 256, seed=1), Norm(random(256, seed=2), EPS)
    weight = make_weight(kind, 48, 256, group)
    linear = Linear(scaled_products.prepared(weight))
    alone = operate("norm_linear", x[5:6], norm, linear, x)
    codes = scaled_products.quantized(x[5:6], norm, weight, pdl=False)
    for tokens in (6, 40, 140):
        many = scaled_products.quantized(x[:tokens], norm, weight, pdl=False)
        assert torch.equal(many.codes[5].float(), codes.codes[0].float())
        assert torch.equal(many.scales[:, 5], codes.scales[:, 0])
        together = operate("norm_linear", x[:tokens], norm, linear, x)[5]
        assert_summed_as_well(kind, together, alone[0], alone[0].double())
        if tokens == 6:  # the same tile
            assert torch.equal(together, alone[0])


@pytest.mark.parametrize(("kind", "k", "group", "served"), [
    ("fp8", 256, 256, True), ("int8", 256, 128, True), ("fp8", 192, 96, False), ("fp8", 192, 16, False),
])  # fmt: skip
def test_groups_that_are_multiplied(kind: str, k: int, group: int, served: bool) -> None:
    weight = make_weight(kind, 16, k, group)
    assert scaled_products.multiplies(weight) == served
    assert not scaled_products.multiplies(PackedWeight(weight.codes, weight.scales, None, group))


def test_a_step_of_some_tokens_is_the_library_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """One threshold, for FP8 on a GPU in bfloat16 alone."""
    weight = scaled_products.prepared(make_weight("fp8", 32, 64, 64))
    at = scaled_products.LIBRARY_TOKENS
    on_gpu = DEVICE.type == "cuda"
    assert not scaled_products.uses_library(at, weight, torch.bfloat16)
    assert scaled_products.uses_library(at + 1, weight, torch.bfloat16) == on_gpu
    assert not scaled_products.uses_library(at + 1, weight, torch.float16)
    whole = scaled_products.prepared(make_weight("int8", 32, 64, 64))
    assert not scaled_products.uses_library(at + 1, whole, torch.bfloat16)


@pytest.mark.parametrize("bias", [True, False])
def test_the_library_s_product_of_rows(bias: bool) -> None:
    """PyTorch's row-wise product takes what the kernel writes, without the rows that only fill up a tile."""
    weight = scaled_products.prepared(make_weight("fp8", 64, 256, 256))
    x, added = random(40, 256, seed=1).bfloat16(), random(64, seed=2).bfloat16() if bias else None
    codes = scaled_products.quantized(x, None, weight, pdl=False)
    actual = library_product(codes, weight, added, torch.bfloat16)
    exact = values_of(codes, 256) @ weight.dequantized(torch.float64).t() + (0.0 if added is None else added.double())
    assert actual.shape == (40, 64)
    assert ((actual.double() - exact).abs() <= exact.abs() * 2**-7 + 0.02).all()


def test_the_library_s_product_of_blocks_has_the_form_that_pytorch_checks() -> None:
    """Shapes and strides alone: there is none on CPUs."""
    codes = torch.empty(256, 640, dtype=torch.float8_e4m3fn, device="meta")
    blocks = torch.empty(2, 8, device="meta").t()
    weight = ScaledWeight(codes, torch.empty(5, 256, device="meta").t(), None, 128, blocks)
    x = QuantizedInput(codes, torch.empty(5, 256, device="meta"), 200)
    assert library_product(x, weight, None, torch.bfloat16).shape == (200, 256)
