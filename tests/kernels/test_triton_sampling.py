"""Sampling on the device against the CPU sampler, token by token, and against the distribution it claims."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.engine import logprobs as host_logprobs
from tandem.engine import sampler
from tandem.engine.cuda.sampler_cuda import CANDIDATES, IN_PROMPT, DeviceSampler
from tandem.engine.kernels.sampling.triton_logprobs import logprobs
from tandem.engine.kernels.triton_launch import overlaps_launches
from tandem.engine.steps.sampling_metadata import NO_TOKEN, History, SamplingInput
from tandem.engine.steps.seeded import uniform
from tandem.protocol.messages import SamplingParams
from tests.factories import draw

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PDL = overlaps_launches()
ON_GPU = DEVICE.type == "cuda"
MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 40, "temperature": 0.7},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"top_p": 0.99, "temperature": 5.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-7, "temperature": 9.0},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    {"top_k": 70, "top_p": 0.95, "temperature": 4.0},
]
MIXED_BIG: list[dict[str, Any]] = [
    *MIXED,
    {"top_k": CANDIDATES + 500, "temperature": 6.0},
    {"top_k": CANDIDATES + 500, "top_p": 0.9, "temperature": 6.0},
    {"top_k": CANDIDATES + 500, "min_p": 0.5, "temperature": 6.0},
]


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def make_draws(mix: list[dict[str, Any]], seed: int = 0) -> list[SamplingInput]:
    return [
        draw(index=place, **({"temperature": 1.0, "seed": seed + place} | params)) for place, params in enumerate(mix)
    ]


def on_device(
    logits: Tensor, draws: list[SamplingInput], counted: list[int] | None = None, counts: Tensor | None = None
) -> Tensor:
    chosen = DeviceSampler(logits.shape[1], len(draws), DEVICE, PDL)
    return run(chosen, logits, draws, counted, counts)


def run(
    chosen: DeviceSampler,
    logits: Tensor,
    draws: list[SamplingInput],
    counted: list[int] | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    plan = chosen.plan(draws, counted)
    out = torch.full((len(draws),), -7, dtype=torch.int64, device=DEVICE)
    params = torch.from_numpy(plan.params).to(DEVICE)
    chosen.sample(logits.to(DEVICE), params, out, greedy_only=plan.greedy_only, counts=counts)
    return out.cpu()


@pytest.mark.parametrize("vocab", [100, 4097, 49152 if ON_GPU else 20_001])
def test_the_tokens_of_the_cpu_sampler(vocab: int) -> None:
    """With continuous logits another token would need a number within 1e-7 of a threshold."""
    mix = MIXED if vocab < CANDIDATES + 500 else MIXED_BIG
    chosen = DeviceSampler(vocab, len(mix) + 1, DEVICE, PDL)
    for seed in range(20 if ON_GPU else 1):
        logits = random_logits(len(mix), vocab, seed)
        draws = make_draws(mix, seed=1000 * seed)
        assert run(chosen, logits, draws).tolist() == sampler.sample(logits, draws).tolist(), seed


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(100, torch.float32), (100, torch.float16), (100, torch.bfloat16), (8000, torch.bfloat16)]
)
def test_ties_go_by_id(vocab: int, dtype: torch.dtype) -> None:
    """Few distinct logits put every threshold among equals."""
    coarse = (random_logits(len(MIXED), vocab, seed=3) / 2).round().to(dtype)
    draws = make_draws(MIXED, seed=77)
    assert on_device(coarse, draws).tolist() == sampler.sample(coarse, draws).tolist()


def test_all_equal_logits_and_the_largest_number() -> None:
    logits = torch.zeros(3, CANDIDATES + 904)
    draws = make_draws([{}, {"top_k": CANDIDATES + 100}, {"top_p": 0.5}])
    chosen = DeviceSampler(logits.shape[1], 3, DEVICE, PDL)
    for number, wanted in ((0.0, (0, 0, 0)), (1 - 2.0**-53, (4999, CANDIDATES + 99, 2499))):
        plan = chosen.plan(draws)
        plan.params[:, 4] = number
        out = torch.empty(3, dtype=torch.int64, device=DEVICE)
        chosen.sample(logits.to(DEVICE), torch.from_numpy(plan.params).to(DEVICE), out, greedy_only=False)
        assert tuple(out.tolist()) == wanted


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("vocab", [100, 20_001])
def test_greedy_takes_the_lowest_of_equal_ids(rows: int, vocab: int) -> None:
    logits = -random_logits(rows, vocab).abs()
    logits[0, [7, 50, vocab - 1]] = torch.tensor([-0.0, 0.0, -0.0])
    logits[-1, 11:] = float("-inf")
    wide = torch.full((rows, vocab + 24), float("inf"))
    wide[:, :vocab] = logits
    tokens = on_device(wide.to(DEVICE)[:, :vocab], [draw()] * rows)
    assert tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize(
    ("vocab", "mix"),
    [(2100, MIXED[::3]), (2100, [{"temperature": 0.0}] * 3), (8200, [{"temperature": 0.0}] * 18)],
    ids=["mixed", "small blocks", "large blocks"],
)
def test_a_row_whose_largest_logit_is_not_finite_has_no_token_and_others_have_theirs(
    value: float, vocab: int, mix: list[dict[str, Any]]
) -> None:
    logits, draws = random_logits(len(mix), vocab), make_draws(mix)
    wanted = on_device(logits, draws)
    assert (wanted >= 0).all()
    broken = logits.clone()
    broken[::2] = value
    tokens = on_device(broken, draws)
    assert (tokens[::2] == NO_TOKEN).all()
    assert torch.equal(tokens[1::2], wanted[1::2])
    broken = logits.clone()
    broken[1::2, vocab - 3] = value
    tokens = on_device(broken, draws)
    assert ((tokens[1::2] == NO_TOKEN) == (value != float("-inf"))).all()
    assert torch.equal(tokens[::2], wanted[::2])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_without_a_token_counts_none() -> None:
    logits = torch.full((2, 100), float("nan"))
    draws = [draw(presence_penalty=1.0), draw(presence_penalty=1.0, temperature=1.0)]
    for some in ([draws[0]] * 2, draws):
        counts = torch.zeros(3, 100, dtype=torch.int32, device=DEVICE)
        assert on_device(logits, some, [1, 2], counts).tolist() == [NO_TOKEN, NO_TOKEN]
        assert not counts.any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_logprobs_of_a_row_without_a_token_read_nothing_else() -> None:
    """The logits of the first row have none in front of them, so that the memory there could be anything."""
    logits = random_logits(2, 100)
    logits[0] = float("nan")
    tokens, rows = torch.tensor([NO_TOKEN, 3], device=DEVICE), torch.tensor([0, 1], device=DEVICE)
    values, ids = logprobs(logits.to(DEVICE), tokens, rows, 2, pdl=PDL)
    host = host_logprobs.logprobs(logits, tokens.cpu(), 2)
    assert torch.isnan(values[0, 0])
    assert torch.isnan(host[0][0, 0])
    torch.testing.assert_close(values[1].cpu(), host[0][1])
    assert torch.equal(ids[1].cpu(), host[1][1])


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_id_is_in_the_vocabulary_where_a_launch_did_not_happen(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that are compiled side by side are launched by the first alone; what the others draw is an address."""
    chosen = DeviceSampler(3000, 2, DEVICE, PDL)
    monkeypatch.setattr(DeviceSampler, "_find_best", lambda *_, **__: 1)
    monkeypatch.setattr(DeviceSampler, "_weigh", lambda *_, **__: None)
    plan = chosen.plan([draw(temperature=temperature)] * 2)
    out = torch.full((2,), -1, dtype=torch.int64, device=DEVICE)
    params = torch.from_numpy(plan.params).to(DEVICE)
    chosen.sample(torch.zeros(2, 3000, device=DEVICE), params, out, greedy_only=plan.greedy_only)
    assert out.tolist() == [0, 0]


@pytest.mark.parametrize("temperature", [1e-45, 1e-6, 1e6])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.tensor([[1e4, -1e4, 9e3, float("-inf")]]).repeat(2, 1)
    draws = make_draws([{"temperature": temperature}, {"temperature": temperature, "top_p": 0.9}], seed=1)
    assert on_device(logits, draws).tolist() == sampler.sample(logits, draws).tolist()


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits, draws = random_logits(len(MIXED), 3000, seed=5), make_draws(MIXED, seed=9)
    together = on_device(logits, draws).tolist()
    order = torch.randperm(len(draws), generator=torch.Generator().manual_seed(1)).tolist()
    assert on_device(logits[order], [draws[place] for place in order]).tolist() == [together[place] for place in order]
    chosen = DeviceSampler(3000, 1, DEVICE, PDL)
    some = range(0, len(draws), 1 if ON_GPU else 4)
    assert [run(chosen, logits[row : row + 1], [draws[row]]).item() for row in some] == [together[row] for row in some]


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    chosen = SamplingParams(max_tokens=1, temperature=0.8, top_k=4, seed=12)
    wanted = (logits / 0.8).masked_fill(logits == -1, float("-inf")).softmax(-1)
    count = 4000 if ON_GPU else 80
    tokens = on_device(logits.expand(count, 5), [SamplingInput(chosen, index) for index in range(count)])
    histogram = torch.bincount(tokens, minlength=5)
    assert histogram[3] == 0
    # Chi-square with 3 degrees of freedom exceeds 21 once in 10,000.
    seen = wanted > 0
    assert ((histogram - wanted * count)[seen] ** 2 / (wanted * count)[seen]).sum() < 21


def test_penalties_change_the_logits_before_everything_else() -> None:
    """Rows of counts are in any order, and rows without penalties have none."""
    vocab, generator = 700, torch.Generator().manual_seed(4)
    logits = random_logits(5, vocab)
    counted = [2, -1, 0, 5, -1]
    answer = torch.randint(0, 3, (6, vocab), generator=generator)
    prompt = torch.rand(6, vocab, generator=generator) < 0.3
    counts = (answer + prompt * IN_PROMPT).int().to(DEVICE)
    penalties: list[dict[str, float]] = [
        {"repetition_penalty": 1.3},
        {},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 1.5},
        {},
    ]
    histories = [
        History(prompt[row].nonzero().flatten().tolist(), torch.arange(vocab).repeat_interleave(answer[row]).tolist())
        if row >= 0
        else None
        for row in counted
    ]
    mixes: list[list[dict[str, Any]]] = [
        [{"temperature": 0.0}] * 5,
        [{}, {"top_p": 0.9}, MIXED[0], {"top_k": 20}, MIXED[0]],
    ]
    for mix in mixes:
        plain = make_draws([params | penalty for params, penalty in zip(mix, penalties, strict=True)], seed=3)
        draws = [replace(plain_draw, history=history) for plain_draw, history in zip(plain, histories, strict=True)]
        before = counts.clone()
        tokens = on_device(logits, draws, counted, counts)
        assert tokens.tolist() == sampler.sample(logits, draws).tolist()
        assert tokens.tolist() != sampler.sample(logits, plain).tolist()
        added = (counts - before).cpu()
        assert added.sum() == 3
        assert all(added[row, token] == 1 for row, token in zip(counted, tokens.tolist(), strict=True) if row >= 0)
        counts.copy_(before)


def test_the_plan_holds_the_numbers_of_the_cpu_sampler() -> None:
    first = draw(index=5, temperature=0.5, seed=42, top_k=3, repetition_penalty=1.5, presence_penalty=-1.0)
    room = np.full((3, 9), 77.0)
    plan = DeviceSampler(100, 2, DEVICE, PDL).plan([first, draw()], [4, -1], room[:2])
    assert plan.params.dtype == np.float64
    assert room[0].tolist() == [0.5, 3, 1, 0, uniform(42, 5), 1.5, -1, 0, 4]
    assert (room[1, 8], room[2, 0]) == (-1, 77)
    assert not plan.greedy_only
    assert DeviceSampler(100, 2, DEVICE, PDL).plan([draw()]).greedy_only


@pytest.mark.parametrize(("vocab", "top"), [(100, 20), (9001, 5), (9001, 0)])
def test_logprobs(vocab: int, top: int) -> None:
    logits = random_logits(4, vocab, seed=8)
    logits[0, 3:] = logits[0, 3:].round()
    logits[1, :50] = float("-inf")
    tokens = torch.tensor([4, 60, 0, vocab - 1])
    rows = torch.tensor([3, 0, 1])
    values, ids = logprobs(logits.to(DEVICE), tokens.to(DEVICE), rows.to(DEVICE), top, pdl=PDL)
    wanted, wanted_ids = host_logprobs.logprobs(logits[rows].double(), tokens[rows], top)
    assert torch.equal(ids.cpu(), wanted_ids)
    torch.testing.assert_close(values.cpu(), wanted, atol=1e-5, rtol=1e-6)
    assert values.shape == (3, 1 + top)
