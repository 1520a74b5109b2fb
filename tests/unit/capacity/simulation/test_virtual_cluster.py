"""Whole requests through simulated workers: exact times, reproducible, and no request is lost."""

import random
from itertools import pairwise
from typing import Any

import pytest

from tandem.capacity.simulation.request import Outcome
from tandem.capacity.simulation.worker import VirtualWorker
from tandem.cost_model.chunks import RECENT_PROMPTS
from tandem.cost_model.step_cost import StepCost
from tandem.protocol.messages import Role
from tandem.protocol.mode import Mode
from tandem.protocol.policy_name import CHUNKED_BUDGET, PolicyName
from tandem.settings.slo import SloClass
from tests.unit.capacity.simulation.stages import NETWORK, cluster, moments, request

APART = (Mode.DISAGGREGATED, [Role.PREFILL, Role.DECODE])
TOGETHER = (Mode.COLOCATED, [Role.BOTH])
STAGES: list[tuple[Mode, list[Role], dict[str, Any]]] = [
    (Mode.DISAGGREGATED, [Role.PREFILL, Role.PREFILL, Role.DECODE], {}),
    (Mode.COLOCATED, [Role.BOTH, Role.BOTH], {}),
    (Mode.COLOCATED, [Role.BOTH, Role.BOTH], {"step_policy": PolicyName.CHUNKED, "step_budget": 100}),
    (Mode.ADAPTIVE, [Role.BOTH, Role.BOTH], {"step_policy": PolicyName.DECODE_PRIORITY}),
]


def load(seed: int, count: int = 60, rate: float = 60.0) -> list[Any]:
    dice, at, made = random.Random(seed), 0.0, []
    for number in range(count):
        at += dice.expovariate(rate)
        made.append(request(at, dice.randrange(1, 3000), dice.randrange(1, 120), key=number % 40))
    return made


def exact(outcomes: list[Outcome]) -> list[Any]:
    """Returns the outcomes with exact times."""
    return [
        (o.asked.due_s, o.token_s(0.0), o.ended_s, o.prefill_worker, o.decode_worker, o.error, o.cached_tokens)
        for o in outcomes
    ]


def test_a_lone_request_takes_the_sum_of_its_parts() -> None:
    """The times are 1 ms to the queue, 1.5 ms for Reserve and Prefill, a step of 4 + 2 ms, and 1 ms to the client.

    Then 1 ms for AllocatePages, 0.3 ms for all pages but one, 0.3 ms for the last, and a step of 5 ms for each token.
    """
    (outcome,) = cluster(*APART).run([request(10.0, 100, 4)])
    assert moments(outcome) == [9.5, 16.1, 21.1, 26.1]


def test_a_local_prefill_decodes_in_the_next_step() -> None:
    (outcome,) = cluster(*TOGETHER).run([request(10.0, 100, 4)])
    assert moments(outcome) == [9.5, 14.5, 19.5, 24.5]


def test_an_answer_beside_a_prompt_waits_for_the_mixed_step() -> None:
    """The second prompt arrives in the first answer's second step, when the third is already launched.

    The fourth computes it, in 4 + 20 + 1 ms. The fifth is launched by then, so the sixth is the first with both
    answers.
    """
    first, second = cluster(*TOGETHER, step_policy=PolicyName.UNCHUNKED).run(
        [request(10.0, 100, 8), request(10.014, 1000, 3, key=1)]
    )
    assert moments(first) == [9.5, 14.5, 19.5, 24.5, 49.5, 54.5, 60.5, 66.5]
    assert moments(second) == [round(moment_s - 14.0, 6) for moment_s in (49.5, 60.5, 66.5)]


@pytest.mark.parametrize(("mode", "roles", "settings"), STAGES)
def test_every_request_ends_once_and_frees_its_pages(mode: Mode, roles: list[Role], settings: dict[str, Any]) -> None:
    stage, asked = cluster(mode, roles, **settings), load(1)
    outcomes = stage.run(asked)
    assert sorted(id(o.asked) for o in outcomes) == sorted(map(id, asked))
    for outcome in outcomes:
        assert not outcome.error
        assert len(outcome.token_s(0.0)) == outcome.asked.new_tokens
        assert moments(outcome) == sorted(moments(outcome))
    for worker in stage.workers.values():
        worker.cache.check_integrity()
        counts = worker.pool.counts()
        assert counts.free + counts.cached == counts.total
        assert counts.reserved == 0
        assert worker.idle
    assert not list(stage.router.requests)
    assert all(not state.request_ids and not state._pages for state in stage.router.fleet.live)


@pytest.mark.parametrize(("mode", "roles", "settings"), STAGES)
def test_steps_taken_at_once_are_those_taken_one_by_one(
    mode: Mode, roles: list[Role], settings: dict[str, Any]
) -> None:
    at_once = cluster(mode, roles, **settings).run(load(2))
    one_by_one = cluster(mode, roles, jumps=False, **settings).run(load(2))
    assert exact(at_once) == exact(one_by_one)


def test_load_reports_during_skipped_steps_are_those_of_their_time() -> None:
    """One answer decodes undisturbed, and half of its steps are skipped."""
    seen: list[tuple[int, int, float]] = []
    for jumps in (True, False):
        stage = cluster(*TOGETHER, jumps=jumps)
        (worker,) = stage.workers.values()

        def look(worker: VirtualWorker = worker) -> None:
            load = worker.load()
            seen.append((load.decode_context_tokens, load.pages_used, round(worker.busy_s, 9)))

        stage.clock.at(10.5, look)
        stage.run([request(10.0, 100, 200)])
    assert seen[0] == seen[1]
    assert seen[0][0] > 150


def test_the_same_load_has_the_same_outcomes() -> None:
    runs = [exact(cluster(Mode.ADAPTIVE, [Role.BOTH] * 3).run(load(seed))) for seed in (3, 3, 4)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_requests_that_would_miss_their_target_are_rejected_at_once() -> None:
    tight = SloClass("tight", ttft_s=0.1)
    flood = [request(10.0, 2000, 2, key=number, slo=tight) for number in range(20)]
    outcomes = cluster(*TOGETHER).run(flood)
    refused = [outcome for outcome in outcomes if outcome.error]
    assert {outcome.error for outcome in refused} == {"RESOURCE_EXHAUSTED"}
    assert all(outcome.ended_s == 10.0 + NETWORK.ingress_s for outcome in refused)
    assert 0 < len(refused) < 20


def test_requests_wait_where_pages_are_few_and_none_is_lost() -> None:
    """The pool holds two of the requests."""
    stage = cluster(*TOGETHER, pages=1024)
    outcomes = stage.run([request(10.0, 3000, 100, key=number) for number in range(6)])
    assert [outcome.error for outcome in outcomes] == [""] * 6
    assert sorted(len(outcome.token_s(0.0)) for outcome in outcomes) == [100] * 6


def test_steps_with_prompts_last_as_long_as_answers_tolerate_and_first_tokens_are_held() -> None:
    """Applies to answers too short to have a spare gap: the first two tokens arrive together."""
    tolerated_s = 0.040
    slo = SloClass("short", ttft_s=5.0, itl_s=tolerated_s)
    load = [request(0.060 * number, 1700 + 83 * (number % 7), 20, key=number, slo=slo) for number in range(40)]
    outcomes = cluster(*TOGETHER, step_policy=PolicyName.DECODE_PRIORITY).run(load)
    gaps = [[b - a for a, b in pairwise(moments(outcome))] for outcome in outcomes if not outcome.error]
    assert len(gaps) > 20
    longest_ms = 1e3 * tolerated_s / StepCost().margin
    assert max(max(gap[1:]) for gap in gaps) == pytest.approx(longest_ms, rel=0.1)
    assert not any(gap[0] for gap in gaps)


def test_the_router_knows_that_answers_run_to_their_limit() -> None:
    """Clients ignore ends of sequences: the router sends no request to a worker that would refuse it."""
    stage = cluster(Mode.DISAGGREGATED, [Role.PREFILL, Role.DECODE], pages=64)
    short = [request(0.0, 16, 256, key=number) for number in range(20)]
    outcomes = stage.run([*short, *(request(60.0, 16, 500, key=20 + number) for number in range(4))])
    assert [outcome.asked.new_tokens for outcome in outcomes] == [256] * 20 + [500] * 4
    assert {outcome.attempts for outcome in outcomes} == {1}


def test_a_backlog_makes_chunks_larger_until_it_is_over() -> None:
    """Prompts arrive faster than steps of 512 tokens compute them, later one at a time."""
    backlog = [request(0.02 * number, 1000, 10, key=number) for number in range(3 * RECENT_PROMPTS)]
    lone = [request(60.0 + 0.5 * number, 1000, 40, key=1000 + number) for number in range(2 * RECENT_PROMPTS)]

    def run(**settings: Any) -> tuple[list[float], float]:
        outcomes = cluster(*TOGETHER, **settings).run([*backlog, *lone])
        by_due = sorted(outcomes, key=lambda outcome: outcome.asked.due_s)
        return [moments(outcome)[0] for outcome in by_due[: len(backlog)]], moments(by_due[-1])[-1]

    (now, alone_ms), (before, alone_before_ms) = run(), run(step_budget=CHUNKED_BUDGET)
    few = RECENT_PROMPTS - 10
    assert now[:few] == before[:few], "it may be a burst"
    assert now[-1] < 0.9 * before[-1]
    assert alone_ms == alone_before_ms
