"""Mixtures of experts whose weights and inputs are 8-bit codes: the products of codes, and the whole layer."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.engine.kernels.experts import packed_experts, scaled_experts
from tandem.engine.kernels.experts.expert_tiles import ExpertTile, ProductTile
from tandem.engine.kernels.experts.triton_products import ACTIVATIONS
from tandem.engine.kernels.layers import ExpertsLayer, Norm
from tandem.engine.kernels.packed import scaled_products
from tandem.engine.kernels.packed.scaled_weight import ScaledWeight
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.reference import ReferenceKernels, activate
from tests.kernels.experts.expert_cases import ExpertCase, experts_as
from tests.kernels.experts.test_packed_experts import DTYPES, packed_case, run_packed
from tests.kernels.packed_cases import make_packed, on_device
from tests.kernels.product_cases import DEVICE, EPS
from tests.kernels.steps import assert_as_good

KINDS = ["int8", "fp8"]
TILE = ExpertTile(16, gate_up=ProductTile(32, 64, 3, 4), down=ProductTile(32, 64, 3, 4))
SIZES = [(128, 64, 32), (192, 96, 0), (192, 128, 64)]
"""(hidden, width, group): several groups, also as wide as a step of columns, and one scale a row with a part of one."""


def with_inputs(weight: PackedWeight) -> PackedWeight:
    return replace(on_device(weight, DEVICE), quantized_inputs=True)


def values_of(x: Tensor, weight: ScaledWeight) -> Tensor:
    """The values [T, K] in float64 for which a product's input codes stand."""
    taken = scaled_products.quantized(x, None, weight, pdl=False)
    scales = taken.scales[:, : len(x)].t().double().repeat_interleave(weight.group, dim=1)
    return taken.codes[: len(x)].double() * scales


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "relu2", None])
def test_products_of_codes(activation: str | None, size: tuple[int, int, int], kind: str, dtype: torch.dtype) -> None:
    """Two experts have 20 and 3 of 24 pairs in tiles of 16; one pair has no expert, and its output stays."""
    hidden, width, group = size
    generator = torch.Generator().manual_seed(hidden)
    k, outputs = (hidden, width) if activation else (width, hidden)
    rows = 2 * outputs if activation == "silu" else outputs
    weight = scaled_experts.prepared(with_inputs(make_packed(kind, (3, rows, k), group or k, seed=k)))
    pairs, top_k = 24, 2 if activation else 1
    order = torch.randperm(pairs, generator=generator)
    chosen = {0: order[:20], 2: order[20:23]}
    x = torch.randn(pairs // top_k, k, generator=generator).to(DEVICE, dtype)
    factors = torch.rand(pairs, generator=generator).to(DEVICE)
    tiles = torch.tensor([16, 4, 2 * 256 + 3, 7, 3], dtype=torch.int32, device=DEVICE)
    places = torch.zeros(4, 16, dtype=torch.int32)
    places[0], places[1, :4], places[2, :3] = order[:16], order[16:20], order[20:23]
    out = torch.full((pairs, outputs), 7.0, dtype=dtype, device=DEVICE)
    packed_experts.launch(
        x, weight, None, factors, tiles, places.flatten().to(DEVICE), out, TILE,
        top_k=top_k, activation=ACTIVATIONS[activation] if activation else None, pdl=False,
    )  # fmt: skip
    values, exact = values_of(x, weight).repeat_interleave(top_k, dim=0), torch.full_like(out, 7.0).double()
    for expert, own in chosen.items():
        product = values[own] @ weight[expert].dequantized(torch.float64).t()
        exact[own] = activate(product, activation) if activation else product * factors[own, None].double()
    assert (out[order[23]] == 7).all()
    assert_as_good(out, exact.to(dtype), exact, times=12 if dtype is torch.float32 else 2)


def whole(kind: str, tokens: int, size: tuple[int, int, int]) -> tuple[ExpertCase, PackedWeight, PackedWeight]:
    case, gate_up, down = packed_case(kind, tokens, size)
    return case, with_inputs(gate_up), with_inputs(down)


def error_of_a_layer(kind: str, tokens: int, size: tuple[int, int, int], dtype: torch.dtype) -> float:
    """Returns the norm of the difference to the reference's float32 / the norm of what the reference adds."""
    case, gate_up, down = whole(kind, tokens, size)
    actual = run_packed(case, gate_up, down, dtype)[case.valid].float()
    hidden = case.hidden[case.valid].float()
    experts = replace(experts_as(case.experts, torch.float32), gate_up=cpu_copy(gate_up), down=cpu_copy(down))
    layer = ExpertsLayer(Norm(case.norm.float(), EPS), experts, case.spec)
    added = torch.zeros_like(hidden)
    ReferenceKernels().experts(hidden, layer, case.slots[case.valid], added)
    return float((actual - hidden - added).norm() / added.norm())


def cpu_copy(weight: PackedWeight) -> PackedWeight:
    return on_device(weight, torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_layer_is_that_of_the_reference(tokens: int, kind: str) -> None:
    # A code at a tie may be rounded the other way, which changes one of many summands by a sixteenth.
    assert error_of_a_layer(kind, tokens, (64, 96, 32), torch.float32) < 2e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_alone_has_the_bits_that_it_has_in_company(kind: str) -> None:
    case, gate_up, down = whole(kind, 24, (64, 96, 32))
    together = run_packed(case, gate_up, down, torch.float32)
    for token in (0, 5, 23):
        alone = run_packed(case.of(slice(token, token + 1)), gate_up, down, torch.float32)
        assert torch.equal(alone[0], together[token])
