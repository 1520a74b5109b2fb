"""Admission by prediction, under a virtual clock: what is admitted meets its target, what cannot be kept is said."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.config import RouterConfig
from router.observability.request_outcome import Outcome, RequestOutcome, rejected
from router.placement.policy import PlacementPolicy
from router.placement.queue import QueuedRequest
from router.placement.scheduler import RequestScheduler, record
from router.placement.worker_state import AnswerWork
from router.refusal import Refusal, Refused
from tandem.cost_model.step_cost import StepCost
from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.lifecycle.spans import Phase
from tandem.protocol.messages import Role
from tandem.protocol.mode import Mode
from tandem.settings.model import ModelSettings
from tandem.settings.slo import BEST_EFFORT, Overload, SloClass
from tests.unit.router.fleets import H200, TestFleet, learn_cost
from tests.unit.router.placement.simulated_load import PROMPT_S, Load, Request

SECOND = SloClass("second", ttft_s=1.0)
KIND = SloClass("kind", ttft_s=1.0, overload=Overload.DEGRADE)
GAP_S = 6e-3
"""Between tokens: with noise, as much as a step of 13 answers to prompts of 2,048 tokens takes."""
HUGE = 10**6
"""Tokens of a prompt that no worker is large enough for."""
CAPACITY = 2 / PROMPT_S
"""Prompts a second that two prefill workers compute."""


class ScheduledFleet(TestFleet):
    """Prefill workers and two decode workers, whose load only the test changes, and a scheduler for them."""

    def __init__(self, prefills: int = 2) -> None:
        super().__init__()
        for number in range(prefills):
            self.add(f"p{number}", Role.PREFILL, pages_total=100_000, max_step_tokens=2048)
        for number in range(2):
            self.add(f"d{number}", Role.DECODE, pages_total=100_000, max_batch_requests=1024)
        config = RouterConfig("r", ModelSettings(Path(), ("m",)), "", max_queued_requests=100_000)
        self.scheduler = RequestScheduler(config, PlacementPolicy(Mode.DISAGGREGATED), self.fleet, self.clock)


def arrivals(
    load: Load, start: float, seconds: float, rate: float, slo: SloClass, *, tenant: str = ""
) -> list[Request]:
    dice, at, made = random.Random(1), start, []
    while (at := at + dice.expovariate(rate)) < start + seconds:
        made.append(load.arrive(at, slo=slo, tenant=tenant))
    return made


def test_the_wait_is_divided_by_the_workers_that_take_prompts() -> None:
    """One worker needs twice as long as two for the same prompts."""
    refused_at = []
    for prefills in (1, 2, 4):
        fleet = ScheduledFleet(prefills=prefills)
        count = 0
        while True:
            queued = QueuedRequest(f"r{count}", count, 1000.0, 2048, 100, slo=SECOND)
            try:
                fleet.scheduler.enter(queued)
            except Refused:
                break
            count += 1
        refused_at.append(count)
    one, two, four = refused_at
    assert two == pytest.approx(2 * one, abs=2)
    assert four == pytest.approx(4 * one, abs=4)
    assert one == pytest.approx(SECOND.ttft_s / 1.2 / PROMPT_S, abs=2)


def test_what_its_tokenization_took_is_part_of_its_ttft() -> None:
    fleet = ScheduledFleet()
    now = fleet.clock()
    fleet.scheduler.enter(QueuedRequest("soon", 0, now, 2048, 100, slo=SECOND))
    with pytest.raises(Refused) as refused:
        fleet.scheduler.enter(QueuedRequest("late", 1, now - 0.8 * SECOND.ttft_s, 2048, 100, slo=SECOND))
    assert refused.value.reason is Refusal.SLO_TTFT


def test_workers_that_refuse_because_they_are_full_still_count_in_predictions() -> None:
    """Otherwise nothing would be checked while all workers refuse, and the queue would fill up."""
    fleet = ScheduledFleet(prefills=1)
    for worker in fleet.fleet.live:
        worker.back_off()
    fits = int(SECOND.ttft_s / PROMPT_S)
    for number in range(fits // 2):
        fleet.scheduler.enter(QueuedRequest(f"r{number}", number, 1000.0, 2048, 100, slo=SECOND))
    with pytest.raises(Refused):
        fleet.scheduler.enter(QueuedRequest("more", fits, 1000.0, 2 * fits * 2048, 100, slo=SECOND))


def test_the_time_until_answers_end_is_part_of_the_ttft() -> None:
    """All slots are taken by answers that end in two seconds, a second too late for the target."""
    fleet = ScheduledFleet()
    decodes = [worker for worker in fleet.fleet.live if worker.decodes]
    for worker in decodes:
        tokens = 3.0 / worker.cost.decode_step_seconds(1024, 1024 * 200)
        for number in range(1024):
            worker.add_answer(f"{worker.slot}-{number}", AnswerWork(1, 200, SECOND, tokens))
    fleet.clock.now += 1.0
    with pytest.raises(Refused) as refused:
        fleet.scheduler.enter(QueuedRequest("early", 0, fleet.clock(), 20, 100, slo=SECOND))
    assert refused.value.retry_after_s == pytest.approx(1.2, abs=0.2)
    fleet.clock.now += 1.5
    fleet.scheduler.enter(QueuedRequest("later", 1, fleet.clock(), 20, 100, slo=SECOND))


def test_under_its_capacity_nobody_is_refused() -> None:
    load = Load()
    arrivals(load, 1000.0, 5.0, 0.8 * CAPACITY, SECOND)
    load.run()
    assert all(each.refused is None and each.met for each in load.requests)


@pytest.mark.parametrize("slowness", [1.0, 1.15])
def test_a_burst_of_ten_times_capacity_does_not_hurt_those_admitted(slowness: float) -> None:
    """Also where predictions are a little too good."""
    load = Load(slowness=slowness)
    before = arrivals(load, 1000.0, 2.0, 0.7 * CAPACITY, SECOND)
    burst = arrivals(load, 1002.0, 1.5, 10 * CAPACITY, SECOND)
    after = arrivals(load, 1005.0, 2.0, 0.7 * CAPACITY, SECOND)
    load.run()
    admitted = [each for each in load.requests if each.refused is None]
    late = [each for each in admitted if not each.met]
    assert len(late) <= 0.01 * len(admitted), max(each.ttft_s for each in late)
    assert all(each.refused is None for each in [*before, *after])
    assert sum(each.refused is not None for each in burst) > 0.8 * len(burst)
    assert sum(each.met for each in burst) > 0.75 * 1.5 * CAPACITY / slowness, "and the capacity is used"


def test_a_refusal_says_when_to_come_back() -> None:
    load = Load()
    flood = [load.arrive(1000.0, slo=SECOND) for _ in range(200)]
    load.run()
    refused = [each.refused for each in flood if each.refused is not None]
    assert refused
    hint = refused[-1].retry_after_s
    again = Load()
    for _ in range(200):
        again.arrive(1000.0, slo=SECOND)
    later = again.arrive(1000.0 + hint + 0.05, slo=SECOND)
    again.run()
    assert later.met, "who comes back then is served in time"
    assert "class 'second' promises it within 1 s" in refused[-1].message


def test_what_no_idle_worker_could_keep_gets_no_hint() -> None:
    load = Load()
    request = load.arrive(1000.0, tokens=100_000, slo=SECOND)
    load.run()
    assert request.refused is not None
    assert request.refused.retry_after_s == 0
    assert "send a shorter prompt" in request.refused.message


def test_a_class_may_rather_be_served_late() -> None:
    load = Load()
    kind = [load.arrive(1000.0, slo=KIND) for _ in range(100)]
    strict = [load.arrive(1000.0 + 0.1 * n, slo=SECOND) for n in range(1, 20)]
    load.run()
    assert all(each.refused is None and each.ttft_s < 60 for each in load.requests)
    assert all(each.met for each in strict), "those without a target go behind"
    degraded = [each for each in kind if each.degraded]
    assert 0 < len(degraded) < 100
    assert all(each.met for each in kind if each not in degraded)


def test_who_has_missed_goes_behind_those_who_can_still_meet() -> None:
    """Nothing was measured, so all are admitted; the first ones take the blame alone."""
    load = Load(reported=replace(H200, observed=0))
    flood = [load.arrive(1000.0, slo=SECOND) for _ in range(200)]
    fresh = [load.arrive(1001.5 + 0.1 * n, slo=SECOND) for n in range(10)]
    load.run()
    assert all(each.refused is None and each.ttft_s < 10 for each in load.requests)
    assert sum(each.met for each in flood) == pytest.approx(CAPACITY, rel=0.15)
    assert all(each.met for each in fresh)


def test_best_effort_waits_for_its_turn_and_not_for_ever() -> None:
    load = Load(settings={"max_deferral_s": 3.0})
    for number in range(2):
        load.arrive(1000.0 + number * 0.001, tokens=8192)
    patient = load.arrive(1000.01)
    arrivals(load, 1000.0, 4.0, 3 * CAPACITY, SECOND)
    load.run()
    assert 1.0 < patient.ttft_s < 4.0


def test_a_tenants_flood_leaves_others_their_service() -> None:
    load = Load(settings={"api_keys": ("a", "b")})
    flood = arrivals(load, 1000.0, 3.0, 10 * CAPACITY, SECOND, tenant="flood")
    small = arrivals(load, 1000.5, 2.0, 0.2 * CAPACITY, SECOND, tenant="small")
    load.run()
    assert sum(each.met for each in small) >= 0.97 * len(small)
    assert sum(each.refused is not None for each in flood) > 0.8 * len(flood)


def test_long_prompts_of_a_tenant_do_not_keep_those_of_another_in_the_router() -> None:
    """A worker computes the shortest prompts first, so that the other tenant's is computed as soon as it is sent."""
    fleet = ScheduledFleet(prefills=1)
    long = [QueuedRequest(f"long-{n}", n, 1000.0, 100_000, 100, tenant="long") for n in range(3)]
    short = QueuedRequest("short", 3, 1000.5, 100, 100, tenant="short")
    for each in (*long, short):
        fleet.scheduler.enter(each)
    fleet.scheduler.queue.charge("short", 10**6)  # so that the next long prompt is the head of the queue
    placed = []
    while (head := fleet.scheduler.head()) is not None:
        if (placement := fleet.scheduler.bind(head)) is not None:
            placed.append(head)
            decode = None if placement.decode is None else fleet.workers[placement.decode.worker_id]
            record(head, placement, fleet.workers[placement.prefill.worker_id], decode)
        elif not fleet.scheduler.may_pass(head):
            break
    assert placed == [long[0], short]
    assert fleet.scheduler.head() is long[1], "it waits on, at its place"


def test_a_tenants_queue_is_bounded() -> None:
    load = Load(settings={"max_queued_per_tenant": 5})
    flood = [load.arrive(1000.0, tenant="flood") for _ in range(50)]
    other = load.arrive(1000.0, tenant="other")
    load.run()
    refused = [each.refused for each in flood if each.refused is not None]
    assert len(refused) > 30
    assert "5 requests with this API key" in refused[0].message
    assert other.refused is None
    assert isinstance(refused[0], ResourceExhausted)
    assert refused[0].retry_after_s > 0


def test_a_worker_that_turns_a_prompt_away_costs_its_tenant_nothing() -> None:
    fleet = ScheduledFleet()
    first, others = (
        QueuedRequest(name, n, 1000.0, 2048, 100, tenant=name) for n, name in enumerate(("first", "others"))
    )
    for each in (first, others):
        fleet.scheduler.enter(each)
    for each in (*10 * [first], others):
        assert fleet.scheduler.bind(each) is not None
        fleet.scheduler.queue.push(each)
    assert fleet.scheduler.head() is first, "it came first, and was given no more than its prompt"


def test_what_nobody_could_serve_yet_counts_for_its_tenant() -> None:
    """Else one key's prompts, too large for whom is left, would take everybody's places."""
    load = Load(settings={"max_queued_per_tenant": 5})
    large = [load.arrive(1000.0 + number, tokens=HUGE, tenant="large") for number in range(6)]
    other = load.arrive(1010.0, tenant="other")
    load.run()
    assert [each.refused is not None for each in large] == [False] * 5 + [True]
    assert other.refused is None


def test_what_nobody_could_serve_yet_does_not_slow_the_queue() -> None:
    load = Load()
    load.arrive(1000.0, tokens=HUGE)
    burst = [load.arrive(1030.0, slo=SECOND) for _ in range(20)]
    load.run()
    assert all(each.refused is None and each.met for each in burst)


@pytest.mark.parametrize("ttft_s", [2.0, math.inf])
def test_an_answer_too_many_is_told_so(ttft_s: float) -> None:
    """26 answers keep the gap; twice as many would run."""
    load = Load()
    asked = arrivals(load, 1000.0, 6.0, CAPACITY, SloClass("gap", ttft_s, itl_s=GAP_S))
    load.run()
    refused = [each.refused for each in asked if each.refused is not None]
    assert 0.3 * len(asked) < len(refused) < 0.7 * len(asked)
    assert 0.75 * GAP_S < load.longest_step_s <= GAP_S, "what is promised is kept, and there is no more room than that"
    assert "class 'gap' is kept up to 5 ms" in refused[0].message
    assert 0.1 <= refused[0].retry_after_s < 0.5, "of an answer's second, as far as it is too many"
    assert refused[0].reason is Refusal.SLO_ITL
    assert rejected(refused[0]) == RequestOutcome(Outcome.REJECTED, Phase.DECODE)


def test_the_noisier_steps_are_the_fewer_are_admitted() -> None:
    """The margin is what workers observe of their steps ÷ what was predicted."""
    slo, refused = SloClass("gap", 2.0, itl_s=GAP_S), []
    for noise in (1.05, 1.2, 1.35):
        load = Load(reported=replace(H200, mixed_step_margin=noise))
        asked = arrivals(load, 1000.0, 4.0, 0.8 * CAPACITY, slo)
        load.run()
        refused.append(sum(each.refused is not None for each in asked))
        assert load.longest_step_s * noise <= 1.02 * GAP_S
        assert all(each.refused is not None or each.met for each in asked)
    assert refused[0] < refused[1] < refused[2] < len(asked)


def test_more_noise_never_admits_more() -> None:
    """At the most noise an answer alone would miss this gap with the margin, without it would not."""
    slo, refused = SloClass("gap", 2.0, itl_s=5.5e-3), []
    for noise in (1.05, 1.2, 1.3, 1.5):
        load = Load(reported=replace(H200, mixed_step_margin=noise))
        asked = arrivals(load, 1000.0, 4.0, CAPACITY, slo)
        load.run()
        refused.append(sum(each.refused is not None for each in asked))
    assert H200.base_s * 1.5 > slo.itl_s > H200.base_s
    assert 0 < refused[0] < refused[1] < refused[2] <= refused[3] < len(asked)


def test_a_gap_that_an_answer_alone_would_miss_limits_nothing() -> None:
    load = Load()
    asked = arrivals(load, 1000.0, 6.0, 0.8 * CAPACITY, SloClass("gap", 2.0, itl_s=H200.base_s))
    load.run()
    assert all(each.refused is None for each in asked)


def test_an_answer_too_many_may_rather_be_served_slowly() -> None:
    load = Load()
    kind = arrivals(load, 1000.0, 6.0, CAPACITY, SloClass("gap", 5.0, itl_s=GAP_S, overload=Overload.DEGRADE))
    load.run()
    assert all(each.refused is None and each.ttft_s < 60 for each in kind)
    assert 0 < sum(each.degraded for each in kind) < len(kind)


GAP = SloClass("gap", 5.0, itl_s=GAP_S)


@pytest.mark.parametrize(
    ("tokens", "waiting"),
    [
        (100, {"slo": BEST_EFFORT}),  # they go behind
        (1, {"slo": SloClass("urgent", ttft_s=0.5)}),  # they never decode
        (100, {"slo": GAP, "tenant": "flood"}),  # it takes turns with others
    ],
)
def test_who_is_not_before_it_is_not_in_its_way(tokens: int, waiting: dict[str, Any]) -> None:
    fleet = ScheduledFleet()
    for number in range(300):
        queued = QueuedRequest(f"w{number}", number, 1000.0, 2048, tokens, **waiting)
        fleet.scheduler._admission.schedule(queued)
        fleet.scheduler.queue.push(queued)
    fleet.scheduler.enter(QueuedRequest("asks", 10**6, 1000.0, 2048, 100, slo=GAP, tenant="calm"))


def test_who_is_before_it_is() -> None:
    fleet = ScheduledFleet()
    for number in range(60):
        queued = QueuedRequest(f"w{number}", number, 1000.0, 2048, 100, slo=replace(GAP, name="other"), service_s=0.05)
        fleet.scheduler._admission.schedule(queued)
        fleet.scheduler.queue.push(queued)
    with pytest.raises(Refused, match="is kept up to 5 ms"):
        fleet.scheduler.enter(QueuedRequest("asks", 10**6, 1000.0, 2048, 100, slo=GAP))


def test_several_answers_count_as_many() -> None:
    fleet = ScheduledFleet()
    fleet.scheduler.enter(QueuedRequest("few", 1, 1000.0, 2048, 100, slo=GAP), more=10)
    with pytest.raises(Refused, match="is kept up to 5 ms"):
        fleet.scheduler.enter(QueuedRequest("many", 2, 1000.0, 2048, 100, slo=GAP), more=63)


def test_where_batches_are_small_no_more_can_join_than_fit_in() -> None:
    fleet = ScheduledFleet()
    for worker in fleet.workers.values():
        worker.update(replace(worker.info, max_batch_requests=8))
    fleet.scheduler.enter(QueuedRequest("many", 2, 1000.0, 2048, 100, slo=GAP), more=63)


def test_the_worker_that_keeps_it_best_decides() -> None:
    """Not the one that is asked first, which has more room and longer steps; nor one that could not keep it alone."""
    fleet = ScheduledFleet()
    slow = fleet.workers["d0"]
    learn_cost(slow, StepCost(replace(H200, base_s=14e-3)))
    fleet.answers("d1", 10, context=2000, pages=9_000)
    assert next(iter(fleet.fleet.decodes)) is slow
    fleet.scheduler.enter(QueuedRequest("fits", 1, 1000.0, 2048, 100, slo=replace(GAP, itl_s=25e-3)))
    fleet.scheduler.enter(QueuedRequest("fits", 2, 1000.0, 2048, 100, slo=GAP))
    fleet.answers("d1", 10, context=2000, pages=10)
    with pytest.raises(Refused, match="is kept up to 5 ms"):
        fleet.scheduler.enter(QueuedRequest("does not fit", 3, 1000.0, 2048, 100, slo=GAP))


def test_who_asks_for_one_token_has_no_gaps() -> None:
    fleet = ScheduledFleet()
    one = QueuedRequest("one", 10**6, fleet.clock.now, 2048, 1, slo=SloClass("gap", 5.0, itl_s=GAP_S))
    for number in range(60):
        fleet.answers(f"d{number % 2}", 1, context=2048)
    fleet.scheduler.enter(one)
    another = QueuedRequest("another", 10**6, fleet.clock.now, 2048, 2, slo=one.slo)
    with pytest.raises(Refused, match="tokens would come every"):
        fleet.scheduler.enter(another)
