"""Products with 4-bit weights and 8-bit inputs on a GPU: Triton's, and the library's with widened codes."""

import pytest
import torch
from torch import Tensor

from tandem.engine.kernels.linear.triton_linear import GATE_UP, STORE, reserve_scratch
from tandem.engine.kernels.packed import packed_products, w4a8_products
from tandem.engine.kernels.packed.scaled_weight import QuantizedInput
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.triton_launch import overlaps_launches
from tests.kernels.packed_cases import make_packed, on_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

TOKENS = [1, 16, 33, 64, 100, 128, 129, 300, 1000]
SHAPES = [(512, 4096, 128), (272, 14336, 128), (1024, 1024, 128)]
"""(rows, k, group)."""
CUDA = torch.device("cuda")


def random_input(tokens: int, weight: PackedWeight, *, grouped: bool = False) -> QuantizedInput:
    x = torch.randn(tokens, weight.shape[1], device=CUDA).bfloat16()
    return w4a8_products.quantized(x, None, weight, pdl=overlaps_launches(), grouped=grouped)


def values_of(x: QuantizedInput) -> Tensor:
    codes, scales = x.codes[: x.tokens].double(), x.scales[:, : x.tokens].t().double()
    return codes * scales.repeat_interleave(codes.shape[1] // scales.shape[1], dim=1)


def check(actual: Tensor, exact: Tensor, columns: int) -> None:
    """An output's rounding, and the matrix units' sums, which have 13 bits beside the largest term."""
    spread = exact.square().mean(1, keepdim=True).sqrt()
    share = 2**-5 * max(1, columns / 4096)
    assert ((actual.double() - exact).abs() <= exact.abs() * 2**-8 + spread * share).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["int4", "int4_offsets"])
@pytest.mark.parametrize("grouped", [True, False])
def test_products_of_any_number_of_tokens(grouped: bool, kind: str, shape: tuple[int, int, int]) -> None:
    reserve_scratch(CUDA)
    rows, k, group = shape
    weight, pdl = on_device(make_packed(kind, (rows, k), group), CUDA), overlaps_launches()
    prepared, exact_weight = packed_products.prepared(weight), weight.dequantized(torch.float64)
    for tokens in TOKENS:
        x = w4a8_products.quantized(
            torch.randn(tokens, k, device=CUDA).bfloat16(), None, weight, pdl=pdl, grouped=grouped
        )
        exact = values_of(x) @ exact_weight.t()
        out = exact.new_empty(tokens, rows, dtype=torch.bfloat16)
        w4a8_products.launch(x, prepared, None, out, STORE.value, pdl=pdl)
        check(out, exact, k)
        again = torch.empty_like(out)
        w4a8_products.launch(x, prepared, None, again, STORE.value, pdl=pdl)
        assert torch.equal(out, again)


@pytest.mark.parametrize("grouped", [True, False])
def test_gate_and_up(grouped: bool) -> None:
    reserve_scratch(CUDA)
    weight, pdl = on_device(make_packed("int4", (1024, 4096), 128), CUDA), overlaps_launches()
    for tokens in (1, 64, 128, 300):
        x = w4a8_products.quantized(
            torch.randn(tokens, 4096, device=CUDA).bfloat16(), None, weight, pdl=pdl, grouped=grouped
        )
        gate, up = (values_of(x) @ weight.dequantized(torch.float64).t()).chunk(2, dim=1)
        out = gate.new_empty(tokens, 512, dtype=torch.bfloat16)
        w4a8_products.launch(x, packed_products.prepared(weight), None, out, GATE_UP.value, pdl=pdl)
        check(out, torch.nn.functional.silu(gate) * up, 8192)


def test_the_library_multiplies_widened_codes() -> None:
    weight = on_device(make_packed("int4", (512, 4096), 128), CUDA)
    prepared = packed_products.prepared(weight)
    assert w4a8_products.library_multiplies(prepared)
    for tokens in TOKENS:
        codes = random_input(tokens, weight)
        made = w4a8_products.library_product(codes, prepared, None, torch.bfloat16)
        check(made, values_of(codes) @ weight.dequantized(torch.float64).t(), 4096)


def test_the_library_multiplies_mxfp4() -> None:
    weight = on_device(make_packed("mxfp4", (512, 4096), 32), CUDA)
    prepared = packed_products.prepared(weight)
    for tokens in TOKENS:
        codes = random_input(tokens, weight)
        made = w4a8_products.library_product(codes, prepared, None, torch.bfloat16)
        check(made, values_of(codes) @ weight.dequantized(torch.float64).t(), 4096)
