"""Experts whose weights are codes on a GPU: in bfloat16, with every tile, and within graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.engine.config.model import ExpertRouter
from tandem.engine.kernels.experts.packed_experts import prepared_experts
from tandem.engine.kernels.layers import Experts, ExpertsLayer, Norm
from tests.kernels.experts.expert_cases import EPS, OURS, ExpertCase, experts_as, make_case, moe, reference_run
from tests.kernels.packed_cases import KINDS, make_packed, on_device
from tests.kernels.steps import assert_as_good

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16
SPEC = moe(ExpertRouter(), experts=32, top_k=8, width=192)
HIDDEN = 512
TOKENS = [1, 2, 16, 33, 100, 200, 600, 1500]


def packed_case(kind: str, tokens: int, group: int) -> tuple[ExpertCase, Experts]:
    """Returns a case with the values of packed weights, and the experts in bfloat16 with those weights."""
    case = make_case(SPEC, tokens, HIDDEN, padding=tokens > 1, seed=tokens, device=GPU)
    weights = []
    for rows, k in ((2 * SPEC.width, HIDDEN), (HIDDEN, SPEC.width)):
        weights.append(on_device(make_packed(kind, (SPEC.experts, rows, k), group or k, seed=k), GPU))
    values = [weight.dequantized(torch.float64) for weight in weights]
    case = replace(case, experts=replace(case.experts, gate_up=values[0], down=values[1]))
    experts = replace(experts_as(case.experts, BF16), gate_up=weights[0], down=weights[1])
    return case, prepared_experts(experts, BF16)


def run(case: ExpertCase, experts: Experts) -> Tensor:
    hidden = case.hidden.to(BF16)
    OURS.add(hidden, ExpertsLayer(Norm(case.norm.to(BF16), EPS), experts, case.spec), case.slots, hidden)
    return hidden[case.valid]


@pytest.mark.parametrize("group", [64, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_all_sizes(kind: str, group: int) -> None:
    for tokens in TOKENS:
        case, experts = packed_case(kind, tokens, group)
        assert_as_good(run(case, experts), reference_run(case, BF16), reference_run(case, torch.float64))


@pytest.mark.parametrize("kind", ["fp8", "int4", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 128])
def test_a_graph_repeats_its_bits(tokens: int, kind: str) -> None:
    case, experts = packed_case(kind, tokens, 64)
    once = run(case, experts)
    hidden = case.hidden.to(BF16)
    layer = ExpertsLayer(Norm(case.norm.to(BF16), EPS), experts, case.spec)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        OURS.add(hidden, layer, case.slots, hidden)
    for _ in range(10):
        hidden.copy_(case.hidden)
        graph.replay()
        assert torch.equal(hidden[case.valid], once)
