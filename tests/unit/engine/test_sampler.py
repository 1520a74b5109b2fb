"""The sampler against transformers' filters, plain penalties, and the distribution it claims to draw from."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tandem.engine.logprobs import logprobs, score
from tandem.engine.sampler import sample
from tandem.engine.sampling_filters import draw_filtered, invert, keep_best, penalize
from tandem.engine.steps.batch import StepBatch, rows_of
from tandem.engine.steps.sampling_metadata import NO_TOKEN, History, SamplingInput
from tandem.engine.steps.seeded import start_of, uniform, uniforms
from tandem.protocol.messages import SamplingParams, TokenLogprobs
from tests.factories import draw, row

VOCAB = 3000


def params(**changes: float) -> SamplingParams:
    return draw(**({"temperature": 1.0} | changes)).sampling


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def transformers_probabilities(logits: torch.Tensor, chosen: SamplingParams) -> torch.Tensor:
    """Returns the probabilities in the order of transformers' own generate."""
    warpers = [TemperatureLogitsWarper(chosen.temperature)]
    warpers += [TopKLogitsWarper(chosen.top_k)] if chosen.top_k else []
    warpers += [TopPLogitsWarper(chosen.top_p)] if chosen.top_p < 1 else []
    warpers += [MinPLogitsWarper(chosen.min_p)] if chosen.min_p else []
    for warper in warpers:
        logits = warper(torch.zeros(1, 1, dtype=torch.long), logits)
    return logits.softmax(-1)


MIXED = [
    params(),
    params(top_k=1),
    params(top_k=40, temperature=0.7),
    params(top_k=2500),
    params(top_k=2 * VOCAB),
    params(top_p=0.9),
    params(top_p=1e-6),
    params(top_p=0.99999, temperature=5.0),
    params(min_p=0.05),
    params(min_p=1.0),
    params(min_p=1e-7, temperature=9.0),
    params(top_k=50, top_p=0.8, min_p=0.02, temperature=1.3),
    params(top_k=2000, top_p=0.95, temperature=4.0),
]


def kept(probabilities: torch.Tensor, chosen: list[SamplingParams]) -> torch.Tensor:
    """Returns the probabilities that the filters keep, by token id."""
    weights, ids, settled = keep_best(probabilities, chosen, probabilities.shape[-1])
    assert settled.all()
    dense = torch.zeros_like(probabilities).scatter(-1, ids, weights)
    return dense / dense.sum(-1, keepdim=True)


def test_filters_are_those_of_transformers() -> None:
    logits = random_logits(len(MIXED))
    softened = torch.stack(
        [(row / sampling.temperature).softmax(-1) for row, sampling in zip(logits, MIXED, strict=True)]
    )
    together = kept(softened, MIXED)
    for index, chosen in enumerate(MIXED):
        wanted = transformers_probabilities(logits[index : index + 1], chosen)
        for actual in (together[index : index + 1], kept(softened[index : index + 1], [chosen])):
            assert torch.equal(actual > 0, wanted > 0), chosen
            torch.testing.assert_close(actual, wanted, atol=1e-6, rtol=1e-4)


def test_any_number_of_candidates_draws_the_same() -> None:
    """Ties are included: logits of few distinct values, whose groups cross every boundary of candidates."""
    coarse = (random_logits(len(MIXED), seed=3) * 2).round()
    for logits in (coarse, random_logits(len(MIXED), seed=4)):
        softened = torch.stack(
            [(row / sampling.temperature).softmax(-1) for row, sampling in zip(logits, MIXED, strict=True)]
        )
        for number in (0.0, 0.3, 0.77, 0.999999):
            numbers = torch.full((len(MIXED), 1), number, dtype=torch.float64)
            whole = draw_filtered(softened, MIXED, numbers, candidates=())
            for candidates in ((1,), (5, 200), (128, 1024), (2999,)):
                assert torch.equal(draw_filtered(softened, MIXED, numbers, candidates), whole)


@pytest.mark.parametrize(
    ("chosen", "count"),
    [(params(top_k=3), 3), (params(top_p=0.5), 3), (params(min_p=0.5), 6), (params(top_k=4, top_p=0.6), 3)],
)
def test_ties_go_to_the_lowest_ids(chosen: SamplingParams, count: int) -> None:
    assert kept(torch.full((1, 6), 1 / 6), [chosen])[0].nonzero().flatten().tolist() == list(range(count))


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]])
    assert sample(logits, [draw(), draw()]).tolist() == [1, 0]


def test_inverse_cdf_picks_the_right_token_at_the_edges() -> None:
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    almost_one = 1 - 2.0**-53
    for number, token in ((0.0, 1), (0.2499, 1), (0.25, 3), (0.9, 3), (almost_one, 3)):
        assert invert(weights, torch.tensor([[number]], dtype=torch.float64)).item() == token
    third = torch.full((1, 7), 1 / 7)
    assert invert(third, torch.tensor([[almost_one]], dtype=torch.float64)).item() == 6


def test_uniform_is_uniform() -> None:
    assert len({uniform(seed, index) for seed in range(50) for index in range(50)}) == 2500
    numbers = torch.tensor([uniform(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(4000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    histogram = torch.histc(numbers, bins=20, min=0, max=1)
    # 600 expected in each bin; Chi-square with 19 degrees of freedom exceeds 60 once in 300,000.
    assert ((histogram - 600) ** 2 / 600).sum() < 60
    lagged = torch.corrcoef(torch.stack((numbers[:-1], numbers[1:])))[0, 1]
    assert abs(lagged) < 0.05


def test_many_numbers_at_once_are_the_same_numbers() -> None:
    seeds, indices = [0, 1, 42, 2**64 - 1, 2**63 + 7], [0, 1, 3, 1000, 2**31]
    numbers = uniforms(np.array([start_of(seed) for seed in seeds], dtype=np.uint64), np.array(indices))
    assert numbers.tolist() == [uniform(seed, index) for seed, index in zip(seeds, indices, strict=True)]


def test_the_sequence_of_a_seed_never_changes() -> None:
    """Workers of two versions serve one request in a rolling update: these numbers are a contract."""
    assert [uniform(42, index) for index in range(3)] == [0.5961188718302076, 0.1603653875985772, 0.16639780398145976]


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    chosen = params(temperature=0.8, top_k=4)
    wanted = transformers_probabilities(logits[None], chosen)[0]
    draws = [SamplingInput(chosen, index) for index in range(8000)]
    frequencies = torch.bincount(sample(logits.expand(8000, 5), draws), minlength=5) / 8000
    assert frequencies[3] == 0
    torch.testing.assert_close(frequencies, wanted, atol=0.02, rtol=0)


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits = random_logits(len(MIXED), seed=5)
    draws = [
        SamplingInput(SamplingParams(**_fields(sampling, seed=index)), 3 + index)
        for index, sampling in enumerate(MIXED)
    ]
    draws[3] = draw(temperature=0.0)
    alone = [sample(logits[i : i + 1], draws[i : i + 1]).item() for i in range(len(draws))]
    assert sample(logits, draws).tolist() == alone
    order = torch.randperm(len(draws), generator=torch.Generator().manual_seed(1)).tolist()
    assert sample(logits[order], [draws[i] for i in order]).tolist() == [alone[i] for i in order]


def test_seeds_and_indices_give_different_draws() -> None:
    logits = torch.zeros(64, 1000)
    by_index = sample(logits, [draw(index=i, temperature=1.0, seed=9) for i in range(64)])
    by_seed = sample(logits, [draw(temperature=1.0, seed=i) for i in range(64)])
    assert len(set(by_index.tolist())) > 50
    assert len(set(by_seed.tolist())) > 50


@pytest.mark.parametrize("temperature", [1e-45, 1e-6, 1e6])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = torch.tensor([[1e4, -1e4, 9e3]])
    token = sample(logits, [draw(temperature=temperature, seed=1)]).item()
    assert token in ({0} if temperature < 1 else {0, 1, 2})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits(dtype: torch.dtype) -> None:
    logits = random_logits(4).to(dtype)
    draws = [draw(), draw(temperature=1.0, top_p=0.9), draw(temperature=1.0, top_k=5), draw(temperature=0.5)]
    assert sample(logits, draws).tolist() == sample(logits.float(), draws).tolist()


PENALTIES: list[dict[str, float]] = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5},
    {"frequency_penalty": 0.7, "presence_penalty": -1.1},
    {"repetition_penalty": 1.7, "frequency_penalty": -2.0, "presence_penalty": 0.4},
]


def penalized(**changes: float) -> SamplingInput:
    """Returns a greedy draw after a prompt and an answer that share tokens and repeat them."""
    made = draw(**changes)
    history = History((7, 5, 5, 3), [3, 9, 9, 9, 11]) if made.sampling.penalized else None
    return SamplingInput(made.sampling, 5, history)


def plainly(logits: list[float], chosen: SamplingInput) -> list[float]:
    """Returns the penalized logits, one token at a time, as OpenAI and vLLM describe them."""
    if chosen.history is None:
        return logits
    penalized, sampling = list(logits), chosen.sampling
    prompt, answer = list(chosen.history.prompt), list(chosen.history.answer)
    for token in range(len(penalized)):
        if token in prompt or token in answer:
            change = 1 / sampling.repetition_penalty if penalized[token] > 0 else sampling.repetition_penalty
            penalized[token] *= change
        penalized[token] -= sampling.frequency_penalty * answer.count(token)
        penalized[token] -= sampling.presence_penalty * (token in answer)
    return penalized


def test_penalties_against_a_plain_reference() -> None:
    logits = random_logits(len(PENALTIES), vocab=16, seed=2)
    before = logits.clone()
    draws = [penalized(**changes) for changes in PENALTIES]
    actual = penalize(logits, draws)
    wanted = torch.tensor([plainly(here.tolist(), chosen) for here, chosen in zip(logits, draws, strict=True)])
    torch.testing.assert_close(actual, wanted)
    assert torch.equal(logits, before), "the model's own logits stay, log probabilities are theirs"
    assert (actual[1:] != logits[1:]).any(dim=-1).all()
    assert sample(logits, draws).tolist() == wanted.argmax(-1).tolist()
    assert penalize(logits, [draw()] * len(logits)) is logits


def test_penalties_come_before_filters_and_temperature() -> None:
    logits = random_logits(8, seed=6)
    changes = {"repetition_penalty": 1.4, "presence_penalty": 1.0, "temperature": 0.8, "top_k": 30, "top_p": 0.9}
    answer = logits.topk(5).indices.tolist()
    draws = [SamplingInput(params(**changes, seed=n), n, History((), answer[n])) for n in range(8)]
    plain = [SamplingInput(params(**changes, seed=n), n) for n in range(8)]
    assert sample(logits, draws).tolist() == sample(penalize(logits, draws), plain).tolist()
    assert sample(logits, draws).tolist() != sample(logits, plain).tolist()
    half = logits.bfloat16()
    assert sample(half, draws).tolist() == sample(half.float(), draws).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_whose_largest_logit_is_not_finite_has_no_token_and_others_have_theirs(
    value: float, dtype: torch.dtype
) -> None:
    logits = random_logits(len(MIXED) + 1, seed=3).to(dtype)
    draws = [draw(temperature=0.0), *(SamplingInput(sampling, 0) for sampling in MIXED)]
    wanted = sample(logits, draws)
    for failed in range(len(draws)):
        broken = logits.clone()
        broken[failed, :] = value
        drawn = sample(broken, draws)
        assert drawn[failed] == NO_TOKEN
        others = torch.arange(len(draws)) != failed
        assert torch.equal(drawn[others], wanted[others])
        broken[failed] = logits[failed]
        broken[failed, VOCAB - 1] = value
        assert (sample(broken, draws)[failed] == NO_TOKEN) == (value != float("-inf"))
    assert sample(torch.full((2, VOCAB), value), [draw(), draw()]).tolist() == [NO_TOKEN, NO_TOKEN]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_the_log_softmax_of_the_logits_as_they_came(dtype: torch.dtype) -> None:
    logits = (random_logits(3, seed=8) * 4).round().to(dtype)  # few distinct values: ties go by id
    logits[0, 5] = -0.0
    logits[1, :50] = float("-inf")
    tokens = torch.tensor([4, 60, VOCAB - 1])
    exact = logits.double().log_softmax(-1)
    values, ids = logprobs(logits, tokens, 20)
    ranked = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :20]
    assert torch.equal(ids, ranked)
    places = torch.cat((tokens[:, None], ranked), dim=-1)
    torch.testing.assert_close(values.double(), exact.gather(-1, places), atol=1e-5, rtol=1e-6)
    assert logprobs(logits[:, :7], tokens.clamp(max=6), 20)[1].shape == (3, 7)


def test_each_row_gets_as_many_logprobs_as_it_asks_for() -> None:
    logits = random_logits(4, seed=9)
    draws = [draw(logprobs=2), draw(), draw(logprobs=0), draw(logprobs=5, temperature=5.0, frequency_penalty=2.0)]
    draws[3] = SamplingInput(draws[3].sampling, 0, History((), [1, 1, 2]))
    tokens = sample(logits, draws)
    exact = logits.log_softmax(-1)
    scores = score(logits, draws, tokens)
    assert [None if logprobs is None else len(logprobs.top) for logprobs in scores] == [2, None, 0, 5]
    for number in (0, 2, 3):
        here = scores[number]
        assert here is not None
        assert here.chosen == pytest.approx(exact[number, tokens[number]].item(), abs=1e-5)
        assert list(here.top_ids) == exact[number].topk(len(here.top)).indices.tolist()
    assert scores[0] is not None
    assert scores[0].top[0] == scores[0].chosen
    assert score(logits[:2], [draw(), draw()], tokens[:2]) == []


def test_logprobs_stand_at_their_rows() -> None:
    one, two = TokenLogprobs(-1.0), TokenLogprobs(-2.0)
    batch = StepBatch([row([1], 0, [0]), row([1], 0, [1], drawn=False), row([1], 0, [2]), row([1], 0, [3])])
    result = rows_of([5, 6, 7], batch, [one, None, two])
    assert (result.token_ids, result.logprobs) == ([5, None, 6, 7], [one, None, None, two])
    first, others = result.split(2)
    assert (first.token_ids, others.logprobs) == ([5, None], [None, two])
    assert rows_of([5, 6, 7], batch).split(1)[1].logprobs == ()


def _fields(chosen: SamplingParams, **changes: int) -> dict[str, float]:
    return {name: getattr(chosen, name) for name in SamplingParams.__slots__} | changes


EOS = (5, 9)


def test_nothing_that_ends_an_answer_is_drawn_before_its_least_length() -> None:
    logits = random_logits(6)
    logits[:, [5, 9, 11]] += 40.0
    kinds = ({}, {"temperature": 0.0}, {"ignore_eos": True}, {"top_k": 3}, {"top_p": 0.5}, {"stop_token_ids": (11,)})
    for index in range(5):
        draws = [replace(draw(**({"temperature": 1.0, "min_tokens": 3} | kind)), index=index) for kind in kinds]
        before = logits.clone()
        drawn = sample(logits, draws, EOS).tolist()
        assert torch.equal(logits, before), "log probabilities are the model's own"
        if index >= 3:
            assert {5, 9, 11} >= {*drawn}
            continue
        assert drawn[:5] == [11] * 5
        assert drawn[5] not in {5, 9, 11}
    assert sample(logits, [draw(min_tokens=0)] * 6, EOS).tolist() == sample(logits, [draw()] * 6).tolist()


def test_a_bias_is_added_before_penalties_and_temperature() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0], [2.0, 1.0, 0.5, -1.0]])
    before = logits.clone()
    assert sample(logits, [draw(logit_bias=((1, 1.5),)), draw(logit_bias=((0, -100.0), (1, -100.0)))]).tolist() == [
        1,
        2,
    ]
    # (1 + 1.5) / 1.5 < 2: the penalty divides the biased logit.
    penalized = replace(draw(logit_bias=((1, 1.5),), repetition_penalty=1.5), history=History((1,), ()))
    assert sample(logits, [penalized, draw(logit_bias=((1, 1.5),))]).tolist() == [0, 1]
    assert torch.equal(logits, before), "log probabilities are the model's own"
    biased, plain = draw(logit_bias=((3, 4.0),), temperature=0.7, seed=5), draw(temperature=0.7, seed=5)
    wanted = logits.clone()
    wanted[:, 3] += 4.0
    for index in range(20):
        here, there = replace(biased, index=index), replace(plain, index=index)
        assert sample(logits, [here, here]).tolist() == sample(wanted, [there, there]).tolist()


def test_a_bias_does_not_end_an_answer_before_its_least_length() -> None:
    logits = torch.zeros(1, 20)
    early = draw(logit_bias=((EOS[0], 100.0), (7, 50.0)), min_tokens=2)
    assert sample(logits, [replace(early, index=1)], EOS).tolist() == [7]
    assert sample(logits, [replace(early, index=2)], EOS).tolist() == [EOS[0]]
