"""The prefill tokens of a step, and the limit of the decode batch."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from prefill_worker.queue import WaitingPrompts
from tandem.cost_model.step_cost import CostParameters, StepCost
from tandem.cost_model.step_grid import TILE_TOKENS
from tandem.cost_model.step_work import NOTHING, StepWork
from tandem.engine.config import EngineConfig
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.messages import Assignment, Role
from tandem.protocol.policy_name import PolicyName
from tandem.worker.assignment import prompt_step_tokens
from tandem.worker.config import WorkerConfig
from tandem.worker.scheduler import BatchGrowth
from tandem.worker.step_policy import (
    FORCED_CHUNK_INTERVAL,
    FORCED_CHUNK_TOKENS,
    MIN_CHUNK_TOKENS,
    StepPolicy,
)

MS = CostParameters(
    base_s=4e-3, prompt_base_s=1e-3, token_s=2e-5, pair_s=0.0, row_s=1e-5, context_s=3e-8, free_tokens=0
)
"""32 rows at 1,000 tokens of context take 5.28 ms."""
DECODING = StepWork(decode_rows=32, decode_context_tokens=32_000)
FEW = StepWork(decode_rows=4, decode_context_tokens=2_000)
"""4.1 ms."""
MANY = WaitingPrompts(prompts=3, tokens=100_000)
STEP = 2048


def cost() -> StepCost:
    return StepCost(MS)


def policy_of(name: PolicyName, budget: int | None = None, target_s: float | None = None) -> StepPolicy:
    return StepPolicy(Assignment(Role.BOTH, name, budget, target_s), cost, STEP)


def priority(target_s: float | None) -> StepPolicy:
    return policy_of(PolicyName.DECODE_PRIORITY, target_s=target_s)


def chunked(budget: int) -> StepPolicy:
    return policy_of(PolicyName.CHUNKED, budget)


@pytest.mark.parametrize("name", PolicyName)
def test_each_policy_leaves_room_for_the_decode_rows(name: PolicyName) -> None:
    granted = policy_of(name, 512, 0.02).prefill_tokens(DECODING, MANY)
    assert 0 < granted <= STEP - 32
    assert policy_of(name).prefill_tokens(NOTHING, MANY)


def test_unchunked_gives_all_there_is() -> None:
    assert policy_of(PolicyName.UNCHUNKED).prefill_tokens(DECODING, MANY) == STEP - 32


def patient(policy: StepPolicy) -> StepPolicy:
    """Its long step was the last one."""
    assert policy.prefill_tokens(StepWork(decode_rows=2 * STEP), MANY) > 0
    return policy


def test_chunked_keeps_the_whole_step_within_its_budget() -> None:
    policy = patient(chunked(512))
    assert policy.prefill_tokens(DECODING, MANY) == 480
    assert policy.prefill_tokens(NOTHING, MANY) == 512
    assert policy.prefill_tokens(StepWork(decode_rows=600), MANY) == 0


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="step_budget"):
        chunked(0)


@pytest.mark.parametrize("context", [0, 5000])
@pytest.mark.parametrize("target_ms", [10, 12, 25])
def test_decode_priority_fills_what_is_left_of_the_target_and_no_more(target_ms: int, context: int) -> None:
    target = target_ms / 1e3 / StepCost(MS).margin
    tokens = priority(target_ms / 1e3).prefill_tokens(DECODING, WaitingPrompts(1, 100_000, context))
    assert cost().seconds(DECODING.with_chunk(tokens, context)) <= target
    assert cost().seconds(DECODING.with_chunk(tokens + 1, context)) > target


def test_decode_priority_gives_nothing_when_decoding_alone_takes_too_long() -> None:
    assert patient(priority(5e-3)).prefill_tokens(DECODING, MANY) == 0


def test_decode_priority_gives_no_crumbs_but_for_a_prompt_that_is_one() -> None:
    target = StepCost(MS).margin * cost().seconds(DECODING.with_chunk(MIN_CHUNK_TOKENS // 2, 0))
    assert patient(priority(target)).prefill_tokens(DECODING, MANY) == 0
    assert patient(priority(target)).prefill_tokens(DECODING, WaitingPrompts(1, 10, 0)) == 10


def test_without_a_target_a_step_has_its_token_budget() -> None:
    assert priority(None).prefill_tokens(FEW, MANY) == 512 - 4
    assert policy_of(PolicyName.DECODE_PRIORITY, 700).prefill_tokens(FEW, MANY) == 700 - 4


@pytest.mark.parametrize("name", PolicyName)
def test_no_policy_breaks_the_target_of_an_answer(name: PolicyName) -> None:
    assert seconds_granted(policy_of(name, 2048), [0.009, math.inf]) == pytest.approx(0.009, abs=2.5e-5)


def test_chunks_end_with_a_tile_of_the_matrix_units() -> None:
    tiled = StepCost(replace(MS, tile_tokens=TILE_TOKENS))
    policy = StepPolicy(Assignment(Role.BOTH, PolicyName.CHUNKED, 512), lambda: tiled, STEP)
    assert policy.prefill_tokens(DECODING, MANY) == 512 - 32
    assert policy.prefill_tokens(StepWork(decode_rows=33), MANY) == 512 - 64, "places for 64 answers"
    assert policy.prefill_tokens(NOTHING, MANY) == 512
    asked = Assignment(Role.BOTH, PolicyName.DECODE_PRIORITY, itl_target_s=0.012)
    granted = StepPolicy(asked, lambda: tiled, STEP).prefill_tokens(DECODING, MANY)
    assert (granted + 32) % TILE_TOKENS == 0


def seconds_granted(policy: StepPolicy, targets: list[float], beside: StepWork = FEW) -> float:
    """Returns the time predicted for the client: the step and the jitter of its delivery."""
    tokens = policy.prefill_tokens(beside, MANY, targets)
    return StepCost(MS).margin * cost().seconds(beside.with_chunk(tokens, 0))


def test_answers_that_bear_long_gaps_leave_prompts_longer_steps() -> None:
    assert seconds_granted(priority(None), [0.03] * 32) == pytest.approx(0.03, abs=2e-5)
    for targets in ([0.03] * 31 + [math.inf], [math.inf] * 32):
        assert priority(None).prefill_tokens(FEW, MANY, targets) == 512 - 4


def test_one_strict_answer_keeps_steps_short_as_long_as_it_can_be_kept() -> None:
    assert seconds_granted(priority(None), [0.0078] + [0.06] * 31) == pytest.approx(0.0078, abs=2.5e-5)
    assert seconds_granted(priority(None), [0.004] + [0.03] * 31) == pytest.approx(0.03, abs=2e-5)


def test_what_was_asked_for_bounds_every_class() -> None:
    assert seconds_granted(priority(0.01), [0.06] * 32) == pytest.approx(0.01, abs=2e-5)
    assert seconds_granted(priority(0.01), [0.0078] + [0.06] * 31) == pytest.approx(0.0078, abs=2.5e-5)


def test_the_batch_grows_up_to_the_tightest_target_that_holds() -> None:
    free, strict = BatchGrowth(cost, None), [0.009, 0.06]
    assert free.rows(DECODING, 256, strict) == BatchGrowth(cost, 0.009).rows(DECODING, 256) < 256
    assert free.rows(DECODING, 256, [0.005, math.inf]) == 256, "broken already: waiting would save nobody"
    assert BatchGrowth(cost, 0.02).rows(DECODING, 2048, strict) == free.rows(DECODING, 2048, strict)


def test_prefill_gets_the_whole_step_when_no_request_decodes() -> None:
    assert priority(1e-6).prefill_tokens(NOTHING, MANY) == STEP


@pytest.mark.parametrize(
    ("policy", "beside", "enough"),
    [(priority(1e-6), DECODING, FORCED_CHUNK_TOKENS), (chunked(512), StepWork(decode_rows=512), 512)],
    ids=["priority", "chunked"],
)
def test_no_prompt_starves(policy: StepPolicy, beside: StepWork, enough: int) -> None:
    granted = [policy.prefill_tokens(beside, MANY) for _ in range(3 * (FORCED_CHUNK_INTERVAL + 1))]
    assert granted == 3 * [enough, *[0] * FORCED_CHUNK_INTERVAL]


def test_fewer_than_one_in_a_hundred_steps_are_long_for_any_arrivals() -> None:
    policy = chunked(512)
    beside, full = StepWork(decode_rows=512 - MIN_CHUNK_TOKENS), StepWork(decode_rows=512)
    assert policy.prefill_tokens(full, MANY) == 512
    without = [
        *[WaitingPrompts()] * (FORCED_CHUNK_INTERVAL // 2),
        *[MANY] * (FORCED_CHUNK_INTERVAL - FORCED_CHUNK_INTERVAL // 2),
    ]
    assert not any(policy.prefill_tokens(full, waiting) for waiting in without if waiting.prompts), "not yet"
    assert {policy.prefill_tokens(beside, MANY) for _ in range(FORCED_CHUNK_INTERVAL // 2 + 1)} == {MIN_CHUNK_TOKENS}, (
        "no long step"
    )
    assert policy.prefill_tokens(full, MANY) == 512, "enough have passed, with nobody waiting and with pieces"


def test_steps_without_prompts_count_though_the_policy_was_not_asked() -> None:
    policy, full = chunked(512), StepWork(decode_rows=512)
    assert policy.prefill_tokens(full, MANY) == 512
    policy.steps_without_prompts += FORCED_CHUNK_INTERVAL - 1
    assert [policy.prefill_tokens(full, MANY) for _ in range(3)] == [0, 512, 0]


def test_the_batch_grows_up_to_the_target() -> None:
    growth = BatchGrowth(cost, 9e-3)
    rows = growth.rows(DECODING, 256)
    assert 32 < rows < 256
    assert (
        cost().decode_step_seconds(rows, rows * 1000) <= 9e-3 < cost().decode_step_seconds(rows + 1, (rows + 1) * 1000)
    )


def test_a_burst_without_running_requests_does_not_join_at_once() -> None:
    growth = BatchGrowth(cost, 9e-3)
    assert growth.rows(NOTHING, 2048) == pytest.approx(500, abs=1)  # of rows without context, before any was seen
    many = growth.rows(DECODING, 2048)
    assert growth.rows(NOTHING, 2048) == many < 256


@pytest.mark.parametrize(
    ("target_s", "running", "rows"),
    [(None, DECODING, 256), (4.5e-3, DECODING, 32), (1e-3, DECODING, 256), (1.0, DECODING, 256)],
    ids=["no target", "over it", "out of reach", "far away"],
)
def test_the_batch_never_shrinks_and_a_target_out_of_reach_limits_nothing(
    target_s: float | None, running: StepWork, rows: int
) -> None:
    assert BatchGrowth(cost, target_s).rows(running, 256) == rows


@pytest.mark.parametrize(
    ("policy", "budget", "tokens"),
    [(PolicyName.UNCHUNKED, 9, STEP), (PolicyName.CHUNKED, 700, 700), (PolicyName.CHUNKED, None, 512)],
)
def test_the_prompt_tokens_of_a_step_follow_the_policy_and_its_budget(
    policy: PolicyName, budget: int | None, tokens: int
) -> None:
    engine = EngineConfig.of(Path("m"), max_step_tokens=STEP)
    config = WorkerConfig("w", Role.BOTH, engine, step_policy=policy, step_budget=budget)
    assert prompt_step_tokens(config.assignment, config.engine) == tokens
