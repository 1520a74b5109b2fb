"""Tests of a worker's state: requests in flight, load reports, and what reports cannot include yet."""

import math
from dataclasses import replace

import pytest

from router.placement.worker_state import AnswerWork, PromptWork, WorkerState
from tandem.cost_model.chunks import StepLimit
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import chunk_pairs
from tandem.protocol.lifecycle.events import TransferStats
from tandem.protocol.messages import Assignment, Role, TierLoad
from tandem.protocol.policy_name import PolicyName
from tandem.protocol.prefixes import KvTier
from tandem.settings.slo import BEST_EFFORT, SloClass
from tests.unit.router.fleets import H200, TestFleet, load


@pytest.fixture
def at() -> TestFleet:
    return TestFleet()


@pytest.fixture
def worker(at: TestFleet) -> WorkerState:
    return at.add("w", Role.BOTH, assignment=Assignment(Role.BOTH, PolicyName.DECODE_PRIORITY), max_batch_requests=64)


class TestPrompts:
    def test_without_a_report_whole_prompts_count(self, worker: WorkerState) -> None:
        worker.add_prompt("a", PromptWork(1000))
        worker.add_prompt("b", PromptWork(500, cached=200))
        assert worker.prefill_tokens == 1500
        assert worker.prefill_pairs == chunk_pairs(1000, 0) + chunk_pairs(500, 200)
        worker.prompt_computed("a")
        worker.prompt_computed("a")
        assert (worker.prefill_tokens, worker.prefill_full, worker.request_ids) == (500, False, {"a", "b"})
        worker.remove_prompt("b")
        assert (worker.prefill_tokens, worker.prefill_full, worker.request_ids) == (0, False, {"a"})
        assert worker.prefill_pairs == 0.0
        worker.remove_prompt("a")
        assert not worker.request_ids

    def test_it_takes_no_further_prompt_from_a_tenant_that_fills_it(self, worker: WorkerState) -> None:
        limit = 2 * worker.max_step_tokens
        worker.add_prompt("a", PromptWork(limit - 1, tenant="long"))
        worker.add_prompt("b", PromptWork(1, tenant="short"))
        assert worker.prefill_full
        assert worker.full_tenants == frozenset()
        worker.add_prompt("c", PromptWork(1, tenant="long"))
        assert worker.full_tenants == {"long"}
        worker.prompt_computed("a")
        assert not worker.full_tenants

    def test_tokens_that_are_being_loaded_fill_it_until_it_accepts_the_prompt(self, worker: WorkerState) -> None:
        limit = 2 * worker.max_step_tokens
        worker.report(replace(load(), tiers=(TierLoad(KvTier.HOST, 1.0, 5), TierLoad(KvTier.DISK, 9.0))))
        worker.add_prompt("a", PromptWork(10, limit, "x", limit, {KvTier.HOST: 30, KvTier.DISK: 2}))
        assert (worker.prefill_tokens, worker.prefill_full, worker.full_tenants) == (10, True, {"x"})
        assert [tier.queued_pages for tier in worker.tiers] == [30, 2]
        worker.prompt_accepted("a")
        assert (worker.prefill_tokens, worker.prefill_full, worker.full_tenants) == (10, False, frozenset())
        assert [tier.queued_pages for tier in worker.tiers] == [5, 0]

    def test_the_worker_reports_how_far_a_prompt_is(self, at: TestFleet, worker: WorkerState) -> None:
        worker.add_prompt("a", PromptWork(1000))
        worker.prompt_accepted("a")
        at.clock.now += 0.05
        worker.report(load(prefill_tokens=400))
        assert worker.prefill_tokens == 400
        assert worker.prefill_pairs == pytest.approx(chunk_pairs(400, 600), rel=1e-2)

    def test_after_its_last_prompt_nothing_is_left(self, at: TestFleet, worker: WorkerState) -> None:
        """An idle worker sends no further report."""
        worker.add_prompt("a", PromptWork(1000))
        worker.prompt_accepted("a")
        at.clock.now += 0.05
        worker.report(load(prefill_tokens=400))
        worker.remove_prompt("a")
        assert worker.prefill_tokens == 0

    def test_what_a_report_cannot_include_counts_beside_it(self, at: TestFleet, worker: WorkerState) -> None:
        worker.add_prompt("a", PromptWork(1000))
        worker.report(load())
        assert worker.prefill_tokens == 1000, "on its way"
        worker.prompt_accepted("a")
        assert worker.prefill_tokens == 1000, "accepted since the last report"
        worker.report(load())
        assert worker.prefill_tokens == 0, "the same number says something else now"

    def test_prompts_of_other_routers_count(self, at: TestFleet, worker: WorkerState) -> None:
        worker.report(load(prefill_tokens=700))
        assert (worker.prefill_tokens, worker.prefill_full) == (700, False)
        assert worker.prefill_pairs == chunk_pairs(700, 0)
        worker.add_prompt("a", PromptWork(1000))
        assert worker.prefill_tokens == 1700
        worker.expire_report()
        assert worker.prefill_tokens == 1700
        worker.expire_report()
        assert worker.prefill_tokens == 1000

    def test_a_report_may_expire_between_the_end_of_a_prompt_and_its_removal(self, worker: WorkerState) -> None:
        worker.add_prompt("a", PromptWork(1000))
        worker.prompt_computed("a")
        worker.expire_report()
        worker.remove_prompt("a")
        worker.add_prompt("b", PromptWork(500))
        assert worker.prefill_tokens == 500

    def test_another_attempt_there_begins_anew(self, at: TestFleet, worker: WorkerState) -> None:
        worker.add_prompt("a", PromptWork(1000))
        worker.prompt_accepted("a")
        at.clock.now += 0.05
        worker.report(load(prefill_tokens=200))
        worker.add_prompt("a", PromptWork(900))
        assert worker.prefill_tokens == 1100, "the report may include the attempt before"
        worker.prompt_accepted("another")
        assert worker.prefill_tokens == 1100


def test_the_larger_of_own_and_reported_counts(at: TestFleet, worker: WorkerState) -> None:
    worker.report(load(prefill_tokens=700, decode_requests=3, pages_used=20))
    assert (worker.prefill_tokens, worker.decode_requests, worker.pages_free) == (700, 3, 44)
    assert worker.decode_context == 20 * 16, "of other routers' answers only the pages are known"
    at.answers("w", 4, pages=10)
    assert (worker.decode_requests, worker.pages_free) == (4, 24), "what is on its way there counts at once"
    worker.expire_report()
    worker.expire_report()
    assert (worker.prefill_tokens, worker.decode_requests) == (0, 4)


def test_a_fresh_report_is_kept(at: TestFleet, worker: WorkerState) -> None:
    for _ in range(3):
        worker.report(load(prefill_tokens=700))
        worker.expire_report()
    assert worker.prefill_tokens == 700


def test_pages_of_an_answer_that_ended_are_free_at_once(at: TestFleet, worker: WorkerState) -> None:
    at.answers("w", 1, pages=10)
    worker.report(load(decode_requests=1, pages_used=12))
    assert worker.pages_free == 64 - 12
    worker.remove_answer("answer-0")
    assert worker.pages_free == 64, "the last report still counts them"


def test_an_answer_that_ended_leaves_the_reported_load_of_others(at: TestFleet, worker: WorkerState) -> None:
    """It was taken for all of the report: a worker that other routers had filled looked idle until its next step."""
    at.answers("w", 2, pages=10)
    worker.report(load(decode_requests=5, pages_used=50))
    worker.remove_answer("answer-0")
    assert (worker.decode_requests, worker.pages_free) == (4, 64 - 40)
    worker.remove_answer("answer-1")
    assert (worker.decode_requests, worker.pages_free) == (3, 64 - 30)


def test_nothing_is_left_when_all_is_over(at: TestFleet, worker: WorkerState) -> None:
    at.prompt("w", 300)
    at.answers("w", 1)
    worker.prompt_computed("prompt-0")
    worker.prompt_computed("prompt-0")
    worker.remove_prompt("prompt-0")
    worker.remove_answer("answer-1")
    worker.remove_answer("answer-1")
    assert not worker.request_ids
    assert (worker.prefill_pairs, worker.decode_context, worker.gap_targets) == (0, 0, ())
    assert (worker.step_s, worker.step_limit) == (0.0, StepLimit())


def test_a_report_brings_the_newest_costs(worker: WorkerState) -> None:
    slower = replace(H200, base_s=8e-3)
    worker.report(replace(load(decode_requests=1), cost=slower))
    assert worker.cost.parameters == slower
    assert worker.idle_step_s == StepCost(slower).decode_step_seconds(1, 0)
    assert worker.step_s >= 8e-3


def test_the_targets_of_the_answers_there_bound_its_steps(at: TestFleet, worker: WorkerState) -> None:
    """One for each class; two idle steps of a class are as many seconds as they take here."""
    tight, relative = SloClass("tight", itl_s=0.02), SloClass("relative", itl_steps=4.0)
    at.answers("w", 2, slo=tight)
    at.answers("w", 1, slo=relative)
    assert worker.gap_targets == (4 * worker.idle_step_s, 0.02)
    assert worker.step_limit.seconds == pytest.approx(4 * worker.idle_step_s / worker.cost.margin)
    worker.remove_answer("answer-2")
    assert worker.gap_targets == (0.02,)
    assert worker.step_target(tight) == worker.step_limit.seconds == pytest.approx(0.02 / H200.mixed_step_margin)
    at.answers("w", 1)
    assert worker.gap_targets == (0.02, math.inf)
    assert worker.gap_target(BEST_EFFORT) == math.inf


def test_answers_that_a_longer_step_would_break_are_counted(at: TestFleet, worker: WorkerState) -> None:
    at.answers("w", 3, slo=SloClass("tight", itl_s=0.006))
    at.answers("w", 2, slo=SloClass("loose", itl_s=0.010))
    at.answers("w", 1)
    assert worker.step_s < 0.006
    assert [worker.answers_broken(seconds) for seconds in (0.005, 0.006, 0.007, 0.010, 0.011)] == [0, 0, 3, 3, 5]
    worker.add_answer("long", AnswerWork(4, 100_000, BEST_EFFORT))
    assert 0.006 < worker.step_s < 0.010
    assert worker.answers_broken(0.011) == 2, "those of the tight class miss theirs already"


def test_a_refusal_is_remembered_for_a_moment(at: TestFleet, worker: WorkerState) -> None:
    assert not worker.refusing
    worker.back_off()
    assert worker.refusing
    at.clock.now += 0.06
    assert not worker.refusing
    worker.update(replace(worker.info, not_ready="it loads its weights"))
    assert worker.refusing


def test_transfers_teach_how_long_a_page_takes(worker: WorkerState) -> None:
    """One that waits for something else counts little."""
    assert worker.page_transfer_s == 0.0
    for _ in range(200):
        worker.learn_transfer(TransferStats(2**24, 8, "UCX", 8 * 10**6))
    assert worker.page_transfer_s == pytest.approx(1e-3, rel=1e-3)
    worker.learn_transfer(TransferStats(2**24, 8, "UCX", 80 * 10**6))
    assert 1e-3 < worker.page_transfer_s < 1.1e-3
    before = worker.page_transfer_s
    worker.learn_transfer(TransferStats(0, 0, "UCX", 0))
    assert worker.page_transfer_s == before, "nothing was moved"


def test_answers_fill_their_part_of_a_worker_that_keeps_pages_for_prompts(at: TestFleet, worker: WorkerState) -> None:
    at.answers("w", 2, pages=16)
    assert (worker.pages_free, worker.answer_pages_free) == (32, 0), "half of the pages are for prompts"
    assert worker.decode_full
    worker.remove_answer("answer-0")
    assert (worker.answer_pages_free, worker.decode_full) == (16, False)
