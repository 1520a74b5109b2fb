"""Products with packed weights on a GPU: in bfloat16, with the real tiles, overlapped launches and within graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.engine.kernels.layers import Linear, Norm
from tandem.engine.kernels.linear.triton_linear import reserve_scratch
from tandem.engine.kernels.packed import packed_products
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.kernels.triton_launch import overlaps_launches
from tests.kernels.packed_cases import KINDS, make_packed, on_device
from tests.kernels.steps import assert_as_good

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

REFERENCE = ReferenceKernels()
EPS = 1e-5
TOKENS = [1, 15, 16, 17, 32, 33, 64, 65, 128, 300, packed_products.FUSED_TOKENS + 1]
SHAPES = [(528, 4096, 128), (528, 4096, 32), (512, 4096, 4096), (272, 14336, 128), (528, 576, 576)]
"""(rows, k, group): few rows, as in a decode step's narrow products, and columns that programs share."""


def on_gpu(packed: PackedWeight) -> PackedWeight:
    return packed_products.prepared(on_device(packed, torch.device("cuda", 0)))


def random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, device="cuda").bfloat16()


def operate(kernels: ReferenceKernels | None, operation: str, x: Tensor, norm: Norm, linear: Linear) -> Tensor:
    pdl = overlaps_launches()
    if operation == "norm_linear":
        if kernels is None:
            return packed_products.norm_linear(x, norm, linear, pdl=pdl)
        return kernels.norm_linear(x, norm, linear)
    if operation == "norm_gate_up":
        if kernels is None:
            return packed_products.norm_gate_up(x, norm, linear, pdl=pdl)
        return kernels.norm_gate_up(x, norm, linear)
    hidden = torch.ones(len(x), len(linear.weight), device="cuda", dtype=x.dtype)
    if kernels is None:
        packed_products.linear_add(x, linear, hidden, pdl=pdl)
    else:
        kernels.linear_add(x, linear, hidden)
    return hidden


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("operation", ["norm_linear", "norm_gate_up", "linear_add"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_dequantized_weight(kind: str, operation: str, shape: tuple[int, int, int]) -> None:
    rows, k, group = shape
    torch.manual_seed(k)
    packed, norm, bias = on_gpu(make_packed(kind, (rows, k), group)), Norm(random(k), EPS), random(rows)
    weights = {dtype: packed.dequantized(dtype) for dtype in (torch.bfloat16, torch.float64)}
    reserve_scratch(packed.device)
    for tokens in TOKENS:
        x = random(tokens, k)
        actual = operate(None, operation, x, norm, Linear(packed, bias))
        baseline = operate(REFERENCE, operation, x, norm, Linear(weights[torch.bfloat16], bias))
        exact = Linear(weights[torch.float64], bias.double())
        assert_as_good(
            actual, baseline, operate(REFERENCE, operation, x.double(), Norm(norm.weight.double(), EPS), exact)
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_repeats_its_bits(kind: str) -> None:
    packed, norm = on_gpu(make_packed(kind, (512, 4096), 128)), Norm(random(4096), EPS)
    x = random(5, 4096)
    linear = Linear(packed)
    reserve_scratch(packed.device)
    once = operate(None, "norm_linear", x, norm, linear)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = operate(None, "norm_linear", x, norm, linear)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, once)


def test_a_row_does_not_depend_on_others_of_the_same_tile() -> None:
    packed, norm = on_gpu(make_packed("int4", (512, 4096), 128)), Norm(random(4096), EPS)
    x = random(16, 4096)
    together = operate(None, "norm_linear", x, norm, Linear(packed))
    for row in range(16):
        assert torch.equal(operate(None, "norm_linear", x[row : row + 1], norm, Linear(packed))[0], together[row])
