"""What a duty means for the next step."""

import math
from dataclasses import replace
from typing import Any

import pytest

from costs.step_cost import CostParameters, StepCost, StepWork
from decode_worker.news import StepNews
from engine.batch import Draw, StepResult, StepRow, TokenRows
from prefill_worker.line import Waiting
from wire.messages import Duty, Role, SamplingParams
from wire.policy_name import PolicyName
from worker.scheduler import StepScheduler

MS = CostParameters(
    base_s=4e-3, prompt_base_s=1e-3, token_s=2e-5, pair_s=0.0, row_s=1e-5, context_s=3e-8, free_tokens=0
)
DECODING = StepWork(decode_rows=32, decode_context_tokens=32_000)
"""Takes 5.28 ms."""
STEP = 2048
SHARED = Duty(Role.BOTH)
BOUND = Duty(Role.BOTH, itl_target_s=5e-3)
CHUNKED = Duty(Role.BOTH, PolicyName.CHUNKED, step_budget=300)
PRIORITY = Duty(Role.BOTH, PolicyName.DECODE_PRIORITY, itl_target_s=9.01e-3)


class Halves:
    """Both in one: a prompt waits, nobody decodes; `asked` is how many rows each might have."""

    idle = False
    gap_targets: tuple[float, ...] = ()
    first_gap_s = math.inf

    def __init__(self) -> None:
        self.asked: list[int] = []

    def waiting_requests(self) -> int:
        return 1

    def waiting(self) -> Waiting:
        return Waiting(prompts=1, tokens=100_000)

    def schedule(self, most: int) -> Any:
        self.asked.append(most)
        return TokenRows.of(()) if len(self.asked) % 2 else ()


def rows_of_step(duty: Duty, *, steered: bool) -> tuple[int, int]:
    """Rows that may decode beside DECODING, and prompt tokens beside nobody."""
    halves: Any = Halves()
    first = SHARED if steered else duty
    scheduler = StepScheduler(
        decode=halves, prefill=halves, max_step_tokens=STEP, cost=lambda: StepCost(MS), duty=first
    )
    if steered:
        scheduler.steer(duty)
    scheduler.decoding = DECODING
    assert scheduler.plan() is None
    rows, tokens = halves.asked
    return rows, tokens


@pytest.mark.parametrize("steered", [False, True])
@pytest.mark.parametrize(
    ("duty", "rows", "tokens"),
    [(SHARED, STEP, STEP), (BOUND, 32, STEP), (CHUNKED, STEP, 300), (PRIORITY, 125, STEP)],
    ids=["shared", "bound", "chunked", "priority"],
)
def test_a_duty_says_who_decodes_and_how_much_of_a_step_is_prompts(
    duty: Duty, rows: int, tokens: int, steered: bool
) -> None:
    assert rows_of_step(duty, steered=steered) == (rows, tokens)


class Ending(Halves):
    """Four answers decode, and each step may end a local prompt that bears `first_gap_s`; `asked` is what prompts may
    have.
    """

    gap_targets = (0.03,) * 4

    def schedule(self, most: int) -> Any:
        self.asked.append(most)
        if len(self.asked) % 2:
            return TokenRows.of([StepRow((5,), 100, [0] * 7, Draw(SamplingParams(1), 0))] * 4)
        return (StepRow((5,) * most, 0, [0], Draw(SamplingParams(1), 0)),)

    @property
    def given(self) -> list[int]:
        return self.asked[1::2]


def test_two_steps_behind_the_end_of_a_local_prompt_are_short() -> None:
    """One of them is launched before its answer can join, the other has it."""
    halves: Any = Ending()
    duty = Duty(Role.BOTH, PolicyName.DECODE_PRIORITY)
    scheduler = StepScheduler(decode=halves, prefill=halves, max_step_tokens=STEP, cost=lambda: StepCost(MS), duty=duty)
    for halves.first_gap_s in (math.inf, 0.03, 0.025, math.inf, math.inf, math.inf):
        scheduler.plan()
    usual, ends, after, second, last, over = halves.given
    assert usual == ends == over
    assert after < usual, "half of what the first bears"
    assert second == last < after, "half of what the tighter one bears, which ended later"


class Alone(Halves):
    """Nobody decodes, and each step with prompts ends one that bears `first_gap_s`."""

    first_gap_s = 0.02

    def schedule(self, most: int) -> Any:
        self.asked.append(most)
        if len(self.asked) % 2:
            return TokenRows.of(())
        return (StepRow((5,) * most, 0, [0], Draw(SamplingParams(1), 0)),) if most else ()

    def apply(self, token_ids: Any, logprobs: Any) -> Any:
        return StepNews()


def test_prompts_wait_for_a_second_token_no_longer_than_it_may_come() -> None:
    """A step with any prompt would break what the first bears, and it ended with its first token: nothing else wakes
    the loop.
    """
    halves: Any = Alone()
    costs = replace(MS, prompt_base_s=8e-3)
    duty = Duty(Role.BOTH, PolicyName.DECODE_PRIORITY)
    scheduler = StepScheduler(
        decode=halves, prefill=halves, max_step_tokens=STEP, cost=lambda: StepCost(costs), duty=duty
    )
    ending = scheduler.plan()
    assert ending is not None
    assert scheduler.plan() is None, "it may decode yet"
    scheduler.apply(ending.work, StepResult((0,)))
    after = scheduler.plan()
    assert after is not None
    assert after.work.prefill_tokens == STEP
