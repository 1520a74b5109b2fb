"""Mixtures of experts in Triton: as exact as PyTorch in the same dtype, for every router, and without neighbours."""

import pytest
import torch

from tandem.engine.config.model import ExpertRouter, MixtureOfExperts
from tandem.engine.kernels.experts import triton_experts
from tandem.engine.kernels.experts.expert_tiles import ExpertTile, ProductTile
from tests.kernels.experts.expert_cases import ExpertCase, make_case, moe, of_ranks, reference_run, run
from tests.kernels.product_cases import DEVICE
from tests.kernels.steps import assert_as_good

# Triton's interpreter multiplies the bit patterns of bfloat16 as integers: float16 is tested for both on the CPU.
SIXTEEN = [torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
ALL = [*SIXTEEN, torch.float32]

SPECS = {
    "qwen": moe(ExpertRouter()),
    "not renormalized": moe(ExpertRouter(renormalize=False, scaling=2.5), experts=6, top_k=3),
    "clamped": moe(
        ExpertRouter("softmax_of_top_k", bias=True), experts=5, top_k=2, activation="clamped_swiglu", bias=True
    ),
    "groups by max": moe(ExpertRouter(groups=4, top_groups=2, renormalize=False), experts=12, top_k=3),
    "groups by two": moe(
        ExpertRouter("sigmoid", groups=3, top_groups=2, group_score="top_2_sum", choice_bias=True, scaling=1.8),
        experts=12,
        top_k=4,
    ),
    "sigmoid": moe(ExpertRouter("sigmoid", choice_bias=True), experts=7, top_k=1),
    "softmax with a choice bias": moe(
        ExpertRouter(groups=3, top_groups=2, group_score="top_2_sum", choice_bias=True), experts=9, top_k=2
    ),
    "without a gate": moe(ExpertRouter("sigmoid", choice_bias=True), experts=6, activation="relu2", bias=True),
    "weights on the inputs": moe(ExpertRouter("sigmoid", renormalize=False, on_input=True), experts=6, top_k=2),
    "own norm, scaled": moe(ExpertRouter(own_norm=True, expert_scales=True), experts=6, activation="gelu_tanh"),
    "latents": moe(ExpertRouter("sigmoid", choice_bias=True), experts=6, activation="relu2", latent=24),
    "all chosen": moe(ExpertRouter(), experts=3, top_k=3),
}


def check(cases: list[ExpertCase], dtype: torch.dtype, tile: ExpertTile | None = None) -> None:
    """Checks all cases together, as the largest of few errors is random."""
    actual = torch.cat([run(case, dtype, tile)[case.valid].flatten() for case in cases])
    baseline = torch.cat([reference_run(case, dtype).flatten() for case in cases])
    exact = torch.cat([reference_run(case, torch.float64).flatten() for case in cases])
    # In float32 little is rounded, and the order of sums decides.
    assert_as_good(actual, baseline, exact, times=4 if dtype is torch.float32 else 2)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_router(spec: MixtureOfExperts, dtype: torch.dtype) -> None:
    check([make_case(spec, tokens, seed=tokens) for tokens in (1, 1, 1, 6)], dtype)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_padding_tokens_choose_no_expert(spec: MixtureOfExperts, dtype: torch.dtype) -> None:
    case = make_case(spec, 8, padding=True)
    counter = torch.zeros(spec.experts, dtype=torch.int64, device=DEVICE)
    check([case], dtype)
    run(case, dtype, counter=counter)
    assert counter.tolist() == case.chosen().flatten().bincount(minlength=spec.experts).tolist()


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_a_step_of_one_padding_token(dtype: torch.dtype) -> None:
    case = make_case(SPECS["clamped"], 2, padding=True).of(slice(1, 2))
    counter = torch.zeros(case.spec.experts, dtype=torch.int64, device=DEVICE)
    run(case, dtype, counter=counter)
    assert not counter.any()


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize(("hidden", "width"), [(72, 33), (24, 130)])
def test_sizes_beside_the_tiles(hidden: int, width: int, dtype: torch.dtype) -> None:
    spec = moe(ExpertRouter("softmax_of_top_k", bias=True), experts=4, width=width, bias=True)
    check([make_case(spec, tokens, hidden, seed=tokens) for tokens in (1, 3, 18)], dtype)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize(("spec", "ranks"), [("qwen", 2), ("groups by max", 3)])
def test_a_rank_computes_the_experts_that_it_has(spec: str, ranks: int, dtype: torch.dtype) -> None:
    """Steps of one token, steps that one program sorts, and larger ones; the terms of all ranks add up to the whole."""
    wholes = [make_case(SPECS[spec], tokens, padding=tokens > 1, seed=tokens) for tokens in (1, 8, 33)]
    cases = [of_ranks(whole, ranks) for whole in wholes]
    for number in range(ranks):
        check([of_rank[number] for of_rank in cases], dtype)
    for whole, of_rank in zip(wholes, cases, strict=True):
        counter = torch.zeros(whole.spec.experts, dtype=torch.int64, device=DEVICE)
        run(of_rank[-1], dtype, counter=counter)
        assert counter.tolist() == whole.chosen().flatten().bincount(minlength=whole.spec.experts).tolist()
        before = whole.hidden[whole.valid]
        terms = torch.stack([reference_run(case, torch.float64) - before for case in of_rank])
        torch.testing.assert_close(terms.sum(0), reference_run(whole, torch.float64) - before)


TILES = [
    ExpertTile(16, ProductTile(16, 16, 2, 4), ProductTile(32, 16, 2, 4)),
    ExpertTile(32, ProductTile(16, 32, 2, 4), ProductTile(16, 64, 2, 4)),
    ExpertTile(64, ProductTile(32, 16, 2, 4), ProductTile(64, 16, 2, 4)),
]


@pytest.mark.parametrize("one_program", [True, False])
@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: str(tile.tokens))
def test_experts_of_several_tiles(
    tile: ExpertTile, dtype: torch.dtype, one_program: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four tokens' experts are the same few, so that some have several tiles and others none."""
    monkeypatch.setattr(triton_experts, "_SORTED_NUMBERS", 4096 if one_program else 0)
    monkeypatch.setattr(triton_experts, "_SORT_CHUNK", 32)
    check([make_case(moe(ExpertRouter(), experts=3, top_k=2, width=16), 70, 24, padding=True)], dtype, tile)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_the_same_bits_alone_and_in_company(dtype: torch.dtype) -> None:
    """float32 has them in any step, the 16-bit types in those that one program of the choice computes alike."""
    case = make_case(SPECS["groups by two"], 14)
    together = run(case, dtype)
    parts = ((0, 1), (1, 3), (4, 14)) if dtype == torch.float32 else ((0, 9), (3, 14))
    for first, last in parts:
        assert torch.equal(run(case.of(slice(first, last)), dtype), together[first:last])


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_the_same_bits_in_every_run(dtype: torch.dtype) -> None:
    case = make_case(SPECS["clamped"], 9, padding=True)
    first = run(case, dtype)[case.valid]
    assert torch.equal(run(case, dtype)[case.valid], first)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_a_valid_token_that_is_not_a_number_spoils_no_other(dtype: torch.dtype) -> None:
    case = make_case(SPECS["groups by two"], 6)
    clean = run(case, dtype)
    case.hidden[2] = float("nan")
    spoiled = run(case, dtype)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(spoiled[others], clean[others])
    assert spoiled[2].isnan().all()
