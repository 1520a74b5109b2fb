"""Tests of the predicted duration of a step, and of the margin of predictions."""

import random

import pytest

from tandem.cost_model.margin import MARGIN_MAX, MARGIN_MIN, LearnedMargin
from tandem.cost_model.step_cost import CostParameters, StepCost
from tandem.cost_model.step_work import NOTHING, StepWork, chunk_pairs

EASY = CostParameters(
    base_s=100.0, prompt_base_s=50.0, token_s=2.0, pair_s=0.1, row_s=3.0, context_s=0.01, free_tokens=0
)
KNEE = CostParameters(base_s=100.0, prompt_base_s=0.0, token_s=2.0, pair_s=0.0, row_s=0.0, context_s=0.0, free_tokens=8)


def test_an_empty_step_takes_no_time() -> None:
    assert StepCost(EASY).seconds(NOTHING) == 0.0


def test_each_part_of_a_step_costs_its_share() -> None:
    cost = StepCost(EASY)
    assert cost.decode_step_seconds(4, 1000) == pytest.approx(100 + 4 * 3 + 10)
    assert cost.seconds(StepWork(decode_rows=4, decode_context_tokens=1000)) == cost.decode_step_seconds(4, 1000)
    mixed = StepWork(decode_rows=4, decode_context_tokens=1000).with_chunk(10, 100)
    assert cost.seconds(mixed) == pytest.approx(100 + 4 * 3 + 10 + 50 + 10 * 2 + 0.1 * mixed.prefill_pairs)


def test_pairs_are_what_causal_attention_computes() -> None:
    assert chunk_pairs(3, 10) == 11 + 12 + 13
    chunks = StepWork().with_chunk(3, 10).with_chunk(2, 0)
    assert chunks == StepWork(5, 11 + 12 + 13 + 1 + 2)


@pytest.mark.parametrize(("tokens", "rows", "charged"), [(5, 0, 0), (8, 0, 0), (9, 0, 1), (5, 4, 1), (5, 20, 5)])
def test_tokens_below_the_knee_are_free(tokens: int, rows: int, charged: int) -> None:
    work = StepWork(prefill_tokens=tokens, decode_rows=rows)
    assert StepCost(KNEE).seconds(work) == pytest.approx(100 + 2 * charged)


@pytest.mark.parametrize("parameters", [EASY, KNEE])
@pytest.mark.parametrize(("tokens", "context", "chunk"), [(1, 0, 4), (25, 7, 10), (30, 0, 10), (9, 3, 100)])
def test_a_prompt_takes_the_time_of_its_steps(
    parameters: CostParameters, tokens: int, context: int, chunk: int
) -> None:
    cost = StepCost(parameters)
    steps = 0.0
    for start in range(0, tokens, chunk):
        steps += cost.seconds(NOTHING.with_chunk(min(chunk, tokens - start), context + start))
    seconds, count = cost.prefill_seconds(tokens, chunk_pairs(tokens, context), chunk)
    assert (seconds, count) == (pytest.approx(steps), -(-tokens // chunk))


def ratios(spread: float, seed: int = 3) -> list[float]:
    dice = random.Random(seed)
    return [dice.lognormvariate(0.0, spread) for _ in range(60_000)]


@pytest.mark.parametrize("spread", [0.03, 0.1])
def test_one_in_two_hundred_observations_exceeds_the_margin(spread: float) -> None:
    margin, over, seen = LearnedMargin(1.2), 0, ratios(spread)
    for number, ratio in enumerate(seen):
        over += number >= len(seen) // 2 and ratio > margin.value
        margin.observe(ratio)
    assert over / (len(seen) / 2) == pytest.approx(0.005, rel=0.25)


def test_all_rows_of_a_step_count_as_one_observation() -> None:
    """A margin is learned as soon from one decode row as from forty."""
    alone, many = LearnedMargin(1.2), LearnedMargin(1.2)
    for ratio in ratios(0.1)[:3000]:
        alone.observe(ratio)
        for _ in range(40):
            many.observe(ratio, 1 / 40)
    assert many.value == pytest.approx(alone.value, rel=0.02)
    assert alone.value != 1.2


def test_a_stall_is_one_observation_and_the_margin_is_bounded() -> None:
    margin = LearnedMargin(1.2)
    margin.observe(1000.0)
    assert 1.2 < margin.value <= 1.22
    for _ in range(1000):
        margin.observe(2.0)
    assert margin.value == MARGIN_MAX
    for _ in range(100_000):
        margin.observe(0.5)
    assert margin.value == MARGIN_MIN
