"""Tests that steps of prompts are charged by the tile, and that chunks are sized to fill tiles."""

from dataclasses import replace

import pytest

from tandem.cost_model.step_cost import CostParameters, StepCost, padded_prompts, slots_of, unpadded_prompts
from tandem.cost_model.step_grid import (
    TILE_TOKENS,
    StepGrid,
    answer_slots,
    gpu_grid,
    step_sizes,
)
from tandem.cost_model.step_work import NOTHING, StepWork, chunk_pairs
from tests.pairwise import pairwise

H200 = CostParameters(
    base_s=4e-3, prompt_base_s=3e-4, token_s=2.5e-5, pair_s=9e-10, row_s=1e-5, context_s=3e-8, free_tokens=150
)
TILED = StepCost(replace(H200, tile_tokens=TILE_TOKENS))
IN_WAVES = StepCost(replace(H200, tile_tokens=TILE_TOKENS, wave_tokens=gpu_grid(32).wave_tokens))


def test_decode_rows_take_slots_by_powers_of_two() -> None:
    assert [slots_of(rows) for rows in (0, 1, 16, 17, 100, 256)] == [0, 16, 16, 32, 128, 256]
    assert answer_slots(256) == [16, 32, 64, 128, 256]
    assert answer_slots(100) == [16, 32, 64, 100]
    assert answer_slots(1) == [1]


@pytest.mark.parametrize("answers", [0, 1, 16, 40])
@pytest.mark.parametrize("tokens", [1, 88, 112, 113, 128, 129, 1000])
def test_a_step_is_a_multiple_of_a_tile(tokens: int, answers: int) -> None:
    padded = padded_prompts(tokens, answers, TILE_TOKENS)
    assert tokens <= padded < tokens + 2 * TILE_TOKENS
    assert (padded + slots_of(answers)) % TILE_TOKENS == 0
    assert padded_prompts(tokens, answers, 1) == tokens


@pytest.mark.parametrize("answers", [0, 1, 40, 300])
def test_a_step_is_as_large_as_the_next_that_is_captured(answers: int) -> None:
    sizes, slots = step_sizes(2048), slots_of(answers)
    for tokens in range(1, 2048 - slots + 1, 7):
        total = tokens + slots
        padded, unpadded = (f(tokens, answers, TILE_TOKENS) + slots for f in (padded_prompts, unpadded_prompts))
        assert padded == next(size for size in sizes if size >= total)
        assert unpadded == max((size for size in sizes if slots < size <= total), default=total)
        assert padded - total < TILE_TOKENS * (1 + (total > 8 * TILE_TOKENS))
    assert padded_prompts(2049, answers, TILE_TOKENS) < 2049 + TILE_TOKENS, "beyond these none is captured"


def test_tokens_that_begin_another_tile_are_left_for_the_next_step() -> None:
    assert unpadded_prompts(200, 5, TILE_TOKENS) == 112
    assert unpadded_prompts(112, 5, TILE_TOKENS) == 112
    assert unpadded_prompts(100, 5, TILE_TOKENS) == 100, "less than a tile is all there is"
    assert unpadded_prompts(200, 5, 1) == 200


@pairwise(
    cost={"tiles": TILED, "waves": IN_WAVES},
    rows=[3, 20, 100],
    pairs=[0.0, 1000.0, 4096.0, 9000.0, 50_000.0],
    target_s=[0.0052, 0.0065, 0.008, 0.012, 0.025],
)
def test_the_most_tokens_within_a_target(cost: StepCost, target_s: float, pairs: float, rows: int) -> None:
    context = 400 * rows
    tokens = cost.tokens_within(target_s, rows, context, pairs)
    within = [
        index
        for index in range(1, 2000)
        if cost.seconds(StepWork(index, index * pairs, rows, context)) <= target_s + 1e-9
    ]
    best = max(within, default=0)
    assert tokens <= best, "never too many"
    assert tokens >= best - 1 or tokens >= unpadded_prompts(best, rows, TILE_TOKENS) - 1


def test_a_tile_costs_the_same_however_full_it_is() -> None:
    seconds = [TILED.seconds(StepWork(tokens, 0.0, 4, 0)) for tokens in (1, 112, 113, 240, 241)]
    assert seconds[0] == seconds[1] < seconds[2] == seconds[3] < seconds[4]


def test_a_wave_is_what_all_multiprocessors_attend_with_at_once() -> None:
    assert gpu_grid(32) == StepGrid(TILE_TOKENS, 4 * TILE_TOKENS)
    assert gpu_grid(16, multiprocessors=132).wave_tokens == 8 * TILE_TOKENS
    assert gpu_grid(200).wave_tokens == TILE_TOKENS, "less than a tile for each head there is not"


def test_a_short_chunk_after_a_long_context_attends_as_long_as_a_wave() -> None:
    context = 6000
    attention = [
        IN_WAVES.seconds(NOTHING.with_chunk(tokens, context)) - IN_WAVES.seconds(StepWork(tokens, 0.0))
        for tokens in (100, 512, 1024)
    ]
    assert attention[0] == pytest.approx(attention[1], rel=0.05)
    assert attention[2] == pytest.approx(2 * attention[1], rel=0.1)


@pairwise(context=[4000, 30_000], uncached=[100, 600, 2148])
def test_a_prompt_takes_what_its_steps_take(context: int, uncached: int) -> None:
    cost, chunk = IN_WAVES, 1024
    steps = [min(chunk, uncached - done) for done in range(0, uncached, chunk)]
    seconds = sum(
        cost.seconds(NOTHING.with_chunk(tokens, context + chunk * number)) for number, tokens in enumerate(steps)
    )
    assert cost.prefill_seconds(uncached, chunk_pairs(uncached, context), chunk)[0] == pytest.approx(seconds, rel=0.05)
