"""The cheapest pair and the runner-up, beside a look at every pair alone."""

import math
import random

import pytest

from router.cheapest import Cheapest
from router.slo import DEFAULT_CLASSES
from router.step_forecast import AnswerForecast, AskedAnswer, PromptForecast
from tests.unit.router.fleets import TestFleet
from wire.messages import Role
from wire.timeline import TransferStats


@pytest.mark.parametrize("local", [False, True])
def test_pairs_that_are_left_out_would_not_have_won(*, local: bool) -> None:
    dice = random.Random(13)
    for _ in range(60):
        at = TestFleet()
        for number in range(5):
            worker = at.add(f"w{number}", Role.BOTH, pages_total=4000, max_step_tokens=2048, max_batch_requests=64)
            at.prompt(f"w{number}", dice.randrange(2000))
            at.answers(f"w{number}", dice.randrange(12), context=1000, slo=dice.choice(DEFAULT_CLASSES))
            at.fleet.learn_transfer(worker, TransferStats(2**24, 8, "UCX", dice.randrange(10**6, 10**8)))
        asked = AskedAnswer(2000, 300.0, dice.choice(DEFAULT_CLASSES), 2)
        workers = list(at.workers.values())
        prompts = [PromptForecast(worker, 2000, 16 * dice.randrange(125)) for worker in workers]
        answers = [AnswerForecast(worker, 16 * dice.randrange(125), asked) for worker in workers]
        found = Cheapest()
        found.together(prompts, answers, at.fleet, local=local)
        costs = []
        for prompt in prompts:
            for answer in answers:
                alone = Cheapest()
                alone.together([prompt], [answer], at.fleet, local=local)
                assert (alone.cost_s < math.inf) == (local or prompt.worker is not answer.worker)
                costs.append((alone.cost_s, prompt, answer))
        (best_s, prompt, answer), (second_s, *_), *_ = sorted(costs, key=lambda each: each[0])
        assert (found.cost_s, found.runner_up_s) == (best_s, second_s)
        assert (found.prompt, found.answer) == (prompt, answer)
