"""How much of a step prompts get: what workers do and routers count on."""

import math
from dataclasses import replace

import pytest

from costs.chunks import GAP_NOISE, PATIENCE, PROGRESS_TOKENS, Beside, Chunks, chunks, first_gap_target, gap_target
from costs.step_cost import CostParameters, StepCost, StepWork
from wire.messages import Duty, Role
from wire.policy_name import PolicyName

H200 = StepCost(
    CostParameters(
        base_s=4e-3, prompt_base_s=3e-4, token_s=2.5e-5, pair_s=9e-10, row_s=1e-5, context_s=3e-8, free_tokens=150
    )
)
ROWS, CONTEXT = 20, 40_000


@pytest.mark.parametrize("target_s", [0.0065, 0.008, 0.025])
@pytest.mark.parametrize("pairs", [0.0, 1000.0, 500_000.0])
def test_the_most_tokens_within_a_target(target_s: float, pairs: float) -> None:
    """One more would be too many."""
    tokens = H200.tokens_within(target_s, ROWS, CONTEXT, pairs)
    assert tokens >= 1
    assert H200.seconds(StepWork(tokens, tokens * pairs, ROWS, CONTEXT)) <= target_s + 1e-9
    assert H200.seconds(StepWork(tokens + 1, (tokens + 1) * pairs, ROWS, CONTEXT)) > target_s


def test_decoding_alone_may_leave_nothing() -> None:
    assert H200.tokens_within(0.005, ROWS, CONTEXT, 100.0) == 0


@pytest.mark.parametrize(
    ("duty", "rows", "expected"),
    [
        (None, 20, Chunks(2028)),
        (Duty(Role.BOTH), 20, Chunks(2028)),
        (Duty(Role.BOTH, PolicyName.CHUNKED, 512), 20, Chunks(492)),
        (Duty(Role.BOTH, PolicyName.CHUNKED), 20, Chunks(492)),
        (Duty(Role.BOTH, PolicyName.CHUNKED, 512), 0, Chunks(2048)),
        (Duty(Role.BOTH, PolicyName.DECODE_PRIORITY), 0, Chunks(2048)),
        (Duty(Role.BOTH, PolicyName.DECODE_PRIORITY, itl_target_s=0.001), 20, Chunks(2028, PATIENCE)),
        (Duty(Role.BOTH, PolicyName.DECODE_PRIORITY, itl_target_s=9.0), 20, Chunks(2028)),
    ],
)
def test_what_each_policy_gives(duty: Duty | None, rows: int, expected: Chunks) -> None:
    assert chunks(H200, duty, 2048, Beside(rows, 1000 * rows), 1000.0) == expected


def test_without_a_target_prompts_may_double_an_unloaded_step() -> None:
    given = chunks(H200, Duty(Role.BOTH, PolicyName.DECODE_PRIORITY), 2048, Beside(ROWS, CONTEXT), 1000.0)
    twice_s = 2 * H200.decode_step_seconds(1, 0)
    assert given.tokens == H200.tokens_within(twice_s / GAP_NOISE, ROWS, CONTEXT, 1000.0) > 64


def test_where_decoding_alone_takes_too_long_prompts_do_not_starve() -> None:
    """A target that was asked for holds; the one that is only guessed saves nobody any more."""
    many, context = 60, 180_000
    decoding_s = H200.decode_step_seconds(many, context)
    assert decoding_s > 2 * H200.decode_step_seconds(1, 0)
    assert chunks(H200, Duty(Role.BOTH, PolicyName.DECODE_PRIORITY), 2048, Beside(many, context), 500.0).tokens > 300
    asked = Duty(Role.BOTH, PolicyName.DECODE_PRIORITY, itl_target_s=0.008)
    assert chunks(H200, asked, 4096, Beside(many, context), 500.0) == Chunks(PROGRESS_TOKENS, PATIENCE)


def test_steps_last_as_long_as_answers_bear() -> None:
    many, context, bears_s = 60, 180_000, 0.025
    beside = Beside(many, context, (bears_s,))
    given = chunks(H200, Duty(Role.BOTH, PolicyName.DECODE_PRIORITY), 2048, beside, 500.0)
    assert given == Chunks(H200.tokens_within(bears_s / GAP_NOISE, many, context, 500.0))
    mixed = chunks(
        H200, Duty(Role.BOTH, PolicyName.DECODE_PRIORITY), 2048, Beside(many, context, (bears_s, math.inf)), 500.0
    )
    assert mixed.tokens < given.tokens, "who has no class is spared"


@pytest.mark.parametrize("rows", [0, 1, 20])
def test_two_steps_fit_into_a_first_gap_that_decoding_leaves_room_for(rows: int) -> None:
    decoding_s = H200.decode_step_seconds(max(1, rows), 1000 * rows)
    assert first_gap_target(H200, rows, 1000 * rows, 0.025) == 0.025 / 2 / GAP_NOISE
    assert first_gap_target(H200, rows, 1000 * rows, 2.01 * decoding_s) < math.inf
    assert first_gap_target(H200, rows, 1000 * rows, 1.99 * decoding_s) == math.inf, "lost: nobody waits for it"
    assert first_gap_target(H200, rows, 1000 * rows, math.inf) == math.inf


def test_noise_shortens_what_is_promised_and_not_what_is_usual() -> None:
    noisy = StepCost(replace(H200.parameters, mixed_noise=1.3))
    beside = (ROWS, CONTEXT)
    for targets, asked_s in (((0.025,), None), ((0.025, math.inf), 0.02), ((), 0.02)):
        assert gap_target(noisy, asked_s, *beside, targets) < gap_target(H200, asked_s, *beside, targets)
    assert gap_target(noisy, None, *beside) == gap_target(H200, None, *beside)
    assert first_gap_target(noisy, *beside, 0.025) < first_gap_target(H200, *beside, 0.025)
