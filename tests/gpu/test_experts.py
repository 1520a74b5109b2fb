"""Mixtures of experts on a real GPU: every tile of the tables, and CUDA graphs replayed with other tokens."""

from dataclasses import replace

import pytest
import torch

from tandem.engine.config.model import ExpertRouter, MixtureOfExperts
from tandem.engine.kernels.experts.expert_tiles import TILES, TUNED, ExpertShape, ExpertTile, tile_for
from tandem.engine.kernels.layers import ExpertsLayer, Norm
from tests.kernels.experts.expert_cases import EPS, OURS, ExpertCase, experts_as, make_case, moe, reference_run, run
from tests.kernels.experts.test_scaled_experts import KINDS, error_of_a_layer
from tests.kernels.steps import assert_as_good

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16
SPECS = {
    "qwen": moe(ExpertRouter(), experts=32, top_k=8, width=192),
    "gpt": moe(
        ExpertRouter("softmax_of_top_k", bias=True),
        experts=16,
        top_k=4,
        width=160,
        activation="clamped_swiglu",
        bias=True,
    ),
    "deepseek": moe(
        ExpertRouter("sigmoid", groups=8, top_groups=4, group_score="top_2_sum", choice_bias=True, scaling=2.5),
        experts=64,
        top_k=6,
        width=128,
    ),
}
HIDDEN = 512


def check(cases: list[ExpertCase], dtype: torch.dtype, tile: ExpertTile | None = None) -> None:
    actual = torch.cat([run(case, dtype, tile)[case.valid].flatten() for case in cases])
    baseline = torch.cat([reference_run(case, dtype).flatten() for case in cases])
    exact = torch.cat([reference_run(case, torch.float64).flatten() for case in cases])
    # In float32 little is rounded, and the kernels sum in another order than PyTorch.
    assert_as_good(actual, baseline, exact, times=12 if dtype is torch.float32 else 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_steps_of_all_sizes(spec: MixtureOfExperts, dtype: torch.dtype) -> None:
    for tokens in (1, 2, 16, 33, 100, 600, 1500):
        check([make_case(spec, tokens, HIDDEN, padding=tokens > 1, seed=tokens, device=GPU)], dtype)


def every_tile() -> list[ExpertTile]:
    tables = (TILES, *TUNED.values())
    return list(dict.fromkeys(tile for table in tables for tile in table.values() if tile.tokens > 1))


@pytest.mark.parametrize("tile", every_tile(), ids=str)
def test_every_tile_of_the_tables(tile: ExpertTile) -> None:
    check([make_case(SPECS["gpt"], tokens, 320, padding=True, device=GPU) for tokens in (5, 700)], BF16, tile)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("tokens", [1, 8, 128, 1024])
def test_a_graph_computes_whatever_tokens_it_is_given(tokens: int, spec: MixtureOfExperts) -> None:
    """Other tokens choose other experts, and another number of tiles."""
    cases = [make_case(spec, tokens, HIDDEN, padding=seed > 0, seed=seed, device=GPU) for seed in range(3)]
    weights, norm = cases[0].experts, cases[0].norm
    cases = [replace(case, experts=weights, norm=norm) for case in cases]
    # Weights of one case make no margins for the tokens of the others, so graphs are compared with plain launches.
    counter = torch.zeros(spec.experts, dtype=torch.int64, device=GPU)
    experts = experts_as(weights, BF16, counter)
    hidden = cases[0].hidden.to(BF16).clone()
    slots = torch.full((tokens,), -1, dtype=torch.int64, device=GPU)

    layer = ExpertsLayer(Norm(norm.to(BF16), EPS), experts, spec)

    def step() -> None:
        OURS.add(hidden, layer, slots, hidden)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for case in cases:
        slots.copy_(case.slots)
        hidden.copy_(case.hidden)
        counter.zero_()
        graph.replay()
        assert torch.equal(hidden[case.valid], run(case, BF16)[case.valid])
        assert int(counter.sum()) == int(case.valid.sum()) * spec.top_k


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_float32_has_the_same_bits_alone_and_in_company(spec: MixtureOfExperts) -> None:
    case = make_case(spec, 300, HIDDEN, device=GPU)
    together = run(case, torch.float32)
    for tokens in (slice(0, 1), slice(17, 19), slice(40, 140)):
        assert torch.equal(run(case.of(tokens), torch.float32), together[tokens])


def test_bfloat16_has_the_same_bits_among_steps_of_one_tile() -> None:
    spec = SPECS["qwen"]
    case = make_case(spec, 32, HIDDEN, device=GPU)
    shape = ExpertShape(spec.experts, spec.top_k, HIDDEN, spec.width)
    assert tile_for(20, shape, 2) == tile_for(32, shape, 2)
    together = run(case, BF16)
    for _ in range(3):
        assert torch.equal(run(case, BF16), together)
    assert torch.equal(run(case.of(slice(3, 23)), BF16), together[3:23])


@pytest.mark.parametrize("group", [128, 0], ids=["groups", "one scale a row"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 40, 60, 100, 700])
def test_experts_with_quantized_inputs(tokens: int, kind: str, group: int) -> None:
    """Steps of every tile; in bfloat16 the norm's rounding changes some codes, those of FP8 by up to an eighth."""
    assert error_of_a_layer(kind, tokens, (512, 256, group), BF16) < (0.04 if kind == "fp8" else 0.03)
