"""How many drafts a step has, by cost and acceptance."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from decode_worker.draft_choice import (
    GAIN_MIN,
    ROWS_MAX,
    Candidate,
    StepBounds,
    break_even,
    with_drafts,
    with_most_tokens,
)
from tandem.cost_model.acceptance import PRIOR, WINDOW, Acceptance
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import StepWork
from tandem.engine.speculation.proposer import Draft, DraftSource, ProposerName
from tandem.protocol.cost_parameters import CostParameters
from tests.soak import seeds

ONE = StepWork(decode_rows=1, decode_context_tokens=100)
CHEAP = StepCost(CostParameters(base_s=10e-3, row_s=0.2e-3, context_s=0.0))
DEAR = StepCost(CostParameters(base_s=10e-3, row_s=6e-3, context_s=0.0))


def candidate(*rates: float) -> Candidate:
    survival = [math.prod(rates[: n + 1]) for n in range(len(rates))]
    request: Any = object()
    return Candidate(request, Draft(list(range(len(rates))), DraftSource(ProposerName.NGRAM, 3)), survival, 100)


def chosen(cost: StepCost, *candidates: Candidate, seconds: float = math.inf, rows: int = 1000) -> list[int]:
    work = StepWork(decode_rows=len(candidates), decode_context_tokens=100 * len(candidates))
    drafts = with_most_tokens(StepBounds(cost, seconds, rows), work, candidates)
    return [len(draft.survival) for draft in drafts]


def test_drafts_are_added_while_the_tokens_per_second_rise() -> None:
    assert chosen(CHEAP, candidate(*[0.9] * 7)) == [7]
    assert chosen(CHEAP, candidate(0.9, 0.9, 0.01, 0.9)) == [2]
    assert chosen(DEAR, candidate(*[0.9] * 7)) == [4]
    assert chosen(DEAR, candidate(0.3)) == []


@seeds(20)
def test_no_other_number_of_drafts_is_better(seed: int) -> None:
    dice = random.Random(seed)
    cost = StepCost(CostParameters(base_s=10e-3, row_s=dice.choice((0.2e-3, 1e-3, 3e-3)), context_s=0.0))
    candidates = [candidate(*(dice.random() for _ in range(4))) for _ in range(2)]
    work = StepWork(decode_rows=2, decode_context_tokens=200)

    def rate(first: int, second: int) -> float:
        drafts = [candidates[0].first(first), candidates[1].first(second)]
        tokens = 2 + sum(sum(one.survival) for one in drafts)
        return tokens / cost.seconds(with_drafts(work, drafts))

    chosen_drafts = with_most_tokens(StepBounds(cost, math.inf, 100), work, candidates)
    counts = {id(draft.request): len(draft.survival) for draft in chosen_drafts}
    best = rate(*(counts.get(id(option.request), 0) for option in candidates))
    most = max(rate(first, second) for first in range(5) for second in range(5))
    assert best == pytest.approx(most) or most < GAIN_MIN * rate(0, 0)


def test_the_bounds_of_a_step_hold() -> None:
    many = candidate(*[0.9] * 7)
    assert chosen(CHEAP, many, rows=4) == [3]
    assert chosen(CHEAP, many, seconds=10.71e-3) == [2]
    assert chosen(CHEAP, many, seconds=1e-3) == []


def test_rows_that_read_no_kv_add_no_context() -> None:
    cost = StepCost(CostParameters(base_s=10e-3, row_s=0.0, context_s=20e-6))
    draft = candidate(0.9, 0.9)
    once = replace(draft, context=None)
    assert with_drafts(ONE, [draft]) == StepWork(decode_rows=3, decode_context_tokens=303, draft_rows=2)
    assert with_drafts(ONE, [once]) == StepWork(decode_rows=3, decode_context_tokens=100, draft_rows=2)
    assert break_even(cost, ONE) == pytest.approx(2 / 12)
    assert break_even(cost, ONE, kv_read_once=True) == 0
    poor = candidate(0.1)
    assert chosen(cost, poor) == []
    assert chosen(cost, replace(poor, context=None)) == [1]


def test_a_step_has_no_more_rows_than_graphs_have() -> None:
    assert sum(chosen(CHEAP, *[candidate(*[0.9] * 7) for _ in range(100)])) == ROWS_MAX - 100


def test_the_break_even_is_the_cost_of_a_row() -> None:
    assert break_even(CHEAP, ONE) == pytest.approx(0.2 / 10.2)
    assert break_even(DEAR, ONE) == pytest.approx(6 / 16)
    assert break_even(StepCost(CostParameters(base_s=0.0, row_s=0.0, context_s=0.0)), ONE) == 1.0
    assert chosen(DEAR, candidate(6 / 16 - 0.01)) == []


def test_a_step_with_drafts_has_a_cost_of_its_own() -> None:
    """It takes a third more, however many drafts there are: what one does not pay for, several may."""
    cost = StepCost(replace(CHEAP.parameters, verify_base_s=10.2e-3 / 3))
    assert cost.seconds(ONE.with_drafts(2, 0)) == pytest.approx(cost.seconds(ONE) * 4 / 3 + 0.4e-3)
    assert chosen(CHEAP, candidate(0.3)) == [1]
    assert chosen(cost, candidate(0.3)) == []
    assert chosen(cost, candidate(0.35), candidate(0.35)) == []
    assert chosen(cost, candidate(*[0.35] * 4)) == [3]
    assert 1 / 4 < break_even(cost, ONE) < 0.35
    assert chosen(cost, candidate(*[0.9] * 7), seconds=14.1e-3) == [2]


def test_acceptance_is_learned_by_class_and_position() -> None:
    acceptance = Acceptance()
    assert acceptance.best() == PRIOR
    for _ in range(100):
        acceptance.observe(3, 4, 2)
    assert acceptance.rate(3, 0) > 0.95
    assert acceptance.rate(3, 2) < 0.05
    assert acceptance.rate(2, 0) == PRIOR, "nothing is known of it"
    assert acceptance.rate(3, 3) == acceptance.rate(3, 2), "no draft has reached it"
    assert acceptance.survival(3, 3)[1] == pytest.approx(acceptance.rate(3, 0) * acceptance.rate(3, 1))


def test_a_position_that_was_unlucky_is_tried_again() -> None:
    acceptance = Acceptance()
    for _ in range(int(WINDOW)):
        acceptance.observe(3, 2, 1)
    assert acceptance.rate(3, 1) < 0.1
    for _ in range(int(2 * WINDOW)):
        acceptance.observe(3, 1, 1)
    assert acceptance.rate(3, 1) > 0.7
    for _ in range(3):
        acceptance.observe(3, 2, 1)
    assert acceptance.rate(3, 1) < 0.6, "what it rests on is old"


@pytest.mark.parametrize("accepted", [0, 1])
def test_a_change_is_noticed_by_drafts_in_a_row(accepted: int) -> None:
    acceptance, dice = Acceptance(), random.Random(1)
    for _ in range(1000):
        acceptance.observe(3, 1, int(dice.random() < 0.8) if not accepted else int(dice.random() < 0.2))
    for _ in range(12):
        acceptance.observe(3, 1, accepted)
    assert abs(acceptance.rate(3, 0) - accepted) < 0.15
    for _ in range(1000):
        acceptance.observe(3, 1, int(dice.random() < 0.5))
    assert acceptance.rate(3, 0) == pytest.approx(0.5, abs=0.25)


def test_acceptance_that_falls_is_noticed_within_a_window() -> None:
    acceptance = Acceptance()
    for _ in range(1000):
        acceptance.observe(3, 1, 1)
    for _ in range(int(2 * WINDOW)):
        acceptance.observe(3, 1, 0)
    assert acceptance.best() < 0.15
