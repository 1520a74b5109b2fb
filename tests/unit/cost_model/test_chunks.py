"""Tests of the chunk sizes that workers compute and routers predict with."""

import math
from dataclasses import replace

import pytest

from tandem.cost_model.chunks import (
    FORCED_CHUNK_INTERVAL,
    FORCED_CHUNK_TOKENS,
    RECENT_PROMPTS,
    Chunks,
    ConcurrentDecode,
    RecentPrompts,
    chunks_within,
    step_limit,
)
from tandem.cost_model.step_cost import CostParameters, StepCost
from tandem.cost_model.step_work import StepWork, chunk_pairs
from tandem.protocol.messages import Assignment, Role
from tandem.protocol.policy_name import BACKLOG_BUDGET, CHUNKED_BUDGET, PolicyName

H200 = StepCost(
    CostParameters(
        base_s=4e-3, prompt_base_s=3e-4, token_s=2.5e-5, pair_s=9e-10, row_s=1e-5, context_s=3e-8, free_tokens=150
    )
)
ROWS, CONTEXT = 20, 40_000


def chunks(
    cost: StepCost, assignment: Assignment | None, most: int, decode: ConcurrentDecode, pairs_per_token: float
) -> Chunks:
    """Returns the chunks that a worker with this assignment computes in steps of at most `most` tokens."""
    return chunks_within(step_limit(cost, assignment, decode), cost, most, decode, pairs_per_token)


@pytest.mark.parametrize("target_s", [0.0065, 0.008, 0.025])
@pytest.mark.parametrize("pairs", [0.0, 1000.0, 500_000.0])
def test_the_most_tokens_within_a_target(target_s: float, pairs: float) -> None:
    """One more would be too many."""
    tokens = H200.tokens_within(target_s, ROWS, CONTEXT, pairs)
    assert tokens >= 1
    assert H200.seconds(StepWork(tokens, tokens * pairs, ROWS, CONTEXT)) <= target_s + 1e-9
    assert H200.seconds(StepWork(tokens + 1, (tokens + 1) * pairs, ROWS, CONTEXT)) > target_s


def test_decoding_alone_may_leave_no_tokens_for_prompts() -> None:
    assert H200.tokens_within(0.005, ROWS, CONTEXT, 100.0) == 0


@pytest.mark.parametrize(
    ("assignment", "rows", "expected"),
    [
        (None, 20, Chunks(2028)),
        (Assignment(Role.BOTH), 20, Chunks(492)),
        (Assignment(Role.BOTH, PolicyName.UNCHUNKED), 20, Chunks(2028)),
        (Assignment(Role.BOTH, PolicyName.UNCHUNKED, itl_target_s=0.001), 20, Chunks(2028, FORCED_CHUNK_INTERVAL)),
        (Assignment(Role.BOTH, PolicyName.CHUNKED, 512), 20, Chunks(492)),
        (Assignment(Role.BOTH, PolicyName.CHUNKED), 20, Chunks(492)),
        (Assignment(Role.BOTH, PolicyName.CHUNKED, 512), 0, Chunks(2048)),
        (Assignment(Role.BOTH, PolicyName.DECODE_PRIORITY), 0, Chunks(2048)),
        (
            Assignment(Role.BOTH, PolicyName.DECODE_PRIORITY, itl_target_s=0.001),
            20,
            Chunks(2028, FORCED_CHUNK_INTERVAL),
        ),
        (Assignment(Role.BOTH, PolicyName.DECODE_PRIORITY, itl_target_s=9.0), 20, Chunks(2028)),
    ],
)
def test_each_policy_has_its_step_limit(assignment: Assignment | None, rows: int, expected: Chunks) -> None:
    assert chunks(H200, assignment, 2048, ConcurrentDecode(rows, 1000 * rows), 1000.0) == expected


def test_without_a_target_a_step_has_its_token_budget() -> None:
    given = chunks(
        H200, Assignment(Role.BOTH, PolicyName.DECODE_PRIORITY, 700), 2048, ConcurrentDecode(ROWS, CONTEXT), 1000.0
    )
    assert given == Chunks(700 - ROWS)


def test_recent_prompts_forget_those_before_them() -> None:
    recent = RecentPrompts()
    for _ in range(RECENT_PROMPTS - 1):
        recent.add(0.3, 1000)
    assert recent.wait_s == 0.0, "as many prompts may be a burst"
    recent.add(0.3, 1000)
    assert recent.wait_s == pytest.approx(0.3e-3)
    for _ in range(RECENT_PROMPTS // 2):
        recent.add(0.0, 1000)
    assert recent.wait_s == pytest.approx(0.15e-3)
    for _ in range(RECENT_PROMPTS // 2):
        recent.add(0.0, 3000)
    assert recent.wait_s == 0.0


@pytest.mark.parametrize(
    ("assignment", "targets", "backlog"),
    [
        (Assignment(Role.BOTH), (), BACKLOG_BUDGET - ROWS),
        (Assignment(Role.BOTH), (9.0, math.inf), BACKLOG_BUDGET - ROWS),
        (Assignment(Role.BOTH, PolicyName.DECODE_PRIORITY, 700), (), 700 - ROWS),
        (Assignment(Role.BOTH, PolicyName.CHUNKED), (), CHUNKED_BUDGET - ROWS),
        (Assignment(Role.BOTH, PolicyName.UNCHUNKED), (), None),
        (Assignment(Role.BOTH, itl_target_s=9.0), (), None),
        (Assignment(Role.BOTH), (9.0,), None),
    ],
)
def test_a_backlog_raises_only_the_default_budget(
    assignment: Assignment, targets: tuple[float, ...], backlog: int | None
) -> None:
    """A budget that the user named is kept, and so are ITL targets."""
    decode = ConcurrentDecode(ROWS, CONTEXT, targets)
    before = step_limit(H200, assignment, decode)
    tokens = CHUNKED_BUDGET - ROWS
    step_s = H200.seconds(StepWork(tokens, chunk_pairs(tokens, 0), ROWS, CONTEXT))
    assert step_limit(H200, assignment, decode, 0.99 * step_s / tokens) == before, "they wait less than they take"
    for ratio in (2.001, 100.0):
        assert step_limit(H200, assignment, decode, ratio * step_s / tokens) == before._replace(tokens=backlog)
    if backlog == BACKLOG_BUDGET - ROWS:
        between = step_limit(H200, assignment, decode, 1.501 * step_s / tokens)
        assert between == before._replace(tokens=CHUNKED_BUDGET * 3 // 2 - ROWS)


def test_a_target_that_decoding_alone_misses_shortens_no_step() -> None:
    """One that was asked for holds; that of an answer that misses it anyway gives way to the token budget."""
    many, context = 60, 180_000
    assignment = Assignment(Role.BOTH, PolicyName.DECODE_PRIORITY)
    assert H200.decode_step_seconds(many, context) > 0.008
    assert chunks(H200, assignment, 2048, ConcurrentDecode(many, context, (0.008,)), 500.0) == Chunks(512 - many)
    asked = Assignment(Role.BOTH, PolicyName.DECODE_PRIORITY, itl_target_s=0.008)
    assert chunks(H200, asked, 4096, ConcurrentDecode(many, context), 500.0) == Chunks(
        FORCED_CHUNK_TOKENS, FORCED_CHUNK_INTERVAL
    )


@pytest.mark.parametrize("policy", PolicyName)
def test_no_policy_ignores_the_target_of_an_answer(policy: PolicyName) -> None:
    """Until these were bounds of every policy, only decode-priority kept what service classes promise."""
    beside, target_s = ConcurrentDecode(ROWS, CONTEXT, (0.012, math.inf)), 0.012
    given = chunks(H200, Assignment(Role.BOTH, policy, 4096), 8192, beside, 1000.0)
    assert given == Chunks(H200.tokens_within(target_s / H200.margin, ROWS, CONTEXT, 1000.0))


def test_a_step_lasts_as_long_as_all_answers_tolerate() -> None:
    many, context, tolerated_s = 60, 180_000, 0.045
    assignment = Assignment(Role.BOTH, PolicyName.DECODE_PRIORITY)
    given = chunks(H200, assignment, 2048, ConcurrentDecode(many, context, (tolerated_s,)), 500.0)
    assert given == Chunks(H200.tokens_within(tolerated_s / H200.margin, many, context, 500.0))
    assert given.tokens > 512
    mixed = chunks(H200, assignment, 2048, ConcurrentDecode(many, context, (tolerated_s, math.inf)), 500.0)
    assert mixed == Chunks(512 - many), "for the sake of the answer without a target"


def test_noise_shortens_steps_with_targets() -> None:
    noisy = StepCost(replace(H200.parameters, mixed_step_margin=1.3))
    for targets, asked_s in (((0.025,), None), ((0.025, math.inf), 0.02), ((), 0.02)):
        assignment, beside = Assignment(Role.BOTH, itl_target_s=asked_s), ConcurrentDecode(ROWS, CONTEXT, targets)
        assert step_limit(noisy, assignment, beside).seconds < step_limit(H200, assignment, beside).seconds < math.inf
