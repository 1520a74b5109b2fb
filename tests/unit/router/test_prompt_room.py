"""When workers are kept free of answers for the prompts that come, and which."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.cost_placement import CostPlacement
from router.placement import Mode, Need, Pair
from router.prompt_room import PromptRoom
from router.slo import BEST_EFFORT, SloClass
from router.step_forecast import AskedAnswer, PromptForecast
from tests.unit.router.fleets import H200, TestFleet, names, need
from wire.messages import Duty, Role
from wire.policy_name import PolicyName

TIGHT = SloClass("tight", ttft_s=2.0, itl_s=0.0077)
LOOSE = SloClass("loose", ttft_s=2.0, itl_s=0.1)
COSTS = replace(H200, prompt_base_s=1e-3, row_s=5e-5)
"""Beside 17 rows of a thousand tokens there is room for prompts in steps of 6.4 ms, beside 18 there is none."""
FACTS = {
    "pages_total": 100_000,
    "max_step_tokens": 2048,
    "max_batch_requests": 256,
    "duty": Duty(Role.BOTH, step_policy=PolicyName.DECODE_PRIORITY),
}


def fleet(workers: int = 2, rows: int = 0, slo: SloClass = TIGHT) -> TestFleet:
    """Workers that do either, each with so many answers."""
    at = TestFleet()
    for number in range(workers):
        at.add(f"w{number}", Role.BOTH, cost=COSTS, **FACTS)
        at.answers(f"w{number}", rows, pages=1, context=1000, slo=slo, spare=5)
    return at


def fed(at: TestFleet, room: PromptRoom, tokens_per_s: int, seconds: int = 5) -> PromptRoom:
    """So many tokens of prompts have come."""
    worker = at.workers["w0"]
    for _ in range(seconds * 10):
        room.note(PromptForecast(worker, tokens_per_s // 10, 0))
        at.clock.now += 0.1
    return room


def looked(at: TestFleet, room: PromptRoom, slo: SloClass = TIGHT) -> list[str]:
    """Names of the workers that are kept free."""
    free = room.look(AskedAnswer(1000, 256.0, slo, 2), at.fleet.live)
    return sorted(name for name, worker in at.workers.items() if worker.slot in free)


@pytest.mark.parametrize(
    ("rows", "tokens_per_s", "kept"),
    [(2, 8000, 0), (14, 8000, 1), (14, 100, 1), (30, 8000, 0), (80, 8000, 0)],
    ids=["room for all", "no room beside answers", "for few prompts, too", "too many for one", "far too many"],
)
def test_a_worker_is_kept_free_where_none_has_room(rows: int, tokens_per_s: int, kept: int) -> None:
    at = fleet(rows=rows)
    assert len(looked(at, fed(at, PromptRoom(), tokens_per_s))) == kept


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
    for name in at.workers:
        for request_id in sorted(at.workers[name].request_ids)[:4]:
            at.workers[name].unbook_decode(request_id)
    at.clock.now += 0.1
    assert looked(at, room) == []


def test_what_waits_keeps_a_worker_free() -> None:
    at = fleet(rows=14)
    room = fed(at, PromptRoom(), 8000)
    assert looked(at, room) == ["w0"]
    for name in ("w0", "w1"):
        for request_id in sorted(at.workers[name].request_ids)[:9]:
            at.workers[name].unbook_decode(request_id)
    at.prompt("w0", 40_000)
    at.clock.now += 0.1
    assert looked(at, room) == ["w0"]
    assert looked(at, fed(at, PromptRoom(), 8000)) == [], "who begins anew keeps nobody free for it"


def test_what_waits_at_the_router_keeps_a_worker_free() -> None:
    at = fleet(rows=14)
    room = fed(at, PromptRoom(), 8000)
    assert looked(at, room) == ["w0"]
    for name in at.workers:
        for request_id in sorted(at.workers[name].request_ids)[:4]:
            at.workers[name].unbook_decode(request_id)
    at.clock.now += 0.1
    assert room.look(AskedAnswer(1000, 256.0, TIGHT, 2), at.fleet.live, waited_s=5.0) == {at.workers["w0"].slot}


def test_a_worker_that_refuses_is_not_relied_on() -> None:
    at = fleet(workers=3, rows=14)
    room = fed(at, PromptRoom(), 8000)
    assert looked(at, room) == ["w0"]
    at.clock.now += 0.1
    at.workers["w0"].refuse()
    assert looked(at, room) == ["w1"]


def test_the_fleet_is_looked_at_now_and_then() -> None:
    at = fleet(rows=14)
    room = fed(at, PromptRoom(), 8000)
    assert looked(at, room) == ["w0"]
    at.remove("w1")
    assert looked(at, room) == ["w0"]
    at.clock.now += 0.1
    assert looked(at, room) == [], "one worker does it all"


def test_a_worker_that_is_gone_is_not_waited_for() -> None:
    at = fleet(workers=3, rows=14)
    room = fed(at, PromptRoom(), 8000)
    assert looked(at, room) == ["w0"]
    at.remove("w0")
    assert looked(at, room) == ["w1"]


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


def test_who_asks_for_nothing_goes_anywhere() -> None:
    at = fleet(rows=14)
    policy = placing(at)
    at.prompt(chosen(policy, at).prefill.worker_id, 8000)
    assert chosen(policy, at, BEST_EFFORT).prefill.worker_id


@pytest.mark.parametrize("mode", [Mode.COLOCATED, Mode.DISAGGREGATED])
def test_other_modes_keep_nobody_free(mode: Mode) -> None:
    at = fleet(rows=14)
    policy = placing(at, mode)
    assert policy._room.free == frozenset()
