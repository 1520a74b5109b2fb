"""What books keep of how prompts go on is what would be found anew, whatever has changed since."""

import random

import pytest

from costs.chunks import Beside
from router.placed_work import AnswerWork, PromptWork
from router.prompt_steps import NO_PROMPTS, PromptSteps
from router.slo import DEFAULT_CLASSES
from router.worker_books import WorkerBooks
from tests.unit.router.fleets import H200, TestFleet, load
from wire.messages import Duty, Role
from wire.policy_name import PolicyName

DUTIES = [None, *(Duty(Role.BOTH, policy) for policy in PolicyName)]


def anew(worker: WorkerBooks) -> PromptSteps:
    beside = Beside(worker.decode_requests, worker.decode_context, worker.gap_targets)
    return PromptSteps(worker.cost, worker.info.duty, worker.max_step_tokens, beside)


def change(worker: WorkerBooks, dice: random.Random, at: TestFleet) -> None:
    name = f"r{dice.randrange(12)}"
    match dice.randrange(7):
        case 0:
            worker.book_prefill(name, PromptWork(dice.randrange(1, 3000), dice.randrange(500)))
        case 1:
            worker.prompt_computed(name)
        case 2:
            worker.unbook_prefill(name)
        case 3:
            worker.unbook_decode(name)
            worker.book_decode(name, AnswerWork(4, dice.randrange(4000), dice.choice(DEFAULT_CLASSES)))
        case 4:
            worker.unbook_decode(name)
        case 5:
            worker.report(load(dice.randrange(3000), dice.randrange(20), dice.randrange(60)))
        case 6:
            at.clock.now += 2
            worker.expire()


@pytest.mark.parametrize("duty", DUTIES)
def test_what_is_kept_is_what_would_be_found(duty: Duty | None) -> None:
    dice = random.Random(7)
    at = TestFleet()
    worker = at.add("w", Role.BOTH, duty=duty, max_step_tokens=2048, max_batch_requests=64)
    for _ in range(400):
        change(worker, dice, at)
        fresh, waiting = anew(worker), worker.prefill_tokens
        tokens, pairs = dice.randrange(1, 5000), 1e6 * dice.random()
        assert worker.queue == (fresh.run(waiting, worker.prefill_pairs) if waiting else NO_PROMPTS)
        assert worker.prompt_steps.run(tokens, pairs) == fresh.run(tokens, pairs)


def test_alone_a_prompt_takes_whole_steps() -> None:
    steps = TestFleet().add("w", Role.PREFILL, cost=H200, max_step_tokens=512).prompt_steps
    assert steps.run(512, 0.0)[1] == 1
    assert steps.run(1200, 0.0)[1] == 3
    assert steps.run(512, 0.0)[2] == steps.run(512, 0.0)[0] == steps.run(1200, 0.0)[2]
