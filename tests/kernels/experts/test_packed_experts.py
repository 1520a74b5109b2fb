"""Mixtures of experts whose weights are codes: the results of the dequantized weights, and as exact as PyTorch's."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.engine.config.model import ExpertRouter
from tandem.engine.kernels.experts import packed_experts
from tandem.engine.kernels.experts.packed_experts import prepared_experts
from tandem.engine.kernels.layers import ExpertsLayer, Linear, Norm
from tandem.engine.kernels.packed import packed_products
from tandem.engine.kernels.packed_weight import PackedWeight, Weight
from tests.kernels.experts.expert_cases import OURS, ExpertCase, experts_as, make_case, moe, reference_run
from tests.kernels.packed_cases import KINDS, make_packed, on_device
from tests.kernels.product_cases import DEVICE, EPS, guarded, guards_of
from tests.kernels.steps import assert_as_good

# Triton's interpreter multiplies the bit patterns of bfloat16 as integers: float16 is tested for both on the CPU.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
SIZES = [(64, 96, 32), (192, 64, 64), (96, 32, 0)]
"""(hidden, width, group); a group of 0 gives one scale a row."""


def packed_case(kind: str, tokens: int, size: tuple[int, int, int]) -> tuple[ExpertCase, PackedWeight, PackedWeight]:
    """Returns a case whose experts have the values of two packed weights, and those."""
    hidden, width, group = size
    spec = moe(ExpertRouter("softmax_of_top_k", bias=True), experts=5, top_k=2, width=width, bias=True)
    case = make_case(spec, tokens, hidden, padding=tokens > 1, seed=tokens)
    gate_up = make_packed(kind, (5, 2 * width, hidden), group or hidden, seed=hidden)
    down = make_packed(kind, (5, hidden, width), group or width, seed=width)
    values = [weight.dequantized(torch.float64).to(case.hidden.device) for weight in (gate_up, down)]
    experts = replace(case.experts, gate_up=values[0], down=values[1])
    return replace(case, experts=experts), gate_up, down


def run_packed(case: ExpertCase, gate_up: Weight, down: Weight, dtype: torch.dtype) -> Tensor:
    hidden = guarded(case.hidden, dtype)
    experts = experts_as(case.experts, dtype, guard=True)
    weights = [weight if isinstance(weight, Tensor) else on_device(weight, DEVICE) for weight in (gate_up, down)]
    experts = prepared_experts(replace(experts, gate_up=weights[0], down=weights[1]), dtype)
    assert isinstance(experts.gate_up, PackedWeight) or isinstance(experts.down, PackedWeight)
    layer = ExpertsLayer(Norm(guarded(case.norm, dtype), EPS), experts, case.spec)
    OURS.add(hidden, layer, case.slots.to(DEVICE), hidden)
    assert guards_of(hidden).isnan().all()
    return hidden.to(case.hidden.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_those_of_the_dequantized_weights(kind: str, dtype: torch.dtype) -> None:
    actual, baseline, exact = [], [], []
    for tokens, size in zip((1, 7, 40), SIZES, strict=True):
        case, gate_up, down = packed_case(kind, tokens, size)
        actual.append(run_packed(case, gate_up, down, dtype)[case.valid].flatten())
        baseline.append(reference_run(case, dtype).flatten())
        exact.append(reference_run(case, torch.float64).flatten())
    assert_as_good(torch.cat(actual), torch.cat(baseline), torch.cat(exact))


@pytest.mark.parametrize("kind", ["int8", "int4_offsets"])
def test_a_token_alone_has_the_bits_that_it_has_in_company(kind: str) -> None:
    case, gate_up, down = packed_case(kind, 24, (64, 96, 32))
    together = run_packed(case, gate_up, down, torch.float32)
    for token in (0, 5, 23):
        alone = run_packed(case.of(slice(token, token + 1)), gate_up, down, torch.float32)
        assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize("most_items", [1 << 20, 2 * 192 * 64], ids=["all experts", "two at a time"])
@pytest.mark.parametrize("kind", KINDS)
def test_long_steps_dequantize_first(kind: str, most_items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, gate_up, down = packed_case(kind, 40, (64, 96, 32))
    exact, baseline = reference_run(case, torch.float64), reference_run(case, torch.float16)
    launches: list[Tensor] = []
    monkeypatch.setattr(packed_experts, "launch", lambda *_, **__: launches.append(case.hidden))
    monkeypatch.setattr(packed_products, "FUSED_TOKENS", 15)
    monkeypatch.setattr(packed_products, "SCRATCH_ITEMS", most_items)
    assert_as_good(run_packed(case, gate_up, down, torch.float16)[case.valid], baseline, exact)
    assert not launches


@pytest.mark.parametrize("tokens", [1, 7])
def test_one_of_the_weights_is_not_packed(tokens: int) -> None:
    case, gate_up, down = packed_case("int8", tokens, (64, 96, 32))
    exact, baseline = reference_run(case, torch.float64), reference_run(case, torch.float32)
    plain = [weight.dequantized(torch.float32).to(DEVICE) for weight in (gate_up, down)]
    for weights in ((plain[0], down), (gate_up, plain[1])):
        assert_as_good(run_packed(case, *weights, torch.float32)[case.valid], baseline, exact, times=4)


def test_groups_that_are_too_narrow_are_dequantized() -> None:
    case, _, down = packed_case("int8", 1, (64, 96, 32))
    narrow = make_packed("int8", (5, 192, 64), 8)
    shared = Linear(make_packed("int8", (32, 64), 64))
    prepared = prepared_experts(
        replace(case.experts, gate_up=narrow, down=down, shared_gate_up=shared, shared_down=shared), torch.float32
    )
    assert isinstance(prepared.gate_up, Tensor)
    assert torch.equal(prepared.gate_up, narrow.dequantized(torch.float32))
    assert isinstance(prepared.down, PackedWeight)
    assert prepared.shared_down is not None
    assert isinstance(prepared.shared_down.weight, PackedWeight)
