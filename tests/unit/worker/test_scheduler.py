"""The effect of an assignment on the next step."""

from types import SimpleNamespace
from typing import Any

import pytest

from prefill_worker.queue import WaitingPrompts
from tandem.cost_model.step_cost import CostParameters, StepCost
from tandem.cost_model.step_work import StepWork
from tandem.engine.steps.batch import TokenRows
from tandem.protocol.messages import Assignment, Role
from tandem.protocol.policy_name import PolicyName
from tandem.worker.scheduler import StepScheduler

MS = CostParameters(
    base_s=4e-3, prompt_base_s=1e-3, token_s=2e-5, pair_s=0.0, row_s=1e-5, context_s=3e-8, free_tokens=0
)
DECODING = StepWork(decode_rows=32, decode_context_tokens=32_000)
"""Takes 5.28 ms."""
STEP = 2048
SHARED = Assignment(Role.BOTH)
BOUND = Assignment(Role.BOTH, itl_target_s=5e-3)
CHUNKED = Assignment(Role.BOTH, PolicyName.CHUNKED, step_budget=300)
PRIORITY = Assignment(Role.BOTH, PolicyName.DECODE_PRIORITY, itl_target_s=9.01e-3)


class PhaseSchedulers:
    """Both in one: a prompt waits, nobody decodes; `asked` is how many rows each might have."""

    idle = False
    gap_targets: tuple[float, ...] = ()
    queue = SimpleNamespace(length=1)
    speculation = None

    def __init__(self) -> None:
        self.asked: list[int] = []

    def waiting(self) -> WaitingPrompts:
        return WaitingPrompts(prompts=1, tokens=100_000)

    def schedule(self, most: int, _bounds: None = None) -> Any:
        self.asked.append(most)
        return TokenRows.of(()) if len(self.asked) % 2 else ()


def rows_of_step(assignment: Assignment, *, steered: bool) -> tuple[int, int]:
    """Rows that may decode beside DECODING, and prompt tokens beside nobody."""
    schedulers: Any = PhaseSchedulers()
    first = SHARED if steered else assignment
    scheduler = StepScheduler(
        decode=schedulers, prefill=schedulers, max_step_tokens=STEP, cost=lambda: StepCost(MS), assignment=first
    )
    if steered:
        scheduler.set_assignment(assignment)
    scheduler.decoding = DECODING
    assert scheduler.plan() is None
    rows, tokens = schedulers.asked
    return rows, tokens


@pytest.mark.parametrize("steered", [False, True])
@pytest.mark.parametrize(
    ("assignment", "rows", "tokens"),
    [(SHARED, STEP, STEP), (BOUND, 32, STEP), (CHUNKED, STEP, 300), (PRIORITY, 125, STEP)],
    ids=["shared", "bound", "chunked", "priority"],
)
def test_an_assignment_sets_the_rows_and_the_prompt_tokens_of_a_step(
    assignment: Assignment, rows: int, tokens: int, steered: bool
) -> None:
    assert rows_of_step(assignment, steered=steered) == (rows, tokens)
