"""Mixtures of experts on CPUs: as exact as PyTorch, and the same bits whatever else is in the step."""

import pytest
import torch

from tandem.engine.config.model import ExpertRouter, MixtureOfExperts
from tandem.engine.kernels.cpu.kernels import CpuKernels
from tandem.engine.kernels.layers import ExpertsLayer, Norm
from tests.kernels.experts.expert_cases import ExpertCase, experts_as, make_case, moe, of_ranks, reference_run
from tests.kernels.product_cases import EPS
from tests.kernels.steps import assert_as_good

SPECS = {
    "softmax": moe(ExpertRouter(), shared_width=24, shared_gate=True),
    "clamped": moe(
        ExpertRouter("softmax_of_top_k", bias=True), experts=5, activation="clamped_swiglu", bias=True
    ),
    "groups": moe(
        ExpertRouter("sigmoid", groups=4, top_groups=2, group_score="top_2_sum", choice_bias=True, scaling=2.5),
        top_k=3,
        shared_width=10,
    ),
    "own norm, scaled": moe(ExpertRouter(own_norm=True, expert_scales=True), activation="gelu_tanh"),
    "latents": moe(ExpertRouter("sigmoid"), activation="relu2", shared_width=10, latent=24),
}  # fmt: skip
_any_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def run(case: ExpertCase, kernels: CpuKernels, dtype: torch.dtype, counter: torch.Tensor | None = None) -> torch.Tensor:
    hidden = case.hidden.to(dtype, copy=True)
    experts = kernels.prepare_experts(experts_as(case.experts, dtype, counter))
    kernels.experts(hidden, ExpertsLayer(Norm(case.norm.to(dtype), EPS), experts, case.spec), case.slots, hidden)
    return hidden


@_any_spec
def test_as_exact_as_torch(spec: MixtureOfExperts, kernels: CpuKernels, dtype: torch.dtype) -> None:
    cases = [make_case(spec, tokens, padding=tokens > 1, seed=tokens) for tokens in (1, 9, 200)]
    actual = torch.cat([run(case, kernels, dtype)[case.valid].flatten() for case in cases])
    baseline = torch.cat([reference_run(case, dtype).flatten() for case in cases])
    assert_as_good(actual, baseline, torch.cat([reference_run(case, torch.float64).flatten() for case in cases]))


def test_a_rank_computes_the_experts_that_it_has(kernels: CpuKernels, dtype: torch.dtype) -> None:
    whole = make_case(moe(ExpertRouter(), experts=6, top_k=3), 30, padding=True)
    for case in of_ranks(whole, 2):
        actual, baseline = run(case, kernels, dtype)[case.valid], reference_run(case, dtype)
        assert_as_good(actual, baseline, reference_run(case, torch.float64))


@_any_spec
def test_the_same_bits_alone_and_in_company(spec: MixtureOfExperts, kernels: CpuKernels, dtype: torch.dtype) -> None:
    case = make_case(spec, 40)
    together = run(case, kernels, dtype)
    for tokens in (slice(0, 1), slice(17, 18), slice(5, 30)):
        assert torch.equal(run(case.of(tokens), kernels, dtype), together[tokens])


@_any_spec
def test_tokens_are_counted(spec: MixtureOfExperts, kernels: CpuKernels, dtype: torch.dtype) -> None:
    case = make_case(spec, 12, padding=True)
    counter = torch.zeros(spec.experts, dtype=torch.int64)
    for _ in range(2):
        run(case, kernels, dtype, counter)
    assert counter.tolist() == (2 * case.chosen().flatten().bincount(minlength=spec.experts)).tolist()
