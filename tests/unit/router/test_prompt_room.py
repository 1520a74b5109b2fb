"""When workers are kept free of answers for the prompts that come, and which."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costs.step_cost import StepCost
from router.cost_placement import CostPlacement
from router.placement import Mode, Need, Pair
from router.prompt_room import PromptRoom
from router.slo import BEST_EFFORT, SloClass
from router.step_forecast import AskedAnswer, PromptForecast
from tests.unit.router.fleets import H200, TestFleet, names, need
from wire.cost_parameters import CostParameters
from wire.messages import Duty, Role
from wire.policy_name import PolicyName

TIGHT = SloClass("tight", ttft_s=2.0, itl_s=0.00924)
LOOSE = SloClass("loose", ttft_s=2.0, itl_s=0.1)
COSTS = replace(H200, prompt_base_s=1e-3, row_s=5e-5)
"""Beside 17 rows of a thousand tokens there is room for prompts in steps of 6.4 ms, beside 18 there is none: what is
left of the tight target for noise and for doubt."""
FACTS = {
    "pages_total": 100_000,
    "max_step_tokens": 2048,
    "max_batch_requests": 256,
    "duty": Duty(Role.BOTH, step_policy=PolicyName.DECODE_PRIORITY),
}


QUICK = replace(COSTS, token_s=1e-5)
"""One worker computes more prompts than two do beside answers, however few."""


def fleet(workers: int = 2, rows: int = 0, slo: SloClass = TIGHT, cost: CostParameters = COSTS) -> TestFleet:
    """Workers that do either, each with so many answers."""
    at = TestFleet()
    for number in range(workers):
        at.add(f"w{number}", Role.BOTH, cost=cost, **FACTS)
        at.answers(f"w{number}", rows, pages=1, context=1000, slo=slo, spare=5)
    return at


def fed(at: TestFleet, room: PromptRoom, tokens_per_s: int, seconds: int = 5) -> PromptRoom:
    """So many tokens of prompts have come."""
    worker = at.workers["w0"]
    for _ in range(seconds * 10):
        room.note(PromptForecast(worker, tokens_per_s // 10, 0))
        at.clock.now += 0.1
    return room


def fewer(at: TestFleet) -> None:
    """Four answers of each worker end."""
    for worker in at.workers.values():
        for request_id in sorted(worker.request_ids)[:4]:
            worker.unbook_decode(request_id)


def looked(at: TestFleet, room: PromptRoom, slo: SloClass = TIGHT) -> list[str]:
    """Names of the workers that are kept free."""
    room.look(AskedAnswer(1000, 256.0, slo, 2), at.fleet.live)
    return sorted(name for name, worker in at.workers.items() if worker.slot in room.free)


@pytest.mark.parametrize(
    ("rows", "tokens_per_s", "kept"),
    [(2, 8000, 0), (14, 8000, 1), (14, 100, 1), (30, 8000, 1), (80, 8000, 0)],
    ids=["room for all", "no room beside answers", "for few prompts, too", "more than one bears", "far too many"],
)
def test_a_worker_is_kept_free_where_none_has_room(rows: int, tokens_per_s: int, kept: int) -> None:
    at = fleet(rows=rows)
    assert len(looked(at, fed(at, PromptRoom(), tokens_per_s))) == kept


@pytest.mark.parametrize(
    ("rows", "tokens_per_s", "slo", "kept"),
    [
        (30, 1000, TIGHT, 0),
        (14, 1000, TIGHT, 1),
        (30, 4000, TIGHT, 1),
        (30, 1000, replace(TIGHT, itl_percent=99.9), 1),
        (30, 1000, replace(TIGHT, worst_gap_s=0.02), 1),
    ],
    ids=["few prompts", "the other bears all answers", "more prompts", "a class of fewer long gaps", "or of none"],
)
def test_few_prompts_get_a_long_step_now_and_then(rows: int, tokens_per_s: int, slo: SloClass, kept: int) -> None:
    """One in 128, of both workers 4,100 tokens a second; one worker alone bears 40 answers and a few."""
    at = fleet(rows=rows, slo=slo)
    assert len(looked(at, fed(at, PromptRoom(), tokens_per_s), slo)) == kept


def test_a_worker_whose_steps_are_all_alike_has_none_now_and_then() -> None:
    at = fleet(rows=30)
    for worker in at.workers.values():
        worker.change(replace(worker.info, duty=Duty(Role.BOTH, step_policy=PolicyName.CHUNKED, step_budget=512)))
    assert len(looked(at, fed(at, PromptRoom(), 1000))) == 1


@pytest.mark.parametrize(("workers", "itl_s"), [(2, 0.0040), (4, 0.0045)], ids=["its target", "that less noise"])
def test_where_an_answer_alone_takes_longer_than_its_class_bears_nobody_bears_it(workers: int, itl_s: float) -> None:
    """One answer a worker at most, of 4.08 ms a step: nothing is left to divide by."""
    slo = replace(TIGHT, itl_s=itl_s)
    at = fleet(workers)
    assert looked(at, fed(at, PromptRoom(), 8000), slo) == []


def test_nothing_is_kept_free_before_anything_came() -> None:
    at = fleet(rows=14)
    room = PromptRoom()
    assert looked(at, room) == []
    room.note(PromptForecast(at.workers["w0"], 4000, 0))
    at.clock.now += 0.5
    assert looked(at, room) == []


def test_answers_that_bear_long_steps_leave_room() -> None:
    at = fleet(rows=14, slo=LOOSE)
    assert looked(at, fed(at, PromptRoom(), 8000), LOOSE) == []


def test_as_many_as_the_prompts_need() -> None:
    at = fleet(workers=6, rows=14)
    assert len(looked(at, fed(at, PromptRoom(), 20_000))) == 1
    assert len(looked(at, fed(at, PromptRoom(), 60_000))) == 3


def test_the_one_with_the_fewest_answers_and_then_the_same() -> None:
    at = fleet(rows=14)
    at.workers["w1"].unbook_decode("answer-3")
    room = fed(at, PromptRoom(), 8000)
    assert looked(at, room) == ["w1"]
    at.answers("w1", 4, pages=1, context=1000, slo=TIGHT)
    at.clock.now += 1.0
    assert looked(at, room) == ["w1"]


def test_answers_spread_again_when_there_is_room() -> None:
    at = fleet(rows=14)
    room = fed(at, PromptRoom(), 8000)
    assert looked(at, room) == ["w0"]
    fewer(at)
    at.clock.now += 0.1
    assert looked(at, room) == []


def test_what_waits_keeps_a_worker_free() -> None:
    at = fleet(rows=14, cost=QUICK)
    room = fed(at, PromptRoom(), 15_000)
    assert looked(at, room) == ["w0"]
    fewer(at)
    at.prompt("w0", 40_000)
    at.clock.now += 0.1
    assert looked(at, room) == ["w0"]
    assert looked(at, fed(at, PromptRoom(), 15_000)) == [], "who begins anew keeps nobody free for it"


@pytest.mark.parametrize(("waited_s", "kept"), [(0.0, 0), (2.0, 1), (1000.0, 1)])
def test_what_waits_at_the_router_keeps_a_worker_free(waited_s: float, kept: int) -> None:
    at = fleet(rows=14, cost=QUICK)
    room = fed(at, PromptRoom(), 15_000)
    assert looked(at, room) == ["w0"]
    fewer(at)
    at.clock.now += 0.1
    room.look(AskedAnswer(1000, 256.0, TIGHT, 2), at.fleet.live, waited_s)
    assert len(room.free) == kept


def test_nobody_is_kept_free_where_both_do_more_together() -> None:
    at = fleet(rows=14)
    room = fed(at, PromptRoom(), 15_000)
    assert looked(at, room) == ["w0"]
    fewer(at)
    at.prompt("w0", 400_000)
    at.clock.now += 0.1
    assert looked(at, room) == []


def test_a_refusal_changes_nothing() -> None:
    at = fleet(workers=3, rows=14)
    room = fed(at, PromptRoom(), 8000)
    assert looked(at, room) == ["w0"]
    at.clock.now += 0.1
    at.workers["w0"].refuse()
    assert looked(at, room) == ["w0"]


def test_one_worker_does_it_all() -> None:
    at = fleet(rows=14)
    room = fed(at, PromptRoom(), 8000)
    assert looked(at, room) == ["w0"]
    at.remove("w1")
    assert looked(at, room) == ["w0"], "the fleet is looked at now and then"
    at.clock.now += 0.1
    assert looked(at, room) == []


def test_others_that_prefill_alone_are_counted_on() -> None:
    at = fleet(rows=14)
    at.add("p", Role.PREFILL, cost=COSTS, **FACTS)
    assert looked(at, fed(at, PromptRoom(), 8000)) == []


def test_no_more_are_kept_free_than_leave_the_others_what_they_bear() -> None:
    at = fleet(workers=4, rows=17)
    assert looked(at, fed(at, PromptRoom(), 90_000)) == []
    room = fed(at, PromptRoom(), 8000)
    assert looked(at, room) == ["w0"]
    assert looked(at, fed(at, room, 90_000)) == ["w0", "w1"], "68 rows on one would take 9.5 ms"


def test_the_tightest_class_decides() -> None:
    at = fleet(rows=14)
    room = fed(at, PromptRoom(), 8000)
    for _ in range(4):
        at.clock.now += 0.1
        assert looked(at, room) == ["w0"]
        at.clock.now += 0.1
        assert looked(at, room, LOOSE) == ["w0"]
    at.clock.now += 6.0
    assert looked(at, room, LOOSE) == [], "none of that class has come for a while"


def test_nobody_is_kept_free_by_guesses() -> None:
    at = fleet(rows=14)
    for worker in at.workers.values():
        worker.learn(StepCost(replace(COSTS, observed=0)))
    assert looked(at, fed(at, PromptRoom(), 8000)) == []


def placing(at: TestFleet, mode: Mode = Mode.ADAPTIVE, seconds: int = 5) -> CostPlacement:
    """A policy that has placed eight prompts of a thousand tokens a second."""
    policy = CostPlacement(mode)
    for _ in range(8 * seconds):
        assert policy.choose(asked(), at.fleet) is not None
        at.clock.now += 0.125
    return policy


def asked(slo: SloClass = TIGHT) -> Need:
    return need(1000, answer=256, slo=slo)


def chosen(policy: CostPlacement, at: TestFleet, slo: SloClass = TIGHT) -> Pair:
    pair = policy.choose(asked(slo), at.fleet)
    assert pair is not None
    return pair


def test_prompts_go_to_the_free_worker_and_answers_to_the_others() -> None:
    at = fleet(rows=14)
    pair = chosen(placing(at), at)
    assert names(pair) in {("w0", "w1"), ("w1", "w0")}
    at.answers(pair.prefill.worker_id, 1, pages=1, context=1000, slo=TIGHT)
    at.clock.now += 0.1
    assert names(chosen(placing(at), at)) != names(pair), "a policy that begins anew takes the one with fewer answers"


def test_the_gate_counts_on_the_free_worker_alone() -> None:
    at = fleet(rows=14)
    policy = placing(at)
    free = chosen(policy, at).prefill.worker_id
    foreseen = policy.foresee(asked(), at.fleet)
    assert foreseen is not None
    at.prompt(free, 20_000)
    later = policy.foresee(asked(), at.fleet)
    assert later is not None
    assert later.ttft_s > foreseen.ttft_s + 0.3


def test_it_waits_until_the_free_worker_has_room() -> None:
    at = fleet(rows=14)
    policy = placing(at)
    at.prompt(chosen(policy, at).prefill.worker_id, 8000)
    assert policy.choose(asked(), at.fleet) is None


def test_it_does_not_wait_for_what_does_not_pass() -> None:
    """A free worker that is too small or gone, others without room for the answer, two releases: anywhere, then."""
    at = fleet(rows=14)
    policy = placing(at)
    free = chosen(policy, at).prefill.worker_id
    (other,) = {"w0", "w1"} - {free}
    long = need(30_000, answer=256, slo=TIGHT)
    at.workers[free].change(replace(at.workers[free].info, pages_total=1000))
    assert names(policy.choose(long, at.fleet)) == (other, other)
    at.workers[free].change(replace(at.workers[free].info, pages_total=100_000))
    at.answers(other, 1, pages=99_980, context=1000, slo=TIGHT)
    assert names(policy.choose(asked(), at.fleet)) == (free, free)


def test_workers_of_two_releases_are_no_pair() -> None:
    at = fleet(rows=14)
    policy = placing(at)
    pair = chosen(policy, at)
    assert pair.decode is not None
    at.fleet.misfits.learn(pair.prefill, pair.decode, "two releases")
    assert chosen(policy, at).local


def test_who_asks_for_nothing_is_decoded_elsewhere_too() -> None:
    at = fleet(rows=14)
    policy = placing(at)
    pair = chosen(policy, at)
    at.prompt(pair.prefill.worker_id, 8000)
    assert policy.choose(asked(), at.fleet) is None
    pairs = chosen(policy, at, BEST_EFFORT)
    assert pairs.decode == pair.decode


def test_nobody_is_kept_free_for_those_that_come_no_more() -> None:
    at = fleet(rows=14)
    policy = placing(at)
    pair = chosen(policy, at)
    at.answers(pair.decode.worker_id if pair.decode else "", 1, pages=1, context=1000)
    at.clock.now += 4.5
    assert chosen(policy, at, BEST_EFFORT).decode == pair.decode, "they may come again"
    at.clock.now += 1.0
    assert chosen(policy, at, BEST_EFFORT).decode == pair.prefill, "which has fewer answers"


def test_a_prompt_goes_to_who_holds_it() -> None:
    at = fleet(rows=2, slo=BEST_EFFORT)
    at.answers("w0", 12, pages=1, context=1000)
    at.answers("w1", 12, pages=1, context=1000)
    policy = placing(at)
    pair = chosen(policy, at)
    assert pair.decode is not None
    digests = tuple(number.to_bytes(16, "little") for number in range(62))
    at.fleet.prefixes.store(at.workers[pair.decode.worker_id].slot, digests)
    held = policy.choose(need(1000, answer=256, slo=TIGHT, digests=digests), at.fleet)
    assert held is not None
    assert held.prefill == pair.decode


@pytest.mark.parametrize(("mode", "local"), [(Mode.COLOCATED, True), (Mode.DISAGGREGATED, False)])
def test_other_modes_keep_nobody_free(mode: Mode, *, local: bool) -> None:
    at = fleet(rows=14)
    policy = placing(at, mode)
    assert {chosen(policy, at).local for _ in range(3)} == {local}
    assert policy._room.free == frozenset()
