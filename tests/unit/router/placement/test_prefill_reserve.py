"""Tests of the workers that are reserved for prefill: their number, their choice, their use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.placement.latency_model import PromptPrediction
from router.placement.policy import Placement, PlacementPolicy
from router.placement.prefill_reserve import PrefillReserve
from router.placement.queue import QueuedRequest
from tandem.cost_model.step_cost import StepCost
from tandem.protocol.messages import Assignment, Role
from tandem.protocol.mode import Mode
from tandem.protocol.policy_name import PolicyName
from tandem.settings.slo import BEST_EFFORT, SloClass
from tests.unit.router.fleets import H200, TestFleet, learn_cost, names, need

TIGHT = SloClass("tight", ttft_s=2.0, itl_s=0.00924)
LOOSE = SloClass("loose", ttft_s=2.0, itl_s=0.1)
COSTS = replace(H200, prompt_base_s=1e-3, row_s=5e-5)
"""With the margin the tight class leaves steps 7.7 ms. 40 rows of a thousand tokens take 7.2 ms, so that prompts have
a rare step beside them: 2,200 tokens a second. 30 rows leave enough for 15,000, and a worker without rows has 49,000.
"""
FACTS = {
    "pages_total": 100_000,
    "max_step_tokens": 2048,
    "max_batch_requests": 256,
    "assignment": Assignment(Role.BOTH, step_policy=PolicyName.DECODE_PRIORITY),
}


def fleet(workers: int = 2, rows: int = 40, slo: SloClass = TIGHT) -> TestFleet:
    """Workers with both roles, each with so many answers."""
    at = TestFleet()
    for number in range(workers):
        at.add(f"w{number}", Role.BOTH, cost=COSTS, **FACTS)
        at.answers(f"w{number}", rows, pages=1, context=1000, slo=slo)
    return at


def fed(at: TestFleet, tokens_per_s: int, reserve: PrefillReserve | None = None, seconds: int = 5) -> PrefillReserve:
    """So many tokens of prompts have come."""
    reserve = reserve or PrefillReserve()
    for _ in range(seconds * 10):
        reserve.observe(PromptPrediction(at.workers["w0"], tokens_per_s // 10, 0))
        at.clock.now += 0.1
    return reserve


def reserved(at: TestFleet, reserve: PrefillReserve, slo: SloClass = TIGHT) -> list[str]:
    """Names of the reserved workers."""
    slots = reserve.workers(asked(slo), at.fleet)
    return sorted(name for name, worker in at.workers.items() if worker.slot in slots)


def leave(at: TestFleet, rows: int) -> None:
    """Answers end until each worker has so many."""
    for worker in at.workers.values():
        for request_id in sorted(worker.request_ids)[rows:]:
            worker.remove_answer(request_id)


def asked(slo: SloClass = TIGHT) -> QueuedRequest:
    return need(1000, answer=256, slo=slo)


def test_nothing_is_reserved_before_any_prompt_has_come() -> None:
    at, reserve = fleet(), PrefillReserve()
    for _ in range(3):
        assert reserved(at, reserve) == []
        at.clock.now += 1.0


@pytest.mark.parametrize(
    ("rows", "tokens_per_s", "count"),
    [(2, 60_000, 0), (30, 8000, 0), (40, 1000, 0), (40, 8000, 1), (80, 8000, 0)],
    ids=["idle", "steps have time for prompts", "rare steps suffice", "they do not", "nobody could decode all"],
)
def test_a_worker_is_reserved_where_shared_steps_do_not_suffice(rows: int, tokens_per_s: int, count: int) -> None:
    at = fleet(rows=rows)
    assert len(reserved(at, fed(at, tokens_per_s))) == count


def test_as_many_as_serve_most() -> None:
    """The number is what the prompts need as long as the others can decode all answers, never all workers."""
    counts = []
    for tokens_per_s in (1500, 12_000, 90_000, 10**6):
        at = fleet(workers=4)
        counts.append(len(reserved(at, fed(at, tokens_per_s))))
    assert counts == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [2, 3, 6])
@pytest.mark.parametrize("rows", [20, 30, 38, 44])
def test_one_worker_at_least_decodes(workers: int, rows: int) -> None:
    for tokens_per_s in (10**4, 10**5, 10**7):
        at = fleet(workers, rows)
        assert len(reserved(at, fed(at, tokens_per_s))) < workers


def test_answers_that_tolerate_long_steps_need_no_reserve() -> None:
    at = fleet(slo=LOOSE)
    assert reserved(at, fed(at, 12_000), LOOSE) == []


def test_nothing_is_reserved_before_anything_came() -> None:
    at = fleet()
    assert reserved(at, PrefillReserve()) == []


@pytest.mark.parametrize("itl_s", [0.0040, 0.0045], ids=["its target", "its target with the margin"])
def test_a_target_that_an_answer_misses_alone_reserves_nothing(itl_s: float) -> None:
    at = fleet()
    assert reserved(at, fed(at, 12_000), replace(TIGHT, itl_s=itl_s)) == []


def test_nothing_is_reserved_by_guesses() -> None:
    at = fleet()
    for worker in at.workers.values():
        learn_cost(worker, StepCost(replace(COSTS, observed=0)))
    assert reserved(at, fed(at, 12_000)) == []


def test_workers_that_only_prefill_are_counted_on() -> None:
    at = fleet()
    at.add("p", Role.PREFILL, cost=COSTS, **FACTS)
    assert reserved(at, fed(at, 12_000)) == []


def test_the_one_with_the_fewest_answers_and_then_the_same() -> None:
    at = fleet()
    at.workers["w1"].remove_answer("answer-3")
    reserve = fed(at, 12_000)
    assert reserved(at, reserve) == ["w1"]
    at.answers("w1", 4, pages=1, context=1000, slo=TIGHT)
    at.clock.now += 1.0
    assert reserved(at, reserve) == ["w1"], "those that are reserved stay so"


def test_it_is_released_when_twice_as_many_answers_would_leave_enough() -> None:
    at = fleet()
    reserve = fed(at, 12_000)
    assert reserved(at, reserve) == ["w0"]
    leave(at, 30)
    at.clock.now += 0.1
    assert reserved(at, reserve) == ["w0"], "answers come and end at random"
    assert reserved(at, fed(at, 12_000)) == [], "a fresh one reserves nothing for so many"
    leave(at, 10)
    at.clock.now += 0.1
    assert reserved(at, reserve) == []


def test_it_stays_where_twice_as_many_answers_would_break_their_target() -> None:
    """A broken target bounds no steps of prompts; the reserve was given up for that, and taken again, in turns."""
    at = fleet()
    reserve = fed(at, 12_000)
    for _ in range(4):
        assert reserved(at, reserve) == ["w0"]
        at.clock.now += 0.1


def test_each_class_has_its_own() -> None:
    at = fleet()
    reserve = fed(at, 12_000)
    for _ in range(3):
        assert reserved(at, reserve) == ["w0"]
        assert reserved(at, reserve, LOOSE) == []
        at.clock.now += 0.1


def test_a_load_that_ends_is_forgotten() -> None:
    at = fleet()
    reserve = fed(at, 12_000)
    assert reserved(at, reserve) == ["w0"]
    assert reserved(at, fed(at, 150, reserve, seconds=40)) == []


def test_a_refusal_changes_nothing() -> None:
    at = fleet(workers=3)
    reserve = fed(at, 12_000)
    assert reserved(at, reserve) == ["w0"]
    at.clock.now += 0.1
    at.workers["w0"].back_off()
    assert reserved(at, reserve) == ["w0"]


def test_the_last_worker_does_both() -> None:
    at = fleet()
    reserve = fed(at, 12_000)
    assert reserved(at, reserve) == ["w0"]
    at.remove("w1")
    at.clock.now += 0.1
    assert reserved(at, reserve) == []


def placing(at: TestFleet, mode: Mode = Mode.ADAPTIVE, seconds: int = 5) -> PlacementPolicy:
    """A policy that has placed eight prompts of a thousand tokens a second."""
    policy = PlacementPolicy(mode)
    for _ in range(8 * seconds):
        assert policy.place(asked(), at.fleet, 0.0) is not None
        at.clock.now += 0.125
    return policy


def chosen(policy: PlacementPolicy, at: TestFleet, slo: SloClass = TIGHT) -> Placement:
    placement = policy.place(asked(slo), at.fleet, 0.0)
    assert placement is not None
    return placement


def test_prompts_go_to_the_reserved_worker_and_answers_to_the_others() -> None:
    at = fleet()
    policy = placing(at)
    placement = chosen(policy, at)
    assert names(placement) in {("w0", "w1"), ("w1", "w0")}
    at.prompt(placement.prefill.worker_id, 2000)
    assert names(chosen(policy, at)) == names(placement), "it has capacity for another"
    assert policy.prefill_workers(asked(), at.fleet) == 1


def test_a_prompt_waits_until_the_reserved_worker_has_capacity() -> None:
    at = fleet()
    policy = placing(at)
    at.prompt(chosen(policy, at).prefill.worker_id, 8000)
    assert policy.place(asked(), at.fleet, 0.0) is None


def test_a_cached_prompt_is_no_exception() -> None:
    """The worker that held it computed the rest in a forced chunk, beside the answers that tolerate none."""
    at = fleet()
    policy = placing(at)
    free, other = names(chosen(policy, at)) or ("", "")
    digests = tuple(bytes([number]) for number in range(62))
    at.fleet.prefixes.store(at.workers[other].slot, digests)
    request = need(1000, answer=256, slo=TIGHT, digests=digests)
    placement = policy.place(request, at.fleet, 0.0)
    assert names(placement) == (free, other)


def test_workers_that_only_prefill_take_prompts_beside_the_reserved_ones() -> None:
    """And the wait of others is divided by all of these."""
    at = fleet(workers=4)
    at.add("p", Role.PREFILL, cost=COSTS, **FACTS)
    policy = PlacementPolicy()
    free = reserved(at, fed(at, 150_000, policy._reserve))
    assert 0 < len(free) < 4
    assert policy.prefill_workers(asked(), at.fleet) == len(free) + 1
    for name in free:
        at.prompt(name, 8000)
    placement = chosen(policy, at)
    assert placement.prefill.worker_id == "p"
    assert placement.decode is not None
    assert placement.decode.worker_id not in free


def test_requests_without_a_gap_target_may_go_anywhere() -> None:
    """They have no share in what the reserve protects."""
    at = fleet()
    policy = placing(at)
    placement = chosen(policy, at)
    at.prompt(placement.prefill.worker_id, 8000)
    assert policy.place(asked(), at.fleet, 0.0) is None
    assert policy.place(asked(BEST_EFFORT), at.fleet, 0.0) is not None


@pytest.mark.parametrize("mode", [Mode.COLOCATED, Mode.DISAGGREGATED])
def test_other_modes_reserve_nothing(mode: Mode) -> None:
    at = fleet()
    policy = placing(at, mode)
    assert policy.prefill_workers(asked(), at.fleet) == 2
    assert {made.prefill == made.decode for made in (chosen(policy, at) for _ in range(3))} == {mode is Mode.COLOCATED}
    policy.mode = Mode.ADAPTIVE
    at.clock.now += 0.1
    assert policy.prefill_workers(asked(), at.fleet) == 1, "what came meanwhile counts"
